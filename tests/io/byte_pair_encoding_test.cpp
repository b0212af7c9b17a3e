#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <mica/io/detail/byte_pair_encoding.h>

using namespace mica;

namespace {

using io::detail::Merge;
using io::detail::Vocabulary;
using Tokens = std::vector<std::int64_t>;

/// A vocabulary of three letters, and merges of random pairs. Each merge has its own result, as if learned.
struct Random {
  explicit Random(unsigned seed) : random(seed) {
    std::vector<Vocabulary::Entry> entries;
    for (const char letter : {'a', 'b', 'c'}) {
      add(entries, std::string(1, letter));
    }
    std::set<std::pair<std::uint32_t, std::uint32_t>> pairs;
    std::set<std::string> texts;
    while (merges.size() < 60) {
      const auto left = static_cast<std::uint32_t>(random() % entries.size()),
                 right = static_cast<std::uint32_t>(random() % entries.size());
      const std::string text = entries[left].text + entries[right].text;
      if (text.size() <= 12 && texts.insert(text).second && pairs.emplace(left, right).second) {
        merges.push_back({left, right, static_cast<std::uint32_t>(entries.size())});
        add(entries, text);
      }
    }
    std::shuffle(merges.begin(), merges.end(), random);  // a merge may come before those that produce its tokens
    vocabulary = Vocabulary(std::move(entries), "test");
  }

  static void add(std::vector<Vocabulary::Entry>& entries, const std::string& text) {
    entries.push_back({.id = static_cast<std::int64_t>(entries.size()), .text = text, .is_bytes = true, .bytes = text});
  }

  std::string word(std::size_t size) {
    std::string result;
    while (result.size() < size) {
      result.push_back("abc"[random() % 3]);
    }
    return result;
  }

  std::mt19937 random;
  Vocabulary vocabulary;
  std::vector<Merge> merges;
};

/// The definition: merge the first pair of those with the lowest rank, until no pair has a merge.
Tokens merged(const std::string& word, const std::vector<Merge>& merges) {
  std::map<std::pair<std::int64_t, std::int64_t>, std::size_t> ranks;
  for (std::size_t rank = 0; rank < merges.size(); ++rank) {
    ranks[{merges[rank].left, merges[rank].right}] = rank;
  }
  Tokens tokens;
  for (const char letter : word) {
    tokens.push_back(letter - 'a');
  }
  for (;;) {
    std::size_t best = merges.size(), at = 0;
    for (std::size_t i = 0; i + 1 < tokens.size(); ++i) {
      const auto found = ranks.find({tokens[i], tokens[i + 1]});
      if (found != ranks.end() && found->second < best) {
        best = found->second;
        at = i;
      }
    }
    if (best == merges.size()) {
      return tokens;
    }
    tokens[at] = merges[best].result;
    tokens.erase(tokens.begin() + static_cast<std::ptrdiff_t>(at) + 1);
  }
}

// Words of at most 48 bytes and longer ones are merged by different algorithms. In the longer ones, most of the merges
// that were found are stale when their turn comes.
TEST(BytePairEncoding, FollowsItsDefinition) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    const io::detail::BytePairEncoder encoder(random.vocabulary, random.merges, {}, "test");
    io::detail::BytePairScratch scratch;
    for (const std::size_t size : {1, 2, 3, 20, 47, 48, 49, 50, 51, 64, 100, 300}) {
      for (int i = 0; i < 4; ++i) {
        const std::string word = random.word(size);
        Tokens tokens;
        encoder.encode(word, random.vocabulary, scratch, tokens);
        EXPECT_EQ(tokens, merged(word, random.merges)) << word;
      }
    }
  }
}

}  // namespace
