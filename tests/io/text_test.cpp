#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include "tests/support.h"
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/progress.h>
#include <mica/io/text.h>

using namespace mica;
using namespace mica::testing_support;

namespace text_test {

TEST(Text, Utf8RoundTripsAtEveryLength) {
  const std::u32string characters{U'a', 0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF};
  EXPECT_EQ(io::from_utf8(io::to_utf8(characters)), characters);
  EXPECT_EQ(io::to_utf8(U"→"), "\xE2\x86\x92");
  EXPECT_EQ(io::from_utf8(std::string("a\0b", 3)).size(), 3u);
}

TEST(Text, ReportsThePositionOfInvalidUtf8) {
  expect_error([] { io::from_utf8("ab\x80"); }, "got something else at byte 2");
  expect_error([] { io::from_utf8("a\xE2\x86"); }, "at byte 1");         // cut off
  expect_error([] { io::from_utf8("\xC0\x80"); }, "at byte 0");          // longer than needed
  expect_error([] { io::from_utf8("\xE0\x9F\xBF"); }, "at byte 0");      // longer than needed
  expect_error([] { io::from_utf8("\xED\xA0\x80"); }, "at byte 0");      // half of a surrogate pair
  expect_error([] { io::from_utf8("\xF4\x90\x80\x80"); }, "at byte 0");  // past the last character
  expect_error([] { io::from_utf8("\xE2(\xA1"); }, "at byte 0");         // no continuation
  expect_error([] { io::to_utf8(std::u32string(1, 0x110000)); }, "got 1114112");
}

TEST(Text, TokenizerSortsAndRoundTrips) {
  const auto tokenizer = io::CharTokenizer::of("hello → wörld\n");
  EXPECT_EQ(tokenizer.alphabet(), "\n dehlorwö→");
  EXPECT_EQ(tokenizer.size(), 11);
  EXPECT_EQ(tokenizer.encode("\nd→"), (std::vector<std::int32_t>{0, 2, 10}));
  EXPECT_EQ(tokenizer.decode(tokenizer.encode("wörld → hello")), "wörld → hello");
  EXPECT_EQ(io::CharTokenizer(tokenizer.alphabet()).alphabet(), tokenizer.alphabet());
}

TEST(Text, TokenizerRefusesUnknownCharacters) {
  const io::CharTokenizer tokenizer("ba");
  EXPECT_EQ(tokenizer.encode("ab"), (std::vector<std::int32_t>{1, 0}));
  expect_error([&] { tokenizer.encode("abc"); }, "got U+0063");
  expect_error([&] { tokenizer.decode(std::vector<std::int32_t>{0, 2}); }, "expected tokens in [0, 2), got 2");
  expect_error([&] { tokenizer.decode(std::vector<std::int32_t>{-1}); }, "got -1");
  expect_error([] { io::CharTokenizer("aba"); }, "got U+0061 twice");
  expect_error([] { io::CharTokenizer(""); }, "got no characters");
}

TEST(Text, ReportsProgress) {
  std::string text;
  while (text.size() < 200'000) {
    text += "wörld → hello\n";
  }
  const auto size = static_cast<std::int64_t>(text.size());
  std::map<std::string, std::int64_t> done;
  {
    const ProgressObserver observer([&](const ProgressReport& report) {
      EXPECT_EQ(report.total, size);
      done[report.task] = report.done;
    });
    const auto tokenizer = io::CharTokenizer::of(text);
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
  }
  EXPECT_EQ(done, (std::map<std::string, std::int64_t>{{"collecting the characters", size}, {"tokenizing", size}}));
  // Positions are those in the whole text.
  expect_error([&] { io::CharTokenizer::of(text + "\x80"); }, "at byte " + std::to_string(size));
}

TEST(Text, ReadsFilesAsTheyAre) {
  const auto path = std::filesystem::temp_directory_path() / "mica_text_test.txt";
  const std::string text("a\r\nb\0c\xFF", 7);
  std::ofstream(path, std::ios::binary) << text;
  EXPECT_EQ(io::read_text(path), text);
  std::filesystem::remove(path);
  expect_error([&] { io::read_text(path); }, "mica_text_test.txt");
}

}  // namespace text_test
