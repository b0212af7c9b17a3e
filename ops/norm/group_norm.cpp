#include <mica/autograd/autocast.h>
#include <mica/core/channels_last.h>
#include <mica/core/creation.h>
#include <mica/ops/batch_norm/batch_norm.h>
#include <mica/ops/norm/group_norm.h>
#include <mica/ops/norm/layer_norm.h>
#include <mica/ops/view/channels_last.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

void check_channel_parameter(const char* op, const char* name, const Tensor& parameter, const Tensor& x) {
  if (!parameter.defined()) {
    return;
  }
  check(parameter.shape() == Shape{x.shape()[1]}, "{}: expected {} of shape [{}], got {}", op, name, x.shape()[1],
        parameter.shape());
  check(parameter.dtype() == x.dtype() || parameter.dtype() == accumulate_dtype(x.dtype()),
        "{}: expected {} of {} or of its sums' dtype, got {}", op, name, x.dtype(), parameter.dtype());
  check(parameter.device() == x.device(), "{}: expected {} on {}, got it on {}", op, name, x.device(),
        parameter.device());
}

Tensor normalized_groups(const char* op, const Tensor& x, std::int64_t groups, const Tensor& weight, const Tensor& bias,
                         double eps) {
  check_channel_parameter(op, "weight", weight, x);
  check_channel_parameter(op, "bias", bias, x);
  check(eps >= 0, "{}: expected eps of at least 0, got {}", op, eps);
  const std::int64_t samples = x.shape()[0];
  const std::int64_t size = x.numel() == 0 ? 1 : x.numel() / (samples * groups);
  Tensor y = x;
  if (x.numel() > 0) {
    y = reshape(layer_norm(reshape(x, {samples, groups, size}), {size}, {}, {}, eps), x.shape());
  }
  if (weight.defined() || bias.defined()) {  // a batch norm of known statistics: y · weight + bias in one pass
    const DType dtype = accumulate_dtype(x.dtype());
    y = batch_norm(y, weight, bias,
                   {.running_mean = zeros({x.shape()[1]}, dtype, x.device()),
                    .running_var = ones({x.shape()[1]}, dtype, x.device()),
                    .training = false,
                    .eps = 0});
  }
  return is_channels_last(x) && !x.is_contiguous() ? channels_last(y) : y;
}

}  // namespace

Tensor group_norm(const Tensor& x, std::int64_t groups, const Tensor& weight, const Tensor& bias, double eps) {
  if (autograd::autocast_widens(x)) {
    return group_norm(autograd::widened(x), groups, autograd::widened(weight), autograd::widened(bias), eps);
  }
  check(x.defined() && is_floating(x.dtype()) && x.dim() >= 2,
        "group_norm: expected a floating x of at least two axes, got {}",
        x.defined() ? fmt::format("{} {}", x.dtype(), x.shape()) : "an undefined one");
  check(groups >= 1 && x.shape()[1] % groups == 0, "group_norm: expected groups that divide {} channels, got {}",
        x.shape()[1], groups);
  return normalized_groups("group_norm", x, groups, weight, bias, eps);
}

Tensor instance_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  check(x.defined() && is_floating(x.dtype()) && x.dim() >= 3 && (x.numel() == 0 || x.numel() > x.size(0) * x.size(1)),
        "instance_norm: expected a floating x (N, C, …) of more than one element per channel, got {}",
        x.defined() ? fmt::format("{} {}", x.dtype(), x.shape()) : "an undefined one");
  return normalized_groups("instance_norm", x, x.shape()[1], weight, bias, eps);
}

}  // namespace mica
