#include <cmath>

#include "tests/rows_close.h"
#include "tests/support.h"
#include <mica/autograd/gradcheck.h>
#include <mica/autograd/node.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/embedding/embedding.h>
#include <mica/ops/reduce/reduce.h>

using namespace mica;
using namespace mica::testing_support;

namespace embedding_test {

TEST(Embedding, TakesRows) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      const Tensor weight = arange(0, 12, 1, float32).to(dtype).to(device);
      const Tensor table = as_strided(weight, {4, 3}, {3, 1}, 0);
      const Tensor indices = from_data<std::int64_t>({3, 0, 3, 1}, {2, 2}, device);
      const Tensor y = embedding(table, indices);
      EXPECT_EQ(y.shape(), (Shape{2, 2, 3}));
      EXPECT_EQ(y.dtype(), dtype);
      expect_close(y, {9, 10, 11, 0, 1, 2, 9, 10, 11, 3, 4, 5}, 0, 0);
      expect_close(embedding(table, indices.to(int32)), to_vector<double>(y), 0, 0);
    }
  }
}

TEST(Embedding, Gradcheck) {
  for (const Device device : test_devices()) {
    const Tensor weight = randn({5, 33}, float64, device);
    const Tensor indices = randint(0, 5, {3, 40}, int64, device);
    EXPECT_TRUE(
        autograd::gradcheck([](const Tensor& w, const Tensor& i) { return embedding(w, i); }, {weight, indices}));
  }
}

TEST(Embedding, GradientSumsInFloat32) {
  // A sum of 3000 ones in float16 would stop at 2048.
  for (const Device device : test_devices()) {
    const Tensor weight = zeros({2, 1}, float16, device).requires_grad_();
    const Tensor y = embedding(weight, zeros({3000}, int64, device));
    y.backward(ones_like(y));
    expect_close(weight.grad(), {3000, 0}, 0, 0);
  }
}

// Rows are used never, once or thousands of times, in any order; some indices are out of range. Gradients are whole
// numbers, so that sums are exact.
TEST(Embedding, GradientOfManyUses) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, bfloat16}) {
      for (const std::int64_t width : {1, 8, 33, 1100}) {
        for (const std::int64_t count : {1, 15, 16, 17, 32, 33, 500, 3001}) {
          constexpr std::int64_t kRows = 7;
          std::vector<std::int64_t> indices(static_cast<std::size_t>(count));
          for (std::int64_t i = 0; i < count; ++i) {
            indices[static_cast<std::size_t>(i)] = i % 97 == 5 ? 1 : i % 41 == 7 ? 5 : i < count / 3 ? 2 : 4;
          }
          if (device.is_cuda() && count > 20) {
            std::fill_n(indices.begin(), 18, -1);
            indices.back() = kRows;
          }
          const Tensor weight = zeros({kRows, width}, dtype, device).requires_grad_();
          const Tensor y = embedding(weight, from_data(indices, {count}, device));
          const Tensor dy = randint(-1, 2, y.shape(), int64, device).to(dtype);
          y.backward(dy);
          const std::vector<double> d = to_vector<double>(dy);
          std::vector<double> expected(kRows * width);
          for (std::int64_t i = 0; i < count; ++i) {
            const std::int64_t row = indices[static_cast<std::size_t>(i)];
            for (std::int64_t c = 0; c < width && row >= 0 && row < kRows; ++c) {
              expected[static_cast<std::size_t>(row * width + c)] += d[static_cast<std::size_t>(i * width + c)];
            }
          }
          SCOPED_TRACE(fmt::format("{} {} uses of width {} on {}", dtype, count, width, device));
          expect_close(weight.grad(), expected, 0, 0);
        }
      }
    }
  }
}

