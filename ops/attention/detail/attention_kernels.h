#pragma once

#include <cstdint>

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>
#include <mica/ops/attention/detail/attention_dropout.h>

namespace mica::kernels {

/// weights = softmax(scale · scores) along the last axis. With `causal`, row i of each matrix ends after column
/// i + causal_offset, and its other weights are 0. A row without columns, or of −inf only, gets zeros. The tensors are
/// contiguous, not empty, and of the same floating dtype.
struct AttentionWeightsForward {
  const Tensor& scores;   // (…, T, S)
  const Tensor& weights;  // (…, T, S)
  double scale;
  bool causal;
  std::int64_t causal_offset;
};

/// dscores = scale · weights · (dweights − Σ weights · dweights), with the sum along the row.
struct AttentionWeightsBackward {
  const Tensor& weights;   // (…, T, S)
  const Tensor& dweights;  // (…, T, S)
  const Tensor& dscores;   // (…, T, S)
  double scale;
  bool causal;
  std::int64_t causal_offset;
};

/// y = x · scale where the weight is kept, else 0. x and y are (…, T, S), contiguous, not empty, and of the same
/// floating dtype.
struct AttentionDropout {
  const Tensor& y;
  const Tensor& x;
  WeightDropout dropout;
};

void attention_weights_forward(Cpu, const AttentionWeightsForward& args);
void attention_weights_forward(Cuda, const AttentionWeightsForward& args);
void attention_weights_backward(Cpu, const AttentionWeightsBackward& args);
void attention_weights_backward(Cuda, const AttentionWeightsBackward& args);
void attention_dropout(Cpu, const AttentionDropout& args);
void attention_dropout(Cuda, const AttentionDropout& args);

}  // namespace mica::kernels
