#pragma once

// Products of few rows with a large matrix on the CPU, as when a decoder generates one token at a time. They are
// limited by reading the matrix, so they read it once and in place, whereas gemm_cpu.h packs it first.

#include <cstdint>

#include <mica/core/dtype.h>
#include <mica/ops/gemm/detail/matrix.h>

namespace mica::gemm {

/// The most rows for which multiply_few_rows() is faster than packing b.
inline constexpr std::int64_t kFewRows = 8;

/// out (M, N) row-major = a (M, K) · b (K, N) + bias (N), where `bias` may be null and 1 ≤ M ≤ kFewRows. a and b each
/// have a stride of 1. Sums are in T's accumulation type; A and Out are T or that type. The order of a sum depends only
/// on K and on b's layout, not on M, N or the number of threads.
template <class A, class T, class Out>
void multiply_few_rows(std::int64_t m, std::int64_t n, std::int64_t depth, Matrix<A> a, Matrix<T> b, const T* bias,
                       Out* out);

}  // namespace mica::gemm
