#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "image_cases.h"
#include <mica/ops/join/join.h>
#include <mica/ops/sample/sample.h>

using namespace mica;
using namespace mica::testing_support;

namespace sample_test {

using Values = std::vector<double>;

ImageCase interpolation(const char* name, const Shape& shape, const InterpolateOptions& options) {
  return {name, shape, [options](const Tensor& x) { return interpolate(x, options); }, 4e-6};
}

// Positions in and around the image, none of them halfway between elements or at an edge, where derivatives jump.
Tensor positions(const Shape& shape, const Tensor& like) {
  const Tensor number = arange(static_cast<double>(numel_of(shape)), float64) * 0.737;
  return reshape((number - floor_divide(number, 3.1) * 3.1 - 1.513), shape).to(like.dtype()).to(like.device());
}

ImageCase sampling(const char* name, const Shape& shape, const Shape& grid, const GridSampleOptions& options) {
  return {name, shape, [=](const Tensor& x) { return grid_sample(x, positions(grid, x), options); }, 1e-4, false};
}

const std::vector<ImageCase>& cases() {
  static const std::vector<ImageCase> all{
      interpolation("nearest", {2, 16, 5, 4}, {.size = PerAxis{7, 3}}),
      interpolation("nearest, factor", {1, 3, 5}, {.scale_factor = {2.6}}),
      interpolation("nearest exact", {1, 2, 5, 4, 3}, {.size = PerAxis{7, 3, 5}, .mode = Interpolation::nearest_exact}),
      interpolation("linear", {2, 3, 7}, {.size = 4, .mode = Interpolation::linear}),
      interpolation("bilinear", {2, 16, 5, 4}, {.scale_factor = {2, 3}, .mode = Interpolation::linear}),
      interpolation("bilinear, down", {1, 3, 9, 11}, {.scale_factor = {0.37}, .mode = Interpolation::linear}),
      interpolation("bilinear, corners", {1, 8, 5, 4},
                    {.size = PerAxis{8, 1}, .mode = Interpolation::linear, .align_corners = true}),
      interpolation("bilinear, recomputed", {1, 3, 5, 6},
                    {.scale_factor = {1.7}, .mode = Interpolation::linear, .recompute_scale_factor = true}),
      interpolation("trilinear", {1, 2, 3, 2, 4}, {.size = PerAxis{4, 5, 2}, .mode = Interpolation::linear}),
      interpolation("bicubic", {1, 16, 4, 5}, {.size = PerAxis{7, 3}, .mode = Interpolation::cubic}),
      interpolation("bicubic, corners", {1, 2, 3, 5},
                    {.size = PerAxis{5, 9}, .mode = Interpolation::cubic, .align_corners = true}),
      interpolation("single elements", {2, 1, 1, 1}, {.size = PerAxis{3, 1}, .mode = Interpolation::cubic}),
      interpolation("area", {1, 8, 5, 7}, {.size = PerAxis{3, 4}, .mode = Interpolation::area}),
      {"unfold",
       {2, 3, 6, 5},
       [](const Tensor& x) {
         return unfold(x, {3, 2}, {.dilation = {2, 1}, .padding = {1, 0}, .stride = {1, 2}});
       },
       2e-6,
       false},
      {"fold",
       {1, 18, 6},
       [](const Tensor& x) {
         return fold(x, {4, 6}, {3, 2}, {.padding = {1, 0}, .stride = {2, 2}});
       },
       2e-6,
       false},
      {"pixel_shuffle", {2, 8, 3, 2}, [](const Tensor& x) { return pixel_shuffle(x, 2); }, 2e-6, false},
      {"pixel_unshuffle", {2, 2, 4, 6}, [](const Tensor& x) { return pixel_unshuffle(x, 2); }, 2e-6, false},
      sampling("grid, bilinear", {2, 3, 4, 5}, {2, 3, 4, 2}, {}),
      sampling("grid, nearest", {1, 2, 4, 3}, {1, 3, 2, 2},
               {.mode = Interpolation::nearest, .padding = SamplePadding::border}),
      sampling("grid, reflected", {1, 2, 4, 5}, {1, 5, 2, 2}, {.padding = SamplePadding::reflection}),
      sampling("grid, corners", {1, 2, 4, 5}, {1, 5, 2, 2},
               {.padding = SamplePadding::reflection, .align_corners = true}),
      sampling("grid, bicubic", {1, 2, 5, 4}, {1, 3, 3, 2}, {.mode = Interpolation::cubic}),
      sampling("grid, 3d", {1, 2, 3, 4, 3}, {1, 2, 2, 3, 3}, {.padding = SamplePadding::border}),
  };
  return all;
}

TEST(Sample, DtypesDevicesAndLayoutsAgree) {
  manual_seed(1);
  for (const ImageCase& c : cases()) {
    if (c.name.rfind("grid", 0) != 0) {  // positions in 16 bits are others
      expect_agreement(c);
    }
  }
}

TEST(Sample, GridsOnAllDevicesAndLayouts) {
  manual_seed(2);
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32}) {
      const Tensor x = randn({2, 3, 4, 5}, float64), grid = positions({2, 3, 4, 2}, x);
      for (const SamplePadding padding : {SamplePadding::zeros, SamplePadding::border, SamplePadding::reflection}) {
        const GridSampleOptions options{.padding = padding};
        const Tensor y = grid_sample(channels_last(x.to(dtype).to(device)), grid.to(dtype).to(device), options);
        expect_close(y, to_vector<double>(grid_sample(x, grid, options)), 1e-4, dtype == float64 ? 1e-12 : 1e-4);
      }
    }
  }
}

