#include <tests/nn/support.h>

#include <mica/core/rng.h>
#include <mica/nn/containers.h>
#include <mica/nn/pool.h>
#include <mica/nn/sample.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

TEST(PoolModule, CallTheirOps) {
  manual_seed(1);
  const Tensor x = randn({2, 4, 8, 8});
  const nn::Sequential layers{nn::MaxPool2d{3, {.stride = 2, .padding = 1}},
                              nn::AvgPool2d{2, {.stride = 1}},
                              nn::Upsample{{.scale_factor = {2}, .mode = Interpolation::linear}},
                              nn::PixelShuffle{2},
                              nn::AdaptiveMaxPool2d{{5, 6}},
                              nn::AdaptiveAvgPool2d{1}};
  const Tensor pooled = avg_pool2d(max_pool2d(x, 3, {.stride = 2, .padding = 1}), 2, {.stride = 1});
  const Tensor larger = pixel_shuffle(interpolate(pooled, {.scale_factor = {2}, .mode = Interpolation::linear}), 2);
  expect_close(layers(x), adaptive_avg_pool2d(adaptive_max_pool2d(larger, {5, 6}), 1), 0, 0);
  const nn::Sequential windows{nn::PixelUnshuffle{2}, nn::Unfold{2, {.stride = 2}}, nn::Fold{4, 2, {.stride = 2}}};
  expect_close(windows(x), pixel_unshuffle(x, 2), 0, 0);
  const nn::Sequential lines{nn::MaxPool1d{2}, nn::AvgPool1d{3}, nn::AdaptiveAvgPool1d{2}, nn::AdaptiveMaxPool1d{1}};
  EXPECT_EQ(lines(randn({3, 12})).shape(), (Shape{3, 1}));
  const nn::Sequential volumes{nn::MaxPool3d{2}, nn::AvgPool3d{1}, nn::AdaptiveAvgPool3d{2}, nn::AdaptiveMaxPool3d{1}};
  EXPECT_EQ(volumes(randn({1, 2, 4, 4, 4})).shape(), (Shape{1, 2, 1, 1, 1}));
}

}  // namespace
