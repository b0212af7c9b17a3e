#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <tuple>
#include <utility>

#include <mica/core/check.h>
#include <mica/io/detail/byte_pair_encoding.h>
#include <mica/io/detail/in_quotes.h>
#include <mica/io/detail/unicode.h>

namespace mica::io::detail {

namespace {

constexpr std::uint32_t kNone = UINT32_MAX;

}  // namespace

Vocabulary::Vocabulary(std::vector<Entry> entries, const std::string& what) {
  // An id makes the table as long as the id, so it must not be huge.
  const std::int64_t most = 2 * static_cast<std::int64_t>(entries.size()) + 65536;
  std::int64_t size = 0;
  for (const Entry& entry : entries) {
    check(entry.id >= 0 && entry.id < most, "{}: the token {} has the id {}, expected one in [0, {})", what,
          in_quotes(entry.text), entry.id, most);
    size = std::max(size, entry.id + 1);
  }
  entries_.assign(static_cast<std::size_t>(size), Entry{.id = -1, .text = {}});
  for (Entry& entry : entries) {
    Entry& own = entries_[static_cast<std::size_t>(entry.id)];
    check(own.id == -1, "{}: the tokens {} and {} have the same id {}", what, in_quotes(own.text),
          in_quotes(entry.text), entry.id);
    own = std::move(entry);
  }
  for (const Entry& entry : entries_) {
    if (entry.id >= 0) {
      check(by_text_.emplace(entry.text, entry.id).second, "{}: the token {} appears twice", what,
            in_quotes(entry.text));
      if (entry.is_bytes) {
        by_bytes_.emplace(entry.bytes, entry.id);
        most_bytes_ = std::max(most_bytes_, entry.bytes.size());
      }
    }
  }
}

std::vector<Vocabulary::Entry> Vocabulary::entries() const {
  std::vector<Entry> result;
  for (const Entry& entry : entries_) {
    if (entry.id >= 0) {
      result.push_back(entry);
    }
  }
  return result;
}

std::array<std::int64_t, 256> byte_tokens_of(const Vocabulary& vocabulary) {
  std::array<std::int64_t, 256> tokens{};
  for (std::size_t byte = 0; byte < tokens.size(); ++byte) {
    tokens[byte] = vocabulary.id_of_text(fmt::format("<0x{:02X}>", byte));
  }
  return tokens;
}

std::vector<Merge> merges_of_scores(const Vocabulary& vocabulary, const std::vector<double>& scores) {
  std::vector<std::uint32_t> order;
  const auto has_score = [&](std::int64_t id) { return id >= 0 && !std::isnan(scores[static_cast<std::size_t>(id)]); };
  for (std::uint32_t id = 0; id < scores.size(); ++id) {
    if (has_score(id)) {
      order.push_back(id);
    }
  }
  std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) { return scores[a] > scores[b]; });
  std::vector<Merge> merges;
  std::uint32_t rank = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    rank = i > 0 && scores[order[i]] == scores[order[i - 1]] ? rank : static_cast<std::uint32_t>(i);
    const std::string_view text = vocabulary[order[i]].bytes;
    for (std::size_t cut = 1; cut < text.size(); ++cut) {
      if ((static_cast<unsigned char>(text[cut]) & 0xC0) == 0x80) {
        continue;
      }
      const std::int64_t left = vocabulary.id_of_bytes(text.substr(0, cut));
      const std::int64_t right = has_score(left) ? vocabulary.id_of_bytes(text.substr(cut)) : -1;
      if (has_score(right)) {
        merges.push_back({static_cast<std::uint32_t>(left), static_cast<std::uint32_t>(right), order[i], rank});
      }
    }
  }
  return merges;
}

