#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include <mica/io/detail/unicode.h>
#include <mica/io/detail/unigram.h>

namespace mica::io::detail {

namespace {

constexpr double kUnknownPenalty = 10;  // below the least likely token, as in SentencePiece

}  // namespace

UnigramEncoder::UnigramEncoder(const Vocabulary& vocabulary, std::vector<double> scores, const Options& options)
    : scores_(std::move(scores)), options_(options), byte_tokens_(byte_tokens_of(vocabulary)) {
  double least = std::numeric_limits<double>::infinity();
  for (const double score : scores_) {
    least = std::isnan(score) ? least : std::min(least, score);
  }
  unknown_score_ = std::isinf(least) ? -kUnknownPenalty : least - kUnknownPenalty;
  build(vocabulary);
}

// Breadth first: the tokens are sorted, and each node stands for a range of them with the same beginning.
void UnigramEncoder::build(const Vocabulary& vocabulary) {
  struct Item {
    std::string_view text;
    std::int64_t id;
  };
  std::vector<Item> items;
  for (std::size_t id = 0; id < scores_.size(); ++id) {
    const auto token = static_cast<std::int64_t>(id);
    if (!std::isnan(scores_[id]) && vocabulary.has(token) && !vocabulary[token].bytes.empty()) {
      items.push_back({vocabulary[token].bytes, token});
    }
  }
  std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.text < b.text; });
  struct Range {
    std::size_t first, last, depth;
  };
  std::vector<Range> ranges{{0, items.size(), 0}};
  nodes_.assign(1, {});
  bytes_.assign(1, '\0');
  for (std::size_t node = 0; node < ranges.size(); ++node) {
    auto [at, last, depth] = ranges[node];
    if (at < last && items[at].text.size() == depth) {
      nodes_[node].token = static_cast<std::int32_t>(items[at].id);
      ++at;
    }
    nodes_[node].first_child = static_cast<std::uint32_t>(nodes_.size());
    while (at < last) {
      const char byte = items[at].text[depth];
      const std::size_t begin = at;
      while (at < last && items[at].text[depth] == byte) {
        ++at;
      }
      ranges.push_back({begin, at, depth + 1});
      nodes_.push_back({});
      bytes_.push_back(byte);
    }
    nodes_[node].child_count = static_cast<std::uint32_t>(nodes_.size()) - nodes_[node].first_child;
  }
  for (std::uint32_t node = 1; node <= nodes_[0].child_count; ++node) {
    roots_[static_cast<unsigned char>(bytes_[node])] = node;
  }
}

// 0: there is none.
std::uint32_t UnigramEncoder::child(std::uint32_t node, char byte) const {
  const Node& own = nodes_[node];
  const char* const first = bytes_.data() + own.first_child;
  const char* const last = first + own.child_count;
  const char* const found = std::find(first, last, byte);
  return found == last ? 0 : own.first_child + static_cast<std::uint32_t>(found - first);
}

bool UnigramEncoder::encode(std::string_view word, const Vocabulary& vocabulary, UnigramScratch& scratch,
                            std::vector<std::int64_t>& out) const {
  constexpr std::size_t none = SIZE_MAX;
  auto& best = scratch.best;
  best.assign(word.size() + 1, {0, -1, none, true});
  const auto offer = [&](std::size_t end, std::size_t begin, double score, std::int64_t token, bool is_known) {
    if (best[end].begin == none || score > best[end].score) {
      best[end] = {score, token, begin, is_known};
    }
  };
  for (std::size_t begin = 0; begin < word.size();) {
    const std::size_t length = character_at(word.data() + begin).length;
    const double before = best[begin].score;
    bool has_character = false;
    std::uint32_t node = roots_[static_cast<unsigned char>(word[begin])];
    for (std::size_t end = begin + 1; node != 0; ++end) {
      if (const std::int32_t token = nodes_[node].token; token >= 0) {
        offer(end, begin, scores_[static_cast<std::size_t>(token)] + before, token, true);
        has_character = has_character || end == begin + length;
      }
      if (end == word.size()) {
        break;
      }
      node = child(node, word[end]);
    }
    if (!has_character) {
      offer(begin + length, begin, unknown_score_ + before, options_.unknown.value_or(-1), false);
    }
    begin += length;
  }
  // Backwards along the best tokens. The unknown token may also be the best one where its own text is.
  scratch.cuts.clear();
  for (std::size_t end = word.size(); end > 0; end = best[end].begin) {
    scratch.cuts.push_back(end);
  }
  bool is_known = true;
  const auto is_unknown = [&](std::size_t end) {
    return !best[end].is_known || (options_.unknown && best[end].token == *options_.unknown);
  };
  const auto put_unknown = [&](std::string_view text) {
    // Unknown characters in a row may be the text of a token.
    if (const std::int64_t token = vocabulary.id_of_bytes(text);
        token >= 0 && !std::isnan(scores_[static_cast<std::size_t>(token)])) {
      out.push_back(token);
      return;
    }
    const bool has_bytes = options_.has_byte_tokens && std::all_of(text.begin(), text.end(), [&](char c) {
                             return byte_tokens_[static_cast<unsigned char>(c)] >= 0;
                           });
    if (has_bytes) {
      for (const char c : text) {
        out.push_back(byte_tokens_[static_cast<unsigned char>(c)]);
      }
      return;
    }
    is_known = false;
    if (options_.unknown) {
      out.push_back(*options_.unknown);
    }
  };
  auto& cuts = scratch.cuts;
  while (!cuts.empty()) {
    std::size_t end = cuts.back();
    cuts.pop_back();
    if (!is_unknown(end)) {
      out.push_back(best[end].token);
      continue;
    }
    const std::size_t begin = best[end].begin;
    while (!cuts.empty() && is_unknown(cuts.back())) {
      end = cuts.back();
      cuts.pop_back();
    }
    put_unknown(word.substr(begin, end - begin));
  }
  if (best.capacity() > 1 << 16) {  // do not keep the memory of a huge word
    best = {};
  }
  return is_known;
}

}  // namespace mica::io::detail
