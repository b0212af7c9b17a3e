#include <cublasLt.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <compare>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include <mica/core/capture.h>
#include <mica/core/copy.h>
#include <mica/core/cuda/cublas.h>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/ops/matmul/cublaslt_cuda.h>

namespace mica::kernels {

namespace {

// Algorithms are kept for so many different products by each thread; one more, and it starts anew.
constexpr std::size_t kMostAlgorithms = 4096;
// The most candidates that are timed for one product.
constexpr int kCandidates = 12;
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

  /// The first `most` of what the heuristics name, the best first; fewer where there are not so many.
  std::vector<Algorithm> find(std::size_t workspace, int most) {
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
    std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<std::size_t>(most));
    int found = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle(), &product_, &b_, &a_, &out_, &out_,
                                                                 &preference, most, results.data(), &found);
    std::vector<Algorithm> algorithms;
    if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE) {
      return algorithms;
    }
    cuda::check(status, "cublasLtMatmulAlgoGetHeuristic");
    for (int i = 0; i < found && results[i].state == CUBLAS_STATUS_SUCCESS; ++i) {
      algorithms.push_back({results[i].algo, results[i].workspaceSize});
    }
    return algorithms;
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
  const std::vector<Algorithm> first = description.find(workspace, 1);
  return known.emplace(problem, first.empty() ? std::nullopt : std::optional(first[0])).first->second;
}

// The choices of MatmulTuning::timed, for all threads.
class TimedAlgorithms {
 public:
  std::optional<Algorithm> find(const Problem& problem) {
    const std::lock_guard lock(mutex_);
    const auto found = known_.find(problem);
    return found == known_.end() ? std::nullopt : std::optional(found->second);
  }
  void add(const Problem& problem, const Algorithm& algorithm) {
    const std::lock_guard lock(mutex_);
    known_.insert_or_assign(problem, algorithm);
  }
  std::map<Problem, Algorithm> all() {
    const std::lock_guard lock(mutex_);
    return known_;
  }

 private:
  std::mutex mutex_;
  std::map<Problem, Algorithm> known_;
};

TimedAlgorithms& timed() {
  static TimedAlgorithms algorithms;
  return algorithms;
}

