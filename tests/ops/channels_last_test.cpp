#include <tests/support.h>

#include <functional>
#include <utility>

#include <mica/autograd/grad.h>
#include <mica/autograd/gradcheck.h>
#include <mica/core/copy.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/elementwise/where.h>
#include <mica/ops/inplace/inplace.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/channels_last.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace channels_last_test {

bool only_channels_last(const Tensor& x) { return is_channels_last(x) && !x.is_contiguous(); }

TEST(ChannelsLast, IsAboutStridesOnly) {
  const Tensor x = randn({2, 3, 4, 5});
  EXPECT_FALSE(is_channels_last(x));
  const Tensor y = channels_last(x);
  EXPECT_EQ(y.strides(), (Strides{60, 1, 15, 3}));
  EXPECT_TRUE(is_channels_last(y));
  expect_close(y, x, 0, 0);
  EXPECT_TRUE(channels_last(y).is_same(y));
  EXPECT_TRUE(contiguous(y).is_contiguous());
  EXPECT_EQ(channels_last(randn({2, 3, 4, 5, 6})).strides(), (Strides{360, 1, 90, 18, 3}));
  EXPECT_TRUE(is_channels_last(permute(randn({2, 4, 5, 3}), {0, 3, 1, 2})));
  EXPECT_FALSE(is_channels_last(slice(y, 1, 0, 2)));
  EXPECT_FALSE(is_channels_last(randn({2, 3, 4})));
  // One channel, or one pixel: both layouts at once.
  EXPECT_TRUE(is_channels_last(randn({2, 1, 4, 5})));
  EXPECT_TRUE(is_channels_last(randn({2, 3, 1, 1})));
  EXPECT_TRUE(is_channels_last(empty({0, 3, 4, 5})));
  expect_error(
      [] {
        channels_last(zeros({3, 4, 5}));
      },
      "channels_last: expected a tensor of 4 or 5 axes, got shape [3, 4, 5]");
  expect_error(
      [] {
        empty_channels_last({3, 4, 5});
      },
      "empty_channels_last: expected a shape of 4 or 5 axes, got [3, 4, 5]");
}

TEST(ChannelsLast, NewTensorsFollowTheirOperands) {
  const Tensor x = channels_last(randn({2, 3, 4, 5}));
  EXPECT_TRUE(only_channels_last(empty_in_layout({2, 3, 2, 2}, x)));
  EXPECT_TRUE(empty_in_layout({2, 3, 2, 2}, contiguous(x)).is_contiguous());
  EXPECT_TRUE(empty_in_layout({2, 3}, x).is_contiguous());
  const Tensor other = randn({2, 3, 4, 5}), small = randn({3, 1, 1}), none;
  EXPECT_TRUE(only_channels_last(empty_in_layout(x.shape(), float32, x.device(), {&x, &small, &none, nullptr})));
  EXPECT_TRUE(empty_in_layout(x.shape(), float32, x.device(), {&x, &other}).is_contiguous());
}

TEST(ChannelsLast, ElementwiseOpsKeepIt) {
  for (const Device device : test_devices()) {
    for (const Shape& shape : {Shape{2, 3, 5, 7}, Shape{2, 8, 3, 4, 2}}) {
      const Tensor x = rand(shape, float32, device) + 0.5;
      const Tensor z = rand(shape, float32, device) + 0.5;
      Shape per_channel = Shape::filled(shape.size() - 1, 1);
      per_channel[0] = shape[1];
      const Tensor scale = rand(per_channel, float32, device);
      using Op = std::function<Tensor(const Tensor&, const Tensor&)>;
      const std::pair<const char*, Op> ops[] = {
          {"relu", [](const Tensor& a, const Tensor&) { return relu(a - 0.9); }},
          {"gelu", [](const Tensor& a, const Tensor&) { return gelu(a); }},
          {"neg", [](const Tensor& a, const Tensor&) { return neg(a); }},
          {"add", [](const Tensor& a, const Tensor& b) { return a + b; }},
          {"scaled", [&](const Tensor& a, const Tensor& b) { return a * scale + b / 3; }},
          {"maximum", [](const Tensor& a, const Tensor& b) { return maximum(a, b); }},
          {"pow", [](const Tensor& a, const Tensor& b) { return pow(a, b); }},
          {"where", [](const Tensor& a, const Tensor& b) { return where(lt(a, b), a, b); }},
          {"cast", [](const Tensor& a, const Tensor&) { return a.to(bfloat16); }},
          {"copy_", [](const Tensor& a, const Tensor& b) { return copy_(a * 2, b.to(float64)) * a; }},
          {"add_", [](const Tensor& a, const Tensor& b) { return add_(a * 2, b, 2); }},
          {"sums", [](const Tensor& a, const Tensor& b) { return a * b + relu(a) + exp(a); }},
      };
      for (const auto& [name, op] : ops) {
        const auto run = [&op = op](const Tensor& a, const Tensor& b) {
          const Tensor left = a.detach().requires_grad_(), right = b.detach().requires_grad_();
          const Tensor y = op(left, right);
          const Tensor dy = relu(y.detach() + 0.125);
          const Tensors grads = autograd::grad({y}, {left, right}, {dy}, {.allow_unused = true});
          return Tensors{y.detach(), grads[0], grads[1]};
        };
        const Tensors expected = run(x, z);
        const Tensors got = run(channels_last(x), channels_last(z));
        for (std::size_t i = 0; i < got.size(); ++i) {
          if (!expected[i].defined()) {
            EXPECT_FALSE(got[i].defined());
            continue;
          }
          EXPECT_TRUE(only_channels_last(got[i])) << name << ", result " << i;
          expect_close(got[i], expected[i], 0, 0, name);
        }
        EXPECT_TRUE(op(channels_last(x), z).defined());
        expect_close(op(channels_last(x), z), expected[0], 0, 0, name);
      }
      EXPECT_TRUE(only_channels_last(channels_last(x).to(Device::cpu())));
      expect_close(channels_last(x).to(Device::cpu(), float64), x.to(float64), 0, 0);
    }
  }
}

TEST(ChannelsLast, GradientsAreRight) {
  const Tensor x = randn({2, 3, 2, 3}, float64).requires_grad_();
  const auto f = [](const Tensors& in) { return channels_last(in[0]) * exp(channels_last(in[0])); };
  EXPECT_TRUE(autograd::gradcheck(f, {x}));
  EXPECT_TRUE(autograd::gradgradcheck(f, {x}));
  sum(channels_last(x) * channels_last(randn({2, 3, 2, 3}, float64))).backward();
  EXPECT_TRUE(x.grad().is_contiguous());  // optimizers and collectives see row-major gradients
}

// A loop that writes a permuted tensor goes through its memory in order.
TEST(ChannelsLast, PermutedOutputsAreWrittenInPlace) {
  for (const Device device : test_devices()) {
    const Tensor x = randn({4, 5, 6}, float32, device), y = randn({6, 4, 5}, float32, device);
    const Tensor view = permute(x, {2, 0, 1});
    const Tensor expected = contiguous(view) + y * 3;
    add_(view, y, 3);
    expect_close(view, expected, 1e-6, 1e-6);  // the product and the sum may be fused
    expect_close(x, permute(expected, {1, 2, 0}), 1e-6, 1e-6);
    fill_(view, 2);
    expect_close(x, full({4, 5, 6}, 2), 0, 0);
  }
}

}  // namespace channels_last_test
