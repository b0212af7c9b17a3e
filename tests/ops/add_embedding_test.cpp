#include <gtest/gtest.h>

#include <cmath>

#include "tests/launches.h"
#include "tests/rows_close.h"
#include "tests/support.h"
#include <mica/autograd/grad.h>
#include <mica/autograd/gradcheck.h>
#include <mica/core/creation.h>
#include <mica/core/rng.h>
#include <mica/ops/add_embedding/add_embedding.h>
#include <mica/ops/dropout/dropout.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/embedding/embedding.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace add_embedding_test {

Tensor by_three_ops(const Tensor& weight, const Tensor& indices, const Tensor& addend, AddEmbeddingOptions options) {
  return dropout(embedding(weight, indices) + addend, options.p, options.training);
}

// y and the gradients of weight and addend.
template <class F>
Tensors run(const F& f, const Tensor& weight, const Tensor& indices, const Tensor& addend, AddEmbeddingOptions options,
            const Tensor& dy) {
  const Tensor w = weight.detach().requires_grad_(), a = addend.detach().requires_grad_();
  manual_seed(21);
  const Tensor y = f(w, indices, a, options);
  const Tensors gradients = autograd::grad({y}, {w, a}, {dy});
  return {y.detach(), gradients[0], gradients[1]};
}

TEST(AddEmbedding, MatchesThreeOps) {
  for (const Device device : test_devices()) {
    const cuda::LaunchRecord record;
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      for (const std::int64_t width : {1, 8, 33, 100, 264, 768}) {
        const Tensor indices = randint(0, 11, {3, 5}, int64, device);
        for (const Shape& shape : {Shape{width}, Shape{5, width}, Shape{3, 5, width}}) {
          for (const AddEmbeddingOptions options : {AddEmbeddingOptions{}, AddEmbeddingOptions{.p = 0.3},
                                                    AddEmbeddingOptions{.p = 0.3, .training = false}}) {
            SCOPED_TRACE(fmt::format("{} on {}, addend {}, p {}, training {}", dtype, device, shape, options.p,
                                     options.training));
            const Tensor weight = randn({11, width}, dtype, device), addend = randn(shape, dtype, device);
            const Tensor dy = randn({3, 5, width}, dtype, device);
            const Tensors got = run(add_embedding, weight, indices, addend, options, dy);
            const auto exact = [](const Tensor& t) { return t.to(Device::cpu(), float64); };
            const Tensors expected =
                run(by_three_ops, exact(weight), indices.to(Device::cpu()), exact(addend), options, exact(dy));
            const double eps = epsilon_of(dtype);
            // The separate ops round the sum before dropout multiplies it by up to 1.5. A gradient sums up to 15 such
            // terms.
            expect_close(got[0], to_vector<double>(expected[0]), 2 * eps, 4 * eps, "y");
            expect_close(got[1], to_vector<double>(expected[1]), 2 * eps, 16 * eps, "dweight");
            expect_close(got[2], to_vector<double>(expected[2]), 2 * eps, 16 * eps, "daddend");
          }
        }
      }
    }
    expect_launched(record, device, {"add_embedding_kernel", "embedding_forward_kernel", "dropout_kernel"});
  }
}

TEST(AddEmbedding, AnyLayoutAndDropsWhatDropoutDrops) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float32, bfloat16}) {
      const Tensor weight = transpose(randn({64, 9}, dtype, device), 0, 1);
      const Tensor addend = slice(randn({7, 65}, dtype, device), 1, 1, 65);
      const Tensor indices = transpose(randint(0, 9, {7, 4}, int32, device), 0, 1);
      expect_close(add_embedding(weight, indices, addend),
                   to_vector<double>(embedding(weight, indices).to(float64) + addend.to(float64)), epsilon_of(dtype),
                   0);
      manual_seed(5);
      const Tensor mask = dropout(ones({4, 7, 64}, dtype, device), 0.5);
      manual_seed(5);
      expect_same_bits(add_embedding(ones({9, 64}, dtype, device), indices, zeros({7, 64}, dtype, device), {.p = 0.5}),
                       mask);
    }
  }
}

