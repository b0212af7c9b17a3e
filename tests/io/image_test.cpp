#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "tests/files.h"
#include "tests/folders.h"
#include "tests/paths.h"
#include "tests/support.h"
#include <mica/io/image.h>
#include <mica/io/safetensors.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace image_test {
namespace {

std::filesystem::path fixture(const std::string& name) {
  return std::filesystem::path(folder_from("MICA_IMAGE_FIXTURES", MICA_IMAGE_FIXTURES)) / name;
}

/// What PIL and torchvision gave: see tests/image/make_fixtures.py.
const StateDict& expected() {
  static const StateDict tensors = io::load(fixture("expected.safetensors"));
  return tensors;
}

std::vector<std::byte> file_of(const std::string& name) {
  const std::string text = contents(fixture(name));
  const auto* const bytes = reinterpret_cast<const std::byte*>(text.data());
  return {bytes, bytes + text.size()};
}

const std::vector<std::string> kPng{"rgb.png", "gray.png", "bits.png", "palette.png", "rgba.png", "gray_alpha.png"};
const std::vector<std::string> kJpeg{"full.jpg", "half.jpg", "progressive.jpg", "gray.jpg", "cmyk.jpg"};

class Image : public testing::Test {
 protected:
  void SetUp() override {
    if (!MICA_READS_IMAGES) {
      GTEST_SKIP() << "mica was built without libpng or libjpeg-turbo";
    }
  }
};

TEST_F(Image, DecodesTheFilesOfPil) {
  for (const std::vector<std::string>& names : {kPng, kJpeg}) {
    const double tolerance = names == kPng ? 0 : 1;
    for (const std::string& name : names) {
      const Tensor rgb = io::read_image(fixture(name));
      EXPECT_EQ(rgb.dtype(), uint8);
      expect_close(rgb, expected().at(name + ".rgb"), 0, tolerance, name);
      if (name != "cmyk.jpg") {
        // libjpeg's luma is that of the file, PIL's that of the decoded colors.
        expect_close(io::read_image(fixture(name), {.channels = 1}), expected().at(name + ".gray"), 0, tolerance, name);
      }
      EXPECT_EQ(io::read_image(fixture("cmyk.jpg"), {.channels = 1}).shape(), (Shape{1, 36, 52}));
    }
  }
  const std::vector<std::pair<std::string, int>> channels{{"rgb.png", 3},  {"gray.png", 1},       {"bits.png", 1},
                                                          {"rgba.png", 4}, {"gray_alpha.png", 2}, {"palette.png", 3},
                                                          {"gray.jpg", 1}, {"cmyk.jpg", 3}};
  for (const auto& [name, count] : channels) {
    const io::Image image = io::Image::read(fixture(name), {.channels = 0});
    EXPECT_EQ(image.channels(), count) << name;
    EXPECT_EQ(image.pixels().shape(), (Shape{count, 36, 52})) << name;
    EXPECT_EQ(image.height(), 36);
    EXPECT_EQ(image.width(), 52);
  }
}

TEST_F(Image, DecodesOnlyARegionWithTheSamePixels) {
  for (const std::string name : {"rgb.png", "full.jpg", "half.jpg", "progressive.jpg", "gray.jpg", "cmyk.jpg"}) {
    const io::Image image = io::Image::read(fixture(name));
    const Tensor whole = image.pixels();
    for (const io::Region& region : {io::Region{0, 0, 36, 52},
                                     {9, 0, 5, 52},
                                     {0, 17, 36, 3},
                                     {20, 33, 16, 19},
                                     {7, 16, 1, 1},
                                     {35, 51, 1, 1},
                                     {3, 1, 31, 50}}) {
      const Tensor part =
          slice(slice(whole, 1, region.top, region.top + region.height), 2, region.left, region.left + region.width);
      expect_close(image.crop(region), part, 0, 0, name);
    }
  }
}

TEST_F(Image, ResizesAsPil) {
  const io::Image image = io::Image::read(fixture("rgb.png")), of_pixels(image.pixels());
  struct Case {
    std::string name;
    io::Region region;
  };
  const io::Region whole{0, 0, 36, 52};
  for (const auto& [name, region] : {Case{"resize.17x30", whole},
                                     {"resize.51x60", whole},
                                     {"resize.4x5", whole},
                                     {"crop.resize", {7, 11, 21, 30}}}) {
    const Tensor& want = expected().at(name);
    expect_close(image.resize(region, want.size(1), want.size(2)), want, 0, 1, name);
    expect_close(of_pixels.resize(region, want.size(1), want.size(2)), want, 0, 1, name);
    const io::Image real(image.pixels().to(float32));  // is not rounded
    expect_close(real.resize(region, want.size(1), want.size(2)), want.to(float32), 0, 1, name);
  }
  EXPECT_EQ(of_pixels.resize(36, 52).shape(), (Shape{3, 36, 52}));
  // A constant stays one.
  for (const DType dtype : {uint8, float32}) {
    const io::Image flat(full({2, 5, 7}, 1, dtype));
    expect_close(flat.resize({1, 2, 3, 4}, 11, 2), full({2, 11, 2}, 1, dtype), 0, 1e-6);
  }
}

TEST_F(Image, DecodesAReducedJpegIfLittleIsNeeded) {
  for (const std::string name : {"full.jpg", "half.jpg", "progressive.jpg", "gray.jpg", "cmyk.jpg"}) {
    const io::Image image = io::Image::read(fixture(name)), exact(image.pixels());
    for (const io::Region& region : {io::Region{0, 0, 36, 52}, {5, 7, 25, 41}}) {
      for (const std::int64_t size : {12, 6, 3, 1}) {
        const Tensor reduced = image.resize(region, size, size), full = exact.resize(region, size, size);
        const std::vector<double> got = to_vector<double>(reduced), want = to_vector<double>(full);
        double sum = 0;
        for (std::size_t i = 0; i < got.size(); ++i) {
          sum += std::abs(got[i] - want[i]) / static_cast<double>(got.size());
        }
        EXPECT_LT(sum, 5) << name << " to " << size;  // of 255
      }
    }
  }
}

TEST_F(Image, WritesPng) {
  const TemporaryFolder folder;
  const std::filesystem::path path = folder.path() / "x.png";
  for (const std::int64_t channels : {1, 2, 3, 4}) {
    const Tensor pixels = randint(0, 256, {channels, 5, 7}, uint8);
    io::write_png(path, pixels);
    expect_close(io::read_image(path, {.channels = 0}), pixels, 0, 0);
  }
  for (const Device device : test_devices()) {
    io::write_png(path, from_data({-1.f, 0.f, 0.5f, 1.f, 2.f, NAN}, {2, 3}).to(device));
    expect_close(io::read_image(path, {.channels = 1}), {0, 0, 128, 255, 255, 0}, 0, 0);
  }
  expect_error([&] { io::write_png(path, zeros({5, 2, 2})); }, "encode_png: expected pixels of shape (H, W) or");
  expect_error([&] { io::write_png(path, zeros({2, 0})); }, "got [2, 0] of float32");
  expect_error([&] { io::write_png(path, zeros({2, 2}, int64)); }, "got [2, 2] of int64");
  expect_error([&] { io::write_png(folder.path() / "no" / "x.png", zeros({2, 2})); }, "x.png");
}

TEST_F(Image, RefusesDamagedFiles) {
  for (const std::string name : {"rgb.png", "half.jpg", "progressive.jpg"}) {
    const std::vector<std::byte> file = file_of(name);
    for (std::size_t length = 0; length < file.size(); length += 1 + length / 16) {
      const std::vector<std::byte> part(file.begin(), file.begin() + static_cast<std::ptrdiff_t>(length));
      expect_error([&] { (void)io::decode_image(part, {}, "some.file"); }, "some.file: ");
    }
    int refused = 0;
    for (std::size_t at = 0; at < file.size(); at += 1 + file.size() / 100) {
      std::vector<std::byte> damaged = file;
      damaged[at] ^= std::byte{0x55};
      try {
        (void)io::decode_image(damaged);
      } catch (const Error&) {
        ++refused;
      }
    }
    EXPECT_GT(refused, name == "rgb.png" ? 95 : 5) << name;  // a PNG file has checksums
  }
  expect_error([] { (void)io::decode_image(std::vector<std::byte>(100)); },
               "the image: expected a PNG or JPEG file, got neither");
  expect_error([] { (void)io::read_image("/nonexistent.png"); }, "/nonexistent.png");
}

TEST_F(Image, RefusesBombs) {
  // Headers that promise more pixels than the limit, or more than the bytes can hold.
  std::vector<std::byte> png = file_of("rgb.png"), jpeg = file_of("half.jpg");
  expect_error([&] { (void)io::decode_image(png, {.max_pixels = 36 * 52 - 1}); },
               "expected an image of at most 1871 pixels, got 36 × 52");
  expect_error([&] { (void)io::Image(jpeg, "x.jpg", {.max_pixels = 36 * 52 - 1}); }, "x.jpg: expected an image of at");
  expect_error([&] { (void)io::decode_image(png, {.max_bytes = 10}); }, "an image file of at most 10 bytes, got");
  expect_error([&] { (void)io::Image::read(fixture("rgb.png"), {.max_bytes = 10}); }, "at most 10 bytes");
  expect_error([&] { (void)io::decode_image(png, {.channels = 2}); }, "expected 0, 1 or 3 channels, got 2");
  const std::byte frame{0xC0};
  for (std::size_t i = 0; i + 8 < jpeg.size(); ++i) {
    if (jpeg[i] == std::byte{0xFF} && jpeg[i + 1] == frame) {  // its height and width follow
      jpeg[i + 5] = jpeg[i + 7] = std::byte{0x20};
    }
  }
  expect_error([&] { (void)io::decode_image(jpeg); }, "bytes are too few for 8228 × 8244 pixels");
}

TEST_F(Image, RefusesBadArguments) {
  const io::Image image(zeros({3, 4, 5}, uint8));
  for (const io::Region& region : {io::Region{0, 0, 5, 5},
                                   {1, 0, 4, 5},
                                   {0, 1, 4, 5},
                                   {-1, 0, 2, 2},
                                   {0, -1, 2, 2},
                                   {0, 0, 0, 1},
                                   {0, 0, 1, 0},
                                   {0, INT64_MAX, 1, 1},
                                   {1, 1, INT64_MAX, 1}}) {
    expect_error([&] { (void)image.crop(region); }, "Image: expected a region in an image of 4 × 5 pixels");
  }
  expect_error([&] { (void)image.resize(0, 3); }, "a size of at least 1 × 1, got 0 × 3");
  expect_error([] { (void)io::Image(Tensor{}); }, "Image: expected pixels of shape (C, H, W)");
  expect_error([] { io::Image(zeros({5, 4, 4})); }, "got [5, 4, 4] of float32");
  expect_error([] { io::Image(zeros({3, 4, 4}, int64)); }, "int64");
  expect_error([] { io::Image(zeros({3, 0, 4})); }, "[3, 0, 4]");
}

}  // namespace
}  // namespace image_test
