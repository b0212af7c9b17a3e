#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <mica/core/capture.h>
#include <mica/core/channels_last.h>
#include <mica/core/copy.h>
#include <mica/core/cuda/detail/cudnn_graph.h>
#include <mica/core/cuda/detail/launch_record.h>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/ops/conv/detail/conv_kernels.h>

// cuDNN sees all tensors channels last, which its tensor core kernels read without conversions. A convolution along one
// axis is one along two, the first of length 1.

namespace mica::kernels {

namespace {

using Graph = cuda::CudnnGraph;
using Node = Graph::Node;
using Plans = std::vector<std::unique_ptr<cuda::CudnnPlan>>;

constexpr std::int64_t kMostWorkspace = std::int64_t{1} << 30;  // bytes
constexpr std::size_t kCandidates = 8;                          // that ::timed measures
constexpr int kRuns = 5;                                        // of each candidate, the fastest counts

cudnnDataType_t type_of(DType dtype) {
  return dtype == float16 ? CUDNN_DATA_HALF : dtype == bfloat16 ? CUDNN_DATA_BFLOAT16 : CUDNN_DATA_FLOAT;
}

// Strides of a dense tensor that is channels last, for a shape of any rank.
Strides dense_strides(const Shape& shape) {
  Strides strides = Strides::filled(shape.size(), 1);
  std::int64_t step = shape[1];
  for (int axis = shape.size() - 1; axis >= 2; --axis) {
    strides[axis] = step;
    step *= shape[axis];
  }
  strides[0] = step;
  return strides;
}

Shape with_two_axes(const Shape& shape) {
  Shape result = shape;
  if (result.size() == 3) {
    result.insert(2, 1);
  }
  return result;
}

// What cuDNN computes, beside the addresses. Padding after the last element is what the filters reach.
struct Problem {
  Shape x, weight, y;
  Dims stride, dilation, before, after;
  ConvPart result;
  DType dtype;
  bool has_bias, has_relu, tf32;

  explicit Problem(const Convolution& args)
      : x(with_two_axes(args.geometry.x)),
        weight(with_two_axes(args.geometry.weight)),
        y(with_two_axes(args.geometry.y)),
        stride(args.geometry.stride),
        dilation(args.geometry.dilation),
        before(args.geometry.padding),
        result(args.result),
        dtype(args.out().dtype()),
        has_bias(args.bias.defined()),
        has_relu(args.activation == Activation::relu),
        tf32(float32_matmul_precision() == MatmulPrecision::tf32) {
    if (stride.size() == 1) {
      stride.insert(0, 1);
      dilation.insert(0, 1);
      before.insert(0, 0);
    }
    for (int axis = 0; axis < stride.size(); ++axis) {
      const std::int64_t reach = (y[2 + axis] - 1) * stride[axis] + (weight[2 + axis] - 1) * dilation[axis] + 1;
      after.push_back(std::max<std::int64_t>(reach - before[axis] - x[2 + axis], 0));
    }
  }

  // The key of the cache of plans.
  std::vector<std::int64_t> key(int device, bool timed) const {
    std::vector<std::int64_t> numbers{
        device, static_cast<std::int64_t>(result), static_cast<std::int64_t>(dtype), has_bias, has_relu, tf32, timed};
    for (const Dims* const dims : {&x, &weight, &y, &stride, &dilation, &before}) {
      numbers.insert(numbers.end(), dims->begin(), dims->end());
    }
    return numbers;
  }

  // Pointers are passed to a plan in the order x, weight, y, bias.
  Graph graph() const {
    Graph g;
    const cudnnDataType_t type = type_of(dtype);
    const auto tensor = [&](const Shape& shape) { return g.tensor(type, shape, dense_strides(shape)); };
    const cuda::CudnnConvolution geometry{.stride = stride, .dilation = dilation, .before = before, .after = after};
    const Node x_node = tensor(x), weight_node = tensor(weight), y_node = tensor(y);
    if (result == ConvPart::x) {
      g.convolution_input_gradient(geometry, y_node, weight_node, x_node);
    } else if (result == ConvPart::weight) {
      g.convolution_weight_gradient(geometry, x_node, y_node, weight_node);
    } else {
      const auto inner = [&] { return g.inner(CUDNN_DATA_FLOAT, y, dense_strides(y)); };
      Node sum = g.convolution(geometry, x_node, weight_node, has_bias || has_relu ? inner() : y_node);
      if (has_bias) {
        Shape channels = Shape::filled(y.size(), 1);
        channels[1] = y[1];
        sum = g.pointwise(CUDNN_POINTWISE_ADD, sum, tensor(channels), has_relu ? inner() : y_node);
      }
      if (has_relu) {
        g.pointwise(CUDNN_POINTWISE_RELU_FWD, sum, y_node);
      }
    }
    return g;
  }

