#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "tests/files.h"
#include "tests/folders.h"
#include "tests/paths.h"
#include "tests/support.h"
#include <mica/io/data_loader.h>
#include <mica/io/image_dataset.h>
#include <mica/io/safetensors.h>
#include <mica/io/transforms.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/join/join.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace transforms_test {
namespace {

namespace fs = std::filesystem;

fs::path image_fixture(const std::string& name) {
  return std::filesystem::path(folder_from("MICA_IMAGE_FIXTURES", MICA_IMAGE_FIXTURES)) / name;
}

/// What torchvision gave: see tests/image/make_fixtures.py.
const Tensor& torchvision(const std::string& name) {
  static const StateDict tensors = io::load(image_fixture("expected.safetensors"));
  return tensors.at(name);
}

const io::Image& photo() {
  static const io::Image image(io::read_image(image_fixture("rgb.png")));
  return image;
}

/// The part of it that torchvision's float32 results are of, in [0, 1].
Tensor real_photo() { return io::Image(photo().crop({10, 20, 16, 20})).pixels().to(float32) * (1.0 / 255); }

Tensor apply(const io::ImageTransform& transform, const io::Image& image, std::int64_t index = 0) {
  io::SampleRandom random(7, 0, index);
  return transform(image, random).pixels();
}

class Transforms : public testing::Test {
 protected:
  void SetUp() override {
    if (!MICA_READS_IMAGES) {
      GTEST_SKIP() << "mica was built without libpng or libjpeg-turbo";
    }
  }
};

using ImageDataset = Transforms;

TEST_F(Transforms, ChangeSizesAsTorchvision) {
  expect_close(apply(io::Resize{17, 30}, photo()), torchvision("resize.17x30"), 0, 1);
  expect_close(apply(io::Resize{15}, photo()), torchvision("shorter.15"), 0, 1);
  expect_close(apply(io::CenterCrop{21, 30}, photo()), torchvision("center.21x30"), 0, 0);
  EXPECT_EQ(apply(io::CenterCrop{8}, photo()).shape(), (Shape{3, 8, 8}));
  const io::Image tall(zeros({1, 50, 20}));
  EXPECT_EQ(apply(io::Resize{11}, tall).shape(), (Shape{1, 27, 11}));
  expect_error([] { (void)apply(io::CenterCrop{37}, photo()); }, "CenterCrop: expected an image of at least 37 × 37");
  expect_error([] { (void)apply(io::Resize{0}, photo()); }, "Resize: expected a size of at least 1, got 0");
}

TEST_F(Transforms, ChangeColorsAsTorchvision) {
  const Tensor x = real_photo();
  const double tolerance = 6e-4;  // of float16, in which the results are stored
  expect_close(io::adjust_brightness(x, 1.3), torchvision("brightness.1.3"), 0, tolerance);
  expect_close(io::adjust_contrast(x, 0.6), torchvision("contrast.0.6"), 0, tolerance);
  expect_close(io::adjust_saturation(x, 1.7), torchvision("saturation.1.7"), 0, tolerance);
  expect_close(io::adjust_saturation(x, 0), torchvision("saturation.0.0"), 0, tolerance);
  expect_close(io::adjust_hue(x, 0.2), torchvision("hue.0.2"), 0, tolerance);
  expect_close(io::adjust_hue(x, -0.4), torchvision("hue.-0.4"), 0, tolerance);
  expect_close(io::rotate(x, 30), torchvision("rotate.30"), 0, tolerance);
  expect_close(io::rotate(slice(x, 2, 0, 16), -90), torchvision("rotate.-90"), 0, tolerance);
  const io::Normalize normalize{{0.485, 0.456, 0.406}, {0.229, 0.224, 0.225}};
  expect_close(apply(normalize, io::Image(x)), torchvision("normalize"), 1e-3, tolerance);
  // uint8 gives the same, rounded.
  const Tensor bytes = io::Image(photo().crop({10, 20, 16, 20})).pixels();
  const auto rounded = [](const Tensor& real) { return real * 255.0; };
  expect_close(io::adjust_hue(bytes, 0.2), rounded(torchvision("hue.0.2").to(float32)), 0, 0.7);
  expect_close(io::adjust_contrast(bytes, 0.6), rounded(torchvision("contrast.0.6").to(float32)), 0, 0.7);
  expect_close(apply(normalize, io::Image(bytes)), torchvision("normalize"), 1e-3, tolerance);
  // One channel has neither saturation nor hue.
  const Tensor gray = slice(x, 0, 0, 1);
  expect_close(io::adjust_hue(gray, 0.3), gray, 0, 0);
  expect_close(io::adjust_saturation(gray, 0.3), gray, 0, 1e-6);
  expect_error([&] { (void)io::adjust_hue(slice(x, 0, 0, 2), 0.3); },
               "adjust_hue: expected pixels with 1 or 3 channels");
  expect_error([&] { (void)io::adjust_hue(x, 0.6); }, "a shift in [-0.5, 0.5], got 0.6");
  expect_error([&] { (void)io::adjust_contrast(x, -1); }, "adjust_contrast: expected a factor of at least 0, got -1");
  expect_error([&] { (void)io::rotate(x, NAN); }, "rotate: expected a finite angle");
  expect_error([&] { (void)apply(io::Normalize{{0, 0}}, io::Image(x)); }, "one for each of 3 channels, got 2 and 1");
  expect_error([&] { (void)apply(io::Normalize{{0}, {0}}, io::Image(x)); }, "positive deviations, got 0");
}

TEST_F(Transforms, AreFunctionsOfSeedEpochAndIndex) {
  const std::vector<io::ImageTransform> all{
      io::RandomCrop{30, 40},    io::RandomCrop{36, 52, 4}, io::RandomResizedCrop{16, 24},       io::RandomFlip{},
      io::RandomFlip{0.5, true}, io::RandomRotation{20},    io::ColorJitter{0.4, 0.4, 0.4, 0.1}, io::RandomErasing{}};
  for (std::size_t t = 0; t < all.size(); ++t) {
    std::set<std::vector<double>> results;
    for (std::int64_t i = 0; i < 20; ++i) {
      const std::vector<double> result = to_vector<double>(apply(all[t], photo(), i));
      EXPECT_EQ(to_vector<double>(apply(all[t], photo(), i)), result);
      results.insert(result);
    }
    EXPECT_GE(results.size(), t == 3 || t == 4 ? 2u : 10u) << t;
  }
}

TEST_F(Transforms, MoveAndFillPixels) {
  const io::Image x(from_data({1.f, 2.f, 3.f, 4.f, 5.f, 6.f}, {1, 2, 3}));
  expect_close(apply(io::RandomFlip{1}, x), {3, 2, 1, 6, 5, 4}, 0, 0);
  expect_close(apply(io::RandomFlip{1, true}, x), {4, 5, 6, 1, 2, 3}, 0, 0);
  expect_close(apply(io::RandomFlip{0}, x), x.pixels(), 0, 0);
  const Tensor padded = apply(io::Pad{1, 9}, x);
  EXPECT_EQ(padded.shape(), (Shape{1, 4, 5}));
  expect_close(padded, {9, 9, 9, 9, 9, 9, 1, 2, 3, 9, 9, 4, 5, 6, 9, 9, 9, 9, 9, 9}, 0, 0);
  expect_error([&] { (void)apply(io::Pad{-1}, x); }, "Pad: expected a padding of at least 0, got -1");
  expect_error([&] { (void)apply(io::RandomCrop{3}, x); }, "RandomCrop: expected an image of at least 3 × 3 pixels");
  // All places are used.
  std::set<double> corners;
  for (std::int64_t i = 0; i < 60; ++i) {
    const Tensor part = apply(io::RandomCrop{1, 1, 1}, x, i);
    corners.insert(part.item());
  }
  EXPECT_EQ(corners.size(), 7u);  // with 0, of the padding
  const io::Image large(ones({3, 40, 50}));
  for (std::int64_t i = 0; i < 20; ++i) {
    const std::vector<double> pixels = to_vector<double>(apply(io::RandomErasing{.probability = 1}, large, i));
    const auto erased = static_cast<double>(std::count(pixels.begin(), pixels.end(), 0));
    EXPECT_GE(erased, 0.015 * 6000);
    EXPECT_LE(erased, 0.35 * 6000);
  }
}

TEST_F(Transforms, ResizedCropsHaveTheirAreaAndRatio) {
  // The image has its coordinates as values, so that a crop's corners show where it is.
  const std::int64_t height = 60, width = 90;
  const Tensor rows = reshape(arange(height, float32), {1, height, 1}),
               columns = reshape(arange(width, float32), {1, 1, width});
  const io::Image image(
      cat({broadcast_view(rows, {1, height, width}), broadcast_view(columns, {1, height, width})}, 0));
  double least = 1, most = 0;
  for (std::int64_t i = 0; i < 200; ++i) {
    const std::vector<double> x =
        to_vector<double>(apply(io::RandomResizedCrop{.height = 8, .area = {0.2, 0.6}}, image, i));
    // Centers of the first and last pixels are 7/8 of the crop's size apart.
    const double h = (x[63] - x[0]) * 8 / 7, w = (x[127] - x[64]) * 8 / 7, share = h * w / (60.0 * 90);
    EXPECT_GT(w / h, 0.75 * 0.95);
    EXPECT_LT(w / h, 1.34 * 1.05);
    least = std::min(least, share);
    most = std::max(most, share);
  }
  EXPECT_NEAR(least, 0.2, 0.02);
  EXPECT_NEAR(most, 0.6, 0.05);
  // No part of a long image has such a ratio and area, so it is the largest one in the middle.
  const io::Image line(reshape(arange(100, float32), {1, 1, 100}));
  const Tensor middle = apply(io::RandomResizedCrop{.height = 1, .area = {0.9, 1}}, line);
  expect_close(middle, {49}, 0, 0.51);
  expect_error(
      [&] {
        (void)apply(io::RandomResizedCrop{.height = 1, .area = {0, 1}}, line);
      },
      "positive ranges of area");
}

io::LabeledImages digits(std::int64_t count) {
  const Tensor images = rand({count, 2, 4, 5});
  Tensor labels = arange(count, int64);
  for (std::int64_t i = 0; i < count; ++i) {
    labels.data<std::int64_t>()[i] %= 3;
  }
  return io::labeled_images(images, labels);
}

TEST_F(ImageDataset, DoesNotDependOnWorkers) {
  const io::ImageTransform augment = io::in_order({io::RandomCrop{3, 4}, io::RandomFlip{}, io::Normalize{{0.5}, {2}}});
  const io::LabeledImages images = digits(11);
  for (const double mixed : {0.0, 0.4}) {
    const io::ImageDataset data(images, {.transform = augment, .seed = 3, .mix_up = mixed, .cut_mix = mixed});
    std::vector<std::vector<float>> expected;
    for (const int workers : {0, 1, 3}) {
      const io::DataLoader loader(data, {.batch = 4, .seed = 5, .workers = workers});
      std::vector<std::vector<float>> got;
      for (const std::int64_t epoch : {0, 1}) {
        for (const Tensors& batch : loader.epoch(epoch)) {
          EXPECT_EQ(batch[1].dtype(), mixed > 0 ? float32 : int64);
          got.push_back(to_vector<float>(batch[0]));
          got.push_back(to_vector<float>(batch[1]));
        }
      }
      expected = workers == 0 ? got : expected;
      EXPECT_EQ(got, expected) << workers;
    }
    EXPECT_NE(expected[0], expected[6]);  // another epoch
  }
}

TEST_F(ImageDataset, MixesPairs) {
  const io::LabeledImages images = digits(6);
  const io::ImageDataset plain(images);
  for (const bool cuts : {false, true}) {
    const io::ImageDataset data(images, {.mix_up = cuts ? 0 : 0.8, .cut_mix = cuts ? 0.8 : 0});
    io::DataLoader mixed(data, {.batch = 5, .shuffle = false}), whole(plain, {.batch = 5, .shuffle = false});
    const Tensors got = mixed.next(), from = whole.next();
    const std::vector<float> x = to_vector<float>(got[0]), y = to_vector<float>(from[0]), p = to_vector<float>(got[1]);
    ASSERT_EQ(got[1].shape(), (Shape{5, 3}));
    for (std::size_t row = 0; row < 5; ++row) {
      const std::size_t other = row == 4 ? 4 : row ^ 1;
      const float share = p[3 * row + row % 3] - (row == other ? 0 : 0);
      EXPECT_NEAR(share + (row == other ? 0 : p[3 * row + other % 3]), 1, 1e-6);
      EXPECT_NEAR(p[3 * other + other % 3], share, 1e-6);
      double own = 0;
      for (std::size_t i = 0; i < 40; ++i) {
        const float a = y[40 * row + i], b = y[40 * other + i], value = x[40 * row + i];
        if (cuts) {
          EXPECT_TRUE(value == a || value == b);
          own += value == a ? 1.0 / 40 : 0;
        } else {
          EXPECT_NEAR(value, share * a + (1 - share) * b, 1e-5);
        }
      }
      if (cuts) {
        EXPECT_NEAR(own, share, 1e-5);
      }
    }
  }
  const io::LabeledImages bytes = io::labeled_images(zeros({2, 3, 3}, uint8), zeros({2}, uint8));
  expect_error([&] { io::ImageDataset(bytes, {.mix_up = 1}); }, "expected images of float32 to mix, got uint8");
  expect_error([&] { io::ImageDataset(bytes, {.mix_up = -1}); }, "at least 0 for mixing, got -1 and 0");
}

TEST_F(ImageDataset, ReadsFoldersOfImages) {
  const TemporaryFolder folder;
  const auto add = [&](const fs::path& name, double value, std::int64_t width = 3) {
    fs::create_directories((folder.path() / name).parent_path());
    io::write_png(folder.path() / name, full({3, 2, width}, value, uint8));
  };
  expect_error([&] { (void)io::image_folder(folder.path()); }, "expected a folder for each class in");
  expect_error([&] { (void)io::image_folder(folder.path() / "no"); }, "image_folder: cannot open the folder");
  add("dog/a.PNG", 1);
  add("cat/2/c.png", 2);
  add("cat/1.png", 3);
  add("cat/.hidden.png", 4);
  fs::create_directories(folder.path() / ".cache");
  const io::LabeledImages images = io::image_folder(folder.path());
  EXPECT_EQ(images.classes, (std::vector<std::string>{"cat", "dog"}));
  EXPECT_EQ(images.labels, (std::vector<std::int64_t>{0, 0, 1}));
  const io::ImageDataset data(images);
  io::DataLoader loader(data, {.batch = 3, .shuffle = false, .workers = 2});
  const Tensors batch = loader.next();
  EXPECT_EQ(batch[0].shape(), (Shape{3, 3, 2, 3}));
  EXPECT_EQ(batch[0].dtype(), uint8);
  expect_close(slice(reshape(batch[0], {3, 18}), 1, 0, 1), {3, 2, 1}, 0, 0);
  expect_close(batch[1], {0, 0, 1}, 0, 0);

  add("dog/b.png", 5, 4);
  const io::ImageDataset other(io::image_folder(folder.path()));
  io::DataLoader uneven(other, {.batch = 4, .shuffle = false});
  expect_error([&] { (void)uneven.next(); },
               "expected transformed images of shape [3, 2, 3] and uint8, like the first one, got [3, 2, 4] and uint8 "
               "for image 3");
  fs::create_directories(folder.path() / "empty");
  expect_error([&] { (void)io::image_folder(folder.path()); }, "expected PNG or JPEG files in");
}

TEST_F(ImageDataset, ReadsTensors) {
  const Tensor images = randint(0, 256, {4, 3, 5}, uint8);
  const io::LabeledImages all = io::labeled_images(images, from_data<std::uint8_t>({0, 2, 1, 2}), {"a", "b", "c"});
  EXPECT_EQ(all.labels, (std::vector<std::int64_t>{0, 2, 1, 2}));
  expect_close(all.image(2).pixels(), slice(images, 0, 2, 3), 0, 0);
  EXPECT_EQ(io::labeled_images(images, from_data({0, 2, 1, 2})).classes, (std::vector<std::string>{"0", "1", "2"}));
  expect_error(
      [&] {
        (void)io::labeled_images(images, from_data({0, 2, 1}), {});
      },
      "got [4, 3, 5] of uint8 and [3] of");
  expect_error(
      [&] {
        (void)io::labeled_images(images, from_data({0, 2, 1, 2}), {"a", "b"});
      },
      "expected labels in [0, 2), got 2");
  expect_error([&] { (void)io::labeled_images(images, from_data({0, -1, 1, 1})); }, "got -1");
  expect_error([&] { io::ImageDataset{io::LabeledImages()}; }, "expected at least one image, got none");
}

}  // namespace
}  // namespace transforms_test
