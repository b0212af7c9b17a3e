#pragma once

// Matrix products by a warpgroup, 4 warps starting at a multiple of 4: instructions of compute capability 9.0 only, for
// which only files named *_sm90.cu are compiled (cmake/MicaTarget.cmake). Elsewhere they trap; the host checks
// device_has_wgmma().
//
// A product is asynchronous, like a copy: begin_products(), multiply_add() …, commit_products(), and wait_products<0>()
// before its sums are used. Its operands are tiles in shared memory, given by descriptors.

#include <cstdint>
#include <type_traits>

#include <mica/core/cuda/ptx.cuh>
#include <mica/core/half.h>

namespace mica::cuda {

/// Two numbers rounded to T, Float16 or BFloat16, in one register, the first in the low half.
template <class T>
__device__ std::uint32_t pair_of(float first, float second) {
  std::uint32_t result;
  if constexpr (std::is_same_v<T, Float16>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(second), "f"(first));
  }
  return result;
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define MICA_PTX_90A(...) asm volatile(__VA_ARGS__)
#else
#define MICA_PTX_90A(...) __trap()
#endif

// Redistribute a block's registers among its warpgroups. kRegisters is the new number per thread, a multiple of 8 from
// 24 to 256. Every warp of the warpgroup must make the call.

template <int kRegisters>
__device__ void release_registers() {
  MICA_PTX_90A("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ void acquire_registers() {
  MICA_PTX_90A("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Tiles in shared memory. The operands are A (M, K) and B (K, N). The lines of 128 bytes that a swizzled tensor map
// copies run along either the rows (M or N) or the depth (K) of a tile.

enum class Lines { depth, rows };

namespace detail {

// The start address and the strides are in units of 16 bytes; bit 62 selects the 128-byte swizzle.
__device__ inline std::uint64_t descriptor(std::uint32_t tile, std::uint64_t leading, std::uint64_t stride) {
  return (tile & 0x3FFFFu) >> 4 | leading / 16 << 16 | stride / 16 << 32 | std::uint64_t{1} << 62;
}

}  // namespace detail

/// The descriptor of the first 16 of K = 64 of a tile whose lines hold the 64 values of one row. The tile is aligned to
/// 1024 bytes.
__device__ inline std::uint64_t depth_lines(std::uint32_t tile) {
  return detail::descriptor(tile, 16, 8 * 128);  // from 8 rows to the next 8; lines hold all of K
}
__device__ inline std::uint64_t depth_lines(const void* tile) { return depth_lines(shared_address(tile)); }

/// The descriptor of the first 16 of K of a tile whose lines hold 64 rows for one k: kDepth lines, then those of the
/// next 64 rows.
template <int kDepth>
__device__ std::uint64_t row_lines(const void* tile) {
  // From 64 rows to the next 64; from 8 k to the next 8.
  return detail::descriptor(shared_address(tile), kDepth * 128, 8 * 128);
}

/// The increment of a descriptor for the next 16 of K.
template <Lines kLines>
inline constexpr std::uint64_t kNextDepth = (kLines == Lines::depth ? 16 * 2 : 16 * 128) / 16;

// Products. Those of one warpgroup are executed in order.

/// Call before the first product, and again after its sums or its registers of A were accessed.
__device__ inline void begin_products() { MICA_PTX_90A("wgmma.fence.sync.aligned;" ::: "memory"); }

/// Commits the products since the last group as one group.
__device__ inline void commit_products() { MICA_PTX_90A("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/// Waits until at most kPending of the latest groups are pending.
template <int kPending>
__device__ void wait_products() {
  MICA_PTX_90A("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Keeps the compiler from moving uses of sums before a wait for them, and the computation of a fragment after
/// begin_products(). Also keeps registers allocated: the compiler considers a fragment's registers free once the
/// product was issued, so pin them again after the wait.
template <int kSize>
__device__ void pin(float (&sums)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    asm volatile("" : "+f"(sums[i])::"memory");
  }
}
template <int kSize>
__device__ void pin(std::uint32_t (&fragment)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    asm volatile("" : "+r"(fragment[i])::"memory");
  }
}

namespace detail {

// The instruction for N columns. Its text lists N / 2 registers of sums; the other operands are numbered after them.
template <int N>
struct Product;

// clang-format off
#define MICA_REGISTERS_4 "%0, %1, %2, %3"
#define MICA_REGISTERS_8 MICA_REGISTERS_4 \
  ", %4, %5, %6, %7"
#define MICA_REGISTERS_16 MICA_REGISTERS_8 \
  ", %8, %9, %10, %11, %12, %13, %14, %15"
#define MICA_REGISTERS_32 MICA_REGISTERS_16 \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MICA_REGISTERS_64 MICA_REGISTERS_32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MICA_REGISTERS_96 MICA_REGISTERS_64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define MICA_REGISTERS_128 MICA_REGISTERS_64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define MICA_SUMS_4(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define MICA_SUMS_8(i) MICA_SUMS_4(i), MICA_SUMS_4(i + 4)
#define MICA_SUMS_16(i) MICA_SUMS_8(i), MICA_SUMS_8(i + 8)
#define MICA_SUMS_32(i) MICA_SUMS_16(i), MICA_SUMS_16(i + 16)
#define MICA_SUMS_64(i) MICA_SUMS_32(i), MICA_SUMS_32(i + 32)
#define MICA_SUMS_96(i) MICA_SUMS_64(i), MICA_SUMS_32(i + 64)
#define MICA_SUMS_128(i) MICA_SUMS_64(i), MICA_SUMS_64(i + 64)

#define MICA_PRODUCT_OF_SHARED(n, half_n, type, p0, p1, p2, p3, p4)                                          \
  MICA_PTX_90A("{\n"                                                                                         \
               ".reg .pred keep;\n"                                                                          \
               "setp.ne.b32 keep, %" #p2 ", 0;\n"                                                            \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" MICA_REGISTERS_##half_n  \
               "}, %" #p0 ", %" #p1 ", keep, 1, 1, %" #p3 ", %" #p4 ";\n"                                    \
               "}\n"                                                                                         \
               : MICA_SUMS_##half_n(0)                                                                       \
               : "l"(a), "l"(b), "r"(static_cast<int>(keep)), "n"(kA == Lines::rows), "n"(kB == Lines::rows))

#define MICA_PRODUCT_OF_REGISTERS(n, half_n, type, p0, p1, p2, p3, p4, p5, p6)                               \
  MICA_PTX_90A("{\n"                                                                                         \
               ".reg .pred keep;\n"                                                                          \
               "setp.ne.b32 keep, %" #p5 ", 0;\n"                                                            \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" MICA_REGISTERS_##half_n  \
               "}, {%" #p0 ", %" #p1 ", %" #p2 ", %" #p3 "}, %" #p4 ", keep, 1, 1, %" #p6 ";\n"              \
               "}\n"                                                                                         \
               : MICA_SUMS_##half_n(0)                                                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(keep)),            \
                 "n"(kB == Lines::rows))

#define MICA_PRODUCT(n, half_n, p0, p1, p2, p3, p4, p5, p6)                                                  \
  template <>                                                                                                \
  struct Product<n> {                                                                                        \
    template <class T, Lines kA, Lines kB>                                                                   \
    __device__ static void add(float (&sums)[half_n], std::uint64_t a, std::uint64_t b, bool keep) {         \
      if constexpr (std::is_same_v<T, Float16>) {                                                               \
        MICA_PRODUCT_OF_SHARED(n, half_n, "f16", p0, p1, p2, p3, p4);                                        \
      } else {                                                                                               \
        MICA_PRODUCT_OF_SHARED(n, half_n, "bf16", p0, p1, p2, p3, p4);                                       \
      }                                                                                                      \
    }                                                                                                        \
    template <class T, Lines kB>                                                                             \
    __device__ static void add(float (&sums)[half_n], const std::uint32_t (&a)[4], std::uint64_t b, bool keep) { \
      if constexpr (std::is_same_v<T, Float16>) {                                                               \
        MICA_PRODUCT_OF_REGISTERS(n, half_n, "f16", p0, p1, p2, p3, p4, p5, p6);                             \
      } else {                                                                                               \
        MICA_PRODUCT_OF_REGISTERS(n, half_n, "bf16", p0, p1, p2, p3, p4, p5, p6);                            \
      }                                                                                                      \
    }                                                                                                        \
  }

MICA_PRODUCT(8, 4, 4, 5, 6, 7, 8, 9, 10);
MICA_PRODUCT(16, 8, 8, 9, 10, 11, 12, 13, 14);
MICA_PRODUCT(32, 16, 16, 17, 18, 19, 20, 21, 22);
MICA_PRODUCT(64, 32, 32, 33, 34, 35, 36, 37, 38);
MICA_PRODUCT(128, 64, 64, 65, 66, 67, 68, 69, 70);
MICA_PRODUCT(192, 96, 96, 97, 98, 99, 100, 101, 102);
MICA_PRODUCT(256, 128, 128, 129, 130, 131, 132, 133, 134);

#undef MICA_PRODUCT
#undef MICA_PRODUCT_OF_REGISTERS
#undef MICA_PRODUCT_OF_SHARED
#undef MICA_SUMS_4
#undef MICA_SUMS_8
#undef MICA_SUMS_16
#undef MICA_SUMS_32
#undef MICA_SUMS_64
#undef MICA_SUMS_96
#undef MICA_SUMS_128
#undef MICA_REGISTERS_4
#undef MICA_REGISTERS_8
#undef MICA_REGISTERS_16
#undef MICA_REGISTERS_32
#undef MICA_REGISTERS_64
#undef MICA_REGISTERS_96
#undef MICA_REGISTERS_128
// clang-format on

}  // namespace detail

/// sums (64, N) = [sums +] a (64, 16) · b (16, N), for T = Float16 or BFloat16 and N = 8, 16, 32, 64, 128, 192 or 256;
/// a and b are descriptors of tiles with lines along kA and kB. Warp w has rows from 16 w on: sums[4 j + i] of lane l
/// is row l / 4 + 8 (i / 2) of these, column 8 j + 2 (l % 4) + i % 2.
template <class T, int N, Lines kA, Lines kB>
__device__ void multiply_add(float (&sums)[N / 2], std::uint64_t a, std::uint64_t b, bool keep_sums = true) {
  detail::Product<N>::template add<T, kA, kB>(sums, a, b, keep_sums);
}

/// The same with a in registers, two elements in each, the first in the low half: a[i] of lane l is row
/// l / 4 + 8 (i % 2), columns 2 (l % 4) + 8 (i / 2) and the next. Do not modify a before the product is complete.
template <class T, int N, Lines kB>
__device__ void multiply_add(float (&sums)[N / 2], const std::uint32_t (&a)[4], std::uint64_t b,
                             bool keep_sums = true) {
  detail::Product<N>::template add<T, kB>(sums, a, b, keep_sums);
}

#undef MICA_PTX_90A

}  // namespace mica::cuda
