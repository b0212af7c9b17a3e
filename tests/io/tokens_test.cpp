#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <span>
#include <type_traits>
#include <utility>

#include "tests/files.h"
#include "tests/support.h"
#include <mica/io/data_loader.h>
#include <mica/io/token_windows.h>
#include <mica/io/tokens.h>

using namespace mica;
using namespace mica::testing_support;

namespace tokens_test {

using Tokens = std::vector<std::int32_t>;
template <class T>
concept GivesTokens = requires(T file) {
  std::forward<T>(file).tokens();
};

// A view of a temporary would be of freed memory.
static_assert(std::is_constructible_v<io::TokenView, Tokens&> && std::is_constructible_v<io::TokenView, const Tokens&>);
static_assert(std::is_constructible_v<io::TokenView, std::span<const std::int32_t>> &&
              std::is_constructible_v<io::TokenView, std::span<std::int32_t>>);
static_assert(!std::is_constructible_v<io::TokenView, Tokens> && !std::is_constructible_v<io::TokenView, const Tokens>);
static_assert(!std::is_constructible_v<io::TokenView, std::array<std::int32_t, 3>>);
static_assert(!std::is_constructible_v<io::TokenView, std::vector<std::int64_t>&>, "another type of tokens");
static_assert(std::is_constructible_v<io::TokenWindows, Tokens&, io::TokenWindowsOptions> &&
              !std::is_constructible_v<io::TokenWindows, Tokens, io::TokenWindowsOptions>);
static_assert(GivesTokens<const io::TokenFile&> && !GivesTokens<io::TokenFile>);

class TokenFiles : public testing::Test {
 protected:
  template <class T>
  void write(const std::vector<T>& tokens, const std::vector<std::int32_t>& header = {}) const {
    std::ofstream file(path_, std::ios::binary | std::ios::trunc);
    std::vector<std::int32_t> numbers = header;
    if (!header.empty()) {
      numbers.resize(256);
    }
    file.write(reinterpret_cast<const char*>(numbers.data()), static_cast<std::streamsize>(numbers.size() * 4));
    file.write(reinterpret_cast<const char*>(tokens.data()), static_cast<std::streamsize>(tokens.size() * sizeof(T)));
  }
  std::vector<std::int64_t> read() const {
    const io::TokenFile file(path_);
    std::vector<std::int64_t> tokens(static_cast<std::size_t>(file.tokens().size()));
    file.tokens().read(0, tokens);
    return tokens;
  }
  void expect_refused(const std::string& text) const {
    expect_error([&] { io::TokenFile{path_}; }, text);
    expect_error([&] { io::TokenFile{path_}; }, path_.string());
  }

