#include <algorithm>
#include <cstring>

#include <mica/io/detail/word_cache.h>

namespace mica::io::detail {

namespace {

// A multiplicative hash, eight bytes at a time.
std::uint64_t word_hash(std::string_view word) {
  std::uint64_t hash = word.size();
  const char* at = word.data();
  std::size_t left = word.size();
  while (left > 0) {
    std::uint64_t eight = 0;
    const std::size_t count = std::min<std::size_t>(left, 8);
    std::memcpy(&eight, at, count);
    hash = (hash ^ eight) * 0x9E3779B97F4A7C15U;
    hash ^= hash >> 32;
    at += count;
    left -= count;
  }
  return hash * 0x9E3779B97F4A7C15U;
}

}  // namespace

WordCache::WordCache() : entries_(std::size_t{1} << kBits) {}

WordCache::Entry& WordCache::entry_of(std::string_view word) { return entries_[word_hash(word) >> (64 - kBits)]; }

void WordCache::Entry::store(std::string_view word, const std::int64_t* from, std::size_t count) {
  std::copy(word.begin(), word.end(), bytes);
  byte_count = static_cast<std::uint8_t>(word.size());
  token_count = static_cast<std::uint8_t>(count);
  std::transform(from, from + count, tokens, [](std::int64_t token) { return static_cast<std::uint32_t>(token); });
}

}  // namespace mica::io::detail