TEST(AddEmbedding, Gradcheck) {
  for (const Device device : test_devices()) {
    manual_seed(3);
    const Tensor indices = from_data(std::vector<std::int64_t>{1, 0, 3, 1, 1, 2}, {2, 3}, device);
    for (const double p : {0.0, 0.4}) {
      const auto f = [&](const Tensor& weight, const Tensor& addend) {
        manual_seed(4);
        return add_embedding(weight, indices, addend, {.p = p});
      };
      const Tensors in{randn({5, 4}, float64, device), randn({3, 4}, float64, device)};
      EXPECT_TRUE(autograd::gradcheck(f, in));
      EXPECT_TRUE(autograd::gradgradcheck(f, in));
    }
  }
}

// If the model's head has the same weight, its gradient comes first, and that of the rows looked up is added to it.
TEST(AddEmbedding, AddsToTheGradientOfATiedWeight) {
  for (const Device device : test_devices()) {
    manual_seed(6);
    const Tensor indices = randint(0, 6, {2, 4}, int64, device);
    const Tensor start = randn({6, 8}, float32, device), addend = randn({4, 8}, float32, device);
    const auto gradient = [&](auto look_up) {
      const Tensor weight = start.detach().requires_grad_();
      manual_seed(7);
      sum(linear(look_up(weight), weight)).backward();
      return to_vector<double>(weight.grad());
    };
    const std::vector<double> expected =
        gradient([&](const Tensor& weight) { return by_three_ops(weight, indices, addend, {.p = 0.2}); });
    expect_close(
        from_data(gradient([&](const Tensor& weight) { return add_embedding(weight, indices, addend, {.p = 0.2}); }),
                  {48}),
        expected, 1e-5, 1e-5);
  }
}

TEST(AddEmbedding, NoElementsAndIndicesOutOfRange) {
  for (const Device device : test_devices()) {
    const Tensor weight = ones({3, 8}, float32, device).requires_grad_();
    const Tensor none = add_embedding(weight, zeros({0, 2}, int64, device), ones({2, 8}, float32, device), {.p = 0.5});
    EXPECT_EQ(none.shape(), (Shape{0, 2, 8}));
    none.backward(ones_like(none));
    expect_close(weight.grad(), std::vector<double>(24, 0), 0, 0);
    const Tensor out = from_data(std::vector<std::int64_t>{0, 3}, {2}, device);
    if (device.is_cpu()) {
      expect_error([&] { add_embedding(weight, out, ones({8})); }, "index 3 is out of range for 3 rows");
      continue;
    }
    const std::vector<double> y = to_vector<double>(add_embedding(weight, out, ones({8}, float32, device)));
    for (std::size_t i = 0; i < y.size(); ++i) {
      EXPECT_EQ(std::isnan(y[i]), i >= 8) << i;
    }
  }
}

TEST(AddEmbedding, Errors) {
  const Tensor weight = ones({3, 4}), indices = zeros({2, 5}, int64);
  expect_error(
      [&] {
        add_embedding(weight, indices, ones({3, 4}));
      },
      "add_embedding: expected addend whose shape is the last axes of [2, 5, 4], got [3, 4]");
  expect_error([&] { add_embedding(weight, indices, full({}, 1)); }, "expected addend whose shape is the last axes");
  expect_error(
      [&] {
        add_embedding(weight, indices, ones({1, 2, 5, 4}));
      },
      "expected addend whose shape is the last axes");
  expect_error([&] { add_embedding(weight, indices, ones({4}, float64)); },
               "add_embedding: expected addend of weight's dtype and device, float32 on cpu, got float64 on cpu");
  expect_error([&] { add_embedding(weight, ones({2}), ones({4})); },
               "add_embedding: expected indices of int64 or int32, got float32");
  expect_error([&] { add_embedding(ones({3}), indices, ones({4})); }, "add_embedding: expected floating weight");
  expect_error([&] { add_embedding(weight, indices, ones({4}), {.p = 1}); },
               "add_embedding: expected p in [0, 1), got 1");
  expect_error([&] { add_embedding(weight, indices, Tensor{}); }, "got an undefined one");
}

}  // namespace add_embedding_test
