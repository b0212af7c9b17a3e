#pragma once

// Shared by all kernels that work on rows: names from core/cuda, dispatch on element types, and grid sizes.

#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <mica/core/cuda/pack.cuh>
#include <mica/core/cuda/ptx.cuh>
#include <mica/core/cuda/reduce.cuh>
#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>

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
using cuda::unpack;
using cuda::with_pack_size;

/// Returns its argument, but hides from the compiler how it was computed, so that the compiler does not compute it
/// again at each use.
__device__ inline int opaque(int n) {
  asm volatile("" : "+r"(n));
  return n;
}
template <class T>
__device__ T* opaque(T* p) {
  asm volatile("" : "+l"(p));
  return p;
}

// On the host.

/// `blocks`, limited to what a grid's x axis can have; kernels loop over the rest.
inline unsigned grid_of(std::int64_t blocks) { return static_cast<unsigned>(std::min<std::int64_t>(blocks, INT_MAX)); }

inline const void* address_of(const void* pointer) { return pointer; }
inline const void* address_of(const Tensor& tensor) { return tensor.defined() ? tensor.raw_data() : nullptr; }

/// The alignment in bytes, at most 16, of pointers, or of the data of defined tensors.
template <class... Operands>
int alignment_of(const Operands&... operands) {
  const std::uintptr_t bits = (std::uintptr_t{16} | ... | reinterpret_cast<std::uintptr_t>(address_of(operands)));
  return static_cast<int>(bits & (~bits + 1));
}

/// Whether rows can be read in packs of 16 bytes in all defined tensors, since they begin and end at multiples of 16.
template <class... Tensors>
bool fit_packs(std::int64_t columns, DType dtype, const Tensors&... tensors) {
  bool fit = false;
  with_pack_size<std::byte>(
      columns * static_cast<std::int64_t>(size_of(dtype)), [&](auto bytes) { fit = bytes > 1; },
      (tensors.defined() ? tensors.raw_data() : nullptr)...);
  return fit;
}

/// Calls f.operator()<V>() with the V elements that fit in 16 bytes, if `packs` and T is not float64; else with 1.
template <class T, class F>
void with_pack(bool packs, const F& f) {
  if constexpr (sizeof(T) <= 4) {
    if (packs) {
      return f.template operator()<16 / sizeof(T)>();
    }
  }
  f.template operator()<1>();
}

/// Calls f.operator()<T, W>() with T the element type of x and W that of its parameters: T or the type of T's sums.
template <class F>
void on_row_types(DType x, DType parameter, const char* op, F&& f) {
  on_dtype(FloatTypes{}, x, op, [&]<class T>() {
    using S = Accumulate<T>;
    using Parameters = std::conditional_t<std::is_same_v<T, S>, Types<T>, Types<T, S>>;
    on_dtype(Parameters{}, parameter, op, [&]<class W>() { f.template operator()<T, W>(); });
  });
}

}  // namespace mica::kernels::rows
