#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include <mica/io/tokenizer.h>

using namespace mica;

namespace {

// Threads take turns in borrowing a tokenizer's scratch memory. Without a lock, two of them sometimes have the same;
// ThreadSanitizer always notices.
TEST(TokenizerThreads, ShareATokenizer) {
  const io::Tokenizer tokenizer = io::Tokenizer::parse(
      R"({"model": {"type": "BPE", "merges": ["a a", "b b", "aa aa"],
          "vocab": {"a": 0, "b": 1, "c": 2, "d": 3, "aa": 4, "bb": 5, "aaaa": 6}},
          "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false}})",
      "", "test");
  constexpr int threads = 4;
  std::vector<std::string> words;
  std::vector<std::vector<std::int64_t>> expected;
  for (int i = 0; i < threads; ++i) {
    words.emplace_back(60, static_cast<char>('a' + i));  // too long for the cache
    expected.push_back(tokenizer.encode(words.back()));
  }
  std::atomic<int> wrong = 0, ready = 0;
  std::vector<std::thread> workers;
  for (int i = 0; i < threads; ++i) {
    workers.emplace_back([&, i] {
      for (++ready; ready < threads;) {
        std::this_thread::yield();
      }
      for (int k = 0; k < 5'000; ++k) {
        for (int borrows = 0; borrows < 20; ++borrows) {
          (void)tokenizer.encode("");
        }
        wrong += tokenizer.encode(words[i]) == expected[i] ? 0 : 1;
      }
    });
  }
  for (std::thread& worker : workers) {
    worker.join();
  }
  EXPECT_EQ(wrong, 0);
}

}  // namespace
