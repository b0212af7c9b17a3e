#pragma once

// The product of two bfloat16 matrices on CPUs with a Bfloat16Unit.

#include <mica/ops/gemm/detail/bfloat16_tiles.h>
#include <mica/ops/gemm/detail/matrix.h>

namespace mica::gemm {

/// out (M, N) row-major = a (M, K) · b (K, N) + start (N). Sums are float32, each in an order that depends on K alone.
/// Requires a bfloat16_unit().
void multiply_bfloat16(std::int64_t m, std::int64_t n, std::int64_t depth, Matrix<BFloat16> a, Matrix<BFloat16> b,
                       const float* start, float* out);
/// The same, with the result rounded to bfloat16.
void multiply_bfloat16(std::int64_t m, std::int64_t n, std::int64_t depth, Matrix<BFloat16> a, Matrix<BFloat16> b,
                       const float* start, BFloat16* out);

/// The same, added to out: out += a · b.
void add_product_bfloat16(std::int64_t m, std::int64_t n, std::int64_t depth, Matrix<BFloat16> a, Matrix<BFloat16> b,
                          float* out);

}  // namespace mica::gemm
