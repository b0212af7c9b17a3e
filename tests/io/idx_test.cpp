#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "tests/files.h"
#include "tests/paths.h"
#include "tests/support.h"
#include <mica/io/idx.h>

using namespace mica;
using namespace mica::testing_support;

namespace idx_test {
namespace {

std::string bytes_of(const std::vector<int>& values) { return {values.begin(), values.end()}; }

/// 0, 1, 2, 3 of uint8, with shape [2, 2], compressed by Python's gzip.
const std::string kCompressed = bytes_of({31, 139, 8,  0,  0,  0,   0, 0,   2,   3,   99, 96, 224, 96, 98, 96,
                                          96, 128, 96, 70, 38, 102, 0, 193, 194, 117, 65, 16, 0,   0,  0});

class Idx : public ::testing::Test {
 protected:
  std::filesystem::path write(const std::string& contents) const {
    std::ofstream(folder_.path() / "x.idx", std::ios::binary) << contents;
    return folder_.path() / "x.idx";
  }
  Tensor read(const std::string& contents) const { return io::read_idx(write(contents)); }
  void refuses(const std::string& contents, const std::string& text) const {
    expect_error([&] { (void)read(contents); }, text);
    expect_error([&] { (void)read(contents); }, (folder_.path() / "x.idx").string());
  }

 private:
  TemporaryFolder folder_;
};

TEST_F(Idx, HasEachTypeInAnyShape) {
  const Tensor bytes = read(bytes_of({0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 253, 254, 255}));
  EXPECT_EQ(bytes.dtype(), uint8);
  EXPECT_EQ(bytes.shape(), (Shape{2, 3}));
  expect_close(bytes, {1, 2, 3, 253, 254, 255}, 0, 0);
  const std::string two = bytes_of({0, 0, 0, 2});
  const auto list = [&](int type, const std::vector<int>& data) {
    return read(bytes_of({0, 0, type, 1}) + two + bytes_of(data));
  };
  const Tensor int8 = list(9, {255, 127}), int16 = list(11, {255, 254, 1, 2});
  EXPECT_EQ(int8.dtype(), int32);
  expect_close(int8, {-1, 127}, 0, 0);
  expect_close(int16, {-2, 258}, 0, 0);
  expect_close(list(12, {255, 255, 255, 253, 1, 2, 3, 4}), {-3, 0x01020304}, 0, 0);
  expect_close(list(13, {0x3F, 0xC0, 0, 0, 0xC0, 0, 0, 0}), {1.5, -2}, 0, 0);
  const Tensor reals = list(14, {0x3F, 0xF8, 0, 0, 0, 0, 0, 0, 0xC0, 0, 0, 0, 0, 0, 0, 0});
  EXPECT_EQ(reals.dtype(), float64);
  expect_close(reals, {1.5, -2}, 0, 0);
  EXPECT_EQ(read(bytes_of({0, 0, 8, 0, 7})).item(), 7);
  EXPECT_EQ(read(bytes_of({0, 0, 8, 2, 0, 0, 0, 0, 255, 255, 255, 255})).shape(), (Shape{0, 0xFFFFFFFF}));
}

TEST_F(Idx, MayBeLargerThanTheBufferAndCompressed) {
  std::string contents = bytes_of({0, 0, 11, 1, 0, 1, 0x86, 0xA0});  // 100,000
  for (int i = 0; i < 100'000; ++i) {
    contents += bytes_of({i / 256 % 128, i % 256});
  }
  const std::vector<std::int32_t> values = to_vector<std::int32_t>(read(contents));
  for (int i = 0; i < 100'000; ++i) {
    ASSERT_EQ(values[static_cast<std::size_t>(i)], i % 32768);
  }
  if (!MICA_READS_GZIP) {
    GTEST_SKIP() << "mica was built without zlib";
  }
  const Tensor small = read(kCompressed);
  EXPECT_EQ(small.shape(), (Shape{2, 2}));
  expect_close(small, {0, 1, 2, 3}, 0, 0);
}

TEST_F(Idx, IsRefusedIfDamaged) {
  expect_error([] { (void)io::read_idx("/nonexistent.idx"); }, "/nonexistent.idx");
  refuses("", "the IDX file is truncated");
  refuses("PNG!", "expected an IDX file, got one that begins with the bytes 50 4e 47 21");
  refuses(bytes_of({0, 0, 10, 1, 0, 0, 0, 0}), "expected an IDX file");
  refuses(bytes_of({0, 0, 8, 9}), "expected an IDX file");
  refuses(bytes_of({0, 0, 8, 2, 0, 0, 0, 2}), "truncated");
  refuses(bytes_of({0, 0, 8, 1, 0, 0, 0, 3, 1, 2}), "truncated");
  refuses(bytes_of({0, 0, 8, 1, 0, 0, 0, 1, 1, 2}), "longer than its shape [1]");
  refuses(bytes_of({0, 0, 8, 4, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255}),
          "truncated: its sizes are [4294967295]");
  const std::filesystem::path file = write(bytes_of({0, 0, 9, 1, 0, 0, 0, 3, 1, 2, 3}));
  expect_error([&] { (void)io::read_idx(file, 11); }, "of at most 11 bytes, got one of shape [3]");
  EXPECT_EQ(io::read_idx(file, 12).numel(), 3);
  if (!MICA_READS_GZIP) {
    GTEST_SKIP() << "mica was built without zlib";
  }
  for (std::size_t length = 2; length < kCompressed.size(); ++length) {
    EXPECT_THROW((void)read(kCompressed.substr(0, length)), Error) << length;
  }
  for (std::size_t i = 10; i < kCompressed.size(); ++i) {
    std::string damaged = kCompressed;
    damaged[i] = static_cast<char>(damaged[i] ^ 16);
    EXPECT_THROW((void)read(damaged), Error) << i;
  }
  refuses(kCompressed + "x", "there is something behind the compressed data");
}

}  // namespace
}  // namespace idx_test
