#pragma once

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>

namespace mica::kernels {

/// The inputs of both directions, row-major; see ctc.h. On the CPU, wrong labels and lengths are errors; on CUDA, they
/// make their sample's results NaN.
struct CtcInputs {
  const Tensor& log_probs;       // (T, N, C) float32 or float64
  const Tensor& targets;         // (N, S) int64
  const Tensor& input_lengths;   // (N) int64
  const Tensor& target_lengths;  // (N) int64
  std::int64_t blank;
};

/// losses[n] = −log p(targets[n]), and the logarithms of the forward variables.
struct CtcForward {
  CtcInputs in;
  const Tensor& alpha;   // (N, T, 2 S + 1) float64
  const Tensor& losses;  // (N) of log_probs' dtype
};

/// dlog_probs, given the gradient of the losses.
struct CtcBackward {
  CtcInputs in;
  const Tensor& alpha;
  const Tensor& dlosses;     // (N) of log_probs' dtype
  const Tensor& dlog_probs;  // (T, N, C), zeros
};

void ctc_forward(Cpu, const CtcForward& args);
void ctc_forward(Cuda, const CtcForward& args);
void ctc_backward(Cpu, const CtcBackward& args);
void ctc_backward(Cuda, const CtcBackward& args);

}  // namespace mica::kernels
