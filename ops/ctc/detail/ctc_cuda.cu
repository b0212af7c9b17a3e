// One block per sample follows the recursions through time, with threads along the states; the gradient is then
// computed for all times at once:
//
//     log_probs ──> ctc_alpha_kernel ──> alpha, losses
//     log_probs, alpha ──> ctc_beta_kernel ──> the probability of each state at each time
//                                                └──> ctc_gradient_kernel ──> its sums by label

#include <algorithm>

#include <mica/core/creation.h>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/reduce.cuh>
#include <mica/core/cuda/stream.h>
#include <mica/ops/ctc/detail/ctc_kernels.h>
#include <mica/ops/ctc/detail/ctc_sample.h>

namespace mica::kernels {

namespace {

constexpr int kThreads = 256;

template <class T>
struct CtcPointers {
  const T* log_probs;
  const std::int64_t* targets;
  const std::int64_t* input_lengths;
  const std::int64_t* target_lengths;
  std::int64_t samples;
  std::int64_t classes;
  std::int64_t most_times;
  std::int64_t most_labels;
  std::int64_t blank;

  explicit CtcPointers(const CtcInputs& in)
      : log_probs(in.log_probs.data<T>()),
        targets(in.targets.data<std::int64_t>()),
        input_lengths(in.input_lengths.data<std::int64_t>()),
        target_lengths(in.target_lengths.data<std::int64_t>()),
        samples(in.log_probs.shape()[1]),
        classes(in.log_probs.shape()[2]),
        most_times(in.log_probs.shape()[0]),
        most_labels(in.targets.shape()[1]),
        blank(in.blank) {}

