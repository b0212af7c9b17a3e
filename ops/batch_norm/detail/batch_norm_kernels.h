#pragma once

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>

namespace mica::kernels {

/// How the channels of a dense tensor lie in memory: element (o, c, i) is number (o · channels + c) · inner + i. A
/// row-major (N, C, …) has N outer elements; channels last, it has one inner element.
struct ChannelLayout {
  std::int64_t outer;
  std::int64_t channels;
  std::int64_t inner;

  std::int64_t count() const { return outer * inner; }  // elements of a channel
};

// S is the type of sums of x's dtype. `channels` is at least 1, and each channel has elements. Parameters of a channel
// (weight, bias, running statistics) may be undefined and are of x's dtype or S; tensors like x are dense in its
// layout.

/// Returns the moments of parts of the batch, (parts, 3, channels) of S: the number of elements, their mean and
/// Σ (x − mean)². Increments num_batches_tracked if it is defined.
Tensor batch_moments(Cpu, const ChannelLayout& layout, const Tensor& x, const Tensor& num_batches_tracked);
Tensor batch_moments(Cuda, const ChannelLayout& layout, const Tensor& x, const Tensor& num_batches_tracked);

/// Combines moments of parts.
struct BatchStatistics {
  const Tensor& parts;         // (parts, 3, channels), or undefined: take the running statistics
  const Tensor& merged;        // (3, channels): the moments of all parts; if it is undefined:
  const Tensor& statistics;    // (2, channels): mean and 1 / √(variance + eps), and running statistics are updated
  const Tensor& running_mean;  // (channels)
  const Tensor& running_var;
  const Tensor& num_batches_tracked;  // if defined, the momentum is 1 / this number
  double momentum;
  double eps;
};
void batch_statistics(Cpu, const BatchStatistics& args);
void batch_statistics(Cuda, const BatchStatistics& args);

struct BatchNormForward {
  ChannelLayout layout;
  const Tensor& x;
  const Tensor& residual;  // like x, or undefined
  const Tensor& weight;
  const Tensor& bias;
  const Tensor& statistics;
  const Tensor& y;  // like x
  bool relu;
};
void batch_norm_forward(Cpu, const BatchNormForward& args);
void batch_norm_forward(Cuda, const BatchNormForward& args);

struct BatchNormBackward {
  ChannelLayout layout;
  const Tensor& dy;  // like x
  const Tensor& x;
  const Tensor& y;  // like x; the relu's result if it had a residual, else undefined
  const Tensor& weight;
  const Tensor& bias;
  const Tensor& statistics;
  bool relu;  // multiply dy by the relu's derivative
};
/// Returns sums over parts of the batch, (parts, 2, channels) of S: Σ g and Σ g · x̂, where g is dy times the relu's
/// derivative. Also writes g to `dresidual`, unless it is undefined.
Tensor batch_norm_sums(Cpu, const BatchNormBackward& args, const Tensor& dresidual);
Tensor batch_norm_sums(Cuda, const BatchNormBackward& args, const Tensor& dresidual);

/// dx = weight · rstd · (g − factor · sums[0] − x̂ · factor · sums[1]). `sums` is (2, channels) of S, or undefined: 0.
void batch_norm_dx(Cpu, const BatchNormBackward& args, const Tensor& sums, double factor, const Tensor& dx);
void batch_norm_dx(Cuda, const BatchNormBackward& args, const Tensor& sums, double factor, const Tensor& dx);

}  // namespace mica::kernels
