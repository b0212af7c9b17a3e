#pragma once

// What is scanned, for both devices. A source file includes this header and its device's scan_rows(), and instantiates
// the scans.
//
// A scan has the type Item of an element, and the type Carry of the result of a long part of a row. It loads items,
// joins them in order (join() is associative, not necessarily commutative), and stores the joined ones. `identity()`
// stands for the elements after the end of a row.

#include <limits>
#include <type_traits>

#include <mica/core/math.h>
#include <mica/ops/scan/detail/scan_kernels.h>
#include <mica/ops/sort/detail/sort_key.h>

namespace mica::kernels {

namespace scans {

// Integers are added and multiplied as unsigned ones, which wrap around; overflow of signed ones would be undefined
// behavior. Floats are joined in double: float would lose the small terms of a long sum.
template <class T>
using Exact = std::conditional_t<std::is_integral_v<T>, std::uint64_t, double>;

/// The joins of one type: most scans need no other for Carry.
template <class S>
struct OneType {
  using Item = S;
  using Carry = S;
};

/// Rows of adjacent elements, in either direction.
struct Rows {
  std::int64_t n;
  bool reverse = false;

  MICA_HOST_DEVICE std::int64_t at(std::int64_t row, std::int64_t j) const {
    return row * n + (reverse ? n - 1 - j : j);
  }
};

template <class T>
struct Sum {
  using Item = std::conditional_t<std::is_integral_v<T>, std::uint64_t, Accumulate<T>>;
  using Carry = Exact<T>;
  const T* x;
  T* y;
  Rows rows;

  MICA_HOST_DEVICE static Item identity() { return 0; }
  MICA_HOST_DEVICE static Item join(Item a, Item b) { return a + b; }
  MICA_HOST_DEVICE static Carry join_carry(Carry a, Carry b) { return a + b; }
  MICA_HOST_DEVICE Item load(std::int64_t row, std::int64_t j) const { return static_cast<Item>(x[rows.at(row, j)]); }
  MICA_HOST_DEVICE void store(std::int64_t row, std::int64_t j, Item sum) const {
    y[rows.at(row, j)] = static_cast<T>(sum);
  }
};

template <class T>
struct Product : OneType<Exact<T>> {
  using S = Exact<T>;
  const T* x;
  T* y;
  Rows rows;

  Product(const T* x, T* y, Rows rows) : x(x), y(y), rows(rows) {}
  MICA_HOST_DEVICE static S identity() { return 1; }
  MICA_HOST_DEVICE static S join(S a, S b) { return a * b; }
  MICA_HOST_DEVICE static S join_carry(S a, S b) { return a * b; }
  MICA_HOST_DEVICE S load(std::int64_t row, std::int64_t j) const { return static_cast<S>(x[rows.at(row, j)]); }
  MICA_HOST_DEVICE void store(std::int64_t row, std::int64_t j, S product) const {
    y[rows.at(row, j)] = static_cast<T>(product);
  }
};

template <class T>
struct LogSum : OneType<double> {
  const T* x;
  T* y;
  Rows rows;

  LogSum(const T* x, T* y, Rows rows) : x(x), y(y), rows(rows) {}
  MICA_HOST_DEVICE static double identity() { return -std::numeric_limits<double>::infinity(); }
  MICA_HOST_DEVICE static double join(double a, double b) {
    const double large = a > b || a != a ? a : b;  // NOLINT(misc-redundant-expression)
    const double small = a > b || a != a ? b : a;  // NOLINT(misc-redundant-expression)
    // The difference of two equal infinities would be NaN.
    return small == large ? large + 0.69314718055994531 : large + math::log1p(math::exp(small - large));
  }
  MICA_HOST_DEVICE static double join_carry(double a, double b) { return join(a, b); }
  MICA_HOST_DEVICE double load(std::int64_t row, std::int64_t j) const {
    return static_cast<double>(x[rows.at(row, j)]);
  }
  MICA_HOST_DEVICE void store(std::int64_t row, std::int64_t j, double sum) const {
    y[rows.at(row, j)] = static_cast<T>(sum);
  }
};

/// v ↦ a v + b.
struct Affine {
  double a;
  double b;
};

template <class T>
struct Recurrence : OneType<Affine> {
  const T* a;
  const T* b;
  T* y;
  Rows rows;