class Event {
 public:
  Event() { cuda::check(cudaEventCreate(&event_), "cudaEventCreate"); }
  ~Event() { (void)cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record() { cuda::check(cudaEventRecord(event_, cuda::current_stream()), "cudaEventRecord"); }
  float ms_since(const Event& start) const {
    float ms = 0;
    cuda::check(cudaEventSynchronize(event_), "cudaEventSynchronize");
    cuda::check(cudaEventElapsedTime(&ms, start.event_, event_), "cudaEventElapsedTime");
    return ms;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// The fastest of the candidates, or nothing where there is none. run(algorithm) queues the product. Candidates take
// turns, so that a change of the clock meets all of them; of those that are about as fast, the first counts.
template <class Run>
std::optional<Algorithm> fastest(const std::vector<Algorithm>& candidates, const Run& run) {
  constexpr int kRounds = 5;
  constexpr float kBurst = 0.2F;  // ms that one measurement takes at least
  constexpr float kAboutAsFast = 1.01F;
  if (candidates.empty()) {
    return std::nullopt;
  }
  Event start, end;
  const auto ms = [&](const Algorithm& algorithm, int calls) {
    start.record();
    for (int i = 0; i < calls; ++i) {
      run(algorithm);
    }
    end.record();
    return end.ms_since(start) / static_cast<float>(calls);
  };
  std::vector<float> best;
  for (const Algorithm& candidate : candidates) {
    ms(candidate, 1);  // the first call may load the kernel
    best.push_back(ms(candidate, 1));
  }
  const int calls = std::clamp(static_cast<int>(kBurst / *std::min_element(best.begin(), best.end())), 1, 50);
  std::fill(best.begin(), best.end(), std::numeric_limits<float>::infinity());
  for (int round = 0; round < kRounds; ++round) {
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      best[i] = std::min(best[i], ms(candidates[i], calls));
    }
  }
  const float least = *std::min_element(best.begin(), best.end());
  const auto chosen = std::find_if(best.begin(), best.end(), [&](float t) { return t <= least * kAboutAsFast; });
  return candidates[static_cast<std::size_t>(chosen - best.begin())];
}

// What the text begins with: what the algorithms are good for.
std::string origin() {
  int device = 0;
  cudaDeviceProp properties{};
  cuda::check(cudaGetDevice(&device), "cudaGetDevice");
  cuda::check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  return fmt::format("cuBLASLt {} on {}", cublasLtGetVersion(), properties.name);
}

constexpr const char* kNumbers = "dtype, compute, epilogue, m, n, k, a, b, workspace, algorithm";

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
  const auto run = [&](const Algorithm& algorithm) {
    description.run(algorithm, workspace, problem.dtype, a.raw_data(), b.raw_data(), out.raw_data());
  };
  std::optional<Algorithm> algorithm;
  if (matmul_tuning() == MatmulTuning::timed) {
    algorithm = timed().find(problem);
    if (!algorithm && !mica::is_capturing()) {
      algorithm = fastest(description.find(workspace.bytes, kCandidates), run);
      if (algorithm) {
        timed().add(problem, *algorithm);
      }
    }
  }
  if (!algorithm) {
    algorithm = algorithm_for(problem, description, workspace.bytes);
  }
  if (algorithm) {
    run(*algorithm);
  }
  return algorithm.has_value();
}

// Whether a plain product is to go through cuBLASLt too. Without timing, cuBLAS chooses at least as well.
bool is_worth_timing(const Tensor& out) {
  const bool on_tensor_cores = size_of(out.dtype()) == 2 || compute_type(out.dtype()) == CUBLAS_COMPUTE_32F_FAST_TF32;
  return matmul_tuning() == MatmulTuning::timed && on_tensor_cores;
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
  if (epilogue == 0) {
    return is_worth_timing(args.out) && multiply(CUBLASLT_EPILOGUE_DEFAULT, args.a, args.b, args.out, data);
  }
  return multiply(static_cast<cublasLtEpilogue_t>(epilogue), args.a, args.b, args.out, data);
}

bool matmul_activation_backward_in_one_kernel(const MatmulActivationBackward& args) {
  if (args.activation != Activation::gelu_tanh || size_of(args.out.dtype()) != 2 || !has_whole_packs(args.a) ||
      !has_whole_packs(args.b) || !has_whole_packs(args.out) || !is_aligned(args.v)) {
    return false;
  }
  const EpilogueData data{.bias = nullptr, .sums = args.v.raw_data()};
  if (!multiply(CUBLASLT_EPILOGUE_DGELU, args.a, args.b, args.out, data)) {
    return false;
  }
  // cuBLASLt has an epilogue for the sum of the rows as well, which makes the product three times as long.
  if (args.dbias.defined()) {
    activation_backward(Cuda{},
                        {.activation = Activation::none, .dy = args.out, .v = {}, .dz = {}, .dbias = args.dbias});
  }
  return true;
}

std::string timed_algorithms(Cuda) {
  int device = 0;
  cuda::check(cudaGetDevice(&device), "cudaGetDevice");
  std::string text = fmt::format("{}: {}\n", origin(), kNumbers);
  for (const auto& [p, algorithm] : timed().all()) {
    if (p.device == device) {
      text += fmt::format("{} {} {} {} {} {} {} {} {} {} {} {}\n", static_cast<int>(p.dtype),
                          static_cast<int>(p.compute), static_cast<int>(p.epilogue), p.m, p.n, p.k,
                          static_cast<int>(p.a.transposed), p.a.leading, static_cast<int>(p.b.transposed), p.b.leading,
                          algorithm.workspace, fmt::join(algorithm.algorithm.data, " "));
    }
  }
  return text;
}

void set_timed_algorithms(Cuda, std::string_view text) {
  constexpr const char* kOp = "set_matmul_algorithms";
  Problem problem{};
  cuda::check(cudaGetDevice(&problem.device), "cudaGetDevice");
  std::istringstream lines{std::string(text)};
  std::string line;
  std::getline(lines, line);
  const std::string expected = fmt::format("{}: {}", origin(), kNumbers);
  check(line == expected, "{}: expected text that begins with \"{}\", got \"{}\"", kOp, expected, line);
  const std::size_t most_workspace = cuda::cublas_workspace().bytes;
  std::map<Problem, Algorithm> found;
  while (std::getline(lines, line)) {
    std::istringstream numbers(line);
    int dtype = 0, compute = 0, epilogue = 0;
    Algorithm algorithm{};
    numbers >> dtype >> compute >> epilogue >> problem.m >> problem.n >> problem.k >> problem.a.transposed >>
        problem.a.leading >> problem.b.transposed >> problem.b.leading >> algorithm.workspace;
    for (auto& number : algorithm.algorithm.data) {
      numbers >> number;
    }
    check(!numbers.fail() && (numbers >> std::ws).eof() && algorithm.workspace <= most_workspace,
          "{}: a line is damaged: \"{}\"", kOp, line);
    problem.dtype = static_cast<DType>(dtype);
    problem.compute = static_cast<cublasComputeType_t>(compute);
    problem.epilogue = static_cast<cublasLtEpilogue_t>(epilogue);
    found.insert_or_assign(problem, algorithm);
  }
  for (const auto& [p, algorithm] : found) {
    timed().add(p, algorithm);
  }
}

}  // namespace mica::kernels
