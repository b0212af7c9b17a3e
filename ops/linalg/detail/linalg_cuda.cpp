#include <algorithm>
#include <limits>
#include <type_traits>

#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/cuda/detail/cublas.h>
#include <mica/core/cuda/detail/cusolver.h>
#include <mica/core/cuda/error.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/linalg/detail/linalg_kernels.h>
#include <mica/ops/view/view.h>

namespace mica::kernels {

namespace {

// Batched kernels give one thread block or less to a matrix, so from this size on matrices are computed one by one.
constexpr std::int64_t kLargeMatrix = 256;
// The largest matrices of the batched Jacobi algorithms.
constexpr std::int64_t kJacobiMatrix = 32;

using Solved = Types<float, double>;

// The function of a library for T.
template <class T, class F32, class F64>
auto of_type(F32 single, F64 wide) {
  if constexpr (std::is_same_v<T, float>) {
    return single;
  } else {
    return wide;
  }
}

int as_int(std::int64_t n, const char* op) {
  check(n <= INT32_MAX, "{}: expected at most {} rows, columns or matrices on CUDA, got {}", op, INT32_MAX, n);
  return static_cast<int>(n);
}

// A batch of matrices, or of vectors, as LAPACK takes it.
template <class T>
struct Batch {
  Batch(const Tensor& x, const char* op)
      : data(x.data<T>()),
        step(x.numel() / x.size(0)),
        count(as_int(x.size(0), op)),
        columns(as_int(x.size(1), op)),
        rows(x.dim() > 2 ? as_int(x.size(2), op) : 1),
        device(x.device()) {}

  T* operator[](int i) const { return data + i * step; }
  bool is_batched() const { return count > 1 && rows <= kLargeMatrix; }

  /// An int64 tensor with the addresses of the matrices.
  Tensor addresses() const {
    return arange(count, int64, device) * static_cast<double>(step * sizeof(T)) +
           static_cast<double>(reinterpret_cast<std::intptr_t>(data));
  }

  T* data;
  std::int64_t step;
  int count, columns, rows;
  Device device;
};

template <class T>
T** pointers_in(const Tensor& addresses) {
  return reinterpret_cast<T**>(addresses.data<std::int64_t>());
}

template <class T>
Tensor workspace(int elements, Device device) {
  return empty({std::max(elements, 1)}, dtype_of<T>, device);
}

// Options of Jacobi's algorithms: results are sorted. One object a thread: kernels that still run may use it.
template <class T>
class SvdParameters {
 public:
  SvdParameters() {
    cuda::check(cusolverDnCreateGesvdjInfo(&info_), "cusolverDnCreateGesvdjInfo");
    cuda::check(cusolverDnXgesvdjSetSortEig(info_, 1), "cusolverDnXgesvdjSetSortEig");
    cuda::check(cusolverDnXgesvdjSetTolerance(info_, std::numeric_limits<T>::epsilon()),
                "cusolverDnXgesvdjSetTolerance");
  }
  ~SvdParameters() { (void)cusolverDnDestroyGesvdjInfo(info_); }
  SvdParameters(const SvdParameters&) = delete;
  SvdParameters& operator=(const SvdParameters&) = delete;
  gesvdjInfo_t get() const { return info_; }

 private:
  gesvdjInfo_t info_ = nullptr;
};

class EighParameters {
 public:
  EighParameters() {
    cuda::check(cusolverDnCreateSyevjInfo(&info_), "cusolverDnCreateSyevjInfo");
    cuda::check(cusolverDnXsyevjSetSortEig(info_, 1), "cusolverDnXsyevjSetSortEig");
  }
  ~EighParameters() { (void)cusolverDnDestroySyevjInfo(info_); }
  EighParameters(const EighParameters&) = delete;
  EighParameters& operator=(const EighParameters&) = delete;
  syevjInfo_t get() const { return info_; }

