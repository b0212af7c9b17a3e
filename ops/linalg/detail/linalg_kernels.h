#pragma once

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>

namespace mica::kernels {

// Batches of matrices of float64 or float32, all contiguous and not empty. As in LAPACK, a matrix is stored by columns:
// a tensor (batch, columns, rows). `info` is int32 (batch), LAPACK's: 0, or what failed.

/// Factors matrices in place: row pivoting, with l below the diagonal and u above it.
struct LuFactor {
  const Tensor& a;       // (batch, n, n)
  const Tensor& pivots;  // int32 (batch, n): row i was swapped with row pivots[i] - 1
  const Tensor& info;    // i + 1 if u[i, i] is the first zero on the diagonal; may be another zero on CUDA
};
void lu_factor(Cpu, const LuFactor& args);
void lu_factor(Cuda, const LuFactor& args);

/// x := a⁻¹ · x, or a⁻ᵀ · x if `transposed`.
struct LuSolve {
  const Tensor& lu;
  const Tensor& pivots;
  const Tensor& x;  // (batch, k, n)
  bool transposed;
};
void lu_solve(Cpu, const LuSolve& args);
void lu_solve(Cuda, const LuSolve& args);

/// Replaces the lower triangle by l with l · lᵀ = a.
struct Cholesky {
  const Tensor& a;     // (batch, n, n)
  const Tensor& info;  // i if the leading minor of order i is not positive
};
void cholesky(Cpu, const Cholesky& args);
void cholesky(Cuda, const Cholesky& args);

/// x := a⁻¹ · x for triangular a.
struct TriangularSolve {
  const Tensor& a;  // (batch, n, n)
  const Tensor& x;  // (batch, k, n)
  bool upper;
  bool unit;
};
void solve_triangular(Cpu, const TriangularSolve& args);
void solve_triangular(Cuda, const TriangularSolve& args);

/// The first c columns of q, where min(m, n) ≤ c ≤ m. Writes r over a's upper triangle.
struct Qr {
  const Tensor& a;  // (batch, n, m)
  const Tensor& q;  // (batch, c, m)
};
void qr(Cpu, const Qr& args);
void qr(Cuda, const Qr& args);

/// Overwrites a. Without vectors, u and v are undefined.
struct Svd {
  const Tensor& a;  // (batch, n, m)
  const Tensor& u;  // (batch, m or min(m, n), m)
  const Tensor& s;  // (batch, min(m, n))
  const Tensor& v;  // (batch, n or min(m, n), n); full if u is
  const Tensor& info;
  bool vectors;
};
void svd(Cpu, const Svd& args);
void svd(Cuda, const Svd& args);

/// From the lower triangle of a; overwrites a with the eigenvectors, if asked for.
struct Eigh {
  const Tensor& a;       // (batch, n, n)
  const Tensor& values;  // (batch, n)
  const Tensor& info;
  bool vectors;
};
void eigh(Cpu, const Eigh& args);
void eigh(Cuda, const Eigh& args);

}  // namespace mica::kernels
