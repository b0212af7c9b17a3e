#pragma once

// Packs: V neighboring elements, moved by one instruction of up to 16 bytes, and their conversion to the type of sums.

#include <cstdint>
#include <type_traits>

#include <mica/core/dispatch.h>

namespace mica::cuda {

/// V neighboring elements.
template <class T, int V>
struct alignas(sizeof(T) * V < 16 ? sizeof(T) * V : 16) Pack {
  T at[V];
};

template <int V, class T>
__device__ Pack<T, V> load(const T* from) {
  return *reinterpret_cast<const Pack<T, V>*>(from);
}
template <int V, class T>
__device__ void store(T* to, const Pack<T, V>& pack) {
  *reinterpret_cast<Pack<T, V>*>(to) = pack;
}

/// A store of 16, 8, 4 or 2 bytes that remains one instruction: after a branch, the compiler would split an ordinary
/// store.
template <class P>
__device__ void store_whole(void* to, const P& pack) {
  if constexpr (sizeof(P) == 16) {
    const uint4 bits = reinterpret_cast<const uint4&>(pack);
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(bits.x), "r"(bits.y), "r"(bits.z),
                 "r"(bits.w)
                 : "memory");
  } else if constexpr (sizeof(P) == 8) {
    const uint2 bits = reinterpret_cast<const uint2&>(pack);
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(bits.x), "r"(bits.y) : "memory");
  } else if constexpr (sizeof(P) == 4) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(to), "r"(reinterpret_cast<const unsigned&>(pack)) : "memory");
  } else {
    static_assert(sizeof(P) == 2);
    asm volatile("st.global.u16 [%0], %1;" ::"l"(to), "h"(reinterpret_cast<const std::uint16_t&>(pack)) : "memory");
  }
}

/// Loads data that is read only once. Packs of 16 bytes bypass the L1 cache.
template <int V, class T>
__device__ Pack<T, V> load_streaming(const T* from) {
  if constexpr (sizeof(Pack<T, V>) == 16) {
    uint4 bits;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "l"(from));
    return *reinterpret_cast<const Pack<T, V>*>(&bits);
  } else {
    return load<V>(from);
  }
}
/// The same, with a policy for the L2 cache. Packs have 16, 4 or 2 bytes; those of 4 and 2 do not bypass the L1 cache,
/// which has the rest of their sector.
template <int V, class T>
__device__ Pack<T, V> load_streaming(const T* from, std::uint64_t policy) {
  if constexpr (sizeof(Pack<T, V>) == 16) {
    uint4 bits;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "l"(from), "l"(policy));
    return *reinterpret_cast<const Pack<T, V>*>(&bits);
  } else if constexpr (sizeof(Pack<T, V>) == 4) {
    unsigned bits;
    asm volatile("ld.global.nc.L2::cache_hint.u32 %0, [%1], %2;" : "=r"(bits) : "l"(from), "l"(policy));
    return *reinterpret_cast<const Pack<T, V>*>(&bits);
  } else {
    static_assert(sizeof(Pack<T, V>) == 2);
    std::uint16_t bits;
    asm volatile("ld.global.nc.L2::cache_hint.u16 %0, [%1], %2;" : "=h"(bits) : "l"(from), "l"(policy));
    return *reinterpret_cast<const Pack<T, V>*>(&bits);
  }
}

/// The elements of a pack as the type of their sums.
template <class T, int V, class S>
__device__ void unpack(const Pack<T, V>& pack, S (&values)[V]) {
  if constexpr (std::is_same_v<T, Float16> && V % 2 == 0) {
#pragma unroll
    for (int j = 0; j < V; j += 2) {
      const float2 pair = __half22float2(reinterpret_cast<const __half2*>(pack.at)[j / 2]);
      values[j] = pair.x;
      values[j + 1] = pair.y;
    }
  } else if constexpr (std::is_same_v<T, BFloat16> && V % 2 == 0) {
    // A bfloat16 is the upper half of a float.
#pragma unroll
    for (int j = 0; j < V; j += 2) {
      const std::uint32_t pair = reinterpret_cast<const std::uint32_t*>(pack.at)[j / 2];
      values[j] = __uint_as_float(pair << 16);
      values[j + 1] = __uint_as_float(pair & 0xffff0000);
    }
  } else {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      values[j] = static_cast<S>(pack.at[j]);
    }
  }
}

/// The values, rounded to T.
template <class T, int V, class S>
__device__ Pack<T, V> pack_of(const S (&values)[V]) {
  Pack<T, V> pack;
  if constexpr (std::is_same_v<T, Float16> && V % 2 == 0) {
#pragma unroll
    for (int j = 0; j < V; j += 2) {
      reinterpret_cast<__half2*>(pack.at)[j / 2] = __floats2half2_rn(values[j], values[j + 1]);
    }
  } else if constexpr (std::is_same_v<T, BFloat16> && V % 2 == 0) {
#pragma unroll
    for (int j = 0; j < V; j += 2) {
      reinterpret_cast<__nv_bfloat162*>(pack.at)[j / 2] = __floats2bfloat162_rn(values[j], values[j + 1]);
    }
  } else {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      pack.at[j] = static_cast<T>(values[j]);
    }
  }
  return pack;
}

/// Loads data that no thread writes while the kernel runs, so that the compiler may move the load across stores.
template <int V, class T>
__device__ Pack<T, V> load_constant(const T* from) {
  using Bits =
      std::conditional_t<sizeof(Pack<T, V>) >= 16, uint4,
                         std::conditional_t<sizeof(Pack<T, V>) == 8, uint2,
                                            std::conditional_t<sizeof(Pack<T, V>) == 4, unsigned, unsigned short>>>;
  constexpr int kCount = static_cast<int>(sizeof(Pack<T, V>) / sizeof(Bits));
  Pack<T, V> pack;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    reinterpret_cast<Bits*>(&pack)[i] = __ldg(reinterpret_cast<const Bits*>(from) + i);
  }
  return pack;
}

/// Loads V columns of a row that no thread writes while the kernel runs, from `column` on. If the row is null, all are
/// `absent`.
template <int V, class T>
__device__ Pack<T, V> load_or(const T* row, std::int64_t column, float absent) {
  if (row != nullptr) {
    return load_constant<V>(row + column);
  }
  Pack<T, V> pack;
#pragma unroll
  for (int j = 0; j < V; ++j) {
    pack.at[j] = static_cast<T>(absent);
  }
  return pack;
}

/// Calls f with the pack size as an integral_constant: the elements of T in 16 bytes if the row length and every
/// pointer that is not null allow such accesses, else 1. For the host.
template <class T, class F, class... Pointers>
void with_pack_size(std::int64_t columns, F&& f, const Pointers*... pointers) {
  constexpr int kFull = 16 / sizeof(T);
  const bool aligned = ((reinterpret_cast<std::uintptr_t>(pointers) % 16 == 0) && ...);
  if (aligned && columns % kFull == 0) {
    f(std::integral_constant<int, kFull>{});
  } else {
    f(std::integral_constant<int, 1>{});
  }
}

}  // namespace mica::cuda
