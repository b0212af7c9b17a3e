#include <Eigen/Cholesky>
#include <Eigen/LU>

#include <mica/ops/linalg/detail/batches_cpu.h>
#include <mica/ops/linalg/detail/linalg_kernels.h>

namespace mica::kernels {

void lu_factor(Cpu, const LuFactor& args) {
  const std::int64_t n = args.a.shape()[1];
  for_each_matrix(args.a, n, "lu_factor", [&]<class T>(std::int64_t i) {
    MatrixMap<T> a = matrix_of<T>(args.a, i);
    Eigen::Transpositions<Eigen::Dynamic> swaps(n);
    int count = 0;
    Eigen::internal::partial_lu_inplace(a, swaps, count);
    auto pivots = row_of<std::int32_t>(args.pivots, i);
    std::int32_t& info = args.info.data<std::int32_t>()[i];
    info = 0;
    for (std::int64_t k = n; k-- > 0;) {
      pivots[k] = static_cast<std::int32_t>(swaps.coeff(k)) + 1;
      info = a(k, k) == T{0} ? static_cast<std::int32_t>(k + 1) : info;
    }
  });
}

void lu_solve(Cpu, const LuSolve& args) {
  const std::int64_t n = args.lu.shape()[1];
  for_each_matrix(args.lu, args.x.shape()[1], "lu_solve", [&]<class T>(std::int64_t i) {
    const MatrixMap<T> lu = matrix_of<T>(args.lu, i);
    const auto pivots = row_of<std::int32_t>(args.pivots, i);
    MatrixMap<T> x = matrix_of<T>(args.x, i);
    if (args.transposed) {
      const Matrix<T> factors = lu.transpose();
      factors.template triangularView<Eigen::Lower>().solveInPlace(x);
      factors.template triangularView<Eigen::UnitUpper>().solveInPlace(x);
      for (std::int64_t k = n; k-- > 0;) {
        x.row(k).swap(x.row(pivots[k] - 1));
      }
    } else {
      for (std::int64_t k = 0; k < n; ++k) {
        x.row(k).swap(x.row(pivots[k] - 1));
      }
      lu.template triangularView<Eigen::UnitLower>().solveInPlace(x);
      lu.template triangularView<Eigen::Upper>().solveInPlace(x);
    }
  });
}

void cholesky(Cpu, const Cholesky& args) {
  const std::int64_t n = args.a.shape()[1];
  for_each_matrix(args.a, n, "cholesky", [&]<class T>(std::int64_t i) {
    MatrixMap<T> a = matrix_of<T>(args.a, i);
    std::int64_t failed = Eigen::internal::llt_inplace<T, Eigen::Lower>::blocked(a);
    // Eigen does not notice NaN.
    for (std::int64_t k = 0; failed < 0 && k < n; ++k) {
      failed = a(k, k) > T{0} ? -1 : k;
    }
    args.info.data<std::int32_t>()[i] = static_cast<std::int32_t>(failed + 1);
  });
}

void solve_triangular(Cpu, const TriangularSolve& args) {
  for_each_matrix(args.a, args.x.shape()[1], "solve_triangular", [&]<class T>(std::int64_t i) {
    const MatrixMap<T> a = matrix_of<T>(args.a, i);
    MatrixMap<T> x = matrix_of<T>(args.x, i);
    if (args.upper && args.unit) {
      a.template triangularView<Eigen::UnitUpper>().solveInPlace(x);
    } else if (args.upper) {
      a.template triangularView<Eigen::Upper>().solveInPlace(x);
    } else if (args.unit) {
      a.template triangularView<Eigen::UnitLower>().solveInPlace(x);
    } else {
      a.template triangularView<Eigen::Lower>().solveInPlace(x);
    }
  });
}

}  // namespace mica::kernels
