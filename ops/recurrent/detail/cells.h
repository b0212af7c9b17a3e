#pragma once

// One element of each cell, forward and backward, for both devices. S is the type of arithmetic.
//
// `x` and `p` are the gates' parts from the input and from the hidden state. What forward saves is all that backward
// needs besides the states before and after.

#include <utility>

#include <mica/core/half.h>
#include <mica/core/math.h>
#include <mica/ops/recurrent/detail/recurrent_kernels.h>

namespace mica::cells {

template <class S, int N>
struct Values {
  S at[N];
};

/// Calls f(0), f(1), … f(N − 1), unrolled.
template <int N, class F>
MICA_HOST_DEVICE inline void for_each(const F& f) {
  [&]<int... K>(std::integer_sequence<int, K...>) { (f(K), ...); }
  (std::make_integer_sequence<int, N>());
}

/// What backward computes for one element: the gradients of x and p (equal unless kSplits), of c, and the part of h's
/// gradient that does not pass through p.
template <class S, int N>
struct CellGradients {
  Values<S, N> x;
  Values<S, N> p;
  S h;
  S c;
};

/// The states around a step and the gradients after it.
template <class S>
struct Around {
  S h_before, h, c_before, c;
  S dh, dc;
};

template <bool kRelu>
struct Rnn {
  static constexpr int kGates = 1;
  static constexpr int kSaved = 0;
  static constexpr bool kSplits = false;
  static constexpr bool kHasCell = false;

  template <class S>
  MICA_HOST_DEVICE static void forward(const Values<S, 1>& x, const Values<S, 1>& p, S, Values<S, 1>&, S& h, S&) {
    const S sum = x.at[0] + p.at[0];
    if constexpr (kRelu) {
      h = sum < S{0} ? S{0} : sum;
    } else {
      h = math::tanh(sum);
    }
  }
  template <class S>
  MICA_HOST_DEVICE static CellGradients<S, 1> backward(const Values<S, 1>&, const Around<S>& a) {
    const S d = kRelu ? (a.h > S{0} ? a.dh : S{0}) : a.dh * (S{1} - a.h * a.h);
    return {{{d}}, {{d}}, S{0}, S{0}};
  }
};

struct Lstm {
  static constexpr int kGates = 4;
  static constexpr int kSaved = 4;  // i, f, g, o
  static constexpr bool kSplits = false;
  static constexpr bool kHasCell = true;

  template <class S>
  MICA_HOST_DEVICE static void forward(const Values<S, 4>& x, const Values<S, 4>& p, S, Values<S, 4>& saved, S& h,
                                       S& c) {
    const S i = math::sigmoid(x.at[0] + p.at[0]), f = math::sigmoid(x.at[1] + p.at[1]);
    const S g = math::tanh(x.at[2] + p.at[2]), o = math::sigmoid(x.at[3] + p.at[3]);
    c = f * c + i * g;
    h = o * math::tanh(c);
    saved = {{i, f, g, o}};
  }
  template <class S>
  MICA_HOST_DEVICE static CellGradients<S, 4> backward(const Values<S, 4>& saved, const Around<S>& a) {
    const S i = saved.at[0], f = saved.at[1], g = saved.at[2], o = saved.at[3];
    const S bounded = math::tanh(a.c);
    const S dc = a.dc + a.dh * o * (S{1} - bounded * bounded);
    const Values<S, 4> d{{dc * g * i * (S{1} - i), dc * a.c_before * f * (S{1} - f), dc * i * (S{1} - g * g),
                          a.dh * bounded * o * (S{1} - o)}};
    return {d, d, S{0}, dc * f};
  }
};

struct Gru {
  static constexpr int kGates = 3;
  static constexpr int kSaved = 4;  // r, z, n, and n's part from the hidden state
  static constexpr bool kSplits = true;
  static constexpr bool kHasCell = false;

  template <class S>
  MICA_HOST_DEVICE static void forward(const Values<S, 3>& x, const Values<S, 3>& p, S h_before, Values<S, 4>& saved,
                                       S& h, S&) {
    const S r = math::sigmoid(x.at[0] + p.at[0]), z = math::sigmoid(x.at[1] + p.at[1]);
    const S n = math::tanh(x.at[2] + r * p.at[2]);
    h = (S{1} - z) * n + z * h_before;
    saved = {{r, z, n, p.at[2]}};
  }
  template <class S>
  MICA_HOST_DEVICE static CellGradients<S, 3> backward(const Values<S, 4>& saved, const Around<S>& a) {
    const S r = saved.at[0], z = saved.at[1], n = saved.at[2];
    const S dn = a.dh * (S{1} - z) * (S{1} - n * n);
    const S dz = a.dh * (a.h_before - n) * z * (S{1} - z);
    const S dr = dn * saved.at[3] * r * (S{1} - r);
    return {{{dr, dz, dn}}, {{dr, dz, dn * r}}, a.dh * z, S{0}};
  }
};

/// CellForward's pointers, to elements T of the op and S of what stays in higher precision.
template <class T, class S = Accumulate<T>>
struct StepForward {
  const T *x, *p, *h_before;
  const S* c_before;
  T *saved, *h;
  S* c;
  const std::int64_t* lengths;
  std::int64_t step, rows, width;

  explicit StepForward(const kernels::CellForward& args)
      : x(args.x.data<T>()),
        p(args.product.data<T>()),
        h_before(args.h_before.data<T>()),
        c_before(args.c_before.data_or_null<S>()),
        saved(args.saved.data_or_null<T>()),
        h(args.h.data<T>()),
        c(args.c.data_or_null<S>()),
        lengths(args.lengths.data_or_null<std::int64_t>()),
        step(args.step),
        rows(args.h.size(0)),
        width(args.h.size(1)) {}

