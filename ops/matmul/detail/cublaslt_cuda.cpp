#include <cublasLt.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <compare>
#include <cstdint>
#include <cstring>
#include <limits>
#include <locale>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <mica/core/capture.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/cuda/detail/cublas.h>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/ops/matmul/detail/agreement.h>
#include <mica/ops/matmul/detail/cublaslt_cuda.h>

namespace mica::kernels {

namespace {

// The maximum number of products in a thread's cache of algorithms; when exceeded, the cache is cleared.
constexpr std::size_t kMaxAlgorithms = 4096;
// How many candidates are requested from cuBLASLt's heuristics for a product that is to be timed.
constexpr int kNamed = 12;
// Rows must be multiples of this size: for some others, cuBLASLt's kernels round the product before adding the bias.
constexpr std::int64_t kPackBytes = 16;

// A matrix in cuBLASLt's column-major view.
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

// Everything that the choice of an algorithm depends on, so that the same product always gets the same algorithm and
// the same bits.
struct Problem {
  int device;
  DType dtype;
  cublasComputeType_t compute;
  cublasLtEpilogue_t epilogue;
  std::int64_t m, n, k;  // out is (M, N), row-major
  Columns a, b;

  auto operator<=>(const Problem&) const = default;
};

struct Algorithm {
  cublasLtMatmulAlgo_t algorithm;
  std::size_t workspace;
};

// The settings of an algorithm that the search varies; see cublasLtMatmulAlgoConfigAttributes_t.
struct Settings {
  std::uint32_t tile;
  std::uint16_t cluster;
  std::int32_t split;
  std::uint32_t option;  // "custom": selects one of several similar kernels

  auto operator<=>(const Settings&) const = default;
};

Settings settings_of(const Algorithm& algorithm) {
  Settings settings{};
  const auto read = [&](cublasLtMatmulAlgoConfigAttributes_t attribute, auto& value) {
    cuda::check(cublasLtMatmulAlgoConfigGetAttribute(&algorithm.algorithm, attribute, &value, sizeof(value), nullptr),
                "cublasLtMatmulAlgoConfigGetAttribute");
  };
  read(CUBLASLT_ALGO_CONFIG_TILE_ID, settings.tile);
  read(CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, settings.cluster);
  read(CUBLASLT_ALGO_CONFIG_SPLITK_NUM, settings.split);
  read(CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, settings.option);
  return settings;
}

// The tile sizes that the algorithm's kernels exist for, for any product.
std::vector<std::uint32_t> tiles_of(const Algorithm& algorithm) {
  std::size_t bytes = 0;
  cuda::check(cublasLtMatmulAlgoCapGetAttribute(&algorithm.algorithm, CUBLASLT_ALGO_CAP_TILE_IDS, nullptr, 0, &bytes),
              "cublasLtMatmulAlgoCapGetAttribute");
  std::vector<std::uint32_t> tiles(bytes / sizeof(std::uint32_t));
  cuda::check(cublasLtMatmulAlgoCapGetAttribute(&algorithm.algorithm, CUBLASLT_ALGO_CAP_TILE_IDS, tiles.data(),
                                                tiles.size() * sizeof(std::uint32_t), &bytes),
              "cublasLtMatmulAlgoCapGetAttribute");
  return tiles;
}

// The operands of an epilogue; null if unused.
struct EpilogueData {
  const void* bias = nullptr;
  const void* sums = nullptr;  // the argument of the activation
};

// cuBLASLt's descriptors of a product, stored here, without allocation.
class Description {
 public:
  Description(const Problem& p, const EpilogueData& data) {
    const cudaDataType_t type = cuda_type(p.dtype);
    const cudaDataType_t scale = p.dtype == DType::float64 ? CUDA_R_64F : CUDA_R_32F;
    cuda::check(cublasLtMatmulDescInit(&product_, p.compute, scale), "cublasLtMatmulDescInit");
    // cuBLASLt computes outᵀ = bᵀ · aᵀ, since it reads row-major matrices as their transposes.
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

  /// At most `most` candidates of the heuristics, best first.
  std::vector<Algorithm> find(std::size_t workspace, int most) {
    cublasLtMatmulPreferenceOpaque_t preference{};
    cuda::check(cublasLtMatmulPreferenceInit(&preference), "cublasLtMatmulPreferenceInit");
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
      cuda::check(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof(value)),
                  "cublasLtMatmulPreferenceSetAttribute");
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace);
    // With split K, partial sums must stay in float32.
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

