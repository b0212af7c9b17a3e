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

/// Whether multiply_split() can compute a product: on a CPU with AMX, if the rows of a and the columns of b are
/// contiguous, as in linear layers.
bool has_split_product(Matrix<float> a, Matrix<float> b);

/// The product of float32 matrices with each element rounded to a sum of two bfloat16, which has 16 significant bits:
/// see MatmulPrecision::bfloat16x2.
void multiply_split(std::int64_t m, std::int64_t n, std::int64_t depth, Matrix<float> a, Matrix<float> b,
                    const float* start, float* out);

}  // namespace mica::gemm
