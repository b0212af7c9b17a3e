#include <gtest/gtest.h>

#include <cstring>

#include "tests/depth.h"
#include "tests/launches.h"
#include "tests/support.h"
#include <mica/autograd/grad.h>
#include <mica/autograd/gradcheck.h>
#include <mica/core/copy.h>
#include <mica/core/rng.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/tiled_matmul/tiled_matmul.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace tiled_matmul_test {

const std::vector<DType> kDTypes{float64, float32, float16, bfloat16};
const std::vector<Activation> kActivations{Activation::none, Activation::leaky_relu};

// The relative error of rounding. On the CPU, the activation rounds again.
double rounding(DType dtype) {
  switch (dtype) {
    case DType::float64: return 1e-15;
    case DType::float32: return 1e-7;
    case DType::float16: return 1.0 / 1024;
    default: return 1.0 / 128;
  }
}

Tensor exact(const Tensor& x) { return x.detach().to(Device::cpu(), float64); }

/// Expects y = activation(a · b), by a product in float64 on the CPU.
void expect_product(const Tensor& y, const Tensor& a, const Tensor& b, Activation activation, const std::string& what) {
  ASSERT_EQ(y.dtype(), a.dtype()) << what;
  ASSERT_EQ(y.shape(), (Shape{a.size(0), b.size(1)})) << what;
  const Tensor product = matmul(exact(a), exact(b));
  const std::vector<double> sums = to_vector<double>(product);
  const std::vector<double> magnitudes = to_vector<double>(matmul(abs(exact(a)), abs(exact(b))));
  const std::vector<double> got = to_vector<double>(y);
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double slope = activation == Activation::leaky_relu && sums[i] < 0 ? 0.01 : 1;
    const double allowed =
        rounding(y.dtype()) * std::abs(slope * sums[i]) + (y.dtype() == float64 ? 1e-14 : 4e-6) * magnitudes[i] + 1e-7;
    ASSERT_LE(std::abs(got[i] - slope * sums[i]), allowed)
        << what << ": element " << i << " is " << got[i] << ", expected " << slope * sums[i];
  }
}

// Views of the same values with other memory layouts.

Tensor by_columns(const Tensor& x) { return transpose(contiguous(transpose(x, 0, 1)), 0, 1); }

// A view with x's elements that is surrounded by NaN, to detect reads outside of it: `lead` elements before the first
// row, `more` after each row.
Tensor inside(const Tensor& x, std::int64_t lead, std::int64_t more) {
  const Tensor base = full({x.size(0), lead + x.size(1) + more}, NAN, x.dtype(), x.device());
  const Tensor view = slice(base, 1, lead, lead + x.size(1));
  copy_into(view, x);
  return view;
}
Tensor unaligned(const Tensor& x) { return inside(x, 1, 2); }
// A view whose rows are aligned to 16 bytes, as TMA requires, although their length is not a multiple of that.
Tensor aligned(const Tensor& x) { return inside(x, 8, 8 + (8 - x.size(1) % 8) % 8); }
Tensor every_other(const Tensor& x) {
  const Tensor base = full({x.size(0), x.size(1), 2}, NAN, x.dtype(), x.device());
  const Tensor view = select(base, 2, 1);
  copy_into(view, x);
  return view;
}

using Layout = Tensor (*)(const Tensor&);
Tensor as_is(const Tensor& x) { return x; }
Tensor aligned_columns(const Tensor& x) { return transpose(aligned(contiguous(transpose(x, 0, 1))), 0, 1); }
Tensor unaligned_columns(const Tensor& x) { return transpose(unaligned(contiguous(transpose(x, 0, 1))), 0, 1); }
const std::vector<std::pair<const char*, Layout>> kLayouts{
    {"rows", as_is},
    {"columns", by_columns},
    {"aligned rows", aligned},
    {"aligned columns", aligned_columns},
    {"unaligned rows", unaligned},
    {"unaligned columns", unaligned_columns},
    {"every other", every_other},
};

std::string describe(const Tensor& a, const Tensor& b) {
  return fmt::format("{} · {} {} on {}", a.shape(), b.shape(), a.dtype(), a.device());
}

