#pragma once

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>

namespace mica::kernels {

// Scans of the rows of matrices (rows, n), row-major, n ≥ 1. Results have x's shape and are row-major.

/// y[r, j] = Σ x[r, i] over i ≤ j or, if `reverse`, over i ≥ j.
struct Cumsum {
  const Tensor& x;  // floating or int64
  const Tensor& y;  // of x's dtype
  bool reverse;
};

/// y[r, j] = Π x[r, i] over i ≤ j.
struct Cumprod {
  const Tensor& x;  // float32, float64 or int64
  const Tensor& y;  // of x's dtype
};

/// y[r, j] = log Σ exp(x[r, i]) over i ≤ j.
struct Logcumsumexp {
  const Tensor& x;  // float32 or float64
  const Tensor& y;  // of x's dtype
};

/// A linear recurrence in either direction; a[r, j] is the factor between the elements j − 1 and j, and a[r, 0] is not
/// used:
///
///     forward   y[r, j] = a[r, j] · y[r, j − 1] + b[r, j]
///     reverse   y[r, j] = a[r, j + 1] · y[r, j + 1] + b[r, j]
struct Recurrence {
  const Tensor& a;  // float32 or float64
  const Tensor& b;  // of a's dtype
  const Tensor& y;  // of a's dtype
  bool reverse;
};

/// indices[r, j] = the position of the largest (or smallest) x[r, i] over i ≤ j; of equal elements, the last. NaN is
/// larger (or smaller) than all numbers.
struct Cumextreme {
  const Tensor& x;        // any dtype
  const Tensor& indices;  // int64
  bool largest;
};

using ScannedTypes = Types<float, double, Float16, BFloat16, std::int64_t>;

template <class On>
void cumsum(On, const Cumsum& args);
template <class On>
void cumprod(On, const Cumprod& args);
template <class On>
void logcumsumexp(On, const Logcumsumexp& args);
template <class On>
void recurrence(On, const Recurrence& args);
template <class On>
void cumextreme(On, const Cumextreme& args);

}  // namespace mica::kernels