// All indices are equal, so that a run has many segments. The kernel searches for its end in one step or in several.
TEST(Embedding, GradientOfARowThatAllUse) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float32, bfloat16}) {
      for (const std::int64_t width : {5, 72}) {
        for (const std::int64_t segments : {255, 257, 258, 259, 700}) {
          for (const std::int64_t before : {0, 3}) {
            std::vector<std::int64_t> indices(static_cast<std::size_t>(16 * segments), 2);
            std::fill_n(indices.begin(), before, 0);
            const Tensor weight = zeros({4, width}, dtype, device).requires_grad_();
            const Tensor y = embedding(weight, from_data(indices, {16 * segments}, device));
            const Tensor dy = randint(-1, 2, y.shape(), int64, device).to(dtype);
            y.backward(dy);
            const std::vector<double> d = to_vector<double>(dy);
            std::vector<double> expected(static_cast<std::size_t>(4 * width));
            for (std::size_t i = 0; i < d.size(); ++i) {
              const std::size_t row = i / static_cast<std::size_t>(width), column = i % static_cast<std::size_t>(width);
              expected[static_cast<std::size_t>(indices[row] * width) + column] += d[i];
            }
            SCOPED_TRACE(fmt::format("{} {} segments of width {} on {}", dtype, segments, width, device));
            expect_close(weight.grad(), expected, epsilon_of(dtype), 0);  // rounded once, if the sum exceeds 256
          }
        }
      }
    }
  }
}

TEST(Embedding, UnusedRowsAndNoIndices) {
  for (const Device device : test_devices()) {
    const Tensor weight = randn({3, 4}, float32, device).requires_grad_();
    const Tensor y = embedding(weight, empty({0}, int64, device));
    EXPECT_EQ(y.shape(), (Shape{0, 4}));
    y.backward(zeros_like(y));
    expect_close(weight.grad(), std::vector<double>(12, 0.0), 0, 0);
  }
}

TEST(Embedding, Errors) {
  const Tensor weight = randn({3, 4});
  expect_error([&] { embedding(weight, from_data<std::int64_t>({0, 3})); }, "index 3 is out of range for 3 rows");
  expect_error([&] { embedding(weight, from_data<std::int64_t>({-1})); }, "index -1 is out of range");
  expect_error([&] { embedding(weight, from_data<float>({0})); }, "expected indices of int64 or int32, got float32");
  expect_error([&] { embedding(randn({3}), from_data<std::int64_t>({0})); }, "shape (V, C), got float32 [3]");
}

TEST(Embedding, IndexOutOfRangeOnCudaIsNan) {
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU";
  }
  const Tensor weight = ones({3, 2}, float32, Device::cuda()).requires_grad_();
  const Tensor y = embedding(weight, from_data<std::int64_t>({1, 3, -7}, Device::cuda()));
  expect_close(y, {1, 1, NAN, NAN, NAN, NAN}, 0, 0);
  y.backward(ones_like(y));
  expect_close(weight.grad(), {0, 0, 1, 1, 0, 0}, 0, 0);
}

// If the weight is shared with the model's head, the look-up adds to the existing gradient, and other rows do not
// change.
TEST(Embedding, AddsToTheGradientOfATiedWeight) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, bfloat16}) {
      for (const std::int64_t width : {1, 8, 33}) {
        constexpr std::int64_t kRows = 7;
        SCOPED_TRACE(fmt::format("{} of width {} on {}", dtype, width, device));
        const Tensor weight = randint(-2, 3, {kRows, width}, int64, device).to(dtype).requires_grad_();
        const Tensor indices = randint(0, kRows - 1, {100}, int64, device);  // row 6 is never looked up
        const Tensor direct = randint(-2, 3, weight.shape(), int64, device).to(dtype);
        const Tensor by_row = randint(-2, 3, {100, width}, int64, device).to(dtype);
        const auto loss = [&] { return sum(embedding(weight, indices) * by_row) + sum(weight * direct); };
        loss().backward();
        const Tensor got = weight.grad();
        weight.set_grad({});
        sum(embedding(weight, indices) * by_row).backward();
        expect_close(got, to_vector<double>(weight.grad() + direct), 0, 0);  // whole numbers: exact in any order

        // A first contribution that a hook has stored must not change.
        weight.set_grad({});
        Tensor kept;
        const Tensor used = weight * direct;
        used.grad_fn()->register_hook([&](const Tensors& results, const Tensors&) {
          kept = results[0];
          return Tensors{};
        });
        (sum(embedding(weight, indices) * by_row) + sum(used)).backward();
        expect_close(kept, to_vector<double>(direct), 0, 0);
        expect_close(weight.grad(), to_vector<double>(got), 0, 0);
      }
    }
  }
}

}  // namespace embedding_test
