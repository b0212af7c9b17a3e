#include <cublasLt.h>

#include <compare>
#include <cstdint>
#include <map>
#include <optional>

#include <mica/core/copy.h>
#include <mica/core/cuda/cublas.h>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/ops/matmul/epilogue_cuda.h>

namespace mica::kernels {

namespace {

// Algorithms are kept for so many different products by each thread; one more, and it starts anew.
constexpr std::size_t kMostAlgorithms = 4096;
// Rows that are not whole packs of so many bytes are left to others: for some of those, cuBLASLt has kernels that round
// the product before they add the bias.
constexpr std::int64_t kPackBytes = 16;

// A matrix as cuBLASLt sees it, column by column.
struct Columns {
  bool transposed;
  std::int64_t leading;

  auto operator<=>(const Columns&) const = default;
};

Columns columns_of(const Tensor& x) {
  const MatrixLayout layout = matrix_layout(x);
  return {layout.transposed, layout.leading};
}

bool is_aligned(const Tensor& x) { return reinterpret_cast<std::uintptr_t>(x.raw_data()) % kPackBytes == 0; }

bool has_whole_packs(const Tensor& x) {
  return is_aligned(x) && matrix_layout(x).leading * static_cast<std::int64_t>(size_of(x.dtype())) % kPackBytes == 0;
}

// All that the choice of an algorithm depends on: the same product always gets the same one, and so the same bits.
struct Problem {
  int device;
  DType dtype;
  cublasComputeType_t compute;
  cublasLtEpilogue_t epilogue;
  std::int64_t m, n, k;  // out is (M, N), row by row
  Columns a, b;

  auto operator<=>(const Problem&) const = default;
};

struct Algorithm {
  cublasLtMatmulAlgo_t algorithm;
  std::size_t workspace;
};

// What an epilogue reads and writes; null where it has none of it.
struct EpilogueData {
  const void* bias = nullptr;
  const void* sums = nullptr;  // what the activation is of
};

// cuBLASLt's own structures, which need no memory beside them.
class Description {
 public:
  Description(const Problem& p, const EpilogueData& data) {
    const cudaDataType_t type = cuda_type(p.dtype);
    const cudaDataType_t scale = p.dtype == DType::float64 ? CUDA_R_64F : CUDA_R_32F;
    cuda::check(cublasLtMatmulDescInit(&product_, p.compute, scale), "cublasLtMatmulDescInit");
    // It computes outᵀ = bᵀ · aᵀ: what lies row by row is a transpose to it.
    set(CUBLASLT_MATMUL_DESC_TRANSA, p.b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, p.a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, p.epilogue);
    if (data.bias != nullptr) {
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, data.bias);
    }
    if (data.sums != nullptr) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, data.sums);
      set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.n);
    }
    layout(&b_, type, p.b, p.n, p.k);
    layout(&a_, type, p.a, p.k, p.m);
    cuda::check(cublasLtMatrixLayoutInit(&out_, type, p.n, p.m, p.n), "cublasLtMatrixLayoutInit");
  }

  std::optional<Algorithm> find(std::size_t workspace) {
    cublasLtMatmulPreferenceOpaque_t preference{};
    cuda::check(cublasLtMatmulPreferenceInit(&preference), "cublasLtMatmulPreferenceInit");
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
      cuda::check(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof(value)),
                  "cublasLtMatmulPreferenceSetAttribute");
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace);
    // Partial sums keep their 32 bits.
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, std::uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    for (const auto alignment :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
      prefer(alignment, std::uint32_t{kPackBytes});
    }
    cublasLtMatmulHeuristicResult_t best{};
    int found = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle(), &product_, &b_, &a_, &out_, &out_, &preference, 1, &best, &found);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE) {
      return std::nullopt;
    }
    cuda::check(status, "cublasLtMatmulAlgoGetHeuristic");
    if (found == 0 || best.state != CUBLAS_STATUS_SUCCESS) {
      return std::nullopt;
    }
    return Algorithm{best.algo, best.workspaceSize};
  }

  void run(const Algorithm& algorithm, const cuda::CublasWorkspace& workspace, DType dtype, const void* a,
           const void* b, void* out) {
    const float one = 1;
    const double wide_one = 1;
    const double zero = 0;  // its first half is float32's
    const void* const alpha = dtype == DType::float64 ? static_cast<const void*>(&wide_one) : &one;
    cuda::check_launch(
        cublasLtMatmul(handle(), &product_, alpha, b, &b_, a, &a_, &zero, out, &out_, out, &out_, &algorithm.algorithm,
                       workspace.data, algorithm.workspace, cuda::current_stream()),
        "cublasLtMatmul");
  }

 private:
  // A handle of cuBLAS is one of cuBLASLt as well.
  static cublasLtHandle_t handle() { return reinterpret_cast<cublasLtHandle_t>(cuda::cublas_handle()); }

  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    cuda::check(cublasLtMatmulDescSetAttribute(&product_, attribute, &value, sizeof(value)),
                "cublasLtMatmulDescSetAttribute");
  }

  // Of op(x) (rows, columns) as it lies in memory.
  static void layout(cublasLtMatrixLayoutOpaque_t* x, cudaDataType_t type, const Columns& lies, std::int64_t rows,
                     std::int64_t columns) {
    cuda::check(cublasLtMatrixLayoutInit(x, type, lies.transposed ? columns : rows, lies.transposed ? rows : columns,
                                         lies.leading),
                "cublasLtMatrixLayoutInit");
  }

  cublasLtMatmulDescOpaque_t product_{};
  cublasLtMatrixLayoutOpaque_t a_{}, b_{}, out_{};
};