TEST(TiledMatmul, MatchesReference) {
  manual_seed(1);
  OneIn three(3);
  // Sizes around those of tiles, which have 64 to 256 rows or columns, and of slices of K, which have 16 to 64.
  const std::vector<std::array<std::int64_t, 3>> sizes{{1, 1, 1},      {1, 8, 3},      {8, 1, 16},     {7, 5, 9},
                                                       {64, 64, 64},   {65, 72, 17},   {128, 128, 64}, {127, 136, 8},
                                                       {129, 120, 65}, {128, 256, 63}, {255, 264, 40}, {257, 248, 33},
                                                       {5, 520, 128},  {515, 8, 129},  {256, 256, 1},  {130, 200, 300}};
  for (const Device device : test_devices()) {
    for (const DType dtype : kDTypes) {
      for (const auto& [m, n, k] : sizes) {
        const Tensor a = randn({m, k}, dtype, device);
        const Tensor b = randn({k, n}, dtype, device);
        for (const Activation activation : kActivations) {
          for (const auto& [a_name, a_layout] : {kLayouts[0], kLayouts[1]}) {
            for (const auto& [b_name, b_layout] : {kLayouts[0], kLayouts[1]}) {
              if (three.skips()) {
                continue;
              }
              const Tensor y = tiled_matmul(a_layout(a), b_layout(b), activation);
              expect_product(y, a, b, activation, fmt::format("{}, {} and {}", describe(a, b), a_name, b_name));
              if (HasFatalFailure()) {
                return;
              }
            }
          }
        }
      }
    }
  }
}

TEST(TiledMatmul, AnyLayout) {
  manual_seed(2);
  OneIn three(3);
  for (const Device device : test_devices()) {
    const cuda::LaunchRecord record;
    for (const DType dtype : kDTypes) {
      // The last one has an output that TMA cannot write.
      for (const auto& [m, n, k] : {std::array{65, 136, 70}, std::array{300, 264, 129}, std::array{140, 131, 67}}) {
        const Tensor a = randn({m, k}, dtype, device);
        const Tensor b = randn({k, n}, dtype, device);
        for (const auto& [a_name, a_layout] : kLayouts) {
          for (const auto& [b_name, b_layout] : kLayouts) {
            if (three.skips()) {
              continue;
            }
            const Tensor y = tiled_matmul(a_layout(a), b_layout(b), Activation::leaky_relu);
            expect_product(y, a, b, Activation::leaky_relu,
                           fmt::format("{}, {} and {}", describe(a, b), a_name, b_name));
            if (HasFatalFailure()) {
              return;
            }
          }
        }
      }
    }
    expect_launched(record, device, {"tiled_matmul_fma_kernel", "tiled_matmul_mma_kernel"});
    if (gpu_has_wgmma()) {
      expect_launched(record, device, {"tiled_matmul_kernel"});
    }
    const Tensor row = broadcast_view(randn({1, 40}, bfloat16, device), {136, 40});  // strides of 0
    const Tensor b = randn({40, 16}, bfloat16, device);
    expect_product(tiled_matmul(row, b), row, b, Activation::none, "rows that are one row");
    expect_product(tiled_matmul(transpose(b, 0, 1), transpose(row, 0, 1)), transpose(b, 0, 1), transpose(row, 0, 1),
                   Activation::none, "columns that are one column");
  }
}

// Matrices are so large that they are copied to another layout if the fast kernel cannot read them.
TEST(TiledMatmul, AnyLayoutOfLargeMatrices) {
  manual_seed(8);
  OneIn two(2);
  for (const Device device : test_devices()) {
    for (const DType dtype : {float16, bfloat16}) {
      for (const std::int64_t n : {400, 403}) {
        const Tensor a = randn({461, 391}, dtype, device);
        const Tensor b = randn({391, n}, dtype, device);
        for (std::size_t i = 0; i < kLayouts.size(); ++i) {
          if (two.skips()) {
            continue;
          }
          const auto& [a_name, a_layout] = kLayouts[i];
          const auto& [b_name, b_layout] = kLayouts[(i + 2) % kLayouts.size()];
          const Tensor y = tiled_matmul(a_layout(a), b_layout(b), Activation::leaky_relu);
          expect_product(y, a, b, Activation::leaky_relu, fmt::format("{}, {} and {}", describe(a, b), a_name, b_name));
          if (HasFatalFailure()) {
            return;
          }
        }
      }
    }
  }
}