TEST(Sample, Gradcheck) {
  for (const Device device : test_devices()) {
    for (const ImageCase& c : cases()) {
      if (numel_of(c.shape) <= 200) {
        expect_gradients(c, device);
      }
    }
    for (const Interpolation mode : {Interpolation::linear, Interpolation::cubic}) {
      const auto of_grid = [&](const Tensor& x, const Tensor& grid) { return grid_sample(x, grid, {.mode = mode}); };
      const Tensor x = randn({1, 2, 4, 5}, float64, device);
      EXPECT_TRUE(autograd::gradcheck(of_grid, {x, positions({1, 3, 2, 2}, x)}));
      EXPECT_TRUE(autograd::gradgradcheck(of_grid, {x, positions({1, 3, 2, 2}, x)}));
    }
    const auto grid_of = [](const Tensor& theta) { return affine_grid(theta, {1, 1, 3, 4}); };
    EXPECT_TRUE(autograd::gradcheck(grid_of, {randn({1, 2, 3}, float64, device)}));
  }
}

TEST(Sample, IdentityGridGivesTheImage) {
  for (const Device device : test_devices()) {
    for (const bool corners : {false, true}) {
      const Tensor x = randn({2, 3, 4, 5}, float64, device);
      const Tensor identity = from_data<double>({1., 0., 0., 0., 1., 0.}, {1, 2, 3}, device);
      const Tensor grid = affine_grid(cat({identity, identity}), x.shape(), corners);
      expect_close(grid_sample(x, grid, {.align_corners = corners}), x, 1e-12, 1e-12);
    }
  }
}

TEST(Sample, NanPositionsAndEmptyBatches) {
  for (const Device device : test_devices()) {
    const Tensor x = ones({1, 1, 2, 2}, float32, device);
    const Tensor y = grid_sample(x, from_data({NAN, 0.f, 0.f, 0.f}, {1, 1, 2, 2}, device));
    EXPECT_TRUE(std::isnan(to_vector<double>(y)[0]));
    EXPECT_EQ(to_vector<double>(y)[1], 1);
    const Tensor none = zeros({0, 2, 4, 4}, float32, device);
    EXPECT_EQ(interpolate(none, {.size = 2}).shape(), (Shape{0, 2, 2, 2}));
    EXPECT_EQ(unfold(none, 2).shape(), (Shape{0, 8, 9}));
    EXPECT_EQ(pixel_shuffle(zeros({0, 4, 2, 2}, float32, device), 2).shape(), (Shape{0, 1, 4, 4}));
    EXPECT_EQ(grid_sample(none, zeros({0, 3, 5, 2}, float32, device)).shape(), (Shape{0, 2, 3, 5}));
  }
}

TEST(Sample, Errors) {
  const Tensor x = ones({1, 2, 4, 4});
  expect_error(
      [&] {
        interpolate(ones({4, 4}), {.size = 2});
      },
      "interpolate: expected x of shape (N, C, 1 to 3 spatial");
  expect_error([&] { interpolate(x, {}); }, "interpolate: expected either size or scale_factor");
  expect_error([&] { interpolate(x, {.size = 2, .align_corners = true}); }, "expected align_corners only with");
  expect_error([&] { interpolate(x, {.scale_factor = {0.1}}); }, "expected a scale_factor that gives at least one");
  expect_error([&] { interpolate(x, {.scale_factor = {1, 2, 3}}); }, "expected scale_factor of 1 or 2 numbers, got 3");
  expect_error([&] { unfold(x, 5); }, "unfold: expected images of at least the windows' size");
  expect_error([&] { fold(ones({1, 3, 4}), 4, 2); }, "fold: expected columns of shape (N, C · 4, 9), got [1, 3, 4]");
  expect_error([&] { pixel_shuffle(x, 2); }, "pixel_shuffle: expected x of shape (…, C · 4, H, W), got [1, 2, 4, 4]");
  expect_error([&] { pixel_unshuffle(x, 3); }, "pixel_unshuffle: expected x of shape (…, C, H · 3, W · 3)");
  expect_error(
      [&] {
        grid_sample(x, ones({1, 3, 3, 3}));
      },
      "grid_sample: expected a grid of shape (1, 2 spatial axes, 2)");
  expect_error(
      [&] {
        affine_grid(ones({1, 3, 3}), x.shape());
      },
      "affine_grid: expected floating theta of shape [1, 2, 3]");
}

}  // namespace sample_test