 private:
  syevjInfo_t info_ = nullptr;
};

// The first columns of square matrices.
void copy_columns(const Tensor& to, const Tensor& from) {
  if (!to.is_same(from)) {
    copy_into(to, slice(from, 1, 0, to.size(1)));
  }
}

template <class T>
void svd_of_small(const Svd& args) {
  const Batch<T> a(args.a, "svd");
  // The algorithm gives full matrices only.
  const auto square = [&](const Tensor& wanted, int n) {
    return args.vectors && wanted.size(1) == n ? wanted : empty({a.count, n, n}, args.a.dtype(), a.device);
  };
  const Tensor u = square(args.u, a.rows);
  const Tensor v = square(args.v, a.columns);
  const cusolverEigMode_t mode = args.vectors ? CUSOLVER_EIG_MODE_VECTOR : CUSOLVER_EIG_MODE_NOVECTOR;
  static thread_local const SvdParameters<T> parameters;
  const auto handle = cuda::cusolver_handle();
  int size = 0;
  cuda::check(of_type<T>(cusolverDnSgesvdjBatched_bufferSize, cusolverDnDgesvdjBatched_bufferSize)(
                  handle, mode, a.rows, a.columns, a.data, a.rows, args.s.data<T>(), u.data<T>(), a.rows, v.data<T>(),
                  a.columns, &size, parameters.get(), a.count),
              "cusolverDngesvdjBatched_bufferSize");
  const Tensor work = workspace<T>(size, a.device);
  cuda::check(of_type<T>(cusolverDnSgesvdjBatched, cusolverDnDgesvdjBatched)(
                  handle, mode, a.rows, a.columns, a.data, a.rows, args.s.data<T>(), u.data<T>(), a.rows, v.data<T>(),
                  a.columns, work.data<T>(), size, args.info.data<int>(), parameters.get(), a.count),
              "cusolverDngesvdjBatched");
  if (args.vectors) {
    copy_columns(args.u, u);
    copy_columns(args.v, v);
  }
}

// The QR algorithm, for matrices with at least as many rows as columns. Jacobi's, cusolverDnDgesvdj, did not converge
// or gave wrong results for some matrices of 70 rows.
template <class T>
void svd_of_each(const Svd& args) {
  const Batch<T> a(args.a, "svd");
  const signed char u_kind = !args.vectors ? 'N' : args.u.size(1) > a.columns ? 'A' : 'S';
  const signed char vt_kind = args.vectors ? 'A' : 'N';
  const Tensor unused = view(workspace<T>(1, a.device), {1, 1, 1});
  const Tensor transposed_v = args.vectors ? empty({a.count, a.columns, a.columns}, args.a.dtype(), a.device) : unused;
  const Batch<T> s(args.s, "svd");
  const Batch<T> u(args.vectors ? args.u : unused, "svd");
  const Batch<T> vt(transposed_v, "svd");
  const auto handle = cuda::cusolver_handle();
  int size = 0;
  cuda::check(of_type<T>(cusolverDnSgesvd_bufferSize, cusolverDnDgesvd_bufferSize)(handle, a.rows, a.columns, &size),
              "cusolverDngesvd_bufferSize");
  const Tensor work = workspace<T>(size, a.device);
  for (int i = 0; i < a.count; ++i) {
    const int vectors = args.vectors ? i : 0;
    cuda::check(of_type<T>(cusolverDnSgesvd, cusolverDnDgesvd)(
                    handle, u_kind, vt_kind, a.rows, a.columns, a[i], a.rows, s[i], u[vectors], a.rows, vt[vectors],
                    a.columns, work.data<T>(), size, nullptr, args.info.data<int>() + i),
                "cusolverDngesvd");
  }
  if (args.vectors) {
    copy_into(args.v, transpose(transposed_v, 1, 2));
  }
}

template <class T>
void eigh_of_small(const Eigh& args) {
  const Batch<T> a(args.a, "eigh");
  const cusolverEigMode_t mode = args.vectors ? CUSOLVER_EIG_MODE_VECTOR : CUSOLVER_EIG_MODE_NOVECTOR;
  static thread_local const EighParameters parameters;
  const auto handle = cuda::cusolver_handle();
  int size = 0;
  cuda::check(of_type<T>(cusolverDnSsyevjBatched_bufferSize, cusolverDnDsyevjBatched_bufferSize)(
                  handle, mode, CUBLAS_FILL_MODE_LOWER, a.rows, a.data, a.rows, args.values.data<T>(), &size,
                  parameters.get(), a.count),
              "cusolverDnsyevjBatched_bufferSize");
  const Tensor work = workspace<T>(size, a.device);
  cuda::check(of_type<T>(cusolverDnSsyevjBatched, cusolverDnDsyevjBatched)(
                  handle, mode, CUBLAS_FILL_MODE_LOWER, a.rows, a.data, a.rows, args.values.data<T>(), work.data<T>(),
                  size, args.info.data<int>(), parameters.get(), a.count),
              "cusolverDnsyevjBatched");
}

template <class T>
void eigh_of_each(const Eigh& args) {
  const Batch<T> a(args.a, "eigh");
  const Batch<T> values(args.values, "eigh");
  const cusolverEigMode_t mode = args.vectors ? CUSOLVER_EIG_MODE_VECTOR : CUSOLVER_EIG_MODE_NOVECTOR;
  const auto handle = cuda::cusolver_handle();
  int size = 0;
  cuda::check(of_type<T>(cusolverDnSsyevd_bufferSize, cusolverDnDsyevd_bufferSize)(
                  handle, mode, CUBLAS_FILL_MODE_LOWER, a.rows, a.data, a.rows, values.data, &size),
              "cusolverDnsyevd_bufferSize");
  const Tensor work = workspace<T>(size, a.device);
  for (int i = 0; i < a.count; ++i) {
    cuda::check(
        of_type<T>(cusolverDnSsyevd, cusolverDnDsyevd)(handle, mode, CUBLAS_FILL_MODE_LOWER, a.rows, a[i], a.rows,
                                                       values[i], work.data<T>(), size, args.info.data<int>() + i),
        "cusolverDnsyevd");
  }
}

}  // namespace

void lu_factor(Cuda, const LuFactor& args) {
  on_dtype(Solved{}, args.a.dtype(), "lu_factor", [&]<class T>() {
    const Batch<T> a(args.a, "lu_factor");
    int* const pivots = args.pivots.data<int>();
    int* const info = args.info.data<int>();
    if (a.is_batched()) {
      const Tensor addresses = a.addresses();
      cuda::check(of_type<T>(cublasSgetrfBatched, cublasDgetrfBatched)(
                      cuda::cublas_handle(), a.rows, pointers_in<T>(addresses), a.rows, pivots, info, a.count),
                  "cublasgetrfBatched");
      return;
    }
    const auto handle = cuda::cusolver_handle();
    int size = 0;
    cuda::check(of_type<T>(cusolverDnSgetrf_bufferSize, cusolverDnDgetrf_bufferSize)(handle, a.rows, a.rows, a.data,
                                                                                     a.rows, &size),
                "cusolverDngetrf_bufferSize");
    const Tensor work = workspace<T>(size, a.device);
    for (int i = 0; i < a.count; ++i) {
      cuda::check(of_type<T>(cusolverDnSgetrf, cusolverDnDgetrf)(handle, a.rows, a.rows, a[i], a.rows, work.data<T>(),
                                                                 pivots + std::int64_t{i} * a.rows, info + i),
                  "cusolverDngetrf");
    }
  });
}

void lu_solve(Cuda, const LuSolve& args) {
  on_dtype(Solved{}, args.lu.dtype(), "lu_solve", [&]<class T>() {
    const Batch<T> a(args.lu, "lu_solve");
    const Batch<T> x(args.x, "lu_solve");
    const int* const pivots = args.pivots.data<int>();
    const cublasOperation_t transposition = args.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    if (a.is_batched()) {
      const Tensor a_addresses = a.addresses();
      const Tensor x_addresses = x.addresses();
      int info = 0;  // about arguments only
      cuda::check(of_type<T>(cublasSgetrsBatched, cublasDgetrsBatched)(
                      cuda::cublas_handle(), transposition, a.rows, x.columns, pointers_in<T>(a_addresses), a.rows,
                      pivots, pointers_in<T>(x_addresses), a.rows, &info, a.count),
                  "cublasgetrsBatched");
      return;
    }
    const auto handle = cuda::cusolver_handle();
    const Tensor info = empty({1}, int32, a.device);  // about arguments only
    for (int i = 0; i < a.count; ++i) {
      cuda::check(of_type<T>(cusolverDnSgetrs, cusolverDnDgetrs)(handle, transposition, a.rows, x.columns, a[i], a.rows,
                                                                 pivots + std::int64_t{i} * a.rows, x[i], a.rows,
                                                                 info.data<int>()),
                  "cusolverDngetrs");
    }
  });
}

void cholesky(Cuda, const Cholesky& args) {
  on_dtype(Solved{}, args.a.dtype(), "cholesky", [&]<class T>() {
    const Batch<T> a(args.a, "cholesky");
    int* const info = args.info.data<int>();
    const auto handle = cuda::cusolver_handle();
    if (a.is_batched()) {
      const Tensor addresses = a.addresses();
      cuda::check(of_type<T>(cusolverDnSpotrfBatched, cusolverDnDpotrfBatched)(
                      handle, CUBLAS_FILL_MODE_LOWER, a.rows, pointers_in<T>(addresses), a.rows, info, a.count),
                  "cusolverDnpotrfBatched");
      return;
    }
    int size = 0;
    cuda::check(of_type<T>(cusolverDnSpotrf_bufferSize, cusolverDnDpotrf_bufferSize)(handle, CUBLAS_FILL_MODE_LOWER,
                                                                                     a.rows, a.data, a.rows, &size),
                "cusolverDnpotrf_bufferSize");
    const Tensor work = workspace<T>(size, a.device);
    for (int i = 0; i < a.count; ++i) {
      cuda::check(of_type<T>(cusolverDnSpotrf, cusolverDnDpotrf)(handle, CUBLAS_FILL_MODE_LOWER, a.rows, a[i], a.rows,
                                                                 work.data<T>(), size, info + i),
                  "cusolverDnpotrf");
    }
  });
}

void solve_triangular(Cuda, const TriangularSolve& args) {
  on_dtype(Solved{}, args.a.dtype(), "solve_triangular", [&]<class T>() {
    const Batch<T> a(args.a, "solve_triangular");
    const Batch<T> x(args.x, "solve_triangular");
    const cublasFillMode_t triangle = args.upper ? CUBLAS_FILL_MODE_UPPER : CUBLAS_FILL_MODE_LOWER;
    const cublasDiagType_t diagonal = args.unit ? CUBLAS_DIAG_UNIT : CUBLAS_DIAG_NON_UNIT;
    const T one = 1;
    const auto handle = cuda::cublas_handle();
    if (a.is_batched()) {
      const Tensor a_addresses = a.addresses();
      const Tensor x_addresses = x.addresses();
      cuda::check(of_type<T>(cublasStrsmBatched, cublasDtrsmBatched)(
                      handle, CUBLAS_SIDE_LEFT, triangle, CUBLAS_OP_N, diagonal, a.rows, x.columns, &one,
                      pointers_in<T>(a_addresses), a.rows, pointers_in<T>(x_addresses), a.rows, a.count),
                  "cublastrsmBatched");
      return;
    }
    for (int i = 0; i < a.count; ++i) {
      cuda::check(of_type<T>(cublasStrsm, cublasDtrsm)(handle, CUBLAS_SIDE_LEFT, triangle, CUBLAS_OP_N, diagonal,
                                                       a.rows, x.columns, &one, a[i], a.rows, x[i], a.rows),
                  "cublastrsm");
    }
  });
}

void qr(Cuda, const Qr& args) {
  on_dtype(Solved{}, args.a.dtype(), "qr", [&]<class T>() {
    const Batch<T> a(args.a, "qr");
    const Batch<T> q(args.q, "qr");
    const int k = std::min(a.rows, a.columns);
    const auto handle = cuda::cusolver_handle();
    const Tensor factors = empty({a.count, k}, args.a.dtype(), a.device);  // of the reflections
    const Tensor info = empty({1}, int32, a.device);                       // about arguments only
    int size = 0;
    cuda::check(of_type<T>(cusolverDnSgeqrf_bufferSize, cusolverDnDgeqrf_bufferSize)(handle, a.rows, a.columns, a.data,
                                                                                     a.rows, &size),
                "cusolverDngeqrf_bufferSize");
    int q_size = 0;
    cuda::check(of_type<T>(cusolverDnSorgqr_bufferSize, cusolverDnDorgqr_bufferSize)(
                    handle, a.rows, q.columns, k, q.data, a.rows, factors.data<T>(), &q_size),
                "cusolverDnorgqr_bufferSize");
    const Tensor work = workspace<T>(std::max(size, q_size), a.device);
    for (int i = 0; i < a.count; ++i) {
      cuda::check(of_type<T>(cusolverDnSgeqrf, cusolverDnDgeqrf)(handle, a.rows, a.columns, a[i], a.rows,
                                                                 factors.data<T>() + std::int64_t{i} * k,
                                                                 work.data<T>(), size, info.data<int>()),
                  "cusolverDngeqrf");
    }
    fill_data(args.q, 0);
    copy_into(slice(args.q, 1, 0, k), slice(args.a, 1, 0, k));
    for (int i = 0; i < a.count; ++i) {
      cuda::check(of_type<T>(cusolverDnSorgqr, cusolverDnDorgqr)(handle, a.rows, q.columns, k, q[i], a.rows,
                                                                 factors.data<T>() + std::int64_t{i} * k,
                                                                 work.data<T>(), q_size, info.data<int>()),
                  "cusolverDnorgqr");
    }
  });
}

void svd(Cuda cuda, const Svd& args) {
  const bool is_small = args.a.size(0) > 1 && args.a.size(1) <= kJacobiMatrix && args.a.size(2) <= kJacobiMatrix;
  if (!is_small && args.a.size(2) < args.a.size(1)) {
    const Tensor tall = contiguous_data(transpose(args.a, 1, 2));
    svd(cuda, {.a = tall, .u = args.v, .s = args.s, .v = args.u, .info = args.info, .vectors = args.vectors});
    return;
  }
  on_dtype(Solved{}, args.a.dtype(), "svd",
           [&]<class T>() { is_small ? svd_of_small<T>(args) : svd_of_each<T>(args); });
}

void eigh(Cuda, const Eigh& args) {
  const bool is_small = args.a.size(0) > 1 && args.a.size(1) <= kJacobiMatrix;
  on_dtype(Solved{}, args.a.dtype(), "eigh",
           [&]<class T>() { is_small ? eigh_of_small<T>(args) : eigh_of_each<T>(args); });
}

}  // namespace mica::kernels