  /// The algorithm `like` with other settings, if such a kernel exists and needs at most `workspace` bytes.
  std::optional<Algorithm> variant(const Algorithm& like, const Settings& settings, std::size_t workspace) {
    Algorithm result = like;
    const auto configure = [&](cublasLtMatmulAlgoConfigAttributes_t attribute, const auto& value) {
      return cublasLtMatmulAlgoConfigSetAttribute(&result.algorithm, attribute, &value, sizeof(value)) ==
             CUBLAS_STATUS_SUCCESS;
    };
    // With split K, partial sums must stay in float32.
    const auto reduction = static_cast<std::uint32_t>(settings.split > 1 ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE
                                                                         : CUBLASLT_REDUCTION_SCHEME_NONE);
    cublasLtMatmulHeuristicResult_t checked{};
    if (!configure(CUBLASLT_ALGO_CONFIG_TILE_ID, settings.tile) ||
        !configure(CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, settings.cluster) ||
        !configure(CUBLASLT_ALGO_CONFIG_SPLITK_NUM, settings.split) ||
        !configure(CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, settings.option) ||
        !configure(CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, reduction) ||
        cublasLtMatmulAlgoCheck(handle(), &product_, &b_, &a_, &out_, &out_, &result.algorithm, &checked) !=
            CUBLAS_STATUS_SUCCESS ||
        checked.workspaceSize > workspace) {
      return std::nullopt;
    }
    result.workspace = checked.workspaceSize;
    return result;
  }

  void run(const Algorithm& algorithm, const cuda::CublasWorkspace& workspace, DType dtype, const void* a,
           const void* b, void* out, bool accumulate = false) {
    const float one = 1;
    const double wide_one = 1;
    const double zero = 0;  // its first four bytes are a float32 zero
    const void* const alpha = dtype == DType::float64 ? static_cast<const void*>(&wide_one) : &one;
    const void* const beta = accumulate ? alpha : &zero;
    cuda::check_launch(
        cublasLtMatmul(handle(), &product_, alpha, b, &b_, a, &a_, beta, out, &out_, out, &out_, &algorithm.algorithm,
                       workspace.data, algorithm.workspace, cuda::current_stream()),
        "cublasLtMatmul");
  }

 private:
  // A cuBLAS handle is also a cuBLASLt handle.
  static cublasLtHandle_t handle() { return reinterpret_cast<cublasLtHandle_t>(cuda::cublas_handle()); }

  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    cuda::check(cublasLtMatmulDescSetAttribute(&product_, attribute, &value, sizeof(value)),
                "cublasLtMatmulDescSetAttribute");
  }

  // Describes the memory layout of op(x) (rows, columns).
  static void layout(cublasLtMatrixLayoutOpaque_t* x, cudaDataType_t type, const Columns& lies, std::int64_t rows,
                     std::int64_t columns) {
    cuda::check(cublasLtMatrixLayoutInit(x, type, lies.transposed ? columns : rows, lies.transposed ? rows : columns,
                                         lies.leading),
                "cublasLtMatrixLayoutInit");
  }

  cublasLtMatmulDescOpaque_t product_{};
  cublasLtMatrixLayoutOpaque_t a_{}, b_{}, out_{};
};

// The first candidate of cuBLASLt's heuristics, which depends on the problem only; nothing is timed.
std::optional<Algorithm> algorithm_for(const Problem& problem, Description& description, std::size_t workspace) {
  static thread_local std::map<Problem, std::optional<Algorithm>> known;
  if (const auto found = known.find(problem); found != known.end()) {
    return found->second;
  }
  if (known.size() >= kMaxAlgorithms) {
    known.clear();
  }
  const std::vector<Algorithm> first = description.find(workspace, 1);
  return known.emplace(problem, first.empty() ? std::nullopt : std::optional(first[0])).first->second;
}

// The choices of MatmulTuning::timed, shared by all threads.
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

// Searches for the fastest algorithm of one product, first among the heuristics' candidates, then among their variants.
// The heuristics rely on a model of the GPU; some variants measure up to 6 % faster.
class Search {
 public:
  Search(Description& description, const cuda::CublasWorkspace& workspace, const Tensor& a, const Tensor& b,
         const Tensor& out)
      : description_(description), workspace_(workspace), a_(a), b_(b), out_(out) {}

