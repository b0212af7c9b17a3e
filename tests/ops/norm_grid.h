#pragma once

// What the tests of normalizations share: the sizes they are tried at, layouts that a kernel must not stumble over,
// and comparison by the scale of a row.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/tensor.h>

namespace mica::testing_support {

struct NormCase {
  DType dtype = float32;
  DType weight_dtype = float32;
  std::int64_t rows = 0;
  std::int64_t columns = 0;

  std::string name() const {
    return fmt::format("{} with weights of {}, {} rows of {}", dtype, weight_dtype, rows, columns);
  }
};

/// (dtype, weight dtype)
inline const std::vector<std::pair<DType, DType>> kNormTypes = {{float32, float32},   {float64, float64},
                                                                {float16, float16},   {float16, float32},
                                                                {bfloat16, bfloat16}, {bfloat16, float32}};

inline const std::vector<std::int64_t> kNormColumns = {1,   2,   3,   7,   8,    31,   32,   33,   64,   127,  128,
                                                       129, 500, 513, 768, 1000, 1600, 2001, 2048, 4005, 8117, 8192};

/// Few rows of every length in every dtype, and many rows where that stays quick. A GPU also gets long rows, past
/// what its registers hold, and more rows than a grid's y axis has blocks.
inline std::vector<NormCase> norm_grid(Device device) {
  std::vector<NormCase> cases;
  const auto add = [&](std::int64_t rows, std::int64_t columns) {
    for (const auto& [dtype, weight_dtype] : kNormTypes) {
      cases.push_back({dtype, weight_dtype, rows, columns});
    }
  };
  for (const std::int64_t columns : kNormColumns) {
    add(3, columns);
    for (const std::int64_t rows : {0, 1, 2, 67, 128, 1151}) {
      if (rows * columns <= (device.is_cuda() ? 4'000'000 : 70'000)) {
        cases.push_back({float32, float32, rows, columns});
        cases.push_back({bfloat16, rows % 2 == 0 ? float32 : bfloat16, rows, columns});
      }
    }
  }
  if (device.is_cuda()) {
    for (const std::int64_t columns :
         {8193, 10000, 15872, 16384, 16385, 16392, 32768, 32769, 50257, 65536, 66679, 123479, 262144}) {
      add(5, columns);
    }
    for (const std::int64_t columns : {500, 513, 768, 1000, 2001}) {
      cases.push_back({float16, float16, 4005, columns});
    }
    for (const std::int64_t columns : {1, 3, 8, 33, 129}) {
      cases.push_back({bfloat16, float32, 65537, columns});
      cases.push_back({float32, float32, 65537, columns});
    }
    // Sums over many rows, in 16 bits only once they are complete.
    for (const std::int64_t columns : {2, 7, 31, 64}) {
      cases.push_back({float16, float16, 100'000, columns});
      cases.push_back({float32, float32, 100'000, columns});
    }
    for (const std::int64_t power : {256, 1024, 4096, 16384}) {
      for (const std::int64_t columns : {power - 1, power, power + 1}) {
        for (const std::int64_t rows : {127, 128, 129}) {
          cases.push_back({rows % 2 == 0 ? float32 : float16, float32, rows, columns});
        }
      }
    }
    for (const auto& [rows, columns] :
         {std::pair<std::int64_t, std::int64_t>{300, 16384}, {1030, 4096}, {70'001, 33}}) {
      cases.push_back({float32, float32, rows, columns});
      cases.push_back({float16, float32, rows, columns});
    }
  }
  return cases;
}

/// The same values, axes reversed in memory and a NaN after every element.
inline Tensor with_gaps(const Tensor& x) {
  Strides strides = x.shape();
  std::int64_t step = 2;
  for (int axis = 0; axis < x.dim(); ++axis) {
    strides[axis] = step;
    step *= std::max<std::int64_t>(x.shape()[axis], 1);
  }
  const Tensor base = full({step}, NAN, x.dtype(), x.device());
  const Tensor result = as_strided(base, x.shape(), strides, 0);
  copy_into(result, x);
  return result;
}

/// The same values, row-major, but one element past where an allocation begins, with NaN on both sides.
inline Tensor off_by_one(const Tensor& x) {
  const Tensor base = full({x.numel() + 2}, NAN, x.dtype(), x.device());
  const Tensor result = as_strided(base, x.shape(), x.strides(), 1);
  copy_into(result, x);
  return result;
}

/// Rows [begin, begin + count) of a row-major (M, N): a view without history.
inline Tensor rows_of(const Tensor& x, std::int64_t begin, std::int64_t count) {
  return as_strided(x, {count, x.size(1)}, x.strides(), x.handle()->offset + begin * x.size(1));
}

inline double epsilon_of(DType dtype) {
  switch (dtype) {
    case DType::float64: return std::numeric_limits<double>::epsilon();
    case DType::float32: return std::numeric_limits<float>::epsilon();
    case DType::float16: return 0x1p-10;
    default: return 0x1p-7;
  }
}

/// Expects |got − expected| ≤ tolerance · scale, with one scale for each run of `columns` elements.
inline void expect_rows_close(const Tensor& got, const std::vector<double>& expected, const std::vector<double>& scales,
                              std::int64_t columns, double tolerance, const std::string& what) {
  const std::vector<double> values = to_vector<double>(got);
  ASSERT_EQ(values.size(), expected.size()) << what;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double limit = tolerance * scales[i / columns];
    ASSERT_LE(std::abs(values[i] - expected[i]), limit) << what << ": row " << i / columns << ", column " << i % columns
                                                        << " is " << values[i] << ", expected " << expected[i];
  }
}

/// Expects the same elements to the last bit, NaN equal to NaN.
inline void expect_same_bits(const Tensor& a, const Tensor& b, const std::string& what = "") {
  ASSERT_EQ(a.defined(), b.defined()) << what;
  if (!a.defined()) {
    return;
  }
  ASSERT_EQ(a.dtype(), b.dtype()) << what;
  const std::vector<double> x = to_vector<double>(a);
  const std::vector<double> y = to_vector<double>(b);
  ASSERT_EQ(x.size(), y.size()) << what;
  for (std::size_t i = 0; i < x.size(); ++i) {
    ASSERT_TRUE(x[i] == y[i] || (std::isnan(x[i]) && std::isnan(y[i])))
        << what << ": element " << i << " is " << x[i] << " and " << y[i];
  }
}

}  // namespace mica::testing_support
