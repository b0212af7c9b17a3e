#include <cublas_v2.h>

#include <algorithm>

#include <mica/core/copy.h>
#include <mica/core/cuda/detail/cublas.h>
#include <mica/ops/matmul/detail/cublaslt_cuda.h>
#include <mica/ops/matmul/detail/matmul_epilogue_cuda.h>
#include <mica/ops/matmul/detail/matmul_kernels.h>

namespace mica::kernels {

namespace {

template <class T>
constexpr cudaDataType_t kCudaType = cuda_type(dtype_of<T>);

// The cost of a launch, in multiplications.
constexpr double kLaunch = 1e9;
constexpr std::int64_t kFewRuns = 4;
// The maximum number of products per call: the limit of the grid's third axis.
constexpr std::int64_t kMaxItems = 65535;

// cuBLAS is column-major and sees a row-major matrix as its transpose: it computes yᵀ = bᵀ · aᵀ.
template <class T>
void multiply(const MatmulArgs& args) {
  using S = Accumulate<T>;
  constexpr cudaDataType_t type = kCudaType<T>;
  const cublasComputeType_t compute = compute_type(dtype_of<T>);

  const std::int64_t m = args.out.size(-2);
  const std::int64_t n = args.out.size(-1);
  const std::int64_t depth = args.a.size(-1);
  const MatrixLayout a_layout = matrix_layout(args.a);
  const MatrixLayout b_layout = matrix_layout(args.b);
  const cublasOperation_t a_op = a_layout.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  const cublasOperation_t b_op = b_layout.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  const T* const a = args.a.data<T>();
  const T* const b = args.b.data<T>();
  T* const out = args.out.data<T>();

  const S one = 1;
  const S beta = args.bias.defined() || args.accumulate ? 1 : 0;
  if (args.bias.defined()) {
    copy_into(args.out, broadcast_view(args.bias, args.out.shape()));
  }

  const cublasHandle_t handle = cuda::cublas_handle();
  const MatmulBatch batch(args.a, args.b, args.out.shape());
  const std::int64_t a_step = batch.run_stride(0);
  const std::int64_t b_step = batch.run_stride(1);
  for (std::int64_t run = 0; run < batch.size(); run += batch.run()) {
    const T* const run_a = a + batch.offset(0, run);
    const T* const run_b = b + batch.offset(1, run);
    for (std::int64_t item = 0; item < batch.run(); item += kMaxItems) {
      const std::int64_t count = std::min(kMaxItems, batch.run() - item);
      const T* const from_a = run_a + item * a_step;
      const T* const from_b = run_b + item * b_step;
      T* const to = out + (run + item) * m * n;
      if (count == 1) {
        cuda::check_launch(
            cublasGemmEx_64(handle, b_op, a_op, n, m, depth, &one, from_b, type, b_layout.leading, from_a, type,
                            a_layout.leading, &beta, to, type, n, compute, CUBLAS_GEMM_DEFAULT),
            "cublasGemmEx");
      } else {
        cuda::check_launch(
            cublasGemmStridedBatchedEx_64(handle, b_op, a_op, n, m, depth, &one, from_b, type, b_layout.leading, b_step,
                                          from_a, type, a_layout.leading, a_step, &beta, to, type, n, m * n, count,
                                          compute, CUBLAS_GEMM_DEFAULT),
            "cublasGemmStridedBatchedEx");
      }
    }
  }
}

// Leading axes that cannot be merged need one call per run of equally spaced products. Instead of many short runs, the
// operands are copied, since the leading axes of a row-major copy can be merged, unless one is broadcast.
MatmulArgs with_few_runs(const MatmulArgs& args) {
  const MatmulBatch batch(args.a, args.b, args.out.shape());
  const double work = static_cast<double>(args.out.numel()) * static_cast<double>(args.a.size(-1));
  const std::int64_t runs = batch.size() / batch.run();
  if (runs <= kFewRuns || work / static_cast<double>(runs) >= kLaunch) {
    return args;
  }
  return {.a = contiguous_data(args.a), .b = contiguous_data(args.b), .bias = args.bias, .out = args.out};
}

template <class T>
void multiply_add(const MatmulAddArgs& args) {
  using S = Accumulate<T>;
  const cublasComputeType_t compute = compute_type(dtype_of<T>);
  const MatrixLayout a = matrix_layout(args.a);
  const MatrixLayout b = matrix_layout(args.b);
  const std::int64_t m = args.sum.size(0);
  const std::int64_t n = args.sum.size(1);
  const S one = 1;
  cuda::check_launch(
      cublasGemmEx_64(cuda::cublas_handle(), b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N,
                      a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N, n, m, args.a.size(1), &one, args.b.data<T>(),
                      kCudaType<T>, b.leading, args.a.data<T>(), kCudaType<T>, a.leading, &one, args.sum.data<S>(),
                      kCudaType<S>, n, compute, CUBLAS_GEMM_DEFAULT),
      "cublasGemmEx");
}

// cuBLAS's matrix-vector kernels round the product to 16 bits before they add the bias; mica rounds once.
bool rounds_before_bias(const MatmulArgs& args) {
  return args.bias.defined() && size_of(args.out.dtype()) == 2 && (args.out.size(0) == 1 || args.out.size(1) == 1);
}

}  // namespace

void matmul_add(Cuda, const MatmulAddArgs& args) {
  on_dtype(FloatTypes{}, args.a.dtype(), "matmul", [&]<class T>() { multiply_add<T>(args); });
}

void matmul_activation_backward(Cuda, const MatmulActivationBackward& args) {
  if (!matmul_with_epilogue(args) && !matmul_activation_backward_in_one_kernel(args)) {
    matmul_activation_backward_in_steps(Cuda{}, args);
  }
}

void matmul(Cuda, const MatmulArgs& args) {
  if (matmul_with_epilogue(args) || matmul_in_one_kernel(args)) {
    return;
  }
  if (args.accumulate) {
    on_dtype(FloatTypes{}, args.out.dtype(), "matmul", [&]<class T>() { multiply<T>(args); });
    return;
  }
  const Tensor& sums = args.sums.defined() ? args.sums : args.out;
  const MatmulArgs product{.a = args.a, .b = args.b, .bias = args.bias, .out = sums};
  if (args.activation == Activation::none || !matmul_in_one_kernel(product)) {
    if (rounds_before_bias(product)) {
      const Tensor wide = empty(sums.shape(), accumulate_dtype(sums.dtype()), sums.device());
      copy_into(wide, broadcast_view(args.bias, sums.shape()));
      matmul_add(Cuda{}, {.a = args.a, .b = args.b, .sum = wide});
      copy_into(sums, wide);
    } else {
      const MatmulArgs ready = with_few_runs(product);
      on_dtype(FloatTypes{}, sums.dtype(), "matmul", [&]<class T>() { multiply<T>(ready); });
    }
  }
  activate(Cuda{}, args.activation, sums, args.out);
}

bool has_fast_bfloat16(Cuda) { return true; }

}  // namespace mica::kernels
