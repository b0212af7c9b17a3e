#include <mica/core/creation.h>
#include <mica/nn/batch_norm.h>
#include <mica/ops/batch_norm/batch_norm.h>

namespace mica::nn {

BatchNorm::BatchNorm(const char* name, int least_axes, int most_axes, std::int64_t num_features,
                     const BatchNormOptions& options)
    : num_features(num_features),
      eps(options.eps),
      momentum(options.momentum),
      name_(name),
      least_axes_(least_axes),
      most_axes_(most_axes) {
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

Tensor BatchNorm::operator()(const Tensor& x) const {
  return call(*this, x, [&](const Tensor& x) { return normalized(x, false, {}); });
}

Tensor BatchNorm::with_relu(const Tensor& x, const Tensor& residual) const {
  return call(*this, x, residual,
              [&](const Tensor& x, const Tensor& residual) { return normalized(x, true, residual); });
}

Tensor BatchNorm::normalized(const Tensor& x, bool relu, const Tensor& residual) const {
  check(x.dim() >= least_axes_ && x.dim() <= most_axes_ && x.shape()[1] == num_features,
        "{}: expected x of shape (N, {}{}), got {}", name_, num_features,
        most_axes_ == 3   ? ") or (N, C, L"
        : most_axes_ == 4 ? ", H, W"
                          : ", D, H, W",
        x.shape());
  return batch_norm(x, weight, bias,
                    {.running_mean = running_mean,
                     .running_var = running_var,
                     .num_batches_tracked = num_batches_tracked,
                     .training = is_training() || !running_mean.defined(),
                     .momentum = momentum,
                     .eps = eps,
                     .relu = relu,
                     .residual = residual,
                     .gather = is_training() ? gather : nullptr});
}

}  // namespace mica::nn
