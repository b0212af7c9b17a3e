#include <Eigen/Eigenvalues>
#include <Eigen/QR>
#include <Eigen/SVD>

#include <algorithm>

#include <mica/ops/linalg/detail/batches_cpu.h>
#include <mica/ops/linalg/detail/linalg_kernels.h>

namespace mica::kernels {

// All compute in double, also for float: Eigen's algorithms take long to compile, and are not much slower.
using Wide = Matrix<double>;

void qr(Cpu, const Qr& args) {
  const std::int64_t k = std::min(args.a.shape()[1], args.a.shape()[2]);
  for_each_matrix(args.a, args.q.shape()[1], "qr", [&]<class T>(std::int64_t i) {
    MatrixMap<T> a = matrix_of<T>(args.a, i);
    MatrixMap<T> q = matrix_of<T>(args.q, i);
    const Eigen::HouseholderQR<Wide> factors(a.template cast<double>());
    a = factors.matrixQR().template cast<T>();
    Wide reflected = Wide::Identity(q.rows(), q.cols());
    reflected.applyOnTheLeft(factors.householderQ().setLength(k));
    q = reflected.template cast<T>();
  });
}

void svd(Cpu, const Svd& args) {
  const std::int64_t n = args.a.shape()[1];
  const std::int64_t m = args.a.shape()[2];
  const bool full = args.vectors && args.u.shape()[1] + args.v.shape()[1] > 2 * std::min(m, n);
  const unsigned wanted = !args.vectors ? 0
                          : full        ? Eigen::ComputeFullU | Eigen::ComputeFullV
                                        : Eigen::ComputeThinU | Eigen::ComputeThinV;
  for_each_matrix(args.a, 4 * std::min(m, n), "svd", [&]<class T>(std::int64_t i) {
    const Eigen::BDCSVD<Wide> svd(matrix_of<T>(args.a, i).template cast<double>(), wanted);
    args.info.data<std::int32_t>()[i] = svd.info() == Eigen::Success ? 0 : 1;
    row_of<T>(args.s, i) = svd.singularValues().array().template cast<T>();
    if (args.vectors) {
      matrix_of<T>(args.u, i) = svd.matrixU().template cast<T>();
      matrix_of<T>(args.v, i) = svd.matrixV().template cast<T>();
    }
  });
}

void eigh(Cpu, const Eigh& args) {
  const int wanted = args.vectors ? Eigen::ComputeEigenvectors : Eigen::EigenvaluesOnly;
  for_each_matrix(args.a, 4 * args.a.shape()[1], "eigh", [&]<class T>(std::int64_t i) {
    const Eigen::SelfAdjointEigenSolver<Wide> solver(matrix_of<T>(args.a, i).template cast<double>(), wanted);
    args.info.data<std::int32_t>()[i] = solver.info() == Eigen::Success ? 0 : 1;
    row_of<T>(args.values, i) = solver.eigenvalues().array().template cast<T>();
    if (args.vectors) {
      matrix_of<T>(args.a, i) = solver.eigenvectors().template cast<T>();
    }
  });
}

}  // namespace mica::kernels
