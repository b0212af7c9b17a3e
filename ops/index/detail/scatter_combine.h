#pragma once

#include <type_traits>

#include <mica/core/detail/wrap.h>
#include <mica/ops/index/detail/scatter_kernels.h>

namespace mica::kernels {

/// The type in which elements of type T are combined.
template <class T>
using Combined = std::conditional_t<std::is_integral_v<T>, std::int64_t, double>;

template <class S>
MICA_HOST_DEVICE S combine(Combination combination, S a, S b) {
  switch (combination) {
    case Combination::product: return wrapping_mul(a, b);
    case Combination::largest: return b > a || b != b ? b : a;   // NOLINT(misc-redundant-expression)
    case Combination::smallest: return b < a || b != b ? b : a;  // NOLINT(misc-redundant-expression)
    case Combination::last: break;
  }
  return b;
}

}  // namespace mica::kernels
