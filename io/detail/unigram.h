#pragma once

// Unigram language models (Kudo, 2018, arXiv:1804.10959): a word is encoded as the most likely sequence of tokens.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <mica/io/detail/byte_pair_encoding.h>

namespace mica::io::detail {

/// Working memory of encoding. For one thread at a time.
struct UnigramScratch {
  struct Best {
    double score;
    std::int64_t token;
    std::size_t begin;
    bool is_known;
  };
  std::vector<Best> best;  // of the text before each position
  std::vector<std::size_t> cuts;
};

class UnigramEncoder {
 public:
  struct Options {
    std::optional<std::int64_t> unknown{};
    bool has_byte_tokens = false;  ///< encode unknown text by tokens such as "<0x41>"
  };
  UnigramEncoder() = default;
  /// `scores` are logarithms of probabilities, by id; NaN for numbers that are not tokens of the model.
  UnigramEncoder(const Vocabulary& vocabulary, std::vector<double> scores, const Options& options);

  /// Appends the tokens of a word, which takes time proportional to its length times that of the longest token.
  /// Characters that no token begins with are the unknown token, once for each run, or tokens of bytes. Returns whether
  /// there was no such character; without an unknown token, they are dropped.
  bool encode(std::string_view word, const Vocabulary& vocabulary, UnigramScratch& scratch,
              std::vector<std::int64_t>& out) const;

  const std::vector<double>& scores() const { return scores_; }
  const Options& options() const { return options_; }

 private:
  // A trie. The children of a node are consecutive, sorted by their bytes.
  struct Node {
    std::uint32_t first_child = 0, child_count = 0;
    std::int32_t token = -1;
  };
  void build(const Vocabulary& vocabulary);
  std::uint32_t child(std::uint32_t node, char byte) const;

  std::vector<Node> nodes_;
  std::string bytes_;  // of the edge to each node
  std::array<std::uint32_t, 256> roots_{};
  std::vector<double> scores_;
  double unknown_score_ = 0;
  Options options_;
  std::array<std::int64_t, 256> byte_tokens_{};
};

}  // namespace mica::io::detail