  /// The fastest algorithm; nullopt if there is none.
  std::optional<Algorithm> fastest() {
    for (const Algorithm& named : description_.find(workspace_.bytes, kNamed)) {
      add(named);
    }
    if (tried_.empty()) {
      return std::nullopt;
    }
    const Algorithm first = tried_.front().algorithm;
    try_variants();
    std::vector<Candidate> last{{first, 0}};
    for (std::size_t i = 0; i < std::min(tried_.size(), kFinalists); ++i) {
      last.push_back(tried_[i]);
    }
    return validated(first, under_load(last));
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Candidate {
    Algorithm algorithm;
    float ms;
  };

  static constexpr std::chrono::milliseconds kMaxTime{1500};  // for trying variants
  static constexpr std::size_t kTiles = 5;                    // tile sizes for which all settings are tried
  static constexpr std::size_t kFinalists = 8;
  static constexpr int kRounds = 5;
  static constexpr float kBurst = 4;     // ms, of one measurement under load
  static constexpr float kWarmUp = 100;  // ms

  // The time per call, over `calls` consecutive calls; infinity if the algorithm cannot run.
  float ms(const Algorithm& algorithm, int calls) {
    try {
      start_.record();
      for (int i = 0; i < calls; ++i) {
        run(algorithm);
      }
      end_.record();
    } catch (const cuda::CudaError&) {
      return std::numeric_limits<float>::infinity();
    }
    return end_.ms_since(start_) / static_cast<float>(calls);
  }

  void run(const Algorithm& algorithm) {
    description_.run(algorithm, workspace_, out_.dtype(), a_.raw_data(), b_.raw_data(), out_.raw_data());
  }

  void add(const Algorithm& algorithm) {
    ms(algorithm, 1);  // the first call may load the kernel
    tried_.push_back({algorithm, std::min(ms(algorithm, 1), ms(algorithm, 1))});
  }

  void sort_tried() {
    std::stable_sort(tried_.begin(), tried_.end(), [](const Candidate& x, const Candidate& y) { return x.ms < y.ms; });
  }

  // Tries every tile with the best settings so far, then every setting of the best tiles.
  void try_variants() {
    const Clock::time_point until = Clock::now() + kMaxTime;
    sort_tried();
    const Algorithm best = tried_.front().algorithm;
    std::set<Settings> known;
    std::set<std::int32_t> splits{1};
    for (const Candidate& candidate : tried_) {
      known.insert(settings_of(candidate.algorithm));
      splits.insert(settings_of(candidate.algorithm).split);
    }
    const auto add_variant = [&](const Settings& settings) {
      if (Clock::now() < until && known.insert(settings).second) {
        if (const auto algorithm = description_.variant(best, settings, workspace_.bytes)) {
          add(*algorithm);
        }
      }
    };
    const Settings like = settings_of(best);
    for (const std::uint32_t tile : tiles_of(best)) {
      add_variant({.tile = tile, .cluster = like.cluster, .split = like.split, .option = like.option});
      add_variant({.tile = tile, .cluster = CUBLASLT_CLUSTER_SHAPE_2x1x1, .split = like.split, .option = 1});
    }
    sort_tried();
    std::vector<std::uint32_t> tiles;
    for (const Candidate& candidate : tried_) {
      const std::uint32_t tile = settings_of(candidate.algorithm).tile;
      if (tiles.size() < kTiles && std::find(tiles.begin(), tiles.end(), tile) == tiles.end()) {
        tiles.push_back(tile);
      }
    }
    for (const std::uint32_t tile : tiles) {
      for (const std::uint16_t cluster :
           {CUBLASLT_CLUSTER_SHAPE_1x1x1, CUBLASLT_CLUSTER_SHAPE_2x1x1, CUBLASLT_CLUSTER_SHAPE_1x2x1}) {
        for (const std::int32_t split : splits) {
          for (std::uint32_t option = 0; option < 4; ++option) {
            add_variant({.tile = tile, .cluster = cluster, .split = split, .option = option});
          }
        }
      }
    }
    sort_tried();
  }

  // The fastest candidate under continuous load, where the GPU lowers its clock more for some kernels than for others.
  // Candidates run in turn, so that the clock is the same for all; of equally fast ones, the first wins.
  Algorithm under_load(const std::vector<Candidate>& candidates) {
    constexpr float kAboutAsFast = 1.005F;
    const float guess = std::max(candidates.back().ms, 1e-3F);
    const int calls = std::clamp(static_cast<int>(kBurst / guess), 1, 100);
    for (float spent = 0; spent < kWarmUp;) {
      const float burst = ms(candidates.front().algorithm, calls);
      spent += std::max(burst, 1e-3F) * static_cast<float>(calls);
    }
    std::vector<std::vector<float>> times(candidates.size());
    for (int round = 0; round < kRounds; ++round) {
      for (std::size_t i = 0; i < candidates.size(); ++i) {
        times[i].push_back(ms(candidates[i].algorithm, calls));
      }
    }
    std::vector<float> medians;
    for (std::vector<float>& of_one : times) {
      std::nth_element(of_one.begin(), of_one.begin() + kRounds / 2, of_one.end());
      medians.push_back(of_one[kRounds / 2]);
    }
    const float least = *std::min_element(medians.begin(), medians.end());
    const auto chosen =
        std::find_if(medians.begin(), medians.end(), [&](float t) { return t <= least * kAboutAsFast; });
    return candidates[static_cast<std::size_t>(chosen - medians.begin())].algorithm;
  }

  // `chosen` if its result equals that of `first` up to rounding, else `first`: cuBLASLt guarantees nothing for
  // settings that its heuristics do not propose.
  Algorithm validated(const Algorithm& first, const Algorithm& chosen) {
    run(first);
    const std::vector<float> expected = sample();
    run(chosen);
    const std::vector<float> got = sample();
    const double tolerance = size_of(out_.dtype()) == 2 ? 1e-2 : 1e-3;  // of the norm; 16 bits or TF32
    return mica::detail::agree_up_to_rounding(expected, got, tolerance) ? chosen : first;
  }

  // Some rows of the result, evenly spaced.
  std::vector<float> sample() const {
    constexpr std::int64_t kRows = 61;
    const std::int64_t step = (out_.size(0) + kRows - 1) / kRows;
    const std::int64_t rows = (out_.size(0) + step - 1) / step;
    return to_vector<float>(as_strided(out_, {rows, out_.size(1)}, {step * out_.size(1), 1}, out_.handle()->offset));
  }

  Description& description_;
  cuda::CublasWorkspace workspace_;
  const Tensor& a_;
  const Tensor& b_;
  const Tensor& out_;
  Event start_, end_;
  std::vector<Candidate> tried_;
};

// The header of the text: the GPU and the library version of the algorithms.
std::string origin() {
  int device = 0;
  cudaDeviceProp properties{};
  cuda::check(cudaGetDevice(&device), "cudaGetDevice");
  cuda::check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  return fmt::format("cuBLASLt {} on {}", cublasLtGetVersion(), properties.name);
}

constexpr const char* kNumbers = "dtype, compute, epilogue, m, n, k, a, b, workspace, algorithm";

bool multiply(cublasLtEpilogue_t epilogue, const Tensor& a, const Tensor& b, const Tensor& out,
              const EpilogueData& data, bool accumulate = false) {
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
    description.run(algorithm, workspace, problem.dtype, a.raw_data(), b.raw_data(), out.raw_data(), accumulate);
  };
  std::optional<Algorithm> algorithm;
  if (matmul_tuning() == MatmulTuning::timed) {
    algorithm = timed().find(problem);
    if (!algorithm && !mica::is_capturing()) {
      const Tensor scratch = accumulate ? empty_like(out) : out;  // the search overwrites it many times
      algorithm = Search(description, workspace, a, b, scratch).fastest();
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

// Whether to use cuBLASLt for a plain product. Without timing it is no faster than cuBLAS.
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
    epilogue = CUBLASLT_EPILOGUE_GELU;  // its tanh is accurate enough for 16 bits only
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
    return is_worth_timing(args.out) &&
           multiply(CUBLASLT_EPILOGUE_DEFAULT, args.a, args.b, args.out, data, args.accumulate);
  }
  return multiply(static_cast<cublasLtEpilogue_t>(epilogue), args.a, args.b, args.out, data);
}

bool matmul_activation_backward_in_one_kernel(const MatmulActivationBackward& args) {
  if (args.activation != Activation::gelu_tanh || !args.v.defined() || size_of(args.out.dtype()) != 2 ||
      !has_whole_packs(args.a) || !has_whole_packs(args.b) || !has_whole_packs(args.out) || !is_aligned(args.v)) {
    return false;
  }
  const EpilogueData data{.bias = nullptr, .sums = args.v.raw_data()};
  if (!multiply(CUBLASLT_EPILOGUE_DGELU, args.a, args.b, args.out, data)) {
    return false;
  }
  // cuBLASLt also has an epilogue for the sum of the rows, but with it the product takes three times as long.
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
    numbers.imbue(std::locale::classic());
    int dtype = 0, compute = 0, epilogue = 0;
    Algorithm algorithm{};
    numbers >> dtype >> compute >> epilogue >> problem.m >> problem.n >> problem.k >> problem.a.transposed >>
        problem.a.leading >> problem.b.transposed >> problem.b.leading >> algorithm.workspace;
    for (auto& number : algorithm.algorithm.data) {
      numbers >> number;
    }
    check(!numbers.fail() && (numbers >> std::ws).eof() && algorithm.workspace <= most_workspace,
          "{}: malformed line: \"{}\"", kOp, line);
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
