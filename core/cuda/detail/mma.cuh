#pragma once

// Warp-level tensor-core products of small matrices, for compute capability 8.0 and later.

#include <cstdint>
#include <type_traits>

#include <mica/core/half.h>

namespace mica::cuda {

/// result (16, 8) = sums (16, 8) + a (16, 16) · b (16, 8), for T = Float16 or BFloat16. A register of a or b holds two
/// elements, the first in its low half. In lane l, with g = l / 4 and t = l % 4: a[i] is row g + 8 (i % 2), columns 2t
/// + 8 (i / 2) and the next; b0 and b1 are column g, rows 2t and the next, and 8 further; sums[i] and result[i] are row
/// g + 8 (i / 2), column 2t + i % 2.
template <class T>
__device__ void multiply_add_16_8_16(float (&result)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                     std::uint32_t b1, const float (&sums)[4]) {
  if constexpr (std::is_same_v<T, Float16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=f"(result[0]), "=f"(result[1]), "=f"(result[2]), "=f"(result[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(sums[0]), "f"(sums[1]), "f"(sums[2]),
          "f"(sums[3]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=f"(result[0]), "=f"(result[1]), "=f"(result[2]), "=f"(result[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(sums[0]), "f"(sums[1]), "f"(sums[2]),
          "f"(sums[3]));
  }
}

/// sums += a · b
template <class T>
__device__ void multiply_add_16_8_16(float (&sums)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                     std::uint32_t b1) {
  multiply_add_16_8_16<T>(sums, a, b0, b1, sums);
}

}  // namespace mica::cuda