// The first choice of cuBLASLt's heuristics, which look at the problem only; nothing is timed.
std::optional<Algorithm> algorithm_for(const Problem& problem, Description& description, std::size_t workspace) {
  static thread_local std::map<Problem, std::optional<Algorithm>> known;
  if (const auto found = known.find(problem); found != known.end()) {
    return found->second;
  }
  if (known.size() >= kMostAlgorithms) {
    known.clear();
  }
  return known.emplace(problem, description.find(workspace)).first->second;
}

bool multiply(cublasLtEpilogue_t epilogue, const Tensor& a, const Tensor& b, const Tensor& out,
              const EpilogueData& data) {
  const Problem problem{.device = out.device().index,
                        .dtype = out.dtype(),
                        .compute = compute_type(out.dtype()),
                        .epilogue = epilogue,
                        .m = out.size(0),
                        .n = out.size(1),
                        .k = a.size(1),
                        .a = columns_of(a),
                        .b = columns_of(b)};
  const cuda::CublasWorkspace workspace = cuda::cublas_workspace();
  Description description(problem, data);
  const std::optional<Algorithm> algorithm = algorithm_for(problem, description, workspace.bytes);
  if (algorithm) {
    description.run(*algorithm, workspace, problem.dtype, a.raw_data(), b.raw_data(), out.raw_data());
  }
  return algorithm.has_value();
}

}  // namespace

bool matmul_in_one_kernel(const MatmulArgs& args) {
  if (args.out.dim() != 2 || !has_whole_packs(args.a) || !has_whole_packs(args.b) || !has_whole_packs(args.out)) {
    return false;
  }
  unsigned epilogue = 0;
  if (args.activation == Activation::relu) {
    epilogue = CUBLASLT_EPILOGUE_RELU;
  } else if (args.activation == Activation::gelu_tanh && size_of(args.out.dtype()) == 2) {
    epilogue = CUBLASLT_EPILOGUE_GELU;  // its tanh is good for 16 bits, not for more
  } else if (args.activation != Activation::none) {
    return false;
  }
  EpilogueData data;
  Tensor bias = args.bias;
  if (bias.defined()) {
    if (!is_aligned(bias)) {
      bias = empty(bias.shape(), bias.dtype(), bias.device());
      copy_into(bias, args.bias);
    }
    data.bias = bias.raw_data();
    epilogue |= CUBLASLT_EPILOGUE_BIAS;
  }
  if (args.sums.defined()) {
    if (args.activation != Activation::gelu_tanh || !is_aligned(args.sums)) {
      return false;
    }
    data.sums = args.sums.raw_data();
    epilogue |= CUBLASLT_EPILOGUE_GELU_AUX;
  }
  return epilogue != 0 && multiply(static_cast<cublasLtEpilogue_t>(epilogue), args.a, args.b, args.out, data);
}

}  // namespace mica::kernels