  const TemporaryFolder folder_;
  const std::filesystem::path path_ = folder_.path() / "tokens.bin";
};

TEST_F(TokenFiles, PlainAndWithHeader) {
  const std::vector<std::int64_t> expected{0, 1, 50256, 65535, 7};
  write<std::uint16_t>({0, 1, 50256, 65535, 7});
  EXPECT_EQ(read(), expected);
  EXPECT_EQ(io::TokenFile(path_).bytes_per_token(), 2);
  write<std::uint16_t>({0, 1, 50256, 65535, 7}, {20240520, 1, 5});
  EXPECT_EQ(read(), expected);
  write<std::uint32_t>({0, 128255, 4294967295}, {20240801, 7, 3});
  EXPECT_EQ(read(), (std::vector<std::int64_t>{0, 128255, 4294967295}));
  EXPECT_EQ(io::TokenFile(path_).bytes_per_token(), 4);
  write<std::uint16_t>({9});
  EXPECT_EQ(read(), std::vector<std::int64_t>{9});
}

TEST_F(TokenFiles, InvalidFilesAreErrors) {
  expect_error([&] { io::TokenFile{path_}; }, "cannot open");
  expect_error([&] { io::TokenFile{testing::TempDir()}; }, "is not a regular file");
  write<char>({});
  expect_refused("it is empty");
  write<char>({'a', 'b', 'c'});
  expect_refused("expected tokens of 2 bytes, got a file of 3 bytes");
  write<std::int32_t>({20240520});
  expect_refused("expected a header of 1024 bytes, got a file of 4");
  write<std::uint16_t>({1, 2}, {20240520, 7, 2});
  expect_refused("expected version 1, got 7");
  write<std::uint32_t>({1, 2}, {20240801, 1, 2});
  expect_refused("expected version 7, got 1");
  for (const std::int32_t count : {0, -1, INT32_MIN}) {
    write<std::uint16_t>({1, 2}, {20240520, 1, count});
    expect_refused("the header says that it has " + std::to_string(count) + " tokens");
  }
  for (const std::int32_t count : {1, 3, INT32_MAX}) {
    write<std::uint16_t>({1, 2}, {20240520, 1, count});
    expect_refused("tokens of 2 bytes, but 4 bytes follow");
  }
  write<char>({'a'}, {20240520, 1, 1});
  expect_refused("but 1 bytes follow");
}

TEST_F(TokenFiles, PartsAndLimits) {
  write<std::uint16_t>({10, 11, 12, 13, 14, 15});
  const io::TokenFile file(path_);
  const io::TokenView part = file.tokens().part(2, 5);
  EXPECT_EQ(part.size(), 3);
  std::vector<std::int64_t> two(2);
  part.part(1, 3).read(0, two);
  EXPECT_EQ(two, (std::vector<std::int64_t>{13, 14}));
  EXPECT_EQ(file.tokens().part(6, 6).size(), 0);
  expect_error([&] { part.part(2, 4); }, "expected a part of 3 tokens, got 2 … 4");
  expect_error([&] { part.part(-1, 1); }, "expected a part of 3 tokens");
  expect_error([&] { part.part(2, 1); }, "expected a part of 3 tokens");
  expect_error([&] { part.read(2, two); }, "expected to read among 3 tokens, got 2 from 2 on");
  expect_error([&] { part.read(-1, two); }, "expected to read among 3 tokens");
  expect_error([&] { part.read(INT64_MAX, two); }, "expected to read among 3 tokens");
  part.below(14).read(0, two);
  expect_error([&] { part.below(14).read(1, two); }, "expected tokens below 14, the vocabulary, got 14 at position 4");
  expect_error([&] { part.below(0); }, "expected a vocabulary of at least 1");
  const std::vector<std::int32_t> negative{3, -1};
  expect_error([&] { io::TokenView(negative).below(10).read(0, two); }, "got 4294967295 at position 1");
}

// A file of 64 GiB that takes no space: only what is read gets into memory.
TEST_F(TokenFiles, MayBeLargerThanTheMemory) {
  constexpr std::int64_t tokens = std::int64_t{1} << 35;
  write<std::uint16_t>({7});
  std::error_code error;
  std::filesystem::resize_file(path_, 2 * tokens, error);
  if (error) {
    GTEST_SKIP() << "the file system has no such files: " << error.message();
  }
  const io::TokenFile file(path_);
  ASSERT_EQ(file.tokens().size(), tokens);
  const io::TokenWindows windows(file.tokens(), {.context = 1024});
  EXPECT_EQ(windows.size(), tokens / 1024 - 1);
  io::DataLoader loader(windows, {.batch = 8, .workers = 2});
  for (int i = 0; i < 4; ++i) {
    const std::vector<std::int64_t> inputs = to_vector<std::int64_t>(loader.next()[0]);
    EXPECT_EQ(std::count(inputs.begin(), inputs.end(), 0), 8 * 1024);
  }
}

TEST_F(TokenFiles, GiveTheSameWindowsAsTokensInMemory) {
  std::vector<std::int32_t> tokens(101);
  std::vector<std::uint16_t> narrow(101);
  for (int i = 0; i < 101; ++i) {
    narrow[i] = static_cast<std::uint16_t>(tokens[i] = 60000 - 31 * i);
  }
  write(narrow, {20240520, 1, 101});
  const io::TokenFile file(path_);
  const io::EvenWindows a(file.tokens().part(50, 101), {.context = 10}, 3);
  const io::TokenView rest = std::span<const std::int32_t>(tokens).subspan(50);
  const io::EvenWindows b(rest, {.context = 10}, 3);
  const auto targets = [](const io::EvenWindows& windows) {
    return to_vector<std::int64_t>(io::DataLoader(windows, {.batch = 3, .shuffle = false}).next()[1]);
  };
  EXPECT_EQ(targets(a), targets(b));
  const io::EvenWindows checked(file.tokens().below(59000), {.context = 10});
  expect_error([&] { targets(checked); }, "expected tokens below 59000, the vocabulary, got ");
  EXPECT_EQ(file.tokens().fingerprint(), io::TokenView(tokens).fingerprint());
}

TEST(TokenView, FingerprintDependsOnTheTokens) {
  Tokens tokens(5000, 7);
  const auto fingerprint = [&] { return io::TokenView(tokens).fingerprint(); };
  const std::string before = fingerprint();
  EXPECT_TRUE(before.starts_with("5000 tokens, fingerprint ")) << before;
  for (const std::size_t at : {0, 2500, 4999}) {
    tokens[at] = 8;
    EXPECT_NE(fingerprint(), before) << at;
    tokens[at] = 7;
  }
  EXPECT_EQ(fingerprint(), before);
  EXPECT_EQ(io::TokenView(std::span<const std::int32_t>()).fingerprint(), "0 tokens, fingerprint 0000000000000000");
}

}  // namespace tokens_test