TEST(TiledMatmul, ManyTiles) {
  manual_seed(3);
  for (const Device device : test_devices()) {
    for (const DType dtype : {float32, float16, bfloat16}) {
      const std::int64_t size = device.is_cuda() ? 2200 : 300;  // more tiles than multiprocessors
      for (const std::int64_t more : {0, 5}) {
        const Tensor a = randn({size + more, 72}, dtype, device);
        const Tensor b = randn({72, size + 8 + more}, dtype, device);
        const cuda::LaunchRecord record;
        const Tensor y = tiled_matmul(a, b);
        const char* const kernel = dtype == float32  ? "tiled_matmul_fma_kernel"
                                   : gpu_has_wgmma() ? "tiled_matmul_kernel"
                                                     : "tiled_matmul_mma_kernel";
        expect_launched(record, device, {kernel}, describe(a, b));
        expect_product(y, a, b, Activation::none, describe(a, b));
      }
    }
  }
}

TEST(TiledMatmul, EmptySizes) {
  for (const Device device : test_devices()) {
    for (const DType dtype : kDTypes) {
      for (const auto& [m, n, k] :
           {std::array{0, 3, 4}, std::array{3, 0, 4}, std::array{3, 4, 0}, std::array{0, 0, 0}}) {
        for (const Activation activation : kActivations) {
          const Tensor a = ones({m, k}, dtype, device).requires_grad_();
          const Tensor b = ones({k, n}, dtype, device).requires_grad_();
          const Tensor y = tiled_matmul(a, b, activation);
          expect_close(y, std::vector<double>(m * n, 0.0), 0, 0);
          y.backward(ones_like(y));
          expect_close(a.grad(), std::vector<double>(m * k, 0.0), 0, 0);
          expect_close(b.grad(), std::vector<double>(k * n, 0.0), 0, 0);
        }
      }
    }
  }
}

TEST(TiledMatmul, ActivationOfSpecialValues) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const Device device : test_devices()) {
    for (const DType dtype : kDTypes) {
      const Tensor a = from_data<double>({2.0, -2.0, 0.0, infinity, -infinity, std::nan("")}).to(device, dtype);
      const Tensor y = tiled_matmul(reshape(a, {6, 1}), ones({1, 8}, dtype, device), Activation::leaky_relu);
      expect_close(select(y, 1, 7), {2, -0.02, 0, infinity, -infinity, std::nan("")}, rounding(dtype), 0);
    }
  }
}

TEST(TiledMatmul, GradientsMatchReference) {
  manual_seed(4);
  for (const Device device : test_devices()) {
    for (const DType dtype : {float32, float16, bfloat16}) {
      for (const auto& [m, n, k] : {std::array{136, 264, 72}, std::array{33, 65, 130}}) {
        const Tensor a = randn({m, k}, dtype, device).requires_grad_();
        const Tensor b = randn({k, n}, dtype, device).requires_grad_();
        const Tensor dy = randn({m, n}, dtype, device);
        const Tensor y = tiled_matmul(a, b, Activation::leaky_relu);
        y.backward(dy);
        const Tensor exact_y = exact(y);
        const std::vector<double> signs = to_vector<double>(exact_y);
        std::vector<double> dz = to_vector<double>(dy);
        for (std::size_t i = 0; i < dz.size(); ++i) {
          dz[i] *= signs[i] > 0 ? 1 : 0.01;
        }
        const Tensor rounded = from_data(dz, {m, n}).to(dtype);  // as backward rounds dz before it multiplies
        expect_product(a.grad(), rounded, transpose(b.detach(), 0, 1), Activation::none, "da");
        expect_product(b.grad(), transpose(a.detach(), 0, 1), rounded, Activation::none, "db");
      }
    }
  }
}

TEST(TiledMatmul, Gradcheck) {
  manual_seed(5);
  for (const Device device : test_devices()) {
    for (const Activation activation : kActivations) {
      const auto f = [&](const Tensor& a, const Tensor& b) { return tiled_matmul(a, b, activation); };
      for (const auto& [m, n, k] : {std::array{1, 1, 1}, std::array{3, 4, 5}, std::array{4, 2, 1}}) {
        const Tensor a = randn({m, k}, float64, device);
        const Tensor b = randn({k, n}, float64, device);
        EXPECT_TRUE(autograd::gradcheck(f, {a, b}));
        EXPECT_TRUE(autograd::gradgradcheck(f, {a, b}));
      }
      // Only one of the operands requires a gradient.
      const Tensor a = randn({3, 5}, float64, device);
      const Tensor b = randn({5, 4}, float64, device);
      EXPECT_TRUE(autograd::gradgradcheck([&](const Tensor& x) { return f(x, b); }, {a}));
      EXPECT_TRUE(autograd::gradgradcheck([&](const Tensor& x) { return f(a, x); }, {b}));
    }
  }
}

