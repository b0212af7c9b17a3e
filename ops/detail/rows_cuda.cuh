#pragma once

// The names that kernels of rows use of core/cuda, the types of rows, and sizes of grids.

#include <algorithm>
#include <climits>
#include <cstdint>
#include <type_traits>

#include <mica/core/cuda/pack.cuh>
#include <mica/core/cuda/ptx.cuh>
#include <mica/core/cuda/reduce.cuh>
#include <mica/core/dispatch.h>

namespace mica::kernels::rows {

using cuda::kAllLanes;
using cuda::kWarp;
using cuda::load;
using cuda::load_or;
using cuda::load_streaming;
using cuda::Pack;
using cuda::pack_of;
using cuda::store;
using cuda::store_whole;
using cuda::sum_lanes;
using cuda::sum_pair;
using cuda::unpack;
using cuda::with_pack_size;

// On the host.

/// As many blocks as a grid's x axis can have; kernels loop over what is left.
inline unsigned grid_of(std::int64_t blocks) { return static_cast<unsigned>(std::min<std::int64_t>(blocks, INT_MAX)); }

/// macro(T, W) for the types that on_row_types() may choose, or for those of them whose sums are float: for explicit
/// instantiations.
#define MICA_FOR_FLOAT_SUM_ROW_TYPES(macro) \
  macro(Half, Half);                        \
  macro(Half, float);                       \
  macro(BFloat16, BFloat16);                \
  macro(BFloat16, float);                   \
  macro(float, float)
#define MICA_FOR_ROW_TYPES(macro)      \
  MICA_FOR_FLOAT_SUM_ROW_TYPES(macro); \
  macro(double, double)

/// Calls f.operator()<T, W>() with the types of x and of its parameters: W is T or the type of its sums.
template <class F>
void on_row_types(DType x, DType parameter, const char* op, F&& f) {
  on_dtype(FloatTypes{}, x, op, [&]<class T>() {
    using S = Accumulate<T>;
    using Parameters = std::conditional_t<std::is_same_v<T, S>, Types<T>, Types<T, S>>;
    on_dtype(Parameters{}, parameter, op, [&]<class W>() { f.template operator()<T, W>(); });
  });
}

}  // namespace mica::kernels::rows
