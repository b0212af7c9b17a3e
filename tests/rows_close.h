#pragma once

// Comparisons relative to the size of the results. A fixed atol would accept anything if results are small: the
// gradient of a softmax over 3,000 elements is about 1e-4, so that zeros would pass with an atol of 1e-2.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/tensor.h>

namespace mica::testing_support {

/// The spacing of the dtype's numbers above 1.
inline double epsilon_of(DType dtype) {
  switch (dtype) {
    case DType::float64: return std::numeric_limits<double>::epsilon();
    case DType::float32: return std::numeric_limits<float>::epsilon();
    case DType::float16: return 0x1p-10;
    default: return 0x1p-7;
  }
}

/// The root mean square of each run of `columns` values.
inline std::vector<double> row_sizes(const std::vector<double>& values, std::int64_t columns) {
  std::vector<double> sizes(columns == 0 ? 0 : values.size() / columns);
  for (std::size_t row = 0; row < sizes.size(); ++row) {
    double squares = 0;
    for (std::size_t i = row * columns; i < (row + 1) * columns; ++i) {
      squares += values[i] * values[i];
    }
    sizes[row] = std::sqrt(squares / static_cast<double>(columns));
  }
  return sizes;
}

/// Expects |got − expected| ≤ tolerance · scale, with one scale for each run of `columns` elements. A 16-bit result may
/// also differ by its own rounding: half an epsilon of itself, and slightly more for a near tie. NaN always fails.
///
/// The scale is the size of a result's terms, because rounding errors are proportional to that, not to the remainder
/// after cancellation. Without cancellation, it is the size of the row.
inline void expect_rows_close(const Tensor& got, const std::vector<double>& expected, const std::vector<double>& scales,
                              std::int64_t columns, double tolerance, const std::string& what) {
  const double rounding = size_of(got.dtype()) == 2 ? 0.51 * epsilon_of(got.dtype()) : 0;
  const double smallest = got.dtype() == float16 ? 0x1p-14 : 0;  // for smaller numbers, the spacing is constant
  const std::vector<double> values = to_vector<double>(got);
  ASSERT_EQ(values.size(), expected.size()) << what;
  ASSERT_EQ(values.size(), scales.size() * columns) << what;
  for (std::size_t row = 0; row < scales.size(); ++row) {
    const double* value = values.data() + row * columns;  // pointers, since tests are not optimized
    const double* x = expected.data() + row * columns;
    const double scale = tolerance * scales[row];
    for (std::int64_t column = 0; column < columns; ++column, ++value, ++x) {
      const double size = *x < 0 ? -*x : *x;
      const double limit = rounding * (size < smallest ? smallest : size) + scale;
      if (!(*value - *x <= limit && *x - *value <= limit)) {
        FAIL() << what << ": row " << row << ", column " << column << " is " << *value << ", expected " << *x
               << ", give or take " << limit;
      }
    }
  }
}

/// The same for sums without cancellation, where the scale is the row's root mean square; the tolerance is also
/// relative to the element itself.
inline void expect_rows_close(const Tensor& got, const std::vector<double>& expected, std::int64_t columns,
                              double tolerance, const std::string& what) {
  std::vector<double> scales(expected.size());
  const std::vector<double> sizes = row_sizes(expected, columns);
  for (std::size_t i = 0; i < scales.size(); ++i) {
    scales[i] = std::abs(expected[i]) + sizes[i / columns];
  }
  expect_rows_close(got, expected, scales, 1, tolerance, what);
}

/// Expects the same bits in all elements, including the sign of 0. Any NaN equals any other NaN.
inline void expect_same_bits(const Tensor& a, const Tensor& b, const std::string& what = "") {
  ASSERT_EQ(a.defined(), b.defined()) << what;
  if (!a.defined()) {
    return;
  }
  ASSERT_EQ(a.dtype(), b.dtype()) << what;
  ASSERT_EQ(a.numel(), b.numel()) << what;
  const auto on_host = [](const Tensor& x) {
    const Tensor host = empty(x.shape(), x.dtype());
    copy_into(host, x);
    return host;
  };
  const Tensor a_host = on_host(a);
  const Tensor b_host = on_host(b);
  if (a.numel() == 0 || std::memcmp(a_host.raw_data(), b_host.raw_data(), a_host.bytes()) == 0) {
    return;
  }
  const std::vector<double> x = to_vector<double>(a_host);
  const std::vector<double> y = to_vector<double>(b_host);
  for (std::size_t i = 0; i < x.size(); ++i) {
    ASSERT_TRUE((x[i] == y[i] && std::signbit(x[i]) == std::signbit(y[i])) || (std::isnan(x[i]) && std::isnan(y[i])))
        << what << ": element " << i << " is " << x[i] << " and " << y[i];
  }
}

}  // namespace mica::testing_support
