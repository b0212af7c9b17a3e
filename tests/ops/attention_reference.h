#pragma once

// Code shared by the tests of attention: its formulas in float64, and comparisons with them.

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "tests/rows_close.h"
#include "tests/support.h"

namespace mica::attention_testing {

using namespace mica::testing_support;

/// Values that are sums, and the size of each sum's terms: the root of the sum of their squares. If terms are rounded
/// independently, the error of the sum is proportional to that.
struct Sums {
  std::vector<double> values, squares;  // the squares of the sizes

  explicit Sums(std::size_t n) : values(n), squares(n) {}
  /// Adds factor · row[i] to values[at + i], for each i < count; this term has the size |size · row[i]|.
  void add(std::size_t at, std::int64_t count, double factor, double size, const double* row) {
    double *const value = values.data() + at, *const square = squares.data() + at;  // pointers: tests aren't optimized
    for (std::int64_t i = 0; i < count; ++i) {
      value[i] += factor * row[i];
      square[i] += size * row[i] * size * row[i];
    }
  }
};

/// y and the gradients by their definitions, for q (…, H, T, D), k (…, Hkv, S, D) and v (…, Hkv, S, Dv).
struct Reference {
  Sums y, dq, dk, dv;
};

struct ReferenceOptions {
  bool causal = false;
  std::int64_t offset = 0;
  double scale = 1;
  std::vector<double> added = {};  // a mask that is added to the scores (…, H, T, S); empty: none
  double least = 0;                // the least size of weights, and of gradients of scores, as terms of sums
};

inline Reference reference(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dy,
                           const ReferenceOptions& options) {
  const std::int64_t width = q.size(-1), queries = q.size(-2), keys = k.size(-2), values = v.size(-1);
  const std::int64_t items = q.numel() / (queries * width);
  const std::int64_t group = q.dim() >= 3 ? q.size(-3) / k.size(-3) : 1;  // heads that share a key head
  const std::vector<double> qs = to_vector<double>(q), ks = to_vector<double>(k), vs = to_vector<double>(v);
  const std::vector<double> gs = to_vector<double>(dy);
  Reference r{Sums(gs.size()), Sums(qs.size()), Sums(ks.size()), Sums(vs.size())};
  for (std::int64_t n = 0; n < items; ++n) {
    for (std::int64_t i = 0; i < queries; ++i) {
      const std::int64_t row = n * queries + i, first = n / group * keys;
      const double* const query = &qs[row * width];
      const double* const g = &gs[row * values];
      const std::int64_t seen = options.causal ? std::clamp<std::int64_t>(i + 1 + options.offset, 0, keys) : keys;
      std::vector<double> p(seen), dp(seen), dp_square(seen);
      double most = -INFINITY, sum = 0, mean = 0, mean_size = 0;
      for (std::int64_t j = 0; j < seen; ++j) {
        const double* const key = &ks[(first + j) * width];
        double score = 0;
        for (std::int64_t d = 0; d < width; ++d) {
          score += options.scale * query[d] * key[d];
        }
        p[j] = score;
        p[j] += options.added.empty() ? 0 : options.added[row * keys + j];
        most = std::max(most, p[j]);
      }
      if (most == -INFINITY) {
        continue;  // the query sees no key
      }
      for (double& x : p) {
        x = std::exp(x - most);
        sum += x;
      }
      for (std::int64_t j = 0; j < seen; ++j) {
        p[j] /= sum;
        const double* const value = &vs[(first + j) * values];
        const double size = std::max(p[j], options.least);
        r.y.add(row * values, values, p[j], size, value);
        r.dv.add((first + j) * values, values, p[j], size, g);
        double slope = 0, square = 0;
        for (std::int64_t d = 0; d < values; ++d) {
          slope += g[d] * value[d];
          square += g[d] * value[d] * g[d] * value[d];
        }
        dp[j] = slope;
        dp_square[j] = square;
        mean += p[j] * dp[j];
        mean_size += p[j] * std::sqrt(dp_square[j]);
      }
      for (std::int64_t j = 0; j < seen; ++j) {
        const double dscore = options.scale * p[j] * (dp[j] - mean);
        const double size =
            std::max(std::abs(options.scale) * p[j] * (std::sqrt(dp_square[j]) + mean_size), options.least);
        r.dq.add(row * width, width, dscore, size, &ks[(first + j) * width]);
        r.dk.add((first + j) * width, width, dscore, size, query);
      }
    }
  }
  return r;
}

inline void expect_sums(const Tensor& got, const Sums& expected, double tolerance, const std::string& what) {
  std::vector<double> scales;
  for (const double square : expected.squares) {
    scales.push_back(std::max(std::sqrt(square), 1e-30));
  }
  expect_rows_close(got, expected.values, scales, 1, tolerance, what);
}

}  // namespace mica::attention_testing
