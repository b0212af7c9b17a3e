#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace mica::io::detail {

/// The tokens of short words that were encoded before; texts repeat most words. For one thread at a time.
class WordCache {
 public:
  WordCache();

  /// Appends the tokens of a word to `out`. If the cache does not have them, `encode()` appends them, and returns
  /// whether to keep them.
  template <class Encode>
  void append(std::string_view word, std::vector<std::int64_t>& out, const Encode& encode) {
    if (word.size() > Entry::kMostBytes) {
      encode();
      return;
    }
    Entry& entry = entry_of(word);
    if (std::string_view(entry.bytes, entry.byte_count) == word) {
      out.insert(out.end(), entry.tokens, entry.tokens + entry.token_count);
      return;
    }
    const std::size_t before = out.size();
    if (encode() && out.size() - before <= Entry::kMostTokens) {
      entry.store(word, out.data() + before, out.size() - before);
    }
  }

 private:
  /// A new word replaces the one with the same hash.
  struct Entry {
    static constexpr std::size_t kMostBytes = 26, kMostTokens = 9;

    void store(std::string_view word, const std::int64_t* from, std::size_t count);

    char bytes[kMostBytes];
    std::uint8_t byte_count = 0, token_count = 0;
    std::uint32_t tokens[kMostTokens];
  };
  static_assert(sizeof(Entry) == 64);
  static constexpr int kBits = 15;  // 2 MiB

  Entry& entry_of(std::string_view word);

  std::vector<Entry> entries_;
};

}  // namespace mica::io::detail