  Recurrence(const T* a, const T* b, T* y, Rows rows) : a(a), b(b), y(y), rows(rows) {}
  MICA_HOST_DEVICE static Affine identity() { return {1, 0}; }
  MICA_HOST_DEVICE static Affine join(const Affine& first, const Affine& then) {
    return {then.a * first.a, then.a * first.b + then.b};
  }
  MICA_HOST_DEVICE static Affine join_carry(const Affine& first, const Affine& then) { return join(first, then); }
  MICA_HOST_DEVICE Affine load(std::int64_t row, std::int64_t j) const {
    const std::int64_t at = rows.at(row, j);
    return {j == 0 ? 0.0 : static_cast<double>(a[at + (rows.reverse ? 1 : 0)]), static_cast<double>(b[at])};
  }
  MICA_HOST_DEVICE void store(std::int64_t row, std::int64_t j, const Affine& v) const {
    y[rows.at(row, j)] = static_cast<T>(v.b);
  }
};

struct Candidate {
  std::uint64_t key;
  std::int64_t index;
};

template <class T>
struct Extreme : OneType<Candidate> {
  const T* x;
  std::int64_t* indices;
  Rows rows;
  bool largest;

  Extreme(const T* x, std::int64_t* indices, Rows rows, bool largest)
      : x(x), indices(indices), rows(rows), largest(largest) {}
  MICA_HOST_DEVICE static Candidate identity() { return {0, -1}; }
  MICA_HOST_DEVICE static Candidate join(const Candidate& a, const Candidate& b) { return b.key >= a.key ? b : a; }
  MICA_HOST_DEVICE static Candidate join_carry(const Candidate& a, const Candidate& b) { return join(a, b); }
  MICA_HOST_DEVICE Candidate load(std::int64_t row, std::int64_t j) const {
    const T value = x[rows.at(row, j)];
    const bool is_nan = value != value;  // NOLINT(misc-redundant-expression)
    return {is_nan ? ~std::uint64_t{0} : sort_key(value, !largest), j};
  }
  MICA_HOST_DEVICE void store(std::int64_t row, std::int64_t j, const Candidate& best) const {
    indices[rows.at(row, j)] = best.index;
  }
};

}  // namespace scans

/// Scans the rows of a matrix of the shape of x, with at least one column: see scan_rows_cpu.h and scan_rows_cuda.cuh.
template <class Scan>
void scan_rows(Cpu, const Scan& scan, const Tensor& x);
template <class Scan>
void scan_rows(Cuda, const Scan& scan, const Tensor& x);

template <class On>
void cumsum(On on, const Cumsum& args) {
  on_dtype(ScannedTypes{}, args.x.dtype(), "cumsum", [&]<class T>() {
    scan_rows(
        on,
        scans::Sum<T>{
            .x = args.x.data<T>(), .y = args.y.data<T>(), .rows = {.n = args.x.shape()[1], .reverse = args.reverse}},
        args.x);
  });
}

template <class On>
void cumprod(On on, const Cumprod& args) {
  on_dtype(Types<float, double, std::int64_t>{}, args.x.dtype(), "cumprod", [&]<class T>() {
    scan_rows(on, scans::Product<T>(args.x.data<T>(), args.y.data<T>(), {.n = args.x.shape()[1]}), args.x);
  });
}

template <class On>
void logcumsumexp(On on, const Logcumsumexp& args) {
  on_dtype(Types<float, double>{}, args.x.dtype(), "logcumsumexp", [&]<class T>() {
    scan_rows(on, scans::LogSum<T>(args.x.data<T>(), args.y.data<T>(), {.n = args.x.shape()[1]}), args.x);
  });
}

template <class On>
void recurrence(On on, const Recurrence& args) {
  on_dtype(Types<float, double>{}, args.a.dtype(), "recurrence", [&]<class T>() {
    scan_rows(on,
              scans::Recurrence<T>(args.a.data<T>(), args.b.data<T>(), args.y.data<T>(),
                                   {.n = args.a.shape()[1], .reverse = args.reverse}),
              args.a);
  });
}

template <class On>
void cumextreme(On on, const Cumextreme& args) {
  on_dtype(AllTypes{}, args.x.dtype(), args.largest ? "cummax" : "cummin", [&]<class T>() {
    scan_rows(
        on,
        scans::Extreme<T>(args.x.data<T>(), args.indices.data<std::int64_t>(), {.n = args.x.shape()[1]}, args.largest),
        args.x);
  });
}

}  // namespace mica::kernels