BytePairEncoder::BytePairEncoder(const Vocabulary& vocabulary, const std::vector<Merge>& merges,
                                 const BytePairOptions& options, const std::string& what)
    : options_(options) {
  if (options_.of_characters) {
    byte_tokens_ = byte_tokens_of(vocabulary);
    character_tokens_.assign(1 << 16, -1);
    for (std::int64_t id = 0; id < vocabulary.size(); ++id) {
      const std::string& text = vocabulary[id].bytes;
      if (!vocabulary.has(id) || !vocabulary[id].is_bytes || text.empty()) {
        continue;
      }
      const Character c = character_at(text.data());
      if (c.length == text.size() && c.code < character_tokens_.size()) {
        character_tokens_[c.code] = static_cast<std::int32_t>(id);
      }
    }
  } else {
    for (int byte = 0; byte < 256; ++byte) {
      const char text = static_cast<char>(byte);
      byte_tokens_[static_cast<std::size_t>(byte)] = vocabulary.id_of_bytes({&text, 1});
    }
  }
  const int bits = std::max(4, static_cast<int>(std::bit_width(2 * merges.size())));
  pairs_.resize(std::size_t{1} << bits);
  shift_ = 64 - bits;
  for (std::size_t rank = 0; rank < merges.size(); ++rank) {
    const Merge& merge = merges[rank];
    std::size_t at = pair_hash(merge.left, merge.right) >> shift_;
    while (pairs_[at].rank != kNoRank) {
      check(pairs_[at].left != merge.left || pairs_[at].right != merge.right,
            "{}: the merge of {} and {} appears twice", what, in_quotes(vocabulary[merge.left].text),
            in_quotes(vocabulary[merge.right].text));
      at = (at + 1) & (pairs_.size() - 1);
    }
    const auto own_rank = merge.rank == UINT32_MAX ? static_cast<std::uint32_t>(rank) : merge.rank;
    pairs_[at] = {merge.left, merge.right, own_rank, merge.result};
  }
  if (options_.of_characters) {
    return;
  }
  const auto byte_of = [&](std::uint32_t token) -> std::size_t {
    const Vocabulary::Entry& entry = vocabulary[token];
    return entry.is_bytes && entry.bytes.size() == 1 ? static_cast<unsigned char>(entry.bytes[0]) : 256;
  };
  byte_ranks_.assign(1 << 16, kNoRank);
  for (std::size_t rank = 0; rank < merges.size(); ++rank) {
    const std::size_t left = byte_of(merges[rank].left), right = byte_of(merges[rank].right);
    if (left < 256 && right < 256) {
      byte_ranks_[left << 8 | right] = static_cast<std::uint32_t>(rank);
    }
  }
}

std::vector<Merge> BytePairEncoder::merges() const {
  std::vector<PairSlot> slots;
  for (const PairSlot& slot : pairs_) {
    if (slot.rank != kNoRank) {
      slots.push_back(slot);
    }
  }
  std::sort(slots.begin(), slots.end(), [](const PairSlot& a, const PairSlot& b) {
    return std::tie(a.rank, a.left, a.right) < std::tie(b.rank, b.left, b.right);
  });
  std::vector<Merge> result;
  result.reserve(slots.size());
  for (const PairSlot& slot : slots) {
    result.push_back({slot.left, slot.right, slot.result, slot.rank});
  }
  return result;
}

const BytePairEncoder::PairSlot* BytePairEncoder::find(std::uint32_t left, std::uint32_t right) const {
  std::size_t at = pair_hash(left, right) >> shift_;
  for (; pairs_[at].rank != kNoRank; at = (at + 1) & (pairs_.size() - 1)) {
    if (pairs_[at].left == left && pairs_[at].right == right) {
      return &pairs_[at];
    }
  }
  return nullptr;
}

bool BytePairEncoder::encode(std::string_view word, const Vocabulary& vocabulary, BytePairScratch& scratch,
                             std::vector<std::int64_t>& out) const {
  const std::int64_t whole = options_.ignore_merges ? vocabulary.id_of_bytes(word) : -1;
  if (whole >= 0) {
    out.push_back(whole);
    return true;
  }
  const bool is_known = look_up(word, vocabulary, scratch);
  const std::vector<std::uint32_t>& tokens = scratch.tokens_;
  // ranks_[i]: the rank of the merge of tokens i and i + 1
  scratch.ranks_.clear();
  const bool of_bytes = !options_.of_characters && is_known;
  for (std::size_t i = 0; i + 1 < tokens.size(); ++i) {
    if (of_bytes) {
      const auto left = static_cast<unsigned char>(word[i]), right = static_cast<unsigned char>(word[i + 1]);
      scratch.ranks_.push_back(byte_ranks_[std::size_t{left} << 8 | right]);
    } else {
      scratch.ranks_.push_back(rank_of(tokens[i], tokens[i + 1]));
    }
  }
  if (tokens.size() <= kShortWord) {
    merge_short(scratch);
  } else {
    merge_long(scratch);
  }
  out.insert(out.end(), tokens.begin(), tokens.end());
  return is_known;
}

std::int64_t BytePairEncoder::token_of(std::string_view character, bool is_first, bool is_last,
                                       const Vocabulary& vocabulary) const {
  if (!options_.of_characters) {
    return byte_tokens_[static_cast<unsigned char>(character[0])];
  }
  const bool has_prefix = !is_first && !options_.prefix.empty(), has_suffix = is_last && !options_.suffix.empty();
  if (has_prefix || has_suffix) {
    std::string text(has_prefix ? options_.prefix : "");
    text += character;
    text += has_suffix ? options_.suffix : "";
    return vocabulary.id_of_bytes(text);
  }
  const char32_t code = character_at(character.data()).code;
  return code < character_tokens_.size() ? character_tokens_[code] : vocabulary.id_of_bytes(character);
}

