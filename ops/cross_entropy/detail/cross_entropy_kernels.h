#pragma once

#include <cstdint>

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>

namespace mica::kernels {

// All tensors are row-major. Below, the dtype "sums" is the logits' accumulate dtype: float32, or float64 for float64.

using IndexTypes = Types<std::int64_t, std::int32_t>;

/// N rows of V logits and their targets, in the notation of README.md: z is a logit after scale and cap, u the weight
/// of its class in the row's loss, Σ u (log Σ eᶻ − z), and U = Σ u. A row whose label is ignore_index has loss and
/// gradient 0.
struct CrossEntropyTerms {
  const Tensor& logits;       // (N, V)
  const Tensor& targets;      // labels (N), int64 or int32; or probabilities (N, V) of the logits' dtype
  const Tensor& weight;       // (V), sums; undefined: all 1
  std::int64_t ignore_index;  // for labels only
  double label_smoothing;
  double logit_scale;
  double softcap;  // 0: none
};

/// Losses and the inputs of backward. Labels must be classes or ignore_index; on CUDA, other labels make their row's
/// loss and gradient NaN.
struct CrossEntropyForward {
  CrossEntropyTerms terms;
  const Tensor& logsumexp;  // out (N), sums: log Σ eᶻ; arbitrary for ignored rows
  const Tensor& mass;       // out (N), sums: U; arbitrary for ignored rows
  const Tensor& losses;     // out (N), sums
};
void cross_entropy_forward(Cpu, const CrossEntropyForward& args);
void cross_entropy_forward(Cuda, const CrossEntropyForward& args);

/// dlogits = dloss / denominator · (U softmax(z) − u) · dz/dlogits
struct CrossEntropyBackward {
  CrossEntropyTerms terms;
  const Tensor& logsumexp;
  const Tensor& mass;
  const Tensor& dloss;        // (N) or (1), sums; undefined: 1
  const Tensor& denominator;  // (1), sums; undefined: 1
  const Tensor& dlogits;      // out (N, V), the logits' dtype; may be the logits
};
void cross_entropy_backward(Cpu, const CrossEntropyBackward& args);
void cross_entropy_backward(Cuda, const CrossEntropyBackward& args);

/// Forward and backward at once: computes the losses and overwrites the logits with dlogits. Labels are as in
/// CrossEntropyForward.
struct CrossEntropyInPlace {
  CrossEntropyTerms terms;  // its logits are overwritten
  const Tensor& dloss;      // as in CrossEntropyBackward
  const Tensor& denominator;
  const Tensor& losses;  // out (N), sums
};
void cross_entropy_in_place(Cpu, const CrossEntropyInPlace& args);
void cross_entropy_in_place(Cuda, const CrossEntropyInPlace& args);

/// The divisor of a mean: the sum of the labels' weights over the rows that are not ignored.
struct CrossEntropyDenominator {
  const Tensor& targets;  // labels (N)
  const Tensor& weight;   // (V), sums; undefined: 1
  std::int64_t ignore_index;
  const Tensor& denominator;  // out (1), sums
};
void cross_entropy_denominator(Cpu, const CrossEntropyDenominator& args);
void cross_entropy_denominator(Cuda, const CrossEntropyDenominator& args);

/// loss = Σ losses / denominator
struct CrossEntropyReduce {
  const Tensor& losses;       // (N), sums
  const Tensor& denominator;  // (1), sums; undefined: 1
  const Tensor& loss;         // out (1), sums
};
void cross_entropy_reduce(Cpu, const CrossEntropyReduce& args);
void cross_entropy_reduce(Cuda, const CrossEntropyReduce& args);

/// gradient (N, V) *= factor, which is one number per row, or one for all rows. Where it is 1, nothing is read or
/// written.
struct CrossEntropyScale {
  const Tensor& gradient;
  const Tensor& factor;  // (N) or (1), sums
};
void cross_entropy_scale(Cpu, const CrossEntropyScale& args);
void cross_entropy_scale(Cuda, const CrossEntropyScale& args);

// Code shared by all devices' kernels.

/// The kind of target.
enum class CrossEntropyTarget {
  label,         // u is 0 for all classes but the label
  distribution,  // u of all classes counts: probabilities, or labels with label smoothing
};

inline CrossEntropyTarget target_of(const CrossEntropyTerms& terms) {
  return is_floating(terms.targets.dtype()) || terms.label_smoothing != 0 ? CrossEntropyTarget::distribution
                                                                          : CrossEntropyTarget::label;
}

/// u · x, or 0 if u is 0, even if x is infinite.
template <class S>
MICA_HOST_DEVICE S weighed(S u, S x) {
  return u == S{0} ? S{0} : u * x;
}

}  // namespace mica::kernels
