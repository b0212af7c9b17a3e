#include <tests/support.h>

#include <algorithm>
#include <string>

#include <mica/core/rng.h>
#include <mica/nn/conv.h>
#include <mica/ops/conv/conv.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/reduce/reduce.h>

using namespace mica;
using namespace mica::testing_support;

namespace nn_conv_test {

// Each module has PyTorch's names and shapes, and computes its op with its options.
TEST(ConvModules, AreTheirOps) {
  const auto expect_parameters = [](const nn::Module& module, const Shape& weight, const Shape& bias) {
    const nn::NamedTensors named = module.named_parameters();
    ASSERT_EQ(named.size(), bias.empty() ? 1U : 2U);
    EXPECT_EQ(named[0].first, "weight");
    EXPECT_EQ(named[0].second.shape(), weight);
    const double bound = 1 / std::sqrt(static_cast<double>(numel_of(weight.slice(1))));
    EXPECT_LE(max(abs(named[0].second)).item(), bound);
    EXPECT_GE(max(abs(named[0].second)).item(), 0.7 * bound);
    if (!bias.empty()) {
      EXPECT_EQ(named[1].first, "bias");
      EXPECT_EQ(named[1].second.shape(), bias);
      EXPECT_LE(max(abs(named[1].second)).item(), bound);
      EXPECT_GT(max(abs(named[1].second)).item(), 0);
    }
  };
  const Tensor line = randn({2, 4, 9}), image = randn({2, 4, 9, 8}), volume = randn({2, 4, 5, 6, 7});
  {
    const nn::Conv1d conv(4, 6, 3, {.stride = 2, .padding = 1, .groups = 2, .padding_mode = PaddingMode::reflect});
    expect_parameters(conv, {6, 2, 3}, {6});
    expect_close(conv(line),
                 conv1d(line, conv.weight, conv.bias,
                        {.stride = 2, .padding = 1, .groups = 2, .padding_mode = PaddingMode::reflect}),
                 0, 0);
  }
  {
    const nn::Conv2d conv(4, 6, {3, 5}, {.padding = "same", .dilation = {2, 1}, .bias = false});
    expect_parameters(conv, {6, 4, 3, 5}, {});
    expect_close(conv(image, Activation::relu),
                 relu(conv2d(image, conv.weight, {}, {.padding = "same", .dilation = {2, 1}})), 0, 0);
  }
  {
    const nn::Conv3d conv(4, 2, 3);
    expect_parameters(conv, {2, 4, 3, 3, 3}, {2});
    expect_close(conv(volume), conv3d(volume, conv.weight, conv.bias), 0, 0);
  }
  {
    const nn::ConvTranspose1d conv(4, 6, 3, {.stride = 2, .output_padding = 1});
    expect_parameters(conv, {4, 6, 3}, {6});
    expect_close(conv(line), conv_transpose1d(line, conv.weight, conv.bias, {.stride = 2, .output_padding = 1}), 0, 0);
  }
  {
    const nn::ConvTranspose2d conv(4, 6, {2, 3}, {.stride = {2, 1}, .padding = 1, .groups = 2, .dilation = 2});
    expect_parameters(conv, {4, 3, 2, 3}, {6});
    expect_close(
        conv(image),
        conv_transpose2d(image, conv.weight, conv.bias, {.stride = {2, 1}, .padding = 1, .dilation = 2, .groups = 2}),
        0, 0);
  }
  {
    const nn::ConvTranspose3d conv(4, 2, 2, {.bias = false});
    expect_parameters(conv, {4, 2, 2, 2, 2}, {});
    expect_close(conv(volume), conv_transpose3d(volume, conv.weight), 0, 0);
  }
}

TEST(ConvModules, Errors) {
  expect_error([] { nn::Conv2d(0, 4, 3); }, "Conv2d: expected in >= 1 and out >= 1, got 0 and 4");
  expect_error([] { nn::Conv2d(4, 6, 3, {.groups = 4}); }, "Conv2d: expected groups that divide 4 and 6, got 4");
  expect_error(
      [] {
        nn::Conv1d(4, 6, {3, 3});
      },
      "Conv1d: expected a kernel length for each of 1 axes, or one number, got [3, 3]");
  expect_error(
      [] {
        nn::ConvTranspose3d(4, 6, {3, 0, 3});
      },
      "ConvTranspose3d: expected kernel lengths of at least 1, got [3, 0, 3]");
}

}  // namespace nn_conv_test