bool BytePairEncoder::look_up(std::string_view word, const Vocabulary& vocabulary, BytePairScratch& scratch) const {
  std::vector<std::uint32_t>& tokens = scratch.tokens_;
  tokens.clear();
  bool is_known = true, is_pending = false;  // whether an unknown token is to be added before the next known one
  const auto put = [&](std::int64_t token) { tokens.push_back(static_cast<std::uint32_t>(token)); };
  for (std::size_t at = 0; at < word.size();) {
    const std::size_t length = options_.of_characters ? character_at(word.data() + at).length : 1;
    const std::string_view character = word.substr(at, length);
    const bool is_first = at == 0;
    at += length;
    if (const std::int64_t token = token_of(character, is_first, at == word.size(), vocabulary); token >= 0) {
      if (std::exchange(is_pending, false)) {
        put(*options_.unknown);
      }
      put(token);
      continue;
    }
    const auto byte_token = [&](char c) { return byte_tokens_[static_cast<unsigned char>(c)]; };
    const bool has_prefix = (!is_first && !options_.prefix.empty()) || (at == word.size() && !options_.suffix.empty());
    if (options_.has_byte_tokens && !has_prefix &&
        std::all_of(character.begin(), character.end(), [&](char c) { return byte_token(c) >= 0; })) {
      for (const char c : character) {
        put(byte_token(c));
      }
      continue;
    }
    is_known = false;
    if (is_pending && !options_.fuses_unknown) {
      put(*options_.unknown);
    }
    is_pending = options_.unknown.has_value();
  }
  if (is_pending) {
    put(*options_.unknown);
  }
  return is_known;
}

// Looks for the best merge among all: quadratic, and the fastest for few tokens.
void BytePairEncoder::merge_short(BytePairScratch& scratch) const {
  std::vector<std::uint32_t>& tokens = scratch.tokens_;
  std::vector<std::uint32_t>& ranks = scratch.ranks_;
  while (!ranks.empty()) {
    const auto best = std::min_element(ranks.begin(), ranks.end());
    if (*best == kNoRank) {
      break;
    }
    const auto at = static_cast<std::size_t>(best - ranks.begin());
    tokens[at] = find(tokens[at], tokens[at + 1])->result;
    tokens.erase(tokens.begin() + static_cast<std::ptrdiff_t>(at) + 1);
    ranks.erase(best);
    if (at > 0) {
      ranks[at - 1] = rank_of(tokens[at - 1], tokens[at]);
    }
    if (at < ranks.size()) {
      ranks[at] = rank_of(tokens[at], tokens[at + 1]);
    }
  }
}

// A heap of merges over a linked list. A merge whose tokens have changed since it was found is skipped.
void BytePairEncoder::merge_long(BytePairScratch& scratch) const {
  using Candidate = BytePairScratch::Candidate;
  std::vector<std::uint32_t>& tokens = scratch.tokens_;
  auto& symbols = scratch.symbols_;
  auto& heap = scratch.heap_;
  const auto count = static_cast<std::uint32_t>(tokens.size());
  symbols.clear();
  heap.clear();
  for (std::uint32_t i = 0; i < count; ++i) {
    symbols.push_back({tokens[i], i == 0 ? kNone : i - 1, i + 1 == count ? kNone : i + 1, true});
  }
  const auto push = [&](std::uint32_t position) {
    const std::uint32_t next = symbols[position].next;
    if (next == kNone) {
      return;
    }
    const std::uint32_t left = symbols[position].token, right = symbols[next].token;
    if (const std::uint32_t rank = rank_of(left, right); rank != kNoRank) {
      heap.push_back({rank, position, left, right});
      std::push_heap(heap.begin(), heap.end(), std::greater<>());
    }
  };
  for (std::uint32_t i = 0; i + 1 < count; ++i) {
    if (scratch.ranks_[i] != kNoRank) {
      heap.push_back({scratch.ranks_[i], i, tokens[i], tokens[i + 1]});
    }
  }
  std::make_heap(heap.begin(), heap.end(), std::greater<>());
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    const Candidate best = heap.back();
    heap.pop_back();
    auto& left = symbols[best.position];
    if (!left.is_alive || left.token != best.left || left.next == kNone || symbols[left.next].token != best.right) {
      continue;
    }
    auto& right = symbols[left.next];
    left.token = find(best.left, best.right)->result;
    right.is_alive = false;
    left.next = right.next;
    if (left.next != kNone) {
      symbols[left.next].previous = best.position;
    }
    if (left.previous != kNone) {
      push(left.previous);
    }
    push(best.position);
  }
  tokens.clear();
  for (std::uint32_t at = 0; at != kNone; at = symbols[at].next) {
    tokens.push_back(symbols[at].token);
  }
  // Do not keep the memory of a huge word.
  if (count > 1 << 16) {
    symbols = {};
    heap = {};
  }
}

}  // namespace mica::io::detail