  // Engines that repeat their bits and round as matmul() does.
  bool accepts(const cuda::CudnnNotes& notes) const {
    return std::none_of(notes.begin(), notes.end(), [&](cudnnBackendNumericalNote_t note) {
      switch (note) {
        case CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC:
        case CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION:
        case CUDNN_NUMERICAL_NOTE_FFT:
        case CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_6x6:
        case CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_13x13: return true;
        case CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS:
        case CUDNN_NUMERICAL_NOTE_TENSOR_CORE: return dtype == float32 && !tf32;
        default: return false;
      }
    });
  }
};

class Event {
 public:
  Event() { cuda::check(cudaEventCreate(&event_), "cudaEventCreate"); }
  ~Event() { (void)cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record() const { cuda::check(cudaEventRecord(event_, cuda::current_stream()), "cudaEventRecord"); }
  float ms_since(const Event& start) const {
    cuda::check(cudaEventSynchronize(event_), "cudaEventSynchronize");
    float ms = 0;
    cuda::check(cudaEventElapsedTime(&ms, start.event_, event_), "cudaEventElapsedTime");
    return ms;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

void run(const cuda::CudnnPlan& plan, const std::vector<void*>& data, Device device) {
  const Tensor workspace = empty({plan.workspace_bytes()}, uint8, device);
  plan.run(data, workspace.raw_data());
}

// The fastest plan. Each run writes the result.
std::size_t fastest(const Plans& plans, const std::vector<void*>& data, Device device) {
  std::size_t best = 0;
  float least = 0;
  for (std::size_t i = 0; i < plans.size(); ++i) {
    run(*plans[i], data, device);
    for (int r = 0; r < kRuns; ++r) {
      const Event start, end;
      start.record();
      run(*plans[i], data, device);
      end.record();
      const float ms = end.ms_since(start);
      if ((i == 0 && r == 0) || ms < least) {
        least = ms;
        best = i;
      }
    }
  }
  return best;
}

// The plan for a problem, or null. It is chosen at the first use, and then cached.
const cuda::CudnnPlan* plan_for(const Problem& problem, const std::vector<void*>& data, Device device) {
  static std::mutex mutex;
  static std::map<std::vector<std::int64_t>, std::unique_ptr<cuda::CudnnPlan>> plans;
  const std::scoped_lock lock(mutex);
  const bool tuned = matmul_tuning() == MatmulTuning::timed;
  const bool timed = tuned && !is_capturing();
  for (const bool of_timed : {tuned, timed}) {
    if (const auto found = plans.find(problem.key(device.index, of_timed)); found != plans.end()) {
      return found->second.get();
    }
  }
  std::unique_ptr<cuda::CudnnPlan> chosen;
  try {
    const auto accepts = [&](const cuda::CudnnNotes& notes) { return problem.accepts(notes); };
    constexpr std::array chosen_modes{CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK};
    constexpr std::array timed_modes{CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_B, CUDNN_HEUR_MODE_FALLBACK};
    std::string reason;
    Graph graph = problem.graph();
    Plans some = timed ? graph.compile(cuda::cudnn_device(), timed_modes, kCandidates, kMostWorkspace, accepts, &reason)
                       : graph.compile(cuda::cudnn_device(), chosen_modes, 1, kMostWorkspace, accepts, &reason);
    if (!some.empty()) {
      chosen = std::move(some[timed ? fastest(some, data, device) : 0]);
    }
  } catch (const cuda::CudaError&) {
    // cuDNN does not know such a graph.
  }
  return plans.emplace(problem.key(device.index, timed), std::move(chosen)).first->second.get();
}

bool is_aligned(const Tensor& x) { return reinterpret_cast<std::uintptr_t>(x.raw_data()) % 16 == 0; }

// `x` channels last, dense, and aligned as plans expect; a copy if it is not.
Tensor ready(const Tensor& x) {
  const Shape shape = with_two_axes(x.shape());
  Strides strides = x.strides();
  if (x.dim() == 3) {
    strides.insert(2, 0);
  }
  const Tensor images = as_strided(x, shape, strides, x.handle()->offset);
  if (is_channels_last(images) && is_aligned(images)) {
    return images;
  }
  const Tensor copy = empty_channels_last(shape, x.dtype(), x.device());
  copy_into(copy, images);
  return copy;
}

}  // namespace

bool cudnn_convolve(Cuda, const Convolution& args) {
  const Tensor& out = args.out();
  if (out.dtype() == float64 || args.x.numel() == 0 || args.weight.numel() == 0 || args.y.numel() == 0) {
    return false;
  }
  // The result may lie in any dense layout; cuDNN writes it channels last.
  const Shape shape = with_two_axes(out.shape());
  const bool direct = is_channels_last(out) && is_aligned(out);
  const Tensor to = direct ? out : empty_channels_last(shape, out.dtype(), out.device());
  const auto operand = [&](const Tensor& x) { return x.is_same(out) ? to : ready(x); };
  const Tensor x = operand(args.x), weight = operand(args.weight), y = operand(args.y);
  Tensor bias = args.bias;
  if (bias.defined() && !is_aligned(bias)) {
    bias = empty(bias.shape(), bias.dtype(), bias.device());
    copy_into(bias, args.bias);
  }
  std::vector<void*> data{x.raw_data(), weight.raw_data(), y.raw_data()};

  const auto attempt = [&](const Convolution& part) {
    const Problem problem(part);
    std::vector<void*> pointers = data;
    if (problem.has_bias) {
      pointers.push_back(bias.raw_data());
    }
    const cuda::CudnnPlan* const plan = plan_for(problem, pointers, out.device());
    if (plan != nullptr) {
      run(*plan, pointers, out.device());
      cuda::LaunchObserver::notify("cudnn_convolve");
    }
    return plan != nullptr;
  };
  const bool ends = args.bias.defined() || args.activation != Activation::none;
  const bool can_fuse = args.result == ConvPart::y && args.activation != Activation::leaky_relu;
  bool done = ends && can_fuse && attempt(args);
  if (!done) {
    Convolution product = args;
    product.bias = {};
    product.activation = Activation::none;
    if (!attempt(product)) {
      return false;
    }
    end_convolution(args, to);
  }
  if (!direct) {
    Strides strides = to.strides();
    if (out.dim() == 3) {
      strides.erase(2);
    }
    copy_into(out, as_strided(to, out.shape(), strides, to.handle()->offset));
  }
  return true;
}

}  // namespace mica::kernels
