#pragma once

#include <cstdint>

#include <mica/nn/module.h>

namespace mica::nn {

struct GroupNormOptions {
  double eps = 1e-5;
  bool affine = true;  ///< with a weight and a bias
};

/// Group normalization of x (N, C, …): see mica::group_norm. The weight is initialized to 1, the bias to 0. Throws
/// unless num_groups divides num_channels, and eps ≥ 0.
class GroupNorm : public Module {
 public:
  GroupNorm(std::int64_t num_groups, std::int64_t num_channels, const GroupNormOptions& options = {});
  Tensor operator()(const Tensor& x) const;

  std::int64_t num_groups;
  std::int64_t num_channels;
  double eps;
  Tensor weight;  // (C); undefined unless affine
  Tensor bias;
};

struct InstanceNormOptions {
  double eps = 1e-5;
  double momentum = 0.1;  ///< of the running statistics
  bool affine = false;    ///< with a weight and a bias
  /// Keep running means and variances of the samples' statistics, by which evaluation normalizes.
  bool track_running_stats = false;
};

/// Instance normalization of x (N, C, spatial axes…), or without N: see mica::instance_norm. Use InstanceNorm1d, 2d and
/// 3d. Parameters and buffers have PyTorch's names. Throws unless num_features ≥ 1 and eps ≥ 0.
class InstanceNorm : public Module {
 public:
  Tensor operator()(const Tensor& x) const;

  std::int64_t num_features;
  double eps;
  double momentum;
  Tensor weight;  // (C); undefined unless affine
  Tensor bias;
  Tensor running_mean;  // (C); undefined unless track_running_stats
  Tensor running_var;
  Tensor num_batches_tracked;  // int64

 protected:
  InstanceNorm(const char* name, int axes, std::int64_t num_features, const InstanceNormOptions& options);

 private:
  Tensor of_batch(const Tensor& x) const;
  void track(const Tensor& x) const;

  const char* name_;
  int axes_;
};

class InstanceNorm1d : public InstanceNorm {
 public:
  explicit InstanceNorm1d(std::int64_t num_features, const InstanceNormOptions& options = {})
      : InstanceNorm("InstanceNorm1d", 1, num_features, options) {}
};
class InstanceNorm2d : public InstanceNorm {
 public:
  explicit InstanceNorm2d(std::int64_t num_features, const InstanceNormOptions& options = {})
      : InstanceNorm("InstanceNorm2d", 2, num_features, options) {}
};
class InstanceNorm3d : public InstanceNorm {
 public:
  explicit InstanceNorm3d(std::int64_t num_features, const InstanceNormOptions& options = {})
      : InstanceNorm("InstanceNorm3d", 3, num_features, options) {}
};

}  // namespace mica::nn
