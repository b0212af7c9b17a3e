#pragma once

#include <cstdint>
#include <optional>

#include <mica/core/tensor.h>

namespace mica {

// Linear algebra. Matrices are in the last two axes; leading axes are a batch, in which every matrix is treated alone.
// float64 and float32, on the CPU and on GPUs; 16-bit floats throw, since no library has such algorithms: cast to
// float32. Under autograd::Autocast they are cast, and everything is computed in float32. Results need not be
// row-major.
//
// All functions throw Error if a shape, dtype or device does not match. Those that say "singular", "positive definite"
// or "converge" below name the matrix of the batch in the error. On a GPU that waits for the result and cannot be
// captured in a CUDA graph.
//
// All are differentiable any number of times, unless stated otherwise.

/// x with a · x = b. Of b's shapes (…, n), which must be a's without its last axis, or (n): one vector; otherwise
/// (…, n, k): k columns. Leading axes of a (…, n, n) and of b's matrices broadcast. By LU factors with row pivoting.
/// Throws if a matrix is singular, that is, if a pivot is exactly 0.
Tensor solve(const Tensor& a, const Tensor& b);

/// The inverse of a (…, n, n), as solve() with the identity. Throws if a matrix is singular.
Tensor inv(const Tensor& a);

/// The determinants of a (…, n, n): shape (…). A singular matrix has determinant 0, and the right first derivative (its
/// cofactors); second derivatives there are not accurate.
Tensor det(const Tensor& a);

struct SlogdetResult {
  Tensor sign;       ///< 1, −1, or 0 for a singular matrix; its gradient is 0
  Tensor logabsdet;  ///< log |det|, −inf for a singular matrix
};

/// The sign and the logarithm of the absolute value of the determinants of a (…, n, n), both of shape (…).
SlogdetResult slogdet(const Tensor& a);

/// The lower triangular l with l · lᵀ = a, for symmetric positive definite a (…, n, n), of which only the lower
/// triangle is read; with `upper`, the upper triangular u with uᵀ · u = a, from the upper triangle. Throws if a matrix
/// is not positive definite. The gradient is symmetric.
Tensor cholesky(const Tensor& a, bool upper = false);

/// x with a · x = b for b (…, n, k), given cholesky()'s factor of a. Leading axes broadcast.
Tensor cholesky_solve(const Tensor& b, const Tensor& factor, bool upper = false);

struct TriangularOptions {
  bool upper = false;
  bool left = true;            ///< solve a · x = b, else x · a = b
  bool unitriangular = false;  ///< a's diagonal is not read and taken as 1
};

/// x with a · x = b for a triangular (…, n, n), whose other triangle is not read, and b (…, n, k); with left = false,
/// x · a = b for b (…, k, n). Leading axes broadcast. A zero on the diagonal gives infinities or NaN, not an error.
Tensor solve_triangular(const Tensor& a, const Tensor& b, TriangularOptions options);

struct QrResult {
  Tensor q;
  Tensor r;
};

enum class QrMode {
  reduced,  ///< for a (…, m, n) and k = min(m, n): q (…, m, k), r (…, k, n)
  complete  ///< q (…, m, m), r (…, m, n). Differentiable only if m ≤ n.
};

/// a = q · r with orthonormal columns of q, and r upper triangular. r's diagonal has the signs that LAPACK's
/// Householder reflections give. Differentiable where the first k columns of a are linearly independent.
QrResult qr(const Tensor& a, QrMode mode = QrMode::reduced);

struct SvdResult {
  Tensor u;
  Tensor s;   ///< (…, k) for k = min(m, n), descending
  Tensor vh;  ///< vᵀ
};

/// The singular value decomposition a = u · diag(s) · vh of a (…, m, n). Without full_matrices, u is (…, m, k) and vh
/// (…, k, n); with it, square, where the further columns of u or rows of vh complete an orthonormal basis. Throws for
/// NaN and infinities, and if the algorithm does not converge.
///
/// Singular vectors are not unique: any of them may have the opposite sign, in u and vh, on another device or in
/// another version, and those of equal singular values may be rotated. Gradients are right for functions that do not
/// depend on this choice. Those of u and vh are infinite or NaN if singular values are equal or, unless m = n, if one
/// is 0. Completing vectors have no gradient: an Error says so.
SvdResult svd(const Tensor& a, bool full_matrices = true);

/// The singular values alone, which takes less time. Differentiable also where some are equal.
Tensor svdvals(const Tensor& a);

struct EighResult {
  Tensor eigenvalues;   ///< (…, n), ascending
  Tensor eigenvectors;  ///< (…, n, n), orthonormal columns
};

/// Eigenvalues and eigenvectors of symmetric a (…, n, n), of which only the lower (or `upper`) triangle is read. What
/// svd() says about errors, about the choice of vectors, and about gradients for equal values, is true here too. The
/// gradient is symmetric.
EighResult eigh(const Tensor& a, bool upper = false);

/// The eigenvalues alone, which takes less time. Differentiable also where some are equal.
Tensor eigvalsh(const Tensor& a, bool upper = false);

struct PinvOptions {
  double atol = 0;                  ///< singular values up to max(atol, rtol · the largest one) count as 0
  std::optional<double> rtol = {};  ///< default: max(m, n) · ε of the dtype, or 0 if atol is given
};

/// The pseudoinverse (Moore and Penrose) of a (…, m, n): shape (…, n, m). By svd(). The gradient is right while the
/// rank stays the same.
Tensor pinv(const Tensor& a, PinvOptions options = {});

/// The x that minimizes ‖a · x − b‖ for each column of b, for a (…, m, n) of full rank min(m, n) and b (…, m, k); of
/// several (m < n), the shortest. By QR. Leading axes broadcast. Not accurate, without an error, for a of lower rank:
/// there use matmul(pinv(a), b). The squared residuals are sum(pow(matmul(a, x) - b, 2), {-2}).
Tensor lstsq(const Tensor& a, const Tensor& b);

/// aᵏ of a (…, n, n), by repeated squaring; for k < 0 a power of the inverse, for k = 0 the identity.
Tensor matrix_power(const Tensor& a, std::int64_t k);

enum class MatrixNorm { frobenius, nuclear };  ///< √Σ|aᵢⱼ|², and the sum of singular values

/// The norm of each matrix of a (…, m, n): shape (…), or (…, 1, 1) with keepdim.
Tensor matrix_norm(const Tensor& a, MatrixNorm norm = MatrixNorm::frobenius, bool keepdim = false);
/// p = 1, −1: the largest or smallest sum of absolute values of a column; ∞, −∞: of a row; 2, −2: the largest or
/// smallest singular value. Throws for any other p.
Tensor matrix_norm(const Tensor& a, double p, bool keepdim = false);

}  // namespace mica
