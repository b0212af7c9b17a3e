#include <algorithm>
#include <bit>
#include <functional>

#include <mica/core/check.h>
#include <mica/io/detail/byte_pair_encoding.h>
#include <mica/io/detail/in_quotes.h>

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

BytePairEncoder::BytePairEncoder(const Vocabulary& vocabulary, const std::vector<Merge>& merges, bool ignore_merges,
                                 const std::string& what)
    : ignore_merges_(ignore_merges) {
  for (int byte = 0; byte < 256; ++byte) {
    const char text = static_cast<char>(byte);
    byte_tokens_[static_cast<std::size_t>(byte)] = vocabulary.id_of_bytes({&text, 1});
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
    pairs_[at] = {merge.left, merge.right, static_cast<std::uint32_t>(rank), merge.result};
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
  std::sort(slots.begin(), slots.end(), [](const PairSlot& a, const PairSlot& b) { return a.rank < b.rank; });
  std::vector<Merge> result;
  result.reserve(slots.size());
  for (const PairSlot& slot : slots) {
    result.push_back({slot.left, slot.right, slot.result});
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

void BytePairEncoder::encode(std::string_view word, const Vocabulary& vocabulary, BytePairScratch& scratch,
                             std::vector<std::int64_t>& out) const {
  const std::int64_t whole = ignore_merges_ ? vocabulary.id_of_bytes(word) : -1;
  if (whole >= 0) {
    out.push_back(whole);
    return;
  }
  merge_word(word, scratch);
  out.insert(out.end(), scratch.tokens_.begin(), scratch.tokens_.end());
}

void BytePairEncoder::merge_word(std::string_view word, BytePairScratch& scratch) const {
  scratch.tokens_.clear();
  for (const char c : word) {
    const auto byte = static_cast<unsigned char>(c);
    const std::int64_t token = byte_tokens_[byte];
    check(token >= 0, "encode: the vocabulary has no token for the byte 0x{:02X}", byte);
    scratch.tokens_.push_back(static_cast<std::uint32_t>(token));
  }
  // ranks_[i]: the rank of the merge of tokens i and i + 1
  scratch.ranks_.clear();
  for (std::size_t i = 0; i + 1 < word.size(); ++i) {
    const auto left = static_cast<unsigned char>(word[i]), right = static_cast<unsigned char>(word[i + 1]);
    scratch.ranks_.push_back(byte_ranks_[std::size_t{left} << 8 | right]);
  }
  if (word.size() <= kShortWord) {
    merge_short(scratch);
  } else {
    merge_long(scratch);
  }
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
