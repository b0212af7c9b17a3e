#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <tests/paths.h>
#include <tests/support.h>

#include <cmath>
#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include <mica/core/creation.h>
#include <mica/core/dispatch.h>
#include <mica/nn/models/resnet.h>
#include <mica/nn/models/vit.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/reduce/reduce.h>

// ResNet and ViT against torchvision's and timm's: see tests/vision/make_fixtures.py.

namespace vision_models_test {

using namespace mica;
using namespace mica::testing_support;
using json = nlohmann::ordered_json;  // weights depend on the order of tensors

// The same numbers as values() there.
std::vector<double> values(std::int64_t count, std::uint32_t seed) {
  std::vector<double> result(static_cast<std::size_t>(count));
  double* const out = result.data();
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint32_t x = static_cast<std::uint32_t>(i) + seed * 0x9E3779B9U;
    x = (x ^ x >> 16U) * 0x045D9F3BU;
    x = (x ^ x >> 16U) * 0x045D9F3BU;
    out[i] = (x ^ x >> 16U) / 4294967296.0 - 0.5;
  }
  return result;
}

// As set_weights() there. `names` are PyTorch's, in the order of its state_dict().
StateDict weights_of(const json& tensors) {
  StateDict state;
  std::uint32_t seed = 0;
  for (const auto& [name, sizes] : tensors.items()) {
    const Shape shape(sizes.get<std::vector<std::int64_t>>());
    if (name.ends_with("num_batches_tracked")) {
      state.emplace(name, zeros(shape, int64));
      ++seed;
      continue;
    }
    std::vector<double> v = values(numel_of(shape), seed++);
    double scale = 0.25, shift = 0;
    if (name.ends_with("running_var")) {
      scale = shift = 1;
    } else if (shape.size() >= 2 && shape[0] > 1) {
      scale = std::sqrt(24.0 * static_cast<double>(shape[0]) / static_cast<double>(numel_of(shape)));
    } else if (name.ends_with("weight")) {
      shift = 1;
    }
    double* const out = v.data();
    for (std::size_t i = 0, count = v.size(); i < count; ++i) {
      out[i] = shift + scale * out[i];
    }
    state.emplace(name, from_data(v, shape));
  }
  return state;
}

// The norm of x and eight elements, against those of PyTorch.
void expect_summary(const std::string& name, const Tensor& x, const json& expected, double least, double tolerance) {
  ASSERT_TRUE(x.defined()) << name;
  const std::vector<double> flat = to_vector<double>(x);
  double squares = 0;
  for (const double value : flat) {
    squares += value * value;
  }
  const double norm = expected[0].get<double>();
  EXPECT_NEAR(std::sqrt(squares), norm, tolerance * std::max(norm, least)) << name;
  // An element may be off by as much as its tensor.
  const double bound = tolerance * std::max(norm, least);
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_NEAR(flat[i * (flat.size() - 1) / 7], expected[i + 1].get<double>(), bound) << name << ", element " << i;
  }
}

const json& fixtures() {
  static const json all = [] {
    std::ifstream file(MICA_SOURCE "/tests/vision/models.json");
    return json::parse(file);
  }();
  return all;
}

