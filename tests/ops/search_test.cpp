// Searching, distinct elements, and statistics that are composed of sorting and searching.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "tests/support.h"
#include <mica/autograd/gradcheck.h>
#include <mica/core/creation.h>
#include <mica/core/rng.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/index/index.h>
#include <mica/ops/search/search.h>
#include <mica/ops/statistics/statistics.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace search_test {

using Values = std::vector<double>;
using Ints = std::vector<std::int64_t>;

TEST(Search, LikeTheStandardLibrary) {
  manual_seed(1);
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16, int64, int32, uint8}) {
      const Tensor values = randint(0, 20, {3, 300}, int64, device).to(dtype);
      Values sorted = to_vector<double>(randint(0, 20, {3, 17}));
      for (int row = 0; row < 3; ++row) {
        std::sort(sorted.begin() + row * 17, sorted.begin() + (row + 1) * 17);
      }
      const Tensor rows = from_data(sorted, {3, 17}, device).to(dtype);
      for (const bool right : {false, true}) {
        Ints expected, in_first;
        const Values wanted = to_vector<double>(values);
        for (std::size_t i = 0; i < wanted.size(); ++i) {
          const auto find = [&](std::size_t row) {
            const auto begin = sorted.begin() + static_cast<std::ptrdiff_t>(row * 17), end = begin + 17;
            return (right ? std::upper_bound(begin, end, wanted[i]) : std::lower_bound(begin, end, wanted[i])) - begin;
          };
          expected.push_back(find(i / 300));
          in_first.push_back(find(0));
        }
        EXPECT_EQ(to_vector<std::int64_t>(searchsorted(rows, values, right)), expected) << name_of(dtype);
        EXPECT_EQ(to_vector<std::int64_t>(bucketize(values, select(rows, 0, 0), right)), in_first) << name_of(dtype);
      }
    }
    const Tensor edges = from_data({-INFINITY, -1.0, 0.0, 1.0}, device);
    const Tensor x = from_data({-INFINITY, -0.0, 2.0, INFINITY, NAN}, device);
    EXPECT_EQ(to_vector<std::int64_t>(searchsorted(edges, x)), (Ints{0, 2, 4, 4, 4}));
    EXPECT_EQ(to_vector<std::int64_t>(searchsorted(edges, x, true)), (Ints{1, 3, 4, 4, 4}));
    EXPECT_EQ(searchsorted(empty({0}, float32, device), ones({2, 2}, float32, device)).shape(), (Shape{2, 2}));
    expect_error([&] { searchsorted(edges, x.to(float32)); }, "searchsorted: ");
    expect_error([&] { searchsorted(ones({2, 3}), ones({3, 3})); }, "searchsorted: expected values of shape");
    expect_error([&] { bucketize(x, ones({2, 3}, float64, device)); }, "bucketize: ");
  }
}

TEST(Search, UniqueAndNonzero) {
  manual_seed(2);
  for (const Device device : test_devices()) {
    for (const std::int64_t n : {1, 50, 30000}) {
      const Tensor x = randint(0, 40, {n, 2}, int64, device);
      const UniqueResult result = unique(x);
      Ints all = to_vector<std::int64_t>(x);
      EXPECT_EQ(to_vector<std::int64_t>(index_select(result.values, 0, flatten(result.inverse))), all);
      EXPECT_EQ(result.inverse.shape(), x.shape());
      std::sort(all.begin(), all.end());
      Ints values, counts;
      for (const std::int64_t value : all) {
        if (values.empty() || values.back() != value) {
          values.push_back(value);
          counts.push_back(0);
        }
        ++counts.back();
      }
      EXPECT_EQ(to_vector<std::int64_t>(result.values), values);
      EXPECT_EQ(to_vector<std::int64_t>(result.counts), counts);
    }
    const UniqueResult nan = unique(from_data({NAN, 0.0, -0.0, NAN, 1.0}, device));
    expect_close(nan.values, Values{0, 1, NAN, NAN}, 0, 0);
    EXPECT_EQ(to_vector<std::int64_t>(nan.counts), (Ints{2, 1, 1, 1}));
    EXPECT_EQ(to_vector<std::int64_t>(nan.inverse), (Ints{2, 0, 0, 3, 1}));
    EXPECT_EQ(unique(empty({0, 3}, float32, device)).values.shape(), Shape{0});

    const Tensor x = from_data({0.0, 1.0, NAN, -0.0, 0.0, 2.0}, {2, 3}, device);
    EXPECT_EQ(to_vector<std::int64_t>(nonzero(transpose(x, 0, 1))), (Ints{1, 0, 2, 0, 2, 1}));
    EXPECT_EQ(nonzero(zeros({2, 3}, boolean, device)).shape(), (Shape{0, 2}));
    EXPECT_EQ(nonzero(ones({}, int32, device)).shape(), (Shape{1, 0}));
  }
}

