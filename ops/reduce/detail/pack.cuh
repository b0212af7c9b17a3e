#pragma once

// 16 bytes of elements at a time. Code that walks rows in packs does so wherever the row starts, so that the order of
// its additions does not depend on alignment; only how a pack is read does.

#include <cstdint>

namespace mica::kernels {

template <class T>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / sizeof(T);
  T values[kSize];
};

template <class T>
__device__ bool is_aligned(const T* x) {
  return reinterpret_cast<std::uintptr_t>(x) % sizeof(Pack<T>) == 0;
}

template <class T>
__device__ Pack<T> load_pack(const T* x, bool aligned) {
  Pack<T> pack;
  if (aligned) {
    pack = *reinterpret_cast<const Pack<T>*>(x);
  } else {
#pragma unroll
    for (int j = 0; j < Pack<T>::kSize; ++j) {
      pack.values[j] = x[j];
    }
  }
  return pack;
}

template <class T>
__device__ void store_pack(T* x, const Pack<T>& pack, bool aligned) {
  if (aligned) {
    *reinterpret_cast<Pack<T>*>(x) = pack;
  } else {
#pragma unroll
    for (int j = 0; j < Pack<T>::kSize; ++j) {
      x[j] = pack.values[j];
    }
  }
}

}  // namespace mica::kernels
