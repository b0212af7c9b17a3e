#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include <mica/nn/module.h>

namespace mica::nn {

struct BatchNormOptions {
  double eps = 1e-5;
  std::optional<double> momentum = 0.1;  ///< of the running statistics; nullopt: their average over all batches
  bool affine = true;                    ///< with a weight and a bias
  bool track_running_stats = true;       ///< keep running statistics; without them, evaluation uses the batch's
};

/// Batch normalization of x (N, C, …), see mica::batch_norm: by the batch's statistics in training, by running_mean and
/// running_var in evaluation. Parameters and buffers have PyTorch's names.
///
/// The weight is initialized to 1, the bias to 0. Throws unless num_features ≥ 1 and eps ≥ 0. Use BatchNorm1d, 2d and
/// 3d, which check the number of axes of x.
class BatchNorm : public Module {
 public:
  Tensor operator()(const Tensor& x) const;
  /// relu(y + residual) or, without a residual, relu(y), in the same pass: for ResNet's blocks.
  Tensor with_relu(const Tensor& x, const Tensor& residual = {}) const;

  std::int64_t num_features;
  double eps;
  std::optional<double> momentum;
  Tensor weight;  // (C); undefined unless affine
  Tensor bias;
  Tensor running_mean;  // (C); undefined unless track_running_stats
  Tensor running_var;
  Tensor num_batches_tracked;  // int64
  /// Gathers the statistics of all ranks: see distributed/sync_batch_norm.h.
  std::function<Tensor(const Tensor&)> gather;

 protected:
  BatchNorm(const char* name, int least_axes, int most_axes, std::int64_t num_features,
            const BatchNormOptions& options);

 private:
  Tensor normalized(const Tensor& x, bool relu, const Tensor& residual) const;

  const char* name_;
  int least_axes_;
  int most_axes_;
};

/// For x (N, C) or (N, C, L).
class BatchNorm1d : public BatchNorm {
 public:
  explicit BatchNorm1d(std::int64_t num_features, const BatchNormOptions& options = {})
      : BatchNorm("BatchNorm1d", 2, 3, num_features, options) {}
};

/// For x (N, C, H, W).
class BatchNorm2d : public BatchNorm {
 public:
  explicit BatchNorm2d(std::int64_t num_features, const BatchNormOptions& options = {})
      : BatchNorm("BatchNorm2d", 4, 4, num_features, options) {}
};

/// For x (N, C, D, H, W).
class BatchNorm3d : public BatchNorm {
 public:
  explicit BatchNorm3d(std::int64_t num_features, const BatchNormOptions& options = {})
      : BatchNorm("BatchNorm3d", 5, 5, num_features, options) {}
};

}  // namespace mica::nn
