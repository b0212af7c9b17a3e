#pragma once

#include <mica/core/detail/strided.h>
#include <mica/ops/elementwise/detail/functions.h>

namespace mica::functions {

/// y = f(gate) · up for elements of type T.
template <class F, class T>
struct Gated {
  static constexpr bool kReadsOnce = true;
  template <class S>
  MICA_HOST_DEVICE S operator()(S gate, S up) const {
    return F::template at<T>(gate).value * up;
  }
};

/// dgate = dy · up · f′(gate) and dup = dy · f(gate).
template <class F, class T>
struct GatedGradient {
  static constexpr bool kReadsOnce = true;
  template <class S>
  MICA_HOST_DEVICE Results<S, 2> operator()(S dy, S gate, S up) const {
    const Activation<S> f = F::template at<T>(gate);
    return {{dy * up * f.slope, dy * f.value}};
  }
};

}  // namespace mica::functions
