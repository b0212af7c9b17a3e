// Tests numerically difficult values, and that results do not depend on other rows or on the run.

#include "layer_norm_reference.h"
#include <mica/autograd/grad_mode.h>

using namespace mica;

namespace layer_norm_numerics_test {

using namespace mica::layer_norm_testing;

// a · x + b, rounded to x's dtype.
Tensor affine(const Tensor& x, double a, double b) {
  std::vector<double> values = to_vector<double>(x);
  for (double& value : values) {
    value = a * value + b;
  }
  return with_values(values, x);
}

void expect_finite(const Tensor& x, const std::string& what) {
  for (const double element : to_vector<double>(x)) {
    ASSERT_TRUE(std::isfinite(element)) << what;
  }
}

TEST(LayerNormNumerics, RowsFarFromZero) {
  manual_seed(8);
  OneIn three(3);
  for (const Device device : test_devices()) {
    for (const auto& [dtype, weight_dtype] : kNormTypes) {
      for (const std::int64_t columns : some_columns(device)) {
        if (three.skips()) {
          continue;
        }
        if (columns < 64) {
          continue;  // too few columns for a variance of about 1
        }
        const NormCase c{dtype, weight_dtype, columns <= 16'384 ? 7 : 3, columns};
        Inputs in = random_inputs(c, device);
        const Tensor x = in.x;
        in.x = affine(x, 1, 2000);
        expect_matches(run(in), reference(in), c);
        in.x = affine(x, 0.01, 100);
        expect_matches(run(in), reference(in), c);
        const Needs no_dx{.x = false};  // without dx, other kernels are used
        in.x = affine(x, 0.5, 2000);
        expect_sums_match(run(in, no_dx), reference(in), c);
      }
    }
  }
}

// Kernels sum the squares of x minus a shift, which they compute from the row's first elements.
TEST(LayerNormNumerics, FirstElementFarFromTheOthers) {
  manual_seed(16);
  for (const Device device : test_devices()) {
    for (const DType dtype : {float32, float16, bfloat16}) {
      for (const std::int64_t columns :
           {300, 513, 601, 1000, 1023, 1025, 1502, 2047, 4005, 8191, 20'001, 20'002, 20'008, 40'001}) {
        for (const double offset : {0.0, 30.0}) {
          Inputs in = random_inputs({dtype, float32, 1, columns}, device);
          std::vector<double> x = to_vector<double>(affine(in.x, 1, offset));
          x[0] = 500;
          in.x = with_values(x, in.x);
          // For a single row, dweight is dy · x̂, which is rounded to more digits than y. In the first column, its
          // relative error is that of rstd.
          const double got = to_vector<double>(run(in).dweight)[0];
          const double expected = reference(in).dweight[0];
          // Long rows in packs or words share a single shift, that of the first elements.
          const bool shares_shift = dtype != float32 && device.is_cuda() && columns > 1024 && columns % 2 == 0;
          EXPECT_NEAR(got / expected, 1, shares_shift ? 1e-4 : 1e-5)
              << fmt::format("{} columns, {}, {}, offset {}", columns, dtype, device.is_cuda() ? "GPU" : "CPU", offset);
        }
      }
    }
  }
}

TEST(LayerNormNumerics, ManyLongRowsFarFromZero) {
  if (!cuda_available()) {
    GTEST_SKIP() << "needs a GPU";
  }
  manual_seed(15);
  const NormCase c{float32, float32, 1024, 32768};
  Inputs in = random_inputs(c, Device::cuda());
  in.x = affine(in.x, 0.01, 100);
  expect_matches(run(in), reference(in), c);
}

TEST(LayerNormNumerics, ConstantRowsGiveTheBiasExactly) {
  manual_seed(9);
  OneIn three(3);
  for (const Device device : test_devices()) {
    for (const auto& [dtype, weight_dtype] : kNormTypes) {
      for (const std::int64_t columns : some_columns(device)) {
        if (three.skips()) {
          continue;
        }
        for (const double value : {0.0, 0.1, -7.3, 3e4, 1e-6}) {
          Inputs in = random_inputs({dtype, weight_dtype, 3, columns}, device);
          in.x = full({3, columns}, value, dtype, device);
          in.bias = affine(in.bias, 1, 0);  // no −0: y would be 0
          const Results got = run(in);
          const Tensor expected = empty({3, columns}, dtype, device);
          copy_into(expected, broadcast_view(in.bias, {3, columns}));
          expect_same_bits(got.y, expected, fmt::format("{} in {}", value, dtype));
          expect_finite(got.dx, fmt::format("dx of {} in {}", value, dtype));
          expect_close(got.dweight, std::vector<double>(columns, 0), 0, 0.05);
          expect_finite(got.dbias, fmt::format("dbias of {} in {}", value, dtype));
        }
      }
    }
  }
}

TEST(LayerNormNumerics, OneColumn) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float32, float64, bfloat16}) {
      const Inputs in{.x = full({2, 1}, 1e6, dtype, device),
                      .weight = full({1}, 3, dtype, device),
                      .bias = full({1}, 0.5, dtype, device),
                      .dy = full({2, 1}, 2, dtype, device)};
      const Results got = run(in);
      expect_close(got.y, {0.5, 0.5}, 0, 0);
      expect_close(got.dx, {0, 0}, 0, 0);
      expect_close(got.dweight, std::vector<double>{0}, 0, 0);
      expect_close(got.dbias, {4}, 0, 0);
    }
  }
}

