#pragma once

#include <functional>
#include <optional>

#include <mica/core/tensor.h>

namespace mica {

struct BatchNormOptions {
  Tensor running_mean{};  ///< (C): estimates of the mean and the variance; undefined: none are kept
  Tensor running_var{};
  /// int64, one element: the number of batches that the estimates have seen, which training increments. Optional.
  Tensor num_batches_tracked{};
  bool training = true;  ///< normalize by the batch's statistics and update the estimates; else use the estimates
  /// The weight of the new batch in the estimates; nullopt: their average over all batches, which needs
  /// num_batches_tracked.
  std::optional<double> momentum = 0.1;
  double eps = 1e-5;  ///< added to the variance, under the root; at least 0
  bool relu = false;  ///< y = relu(…)
  Tensor residual{};  ///< like x, added to the result, before the relu
  /// For a batch that is spread over ranks: takes a tensor of shape (k, C) and returns those of all ranks, in the order
  /// of ranks, as (ranks, k, C). Called once in forward and once in backward.
  std::function<Tensor(const Tensor&)> gather{};
};

/// Batch normalization: each channel is shifted and scaled to mean 0 and variance 1, then weighted.
///
///   y = (x − mean) / √(var + eps) · weight + bias, then optionally + residual and relu
///
/// In training, mean and var = mean((x − mean)²) are over all axes except 1, the channels, and the estimates become
///   running_mean = (1 − momentum) · running_mean + momentum · mean
///   running_var  = (1 − momentum) · running_var  + momentum · var · n / (n − 1), for n elements of a channel.
/// Otherwise mean = running_mean and var = running_var.
///
/// @param x             (N, C, …), floating, at least two axes.
/// @param weight, bias  (C), each optional (1 and 0), like the estimates of x's dtype or, for 16-bit x, of float32.
/// @return y, of x's shape, dtype and layout: channels last if x is (core/channels_last.h), else row-major.
///         Differentiable in x, weight, bias and residual any number of times; over ranks, once.
///
/// Sums are in float32 (float64 for float64 x), in an order that depends on shape and layout only. An empty x gives an
/// empty y and keeps the estimates. Throws Error before anything is written if a shape, dtype or device does not match,
/// and in training if a channel has one element.
///
/// Ioffe, Szegedy: Batch Normalization (2015), arXiv:1502.03167. README.md beside this file describes the kernels.
Tensor batch_norm(const Tensor& x, const Tensor& weight = {}, const Tensor& bias = {},
                  const BatchNormOptions& options = {});

}  // namespace mica
