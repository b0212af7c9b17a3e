#pragma once

// The CPU's instructions that a compiler may use, as the macro that tells so and the name for __builtin_cpu_supports().
// Only those that g++ and clang both know.

namespace mica::detail {

// clang-format off
#define MICA_CPU_FEATURES(apply)                                                                             \
  apply(__POPCNT__, "popcnt") apply(__SSE3__, "sse3") apply(__SSSE3__, "ssse3") apply(__SSE4_1__, "sse4.1")  \
  apply(__SSE4_2__, "sse4.2") apply(__SSE4A__, "sse4a") apply(__AES__, "aes") apply(__PCLMUL__, "pclmul")    \
  apply(__AVX__, "avx") apply(__FMA4__, "fma4") apply(__XOP__, "xop") apply(__BMI__, "bmi")                  \
  apply(__BMI2__, "bmi2") apply(__FMA__, "fma") apply(__AVX2__, "avx2") apply(__AVX512F__, "avx512f")        \
  apply(__AVX512CD__, "avx512cd") apply(__AVX512BW__, "avx512bw") apply(__AVX512DQ__, "avx512dq")            \
  apply(__AVX512VL__, "avx512vl") apply(__AVX512IFMA__, "avx512ifma") apply(__AVX512VBMI__, "avx512vbmi")    \
  apply(__AVX512VBMI2__, "avx512vbmi2") apply(__AVX512VNNI__, "avx512vnni") apply(__GFNI__, "gfni")          \
  apply(__AVX512BITALG__, "avx512bitalg") apply(__AVX512VPOPCNTDQ__, "avx512vpopcntdq")                      \
  apply(__VPCLMULQDQ__, "vpclmulqdq") apply(__AVX512BF16__, "avx512bf16")
// clang-format on

/// For each of them, whether the library was compiled with it.
extern const bool cpu_features_used[];

}  // namespace mica::detail