TEST(Statistics, Median) {
  manual_seed(3);
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16, int64, int32, uint8}) {
      const Tensor x = from_data({5.0, 1.0, 4.0, 2.0, 9.0, 9.0, 7.0, 8.0}, {2, 4}, device).to(dtype);
      EXPECT_EQ(median(x).item(), 5);
      const MaxResult rows = median(x, 1, true);
      expect_close(rows.values, Values{2, 8}, 0, 0);
      EXPECT_EQ(rows.values.shape(), (Shape{2, 1}));
      EXPECT_EQ(to_vector<std::int64_t>(rows.indices), (Ints{3, 3}));
    }
    const Tensor x = from_data({1.0, NAN, 3.0, NAN, 2.0, 2.0}, {2, 3}, device).requires_grad_();
    const MaxResult columns = median(x, 0), rows = median(x, 1);
    expect_close(rows.values, Values{NAN, NAN}, 0, 0);
    EXPECT_EQ(to_vector<std::int64_t>(rows.indices), (Ints{1, 0}));
    expect_close(columns.values, Values{NAN, NAN, 2}, 0, 0);
    // Equal elements share the gradient of the median of all.
    const Tensor tied = from_data({1.0, 2.0, 2.0, 5.0}, device).requires_grad_();
    median(tied).backward();
    expect_close(tied.grad(), Values{0, 0.5, 0.5, 0}, 0, 0);
    const Tensor y = randn({3, 5}, float64, device);
    const auto f = [](const Tensor& t) { return median(t * t, 1).values; };
    EXPECT_TRUE(autograd::gradcheck(f, {y}));
    EXPECT_TRUE(autograd::gradgradcheck(f, {y}));
    const auto all = [](const Tensor& t) { return median(t * t); };
    EXPECT_TRUE(autograd::gradgradcheck(all, {y}));
    expect_error([&] { median(empty({2, 0}, float32, device), 1); }, "median: expected an axis with elements");
    expect_error([&] { median(empty({0}, float32, device)); }, "median: ");
  }
}

TEST(Statistics, Quantile) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      const Tensor x = from_data({4.0, 1.0, 3.0, 2.0, NAN, 1.0, 0.0, 0.0}, {2, 4}, device).to(dtype);
      expect_close(quantile(x, 0.5, 1), Values{2.5, NAN}, 0, 0);
      expect_close(quantile(x, 0.5, 1, true, Interpolation::lower), Values{2, NAN}, 0, 0);
      expect_close(quantile(x, 0.5, 1, true, Interpolation::higher), Values{3, NAN}, 0, 0);
      expect_close(quantile(x, 0.5, 1, true, Interpolation::nearest), Values{3, NAN}, 0, 0);
      expect_close(quantile(x, 0.9, 1, true, Interpolation::midpoint), Values{3.5, NAN}, 0, 0);
      const Tensor some = quantile(slice(x, 0, 0, 1), {0.0, 0.25, 1.0}, {}, true);
      EXPECT_EQ(some.shape(), (Shape{3, 1, 1}));
      expect_close(some, Values{1, 1.75, 4}, 0, 0);
    }
    const Tensor x = from_data({4.0, 1.0, 3.0, 2.0}, device);
    const auto f = [](const Tensor& t) { return quantile(t * t, {0.2, 0.5, 1.0}); };
    EXPECT_TRUE(autograd::gradcheck(f, {x}));
    EXPECT_TRUE(autograd::gradgradcheck(f, {x}));
    expect_error([&] { quantile(x, 1.1); }, "quantile: expected q from 0 to 1, got 1.1");
    expect_error([&] { quantile(empty({0}, float32, device), 0.5); }, "quantile: expected at least one element");
  }
}

TEST(Statistics, BincountAndHistogram) {
  manual_seed(4);
  for (const Device device : test_devices()) {
    const Tensor x = randint(0, 5, {20000}, int32, device);
    Ints expected(7, 0);
    for (const std::int64_t value : to_vector<std::int64_t>(x)) {
      ++expected[static_cast<std::size_t>(value)];
    }
    EXPECT_EQ(to_vector<std::int64_t>(bincount(x, {}, 7)), expected);
    const Tensor weights = from_data({0.5, 1.5, 2.0}, device).requires_grad_();
    const Tensor sums = bincount(from_data<std::int64_t>({1, 3, 1}, device), weights);
    expect_close(sums, Values{0, 2.5, 0, 1.5}, 0, 0);
    sums.backward(from_data({1.0, 2.0, 3.0, 4.0}, device));
    expect_close(weights.grad(), Values{2, 4, 2}, 0, 0);
    EXPECT_EQ(bincount(empty({0}, int64, device), {}, 3).shape(), Shape{3});
    expect_error(
        [&] {
          bincount(from_data<std::int64_t>({1, -1}, device));
        },
        "bincount: expected elements of at least 0");
    expect_error([&] { bincount(ones({2}, float32, device)); }, "bincount: ");

    const Tensor values = from_data({0.0, 0.25, 0.5, 1.0, 1.5, -0.1, NAN}, device);
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      const HistogramResult two = histogram(values.to(dtype), 2, {.range = {{0, 1}}});
      expect_close(two.counts, Values{2, 2}, 0, 0);
      expect_close(two.edges, Values{0, 0.5, 1}, 0, 0);
      EXPECT_EQ(two.counts.dtype(), dtype == float64 ? float64 : float32);
      const Tensor edges = from_data({0.0, 0.25, 1.25}, device).to(dtype);
      expect_close(histogram(values.to(dtype), edges).counts, Values{1, 3}, 0, 0);
      const HistogramOptions options{.weight = full_like(values.to(dtype), 0.5), .density = true};
      expect_close(histogram(values.to(dtype), edges, options).counts, Values{1, 0.75}, 0, 0);
    }
    expect_close(histogram(full({4}, 3, float64, device), 2).edges, Values{2.5, 3, 3.5}, 0, 0);
    expect_error([&] { histogram(values, 3); }, "histogram: expected a finite ascending range");
    expect_error([&] { histogram(values, 0, {.range = {{0, 1}}}); }, "histogram: expected at least one bin");
  }
}

}  // namespace search_test