  __device__ CtcSample<T> sample(std::int64_t n) const {
    return {log_probs, targets, input_lengths, target_lengths, n, samples, classes, most_labels, blank};
  }
  /// Whether the sample's lengths are in range.
  __device__ bool is_valid(const CtcSample<T>& s) const {
    return s.times >= 0 && s.times <= most_times && s.length >= 0 && s.length <= most_labels;
  }
  __device__ std::int64_t width() const { return 2 * most_labels + 1; }
  /// Where the states of sample n begin in a tensor (samples, times, width).
  __device__ std::int64_t start(std::int64_t n) const { return n * most_times * width(); }
};

template <class T>
__global__ void __launch_bounds__(kThreads) ctc_alpha_kernel(CtcPointers<T> in, double* alpha, T* losses) {
  for (std::int64_t n = blockIdx.x; n < in.samples; n += gridDim.x) {
    const CtcSample<T> sample = in.sample(n);
    const bool valid = in.is_valid(sample);
    double* row = alpha + in.start(n);
    const double* before = nullptr;
    for (std::int64_t t = 0; valid && t < sample.times; ++t) {
      for (std::int64_t state = threadIdx.x; state < sample.states(); state += kThreads) {
        row[state] = sample.forward(before, t, state);
      }
      __syncthreads();
      before = row;
      row += in.width();
    }
    if (threadIdx.x == 0) {
      losses[n] = static_cast<T>(valid ? sample.loss(before) : NAN);
    }
  }
}

// posterior[n, t, state] = the probability of the state at time t, given the target; NaN if the loss is not finite.
// `beta` has two rows of states per sample.
template <class T>
__global__ void __launch_bounds__(kThreads)
    ctc_beta_kernel(CtcPointers<T> in, const double* alpha, double* beta, double* posterior) {
  for (std::int64_t n = blockIdx.x; n < in.samples; n += gridDim.x) {
    const CtcSample<T> sample = in.sample(n);
    if (!in.is_valid(sample) || sample.times == 0) {
      continue;
    }
    const double loss = sample.loss(alpha + in.start(n) + (sample.times - 1) * in.width());
    double* const rows = beta + 2 * n * in.width();
    for (std::int64_t t = sample.times - 1; t >= 0; --t) {
      double* const row = rows + t % 2 * in.width();
      const double* const after = rows + (t + 1) % 2 * in.width();
      const std::int64_t at = in.start(n) + t * in.width();
      for (std::int64_t state = threadIdx.x; state < sample.states(); state += kThreads) {
        row[state] = sample.backward(after, t, state);
        posterior[at + state] = math::exp(alpha[at + state] + row[state] + loss);
      }
      __syncthreads();
    }
  }
}

// A block has one time of one sample. The states of a label are added by the thread of the first one, in order; those
// of the blank by one warp.
template <class T>
__global__ void __launch_bounds__(kThreads, 4)
    ctc_gradient_kernel(CtcPointers<T> in, const double* posterior, const T* dlosses, T* dlog_probs) {
  const std::int64_t t = blockIdx.x;
  for (std::int64_t n = blockIdx.y; n < in.samples; n += gridDim.y) {
    const CtcSample<T> sample = in.sample(n);
    const auto dloss = static_cast<double>(dlosses[n]);
    T* const to = dlog_probs + t * sample.stride + n * sample.classes;
    if (!in.is_valid(sample)) {
      if (threadIdx.x == 0) {
        to[in.blank] = static_cast<T>(NAN);
      }
      continue;
    }
    if (t >= sample.times || dloss == 0) {
      continue;
    }
    const double* const states = posterior + in.start(n) + t * in.width();
    if (threadIdx.x < cuda::kWarp) {
      double sum = 0;
      for (std::int64_t i = threadIdx.x; i <= sample.length; i += cuda::kWarp) {
        sum += states[2 * i];
      }
      sum = cuda::sum_lanes<cuda::kWarp>(sum);
      if (threadIdx.x == 0) {
        to[in.blank] = static_cast<T>(-dloss * sum);
      }
    }
    for (std::int64_t i = threadIdx.x; i < sample.length; i += kThreads) {
      const std::int64_t label = sample.labels[i];
      bool is_first = label >= 0 && label < in.classes && label != in.blank;
      for (std::int64_t j = 0; j < i && is_first; ++j) {
        is_first = sample.labels[j] != label;
      }
      if (is_first) {
        double sum = 0;
        for (std::int64_t j = i; j < sample.length; ++j) {
          sum += sample.labels[j] == label ? states[2 * j + 1] : 0;
        }
        to[label] = static_cast<T>(-dloss * sum);
      }
    }
  }
}

unsigned ctc_blocks(std::int64_t samples) { return static_cast<unsigned>(std::min<std::int64_t>(samples, 65535)); }

}  // namespace

void ctc_forward(Cuda, const CtcForward& args) {
  const unsigned blocks = ctc_blocks(args.losses.numel());
  if (blocks == 0) {
    return;
  }
  on_dtype(Types<float, double>{}, args.losses.dtype(), "ctc_loss", [&]<class T>() {
    ctc_alpha_kernel<T><<<blocks, kThreads, 0, cuda::current_stream()>>>(
        CtcPointers<T>(args.in), args.alpha.data<double>(), args.losses.data<T>());
    cuda::check_launch("ctc_alpha_kernel");
  });
}

void ctc_backward(Cuda, const CtcBackward& args) {
  const unsigned blocks = ctc_blocks(args.dlosses.numel());
  const std::int64_t times = args.alpha.shape()[1];
  if (blocks == 0 || times == 0) {
    return;
  }
  const cudaStream_t stream = cuda::current_stream();
  const Tensor beta = empty({args.alpha.shape()[0], 2, args.alpha.shape()[2]}, float64, args.alpha.device());
  const Tensor posterior = empty(args.alpha.shape(), float64, args.alpha.device());
  on_dtype(Types<float, double>{}, args.dlosses.dtype(), "ctc_loss", [&]<class T>() {
    const CtcPointers<T> in(args.in);
    ctc_beta_kernel<T>
        <<<blocks, kThreads, 0, stream>>>(in, args.alpha.data<double>(), beta.data<double>(), posterior.data<double>());
    cuda::check_launch("ctc_beta_kernel");
    const dim3 grid(static_cast<unsigned>(times), blocks);
    ctc_gradient_kernel<T><<<grid, kThreads, 0, stream>>>(in, posterior.data<double>(), args.dlosses.data<T>(),
                                                          args.dlog_probs.data<T>());
    cuda::check_launch("ctc_gradient_kernel");
  });
}

}  // namespace mica::kernels