bool same_bits(const Tensor& a, const Tensor& b) {
  const Tensor x = contiguous(a).to(Device::cpu());
  const Tensor y = contiguous(b).to(Device::cpu());
  return x.shape() == y.shape() && std::memcmp(x.raw_data(), y.raw_data(), x.bytes()) == 0;
}

TEST(TiledMatmul, SameBitsInEveryRunAndForAnyNumberOfRows) {
  manual_seed(6);
  for (const Device device : test_devices()) {
    for (const DType dtype : kDTypes) {
      for (const std::int64_t n : {520, 131}) {
        const Tensor a = randn({700, 200}, dtype, device);
        const Tensor b = randn({200, n}, dtype, device);
        const Tensor y = tiled_matmul(a, b, Activation::leaky_relu);
        for (int run = 0; run < 5; ++run) {
          ASSERT_TRUE(same_bits(tiled_matmul(a, b, Activation::leaky_relu), y));
        }
        const Tensor some = tiled_matmul(slice(a, 0, 300, 340), b, Activation::leaky_relu);
        EXPECT_TRUE(same_bits(some, slice(y, 0, 300, 340))) << describe(a, b);
        if (n % 8 == 0) {  // if matrices are not aligned, large ones use another kernel
          const std::int64_t times = device.is_cuda() ? 60 : 11;  // so many rows that larger tiles are used on CUDA
          const Tensor rows = reshape(broadcast_view(reshape(a, {1, 700, 200}), {times, 700, 200}), {times * 700, 200});
          const Tensor many = tiled_matmul(rows, b, Activation::leaky_relu);
          EXPECT_TRUE(same_bits(slice(many, 0, 7300, 7340), some)) << describe(a, b);
        }
      }
    }
  }
}

// More elements of y than 32 bits can count, by the kernel for aligned rows and by the other one.
TEST(TiledMatmul, MoreElementsThan32BitsCount) {
  if (!cuda_available()) {
    GTEST_SKIP() << "needs a GPU";
  }
  manual_seed(7);
  const Device device = Device::cuda();
  try {
    for (const std::int64_t n : {40'000, 40'001}) {
      const std::int64_t m = (std::int64_t{1} << 32) / n + 300;
      const Tensor a = randn({m, 16}, bfloat16, device);
      const Tensor b = randn({16, n}, bfloat16, device);
      const Tensor y = tiled_matmul(a, b);
      for (const std::int64_t row : {std::int64_t{0}, m / 2 - 5, m - 9}) {
        const Tensor rows = slice(a, 0, row, row + 9);
        expect_product(slice(y, 0, row, row + 9), rows, b, Activation::none, describe(a, b));
      }
    }
  } catch (const OutOfMemory& error) {
    GTEST_SKIP() << error.what();
  }
}

TEST(TiledMatmul, Errors) {
  const Tensor a = ones({2, 3});
  expect_error(
      [&] {
        tiled_matmul(a, ones({2, 3}));
      },
      "tiled_matmul: expected inner sizes that are equal, got [2, 3] and [2, 3]");
  expect_error(
      [&] {
        tiled_matmul(ones({4, 2, 3}), a);
      },
      "tiled_matmul: expected a to be a matrix, without leading axes, got shape [4, 2, 3]");
  expect_error([&] { tiled_matmul(a, ones({3})); }, "tiled_matmul: expected b to be a matrix, without leading axes");
  expect_error(
      [&] {
        tiled_matmul(a, ones({3, 2}, float64));
      },
      "tiled_matmul: expected one floating dtype, got float32 and float64");
  expect_error(
      [&] {
        tiled_matmul(ones({2, 2}, int64), ones({2, 2}, int64));
      },
      "tiled_matmul: expected one floating dtype, got int64 and int64");
  expect_error([&] { tiled_matmul(Tensor{}, a); }, "tiled_matmul: expected a defined a, got an undefined one");
  expect_error([&] { tiled_matmul(a, Tensor{}); }, "tiled_matmul: expected a defined b, got an undefined one");
  expect_error(
      [&] {
        tiled_matmul(a, ones({3, 2}), Activation::gelu);
      },
      "tiled_matmul: expected the activation none or leaky_relu");
  if (cuda_available()) {
    expect_error([&] { tiled_matmul(a, ones({3, 2}, float32, Device::cuda())); }, "tiled_matmul: expected one device");
  }
}

}  // namespace tiled_matmul_test
