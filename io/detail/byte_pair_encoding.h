#pragma once

// Byte-pair encoding (Sennrich et al., 2016, arXiv:1508.07909) of bytes (Radford et al., 2019, GPT-2) or characters.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace mica::io::detail {

/// Tokens as bytes, by id. Ids need not be contiguous.
class Vocabulary {
 public:
  struct Entry {
    std::int64_t id;
    std::string text;       ///< as the file has it
    bool is_bytes = false;  ///< whether encoding can produce it from bytes; false for added tokens
    std::string bytes{};    ///< the bytes it stands for
  };
  Vocabulary() = default;
  Vocabulary(Vocabulary&&) = default;
  Vocabulary& operator=(Vocabulary&&) = default;
  /// Throws an Error that starts with `what` for negative or duplicate ids, and for ids far above the number of
  /// tokens.
  Vocabulary(std::vector<Entry> entries, const std::string& what);

  /// The largest id plus one.
  std::int64_t size() const { return static_cast<std::int64_t>(entries_.size()); }
  bool has(std::int64_t id) const { return id >= 0 && id < size() && entries_[static_cast<std::size_t>(id)].id == id; }
  const Entry& operator[](std::int64_t id) const { return entries_[static_cast<std::size_t>(id)]; }
  /// All tokens in the order of their ids.
  std::vector<Entry> entries() const;
  /// The id of a token as the file has it, or −1.
  std::int64_t id_of_text(std::string_view text) const { return find(by_text_, text); }
  /// The id of the token that stands for these bytes, or −1.
  std::int64_t id_of_bytes(std::string_view bytes) const { return find(by_bytes_, bytes); }
  /// The most bytes that a token stands for, among those that id_of_bytes() finds.
  std::size_t most_bytes() const { return most_bytes_; }

 private:
  using Index = std::unordered_map<std::string_view, std::int64_t>;
  static std::int64_t find(const Index& index, std::string_view key) {
    const auto found = index.find(key);
    return found == index.end() ? -1 : found->second;
  }

  std::vector<Entry> entries_;  // id −1 where there is no token
  Index by_text_, by_bytes_;    // refer to entries_
  std::size_t most_bytes_ = 0;
};

/// A pair of tokens that is merged into one. Merges are applied in the order of their ranks, and those of the same rank
/// from left to right.
struct Merge {
  std::uint32_t left, right, result;
  std::uint32_t rank = UINT32_MAX;  ///< UINT32_MAX: its position in the list, the order in which they were learned
};

struct BytePairOptions {
  bool ignore_merges = false;  ///< a word that is a token is encoded as that token, even if merges would not produce it
  bool of_characters = false;  ///< a word's characters are merged, not its bytes
  std::string prefix{}, suffix{};         ///< of characters that do not begin a word, and of those that end one
  std::optional<std::int64_t> unknown{};  ///< the token for what the vocabulary lacks; none: it is dropped
  bool fuses_unknown = false;             ///< several in a row are one token
  bool has_byte_tokens = false;           ///< tokens such as "<0x41>" encode characters that the vocabulary lacks

  bool operator==(const BytePairOptions&) const = default;
};

/// Working memory of encoding. For one thread at a time.
class BytePairScratch {
  friend class BytePairEncoder;

  /// Tokens of a long word as a linked list.
  struct Symbol {
    std::uint32_t token, previous, next;
    bool is_alive;
  };
  /// A merge that was possible when it was found.
  struct Candidate {
    std::uint32_t rank, position, left, right;
    bool operator>(const Candidate& other) const {
      return rank != other.rank ? rank > other.rank : position > other.position;
    }
  };

  std::vector<std::uint32_t> tokens_, ranks_;
  std::vector<Symbol> symbols_;
  std::vector<Candidate> heap_;
};

class BytePairEncoder {
 public:
  BytePairEncoder() = default;
  /// `vocabulary` need not outlive the constructor. Throws an Error that starts with `what` for a duplicate pair.
  BytePairEncoder(const Vocabulary& vocabulary, const std::vector<Merge>& merges, const BytePairOptions& options,
                  const std::string& what);

  /// The merges, in the order of their ranks.
  std::vector<Merge> merges() const;
  const BytePairOptions& options() const { return options_; }

  /// Appends the tokens of one word. Time is n log n in its length. Returns whether the vocabulary has all of it.
  bool encode(std::string_view word, const Vocabulary& vocabulary, BytePairScratch& scratch,
              std::vector<std::int64_t>& out) const;

 private:
  struct PairSlot {
    std::uint32_t left, right, rank = kNoRank, result;
  };
  static constexpr std::uint32_t kNoRank = UINT32_MAX;
  static constexpr std::size_t kShortWord = 48;

  static std::uint64_t pair_hash(std::uint32_t left, std::uint32_t right) {
    return ((std::uint64_t{left} << 32) | right) * 0x9E3779B97F4A7C15U;
  }
  const PairSlot* find(std::uint32_t left, std::uint32_t right) const;
  std::uint32_t rank_of(std::uint32_t left, std::uint32_t right) const {
    const PairSlot* const slot = find(left, right);
    return slot == nullptr ? kNoRank : slot->rank;
  }

  // Writes the tokens of a word's bytes or characters to scratch.tokens_. Returns whether the vocabulary has all.
  bool look_up(std::string_view word, const Vocabulary& vocabulary, BytePairScratch& scratch) const;
  std::int64_t token_of(std::string_view character, bool is_first, bool is_last, const Vocabulary& vocabulary) const;
  // Merge the tokens.
  void merge_short(BytePairScratch& scratch) const;
  void merge_long(BytePairScratch& scratch) const;

  BytePairOptions options_;
  std::array<std::int64_t, 256> byte_tokens_{};  // of bytes, or "<0x00>" to "<0xFF>"
  std::vector<std::int32_t> character_tokens_;   // of the characters below U+10000; −1: none
  std::vector<PairSlot> pairs_;                  // a hash table with open addressing
  std::vector<std::uint32_t> byte_ranks_;        // ranks of merges of two bytes' tokens: a small, cached table
  int shift_ = 63;
};

/// The tokens "<0x00>" to "<0xFF>", −1 for those that there are not.
std::array<std::int64_t, 256> byte_tokens_of(const Vocabulary& vocabulary);

/// The merges of SentencePiece, which stores scores of tokens: all pairs of tokens that form a token with a score that
/// is not NaN, whose rank is that of the score. `scores` are by id.
std::vector<Merge> merges_of_scores(const Vocabulary& vocabulary, const std::vector<double>& scores);

}  // namespace mica::io::detail
