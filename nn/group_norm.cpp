#include <mica/autograd/grad_mode.h>
#include <mica/core/creation.h>
#include <mica/nn/group_norm.h>
#include <mica/ops/batch_norm/batch_norm.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/inplace/inplace.h>
#include <mica/ops/norm/group_norm.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

namespace mica::nn {

GroupNorm::GroupNorm(std::int64_t num_groups, std::int64_t num_channels, const GroupNormOptions& options)
    : num_groups(num_groups), num_channels(num_channels), eps(options.eps) {
  check(num_groups >= 1 && num_channels >= 1 && num_channels % num_groups == 0,
        "GroupNorm: expected num_groups that divides num_channels, got {} and {}", num_groups, num_channels);
  check(eps >= 0, "GroupNorm: expected eps >= 0, got {}", eps);
  if (options.affine) {
    weight = param("weight", ones({num_channels}));
    bias = param("bias", zeros({num_channels}));
  }
}

Tensor GroupNorm::operator()(const Tensor& x) const {
  return call(*this, x, [&](const Tensor& x) {
    check(x.dim() >= 2 && x.shape()[1] == num_channels, "GroupNorm: expected x of shape (N, {}, …), got {}",
          num_channels, x.shape());
    return group_norm(x, num_groups, weight, bias, eps);
  });
}

InstanceNorm::InstanceNorm(const char* name, int axes, std::int64_t num_features, const InstanceNormOptions& options)
    : num_features(num_features), eps(options.eps), momentum(options.momentum), name_(name), axes_(axes) {
  check(num_features >= 1, "{}: expected num_features >= 1, got {}", name, num_features);
  check(eps >= 0, "{}: expected eps >= 0, got {}", name, eps);
  if (options.affine) {
    weight = param("weight", ones({num_features}));
    bias = param("bias", zeros({num_features}));
  }
  if (options.track_running_stats) {
    running_mean = buffer("running_mean", zeros({num_features}));
    running_var = buffer("running_var", ones({num_features}));
    num_batches_tracked = buffer("num_batches_tracked", zeros({}, int64));
  }
}

Tensor InstanceNorm::operator()(const Tensor& x) const {
  return call(*this, x, [&](const Tensor& x) {
    const bool has_batch = x.dim() == axes_ + 2;
    check((has_batch || x.dim() == axes_ + 1) && x.shape()[has_batch ? 1 : 0] == num_features,
          "{}: expected x of shape (N, {}, {} spatial axes), or without N, got {}", name_, num_features, axes_,
          x.shape());
    return has_batch ? of_batch(x) : squeeze(of_batch(unsqueeze(x, 0)), 0);
  });
}

Tensor InstanceNorm::of_batch(const Tensor& x) const {
  if (running_mean.defined() && !is_training()) {
    return batch_norm(x, weight, bias,
                      {.running_mean = running_mean, .running_var = running_var, .training = false, .eps = eps});
  }
  const Tensor y = instance_norm(x, weight, bias, eps);
  if (running_mean.defined() && x.numel() > 0) {
    track(x);
  }
  return y;
}

// The running statistics move towards the mean of the samples' statistics.
void InstanceNorm::track(const Tensor& x) const {
  const autograd::NoGrad guard;
  const DType dtype = running_mean.dtype();
  const Tensor rows = reshape(x, {x.shape()[0], num_features, -1}).to(accumulate_dtype(x.dtype()));
  const auto move = [&](const Tensor& estimate, const Tensor& now) {
    mul_(estimate, 1 - momentum);
    add_(estimate, mean(now, {0}).to(dtype), momentum);
  };
  move(running_mean, mean(rows, {2}));
  move(running_var, var(rows, {2}));
  add_(num_batches_tracked, ones({}, int64, num_batches_tracked.device()));
}

}  // namespace mica::nn
