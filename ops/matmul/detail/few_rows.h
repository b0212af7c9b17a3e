#pragma once

// Products of few rows with a large matrix on the CPU, as in a decoder's step. Their time is that of reading the
// matrix, so these kernels read it once, in place, and convert 16-bit floats in registers. gemm_cpu.h would pack it
// first.

#include <cstdint>

#include <mica/core/dtype.h>
#include <mica/ops/matmul/detail/gemm_matrix.h>

namespace mica::gemm {

/// Up to so many rows, multiply_few_rows() is faster than packing b.
inline constexpr std::int64_t kFewRows = 8;

/// out (M, N) row-major = a (M, K) · b (K, N) + bias (N), where `bias` may be null. One stride of b is 1, and so is one
/// of a; 1 ≤ M ≤ kFewRows. Sums have T's accumulation type; A and Out are T or that type. Their order depends on K and
/// b's layout alone: not on M, N or the number of threads.
template <class A, class T, class Out>
void multiply_few_rows(std::int64_t m, std::int64_t n, std::int64_t depth, Matrix<A> a, Matrix<T> b, const T* bias,
                       Out* out);

}  // namespace mica::gemm
