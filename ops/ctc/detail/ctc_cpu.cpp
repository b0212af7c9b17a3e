#include <array>
#include <vector>

#include <mica/core/parallel.h>
#include <mica/ops/ctc/detail/ctc_kernels.h>
#include <mica/ops/ctc/detail/ctc_sample.h>

namespace mica::kernels {

namespace {

template <class T>
CtcSample<T> sample_of(const CtcInputs& in, std::int64_t n) {
  return {in.log_probs.data<T>(),
          in.targets.data<std::int64_t>(),
          in.input_lengths.data<std::int64_t>(),
          in.target_lengths.data<std::int64_t>(),
          n,
          in.log_probs.shape()[1],
          in.log_probs.shape()[2],
          in.targets.shape()[1],
          in.blank};
}

void check_sample(const CtcInputs& in, std::int64_t n) {
  const std::int64_t times = in.input_lengths.data<std::int64_t>()[n];
  const std::int64_t length = in.target_lengths.data<std::int64_t>()[n];
  const std::int64_t most_times = in.log_probs.shape()[0], classes = in.log_probs.shape()[2];
  const std::int64_t most_labels = in.targets.shape()[1];
  check(times >= 0 && times <= most_times, "ctc_loss: expected input lengths from 0 to {}, got {} for sample {}",
        most_times, times, n);
  check(length >= 0 && length <= most_labels, "ctc_loss: expected target lengths from 0 to {}, got {} for sample {}",
        most_labels, length, n);
  for (std::int64_t i = 0; i < length; ++i) {
    const std::int64_t label = in.targets.data<std::int64_t>()[n * most_labels + i];
    check(label >= 0 && label < classes && label != in.blank,
          "ctc_loss: expected labels from 0 to {} that are not the blank {}, got {} in sample {}", classes - 1,
          in.blank, label, n);
  }
}

}  // namespace

void ctc_forward(Cpu, const CtcForward& args) {
  const std::int64_t samples = args.losses.numel();
  for (std::int64_t n = 0; n < samples; ++n) {
    check_sample(args.in, n);
  }
  const std::int64_t times = args.alpha.shape()[1], width = args.alpha.shape()[2];
  on_dtype(Types<float, double>{}, args.losses.dtype(), "ctc_loss", [&]<class T>() {
    parallel_for(samples, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t n = begin; n < end; ++n) {
        const CtcSample<T> sample = sample_of<T>(args.in, n);
        double* row = args.alpha.data<double>() + n * times * width;
        const double* before = nullptr;
        for (std::int64_t t = 0; t < sample.times; ++t) {
          for (std::int64_t state = 0; state < sample.states(); ++state) {
            row[state] = sample.forward(before, t, state);
          }
          before = row;
          row += width;
        }
        args.losses.data<T>()[n] = static_cast<T>(sample.loss(before));
      }
    });
  });
}

void ctc_backward(Cpu, const CtcBackward& args) {
  const std::int64_t times = args.alpha.shape()[1], width = args.alpha.shape()[2];
  on_dtype(Types<float, double>{}, args.dlosses.dtype(), "ctc_loss", [&]<class T>() {
    parallel_for(args.dlosses.numel(), 1, [&](std::int64_t begin, std::int64_t end) {
      std::array<std::vector<double>, 2> beta;
      beta.fill(std::vector<double>(static_cast<std::size_t>(width)));
      std::vector<double> sums(static_cast<std::size_t>(args.in.log_probs.shape()[2]));
      for (std::int64_t n = begin; n < end; ++n) {
        const CtcSample<T> sample = sample_of<T>(args.in, n);
        const auto dloss = static_cast<double>(args.dlosses.data<T>()[n]);
        if (sample.times == 0 || dloss == 0) {
          continue;
        }
        const double* const alpha = args.alpha.data<double>() + n * times * width;
        const double loss = sample.loss(alpha + (sample.times - 1) * width);
        for (std::int64_t t = sample.times - 1; t >= 0; --t) {
          const double* const after = beta[(t + 1) % 2].data();
          double* const row = beta[t % 2].data();
          std::fill(sums.begin(), sums.end(), 0);
          for (std::int64_t state = 0; state < sample.states(); ++state) {
            row[state] = sample.backward(after, t, state);
            sums[static_cast<std::size_t>(sample.label(state))] +=
                math::exp(alpha[t * width + state] + row[state] + loss);
          }
          T* const to = args.dlog_probs.data<T>() + t * sample.stride + n * sample.classes;
          for (std::int64_t c = 0; c < sample.classes; ++c) {
            to[c] = static_cast<T>(-dloss * sums[static_cast<std::size_t>(c)]);
          }
        }
      }
    });
  });
}

}  // namespace mica::kernels