// In training, batch norm of few images enlarges the rounding of float32 (also PyTorch's) beyond a useful tolerance.
//
// `rename` maps PyTorch's state to the model's.
template <class Model, class Rename>
void expect_as_pytorch(const char* name, Model&& model, Rename rename) {
  const json& c = fixtures().at(name);
  const std::int64_t size = c["size"], batch = c["batch"];
  for (const Device device : test_devices()) {
    const DeviceGuard guard(device);
    const bool training = c["training"];
    const bool in_float64 = training && c.contains("buffers") && !c["buffers"].empty();
    const DType dtype = in_float64 ? float64 : float32;
    const double tolerance = in_float64 ? 1e-6 : 1e-4;
    model.to(device, dtype);
    model.load_state_dict(rename(weights_of(c["tensors"])));
    model.train(training);
    model.zero_grad();
    std::vector<double> pixels = values(batch * 3 * size * size, 1000);
    for (double& pixel : pixels) {
      pixel *= 4;
    }
    const Tensor images = from_data(pixels, {batch, 3, size, size}, device).to(dtype).requires_grad_();
    const Tensor logits = model(images);
    const auto expected = c["logits"].template get<std::vector<double>>();
    const std::vector<double> got = to_vector<double>(logits);
    ASSERT_EQ(got.size(), expected.size());
    double largest = 0;
    for (const double value : expected) {
      largest = std::max(largest, std::abs(value));
    }
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_NEAR(got[i], expected[i], tolerance * largest) << "logit " << i;
    }
    sum(logits * from_data(values(logits.numel(), 2000), logits.shape(), device).to(dtype)).backward();

    double most = 0;
    for (const auto& gradient : c["gradients"].items()) {
      most = std::max(most, gradient.value()[0].template get<double>());
    }
    const nn::NamedTensors parameters = model.named_parameters();
    ASSERT_EQ(parameters.size(), c["gradients"].size());
    StateDict by_name(parameters.begin(), parameters.end());
    for (const auto& [pytorch, gradient] : c["gradients"].items()) {
      const StateDict one = rename(StateDict{{pytorch, Tensor{}}});
      ASSERT_TRUE(by_name.contains(one.begin()->first)) << pytorch;
      expect_summary(pytorch, by_name.at(one.begin()->first).grad(), gradient, 1e-3 * most, tolerance);
    }
    expect_summary("images", images.grad(), c["images"], 0, tolerance);
    if (c.contains("buffers")) {
      for (const auto& [buffer, tensor] : model.named_buffers()) {
        if (is_floating(tensor.dtype())) {
          expect_summary(buffer, tensor, c["buffers"].at(buffer), 0, tolerance);
        }
      }
    }
  }
}

StateDict same(const StateDict& state) { return state; }

TEST(ResNet, ComputesWhatTorchvisionAndTimmCompute) {
  for (const auto& [name, depth] : std::vector<std::pair<const char*, std::int64_t>>{
           {"resnet18", 18}, {"resnet34", 34}, {"resnet50", 50}, {"resnet50_timm", 50}}) {
    SCOPED_TRACE(name);
    expect_as_pytorch(name, nn::ResNet({.depth = depth, .classes = 7}), same);
  }
}

TEST(ViT, ComputesWhatTorchvisionAndTimmCompute) {
  expect_as_pytorch(
      "vit", nn::ViT({.image = 32, .patch = 8, .classes = 7, .layers = 3, .heads = 3, .width = 48, .hidden = 96}),
      nn::vit_state);
  expect_as_pytorch(
      "vit_timm", nn::ViT({.image = 24, .patch = 8, .classes = 7, .layers = 2, .heads = 4, .width = 48, .hidden = 192}),
      nn::vit_state);
}

TEST(ResNet, SmallImagesKeepTheirSize) {
  const nn::ResNet model({.depth = 18, .classes = 10, .channels = 1, .small_images = true});
  EXPECT_EQ(model.features(zeros({2, 1, 28, 28})).shape(), Shape({2, 512, 4, 4}));
  EXPECT_EQ(model(zeros({2, 1, 28, 28})).shape(), Shape({2, 10}));
}

TEST(VisionModels, RejectWrongSizes) {
  expect_error([] { nn::ResNet({.depth = 20}); }, "ResNet: expected a depth of 18, 34, 50, 101 or 152, got 20");
  expect_error([] { nn::ResNet({.classes = 0}); }, "ResNet: expected classes and channels of at least 1, got 0 and 3");
  expect_error(
      [] {
        nn::ResNet({.depth = 18, .classes = 2})(zeros({1, 1, 32, 32}));
      },
      "ResNet: expected images of shape (N, 3, H, W), got [1, 1, 32, 32]");
  expect_error([] { nn::ViT({.image = 30, .patch = 8}); },
               "ViT: expected patch to divide image, got image 30 and patch 8");
  expect_error([] { nn::ViT({.heads = 5}); }, "ViT: expected heads to divide width, got width 768 and heads 5");
  expect_error(
      [] {
        nn::ViT({.image = 16, .patch = 8, .classes = 2, .layers = 1, .heads = 1, .width = 8, .hidden = 8})(
            zeros({1, 3, 16, 8}));
      },
      "ViT: expected images of shape (B, 3, 16, 16), got [1, 3, 16, 8]");
  expect_error(
      [] {
        nn::vit_state({{"conv_proj.weight", Tensor{}}, {"patch_embed.proj.weight", Tensor{}}});
      },
      "vit_state: two tensors are \"patch_embed.weight\" in mica");
}

}  // namespace vision_models_test