TEST(LayerNormNumerics, EpsIsAddedUnderTheRoot) {
  manual_seed(14);
  for (const Device device : test_devices()) {
    for (const DType dtype : {float32, float64, float16, bfloat16}) {
      for (const std::int64_t columns : some_columns(device)) {
        for (const double eps : {0.0, 1e-12, 0.5, 100.0}) {
          if (columns < 7 && eps == 0) {
            continue;  // it would be 0 / 0
          }
          const NormCase c{dtype, dtype, columns <= 16'384 ? 4 : 2, columns};
          const Inputs in = random_inputs(c, device);
          expect_matches(run(in, {}, eps), reference(in, eps), c);
        }
      }
    }
  }
}

// Values whose squares overflow in the dtype of sums. The op scales such rows by a power of 2 first.
struct Huge {
  DType dtype;
  std::vector<double> sizes;
  double top;  // near the largest finite number
};

const std::vector<Huge> kHuge = {{float32, {1e19, 1e30, 3e37}, 3.4e38},
                                 {bfloat16, {1e19, 1e30, 3e37}, 3.38e38},
                                 {float64, {1e155, 1e300, 2e307}, 1.79e308}};

TEST(LayerNormNumerics, HugeValuesDoNotOverflow) {
  manual_seed(10);
  for (const Device device : test_devices()) {
    for (const Huge& huge : kHuge) {
      for (const std::int64_t columns : some_columns(device)) {
        if (columns < 7) {
          continue;
        }
        const NormCase c{huge.dtype, accumulate_dtype(huge.dtype), columns <= 16'384 ? 4 : 2, columns};
        for (const double size : huge.sizes) {
          Inputs in = random_inputs(c, device);
          std::vector<double> x = to_vector<double>(in.x);
          for (std::size_t i = 0; i < x.size(); ++i) {
            x[i] = std::clamp(x[i], -4.0, 4.0) * (i / columns == 1 ? 1 : size);  // row 1 stays ordinary
          }
          in.x = with_values(x, in.x);
          const Results got = run(in);
          // dx is about 1 / size, which may be subnormal and then has few digits. So only y and the sums are compared.
          expect_matches({.y = got.y, .dx = {}, .dweight = got.dweight, .dbias = got.dbias}, reference(in), c);
          expect_finite(got.dx, fmt::format("dx of {}, {}", size, c.name()));
        }
        // Values so large that even the difference of two overflows.
        std::vector<double> top(columns);
        std::vector<double> expected(columns);
        const double mean = columns % 2 == 0 ? 0 : 1.0 / static_cast<double>(columns);  // in units of `top`
        for (std::int64_t i = 0; i < columns; ++i) {
          const double sign = i % 2 == 0 ? 1 : -1;
          top[i] = sign * huge.top;
          expected[i] = (sign - mean) / std::sqrt(1 - mean * mean);
        }
        const Tensor x = with_values(top, empty({1, columns}, huge.dtype, device));
        const double rounding = huge.dtype == bfloat16 ? epsilon_of(bfloat16) : 0;
        expect_close(layer_norm(x, {columns}), expected, 1e-5 + rounding, 0, "the top of the range, " + c.name());
      }
    }
  }
}

TEST(LayerNormNumerics, NonFiniteValuesStayInTheirRow) {
  manual_seed(11);
  for (const Device device : test_devices()) {
    for (const auto& [dtype, weight_dtype] : kNormTypes) {
      for (const std::int64_t columns : some_columns(device)) {
        const NormCase c{dtype, weight_dtype, 5, columns};
        const Inputs clean = random_inputs(c, device);
        const Results expected = run(clean);
        // Bad values at the ends, too: kernels compute the shift from the first elements, and read the last ones in an
        // incomplete pack.
        const std::vector<std::pair<double, std::int64_t>> bad_values = {
            {NAN, 0}, {INFINITY, 0}, {NAN, columns / 2}, {INFINITY, columns / 2}, {-INFINITY, columns - 1}};
        for (const auto& [bad, at] : bad_values) {
          std::vector<double> x = to_vector<double>(clean.x);
          x[2 * columns + at] = bad;
          Inputs in = clean;
          in.x = with_values(x, clean.x);
          const Results got = run(in);
          const std::string what = fmt::format("{} at {}, {}", bad, at, c.name());
          for (const auto& [begin, count] : {std::pair<std::int64_t, std::int64_t>{0, 2}, {3, 2}}) {
            expect_same_bits(rows_of(got.y, begin, count), rows_of(expected.y, begin, count), what);
            expect_same_bits(rows_of(got.dx, begin, count), rows_of(expected.dx, begin, count), what);
          }
          for (const double value : to_vector<double>(rows_of(got.y, 2, 1))) {
            ASSERT_TRUE(std::isnan(value)) << what;
          }
        }
      }
    }
  }
}

// On a GPU, unaligned rows of a large matrix begin and end in packs that they share with other rows.
TEST(LayerNormNumerics, NeighborsOfUnalignedRowsDoNotMatter) {
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU";
  }
  manual_seed(14);
  for (const auto& [dtype, weight_dtype] : kNormTypes) {
    if (size_of(dtype) > 2) {
      continue;
    }
    for (const std::int64_t columns : {1025, 2564, 4099, 8190, 12'281, 12'283, 16'377, 20'003}) {
      constexpr std::int64_t kRows = 2123;
      const NormCase c{dtype, weight_dtype, 3, columns};
      Inputs in = random_inputs({dtype, weight_dtype, kRows, columns}, Device::cuda());
      const Tensor clean = no_grad([&] { return layer_norm(in.x, {columns}, in.weight, in.bias); });
      for (const std::int64_t begin : {std::int64_t{0}, std::int64_t{7}, std::int64_t{1060}, kRows - 3}) {
        const Reference expected = reference(part_of(in, begin, 3));
        expect_rows_close(rows_of(clean, begin, 3), expected.y, expected.y_scale, columns, tolerance(c), c.name());
      }
      // Every other row, the last one too, gets a NaN or an infinity at both ends. The rows between keep their bits.
      std::vector<double> x = to_vector<double>(in.x);
      for (std::int64_t row = 0; row < kRows; row += 2) {
        const double bad = row % 4 == 0 ? NAN : INFINITY;
        x[row * columns] = bad;
        x[(row + 1) * columns - 1] = bad;
      }
      const Tensor changed = no_grad([&] { return layer_norm(with_values(x, in.x), {columns}, in.weight, in.bias); });
      for (const std::int64_t row :
           {std::int64_t{1}, std::int64_t{3}, std::int64_t{6}, std::int64_t{1061}, kRows - 1}) {
        if (row % 2 == 1) {
          expect_same_bits(rows_of(changed, row, 1), rows_of(clean, row, 1), fmt::format("{}, row {}", c.name(), row));
        } else {
          for (const double y : to_vector<double>(rows_of(changed, row, 1))) {
            ASSERT_TRUE(std::isnan(y)) << c.name() << ", row " << row;
          }
        }
      }
    }
  }
}

// The same, for rows whose squares overflow float32, and for rows whose first elements are far from the others.
TEST(LayerNormNumerics, UnalignedRowsOfExtremeValues) {
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU";
  }
  manual_seed(15);
  constexpr std::int64_t kRows = 2114;
  for (const std::int64_t columns : {1031, 13'001}) {
    Inputs in = random_inputs({bfloat16, float32, kRows, columns}, Device::cuda());
    std::vector<double> x = to_vector<double>(in.x);
    for (std::int64_t row = 0; row < kRows; ++row) {
      for (std::int64_t i = row * columns; i < (row + 1) * columns; ++i) {
        const bool is_outlier = row % 3 == 1 && i - row * columns < 12;
        x[i] = row % 3 == 0 ? std::clamp(x[i], -4.0, 4.0) * 1e30 : is_outlier ? 1000 : x[i] + 100;
      }
    }
    in.x = with_values(x, in.x);
    const Tensor y = no_grad([&] { return layer_norm(in.x, {columns}, in.weight, in.bias); });
    for (const std::int64_t begin : {std::int64_t{0}, std::int64_t{1050}, kRows - 9}) {
      const Inputs part = part_of(in, begin, 9);
      const Reference expected = reference(part);
      expect_rows_close(rows_of(y, begin, 9), expected.y, expected.y_scale, columns,
                        tolerance({bfloat16, float32, 9, columns}), fmt::format("{} columns, from {}", columns, begin));
    }
  }
}

TEST(LayerNormNumerics, RowsDoNotDependOnHowManyThereAre) {
  manual_seed(12);
  OneIn three(3);
  for (const Device device : test_devices()) {
    for (const auto& [dtype, weight_dtype] : kNormTypes) {
      for (const std::int64_t columns : some_columns(device)) {
        if (three.skips()) {
          continue;
        }
        // On a GPU, more rows than it processes at a time.
        const std::int64_t rows = columns <= (device.is_cuda() ? 4005 : 256) ? 1151
                                  : device.is_cuda() && columns <= 50'000    ? 300
                                                                             : 70;
        const Inputs in = random_inputs({dtype, weight_dtype, rows, columns}, device);
        const Results all = run(in);
        for (const auto& [begin, count] : {std::pair<std::int64_t, std::int64_t>{0, 1}, {5, 2}, {rows - 35, 33}}) {
          const Results some = run(part_of(in, begin, count));
          const std::string what = fmt::format("{} from {} of {}, {} columns, {}", count, begin, rows, columns, dtype);
          expect_same_bits(some.y, rows_of(all.y, begin, count), "y, " + what);
          expect_same_bits(some.dx, rows_of(all.dx, begin, count), "dx, " + what);
        }
      }
    }
  }
}

TEST(LayerNormNumerics, RowsDoNotDependOnWhatTheL2CacheHolds) {
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU";
  }
  manual_seed(12);
  for (const auto& [dtype, weight_dtype] : kNormTypes) {
    for (const std::int64_t columns : {768, 1536, 2048, 4096}) {
      const std::int64_t rows =
          (48 << 20) / (columns * static_cast<std::int64_t>(size_of(dtype)));  // few rows use another kernel
      const Inputs in = random_inputs({dtype, weight_dtype, rows, columns}, Device::cuda());
      const Results all = run(in);
      const Results some = run(part_of(in, 5, 300));
      const std::string what = fmt::format("300 of {}, {} columns, {}", rows, columns, dtype);
      expect_same_bits(some.y, rows_of(all.y, 5, 300), "y, " + what);
      expect_same_bits(some.dx, rows_of(all.dx, 5, 300), "dx, " + what);
    }
  }
}

TEST(LayerNormNumerics, SameBitsEveryTimeAndWithAnyNumberOfThreads) {
  manual_seed(13);
  const int threads = num_threads();
  OneIn three(3);
  for (const Device device : test_devices()) {
    for (const auto& [dtype, weight_dtype] : kNormTypes) {
      for (const std::int64_t columns : some_columns(device)) {
        if (three.skips()) {
          continue;
        }
        const std::int64_t rows = std::max<std::int64_t>(200'000 / (columns + 300), 20);
        const Inputs in = random_inputs({dtype, weight_dtype, rows, columns}, device);
        const Results first = run(in);
        for (const int count : {1, 2, 3, 7, threads}) {
          set_num_threads(count);
          expect_same(first, run(in), fmt::format("{} columns, {}, {} threads", columns, dtype, count));
        }
      }
    }
  }
  set_num_threads(threads);
}

}  // namespace layer_norm_numerics_test