  MICA_HOST_DEVICE bool is_padding(std::int64_t row) const { return lengths != nullptr && step >= lengths[row]; }
};

template <class T, class S = Accumulate<T>>
struct StepBackward {
  const T *saved, *h_before, *h;
  const S *c_before, *c;
  const T *dy, *dh_product;
  S *dh, *dc;
  T *dx, *dp;
  const std::int64_t* lengths;
  std::int64_t step, rows, width;

  explicit StepBackward(const kernels::CellBackward& args)
      : saved(args.saved.data_or_null<T>()),
        h_before(args.h_before.data<T>()),
        h(args.h.data<T>()),
        c_before(args.c_before.data_or_null<S>()),
        c(args.c.data_or_null<S>()),
        dy(args.dy.data<T>()),
        dh_product(args.dh_product.data<T>()),
        dh(args.dh.data<S>()),
        dc(args.dc.data_or_null<S>()),
        dx(args.dx.data<T>()),
        dp(args.dp.data<T>()),
        lengths(args.lengths.data_or_null<std::int64_t>()),
        step(args.step),
        rows(args.h.size(0)),
        width(args.h.size(1)) {}

  MICA_HOST_DEVICE bool is_padding(std::int64_t row) const { return lengths != nullptr && step >= lengths[row]; }
};

/// Element `j` of a row that is not padding. `first` is the row's first element in (rows, width).
template <class Cell, class T, class S>
MICA_HOST_DEVICE inline void forward_element(const StepForward<T, S>& a, std::int64_t first, std::int64_t j) {
  constexpr int kHeld = Cell::kSaved > 0 ? Cell::kSaved : 1;
  Values<S, Cell::kGates> x, p;
  Values<S, kHeld> saved{};
  for_each<Cell::kGates>([&](int g) {
    const std::int64_t at = Cell::kGates * first + g * a.width + j;
    x.at[g] = static_cast<S>(a.x[at]);
    p.at[g] = static_cast<S>(a.p[at]);
  });
  S h{}, c{};
  if constexpr (Cell::kHasCell) {
    c = a.c_before[first + j];
  }
  Cell::forward(x, p, static_cast<S>(a.h_before[first + j]), saved, h, c);
  a.h[first + j] = static_cast<T>(h);
  if constexpr (Cell::kHasCell) {
    a.c[first + j] = c;
  }
  for_each<Cell::kSaved>([&](int k) { a.saved[Cell::kSaved * first + k * a.width + j] = static_cast<T>(saved.at[k]); });
}

/// The gradient of h after the step.
template <class T, class S>
MICA_HOST_DEVICE inline S gradient_after(const StepBackward<T, S>& a, std::int64_t at) {
  return a.dh[at] + static_cast<S>(a.dh_product[at]) + static_cast<S>(a.dy[at]);
}

template <class Cell, class T, class S>
MICA_HOST_DEVICE inline void backward_element(const StepBackward<T, S>& a, std::int64_t first, std::int64_t j) {
  constexpr int kHeld = Cell::kSaved > 0 ? Cell::kSaved : 1;
  const std::int64_t at = first + j;
  Values<S, kHeld> saved{};
  for_each<Cell::kSaved>([&](int k) { saved.at[k] = static_cast<S>(a.saved[Cell::kSaved * first + k * a.width + j]); });
  Around<S> around{.h_before = static_cast<S>(a.h_before[at]),
                   .h = static_cast<S>(a.h[at]),
                   .c_before = S{},
                   .c = S{},
                   .dh = gradient_after(a, at),
                   .dc = S{}};
  if constexpr (Cell::kHasCell) {
    around.c_before = a.c_before[at];
    around.c = a.c[at];
    around.dc = a.dc[at];
  }
  const CellGradients<S, Cell::kGates> d = Cell::backward(saved, around);
  for_each<Cell::kGates>([&](int g) {
    const std::int64_t to = Cell::kGates * first + g * a.width + j;
    a.dx[to] = static_cast<T>(d.x.at[g]);
    if constexpr (Cell::kSplits) {
      a.dp[to] = static_cast<T>(d.p.at[g]);
    }
  });
  a.dh[at] = d.h;
  if constexpr (Cell::kHasCell) {
    a.dc[at] = d.c;
  }
}

/// Element `j` of a row of padding: states and gradients pass.
template <class Cell, class T, class S>
MICA_HOST_DEVICE inline void forward_padding(const StepForward<T, S>& a, std::int64_t first, std::int64_t j) {
  a.h[first + j] = a.h_before[first + j];
  if constexpr (Cell::kHasCell) {
    a.c[first + j] = a.c_before[first + j];
  }
}
template <class Cell, class T, class S>
MICA_HOST_DEVICE inline void backward_padding(const StepBackward<T, S>& a, std::int64_t first, std::int64_t j) {
  a.dh[first + j] = gradient_after(a, first + j);
  for_each<Cell::kGates>([&](int g) {
    const std::int64_t to = Cell::kGates * first + g * a.width + j;
    a.dx[to] = static_cast<T>(S{0});
    a.dp[to] = static_cast<T>(S{0});
  });
}

/// Calls f.operator()<Cell>().
template <class F>
void with_cell(Recurrence kind, F&& f) {
  switch (kind) {
    case Recurrence::rnn_tanh: f.template operator()<Rnn<false>>(); break;
    case Recurrence::rnn_relu: f.template operator()<Rnn<true>>(); break;
    case Recurrence::lstm: f.template operator()<Lstm>(); break;
    case Recurrence::gru: f.template operator()<Gru>(); break;
  }
}

}  // namespace mica::cells
