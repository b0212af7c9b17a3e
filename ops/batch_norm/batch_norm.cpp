#include <array>

#include <mica/autograd/function.h>
#include <mica/autograd/grad.h>
#include <mica/autograd/grad_mode.h>
#include <mica/core/channels_last.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/batch_norm/batch_norm.h>
#include <mica/ops/batch_norm/detail/batch_norm_kernels.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/images/detail/image_grid.h>
#include <mica/ops/join/join.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

constexpr const char* kBatchNorm = "batch_norm";

using Gather = std::function<Tensor(const Tensor&)>;

kernels::ChannelLayout layout_of(const Tensor& x, bool channels_last) {
  const std::int64_t channels = x.shape()[1];
  const std::int64_t outer = x.shape()[0];
  const std::int64_t inner = x.numel() / (outer * channels);
  return channels_last ? kernels::ChannelLayout{outer * inner, channels, 1}
                       : kernels::ChannelLayout{outer, channels, inner};
}

// x in a layout; undefined if x is.
Tensor in_layout(const Tensor& x, bool channels_last) { return x.defined() ? images::in_layout(x, channels_last) : x; }

// The shape in which a tensor of shape (C) broadcasts to x.
Shape by_axis_1(const Tensor& x) {
  Shape shape = Shape::filled(x.dim(), 1);
  shape[1] = x.shape()[1];
  return shape;
}

// (N, C, …) as (C, N · …).
Tensor by_channel(const Tensor& x) {
  const std::int64_t channels = x.shape()[1];
  return reshape(transpose(reshape(x, {x.shape()[0], channels, -1}), 0, 1), {channels, -1});
}

// The inverse of by_channel().
Tensor from_channels(const Tensor& x, const Shape& shape) {
  return reshape(transpose(reshape(x, {shape[1], shape[0], -1}), 0, 1), shape);
}

// (dy, x, weight, bias, statistics, y) → (dx, dweight, dbias, dresidual). Results that are not wanted are undefined. y
// is defined if there was a relu of a sum with a residual; then y tells where its derivative is 0.
struct BatchNormGradient {
  static constexpr bool composed = true;
  bool training;
  double eps;
  bool relu;
  Gather gather;
  std::array<bool, 4> wanted;

  Tensors forward(autograd::Context& ctx, const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& bias,
                  const Tensor& statistics, const Tensor& y) const {
    ctx.set_materialize_grads(false);
    ctx.save_for_backward(dy, x, weight, bias, statistics, y);
    const bool last = images::is_last(x);
    const Tensor xs = in_layout(x, last);
    const Tensor dys = in_layout(dy, last);
    const Tensor ys = in_layout(y, last);
    const Tensor none;
    const kernels::ChannelLayout layout = layout_of(xs, last);
    const auto arguments = [&](const Tensor& gradient, const Tensor& output, bool masks) {
      return kernels::BatchNormBackward{.layout = layout,
                                        .dy = gradient,
                                        .x = xs,
                                        .y = output,
                                        .weight = weight,
                                        .bias = bias,
                                        .statistics = statistics,
                                        .relu = masks};
    };
    // With y, the sums' kernel stores the masked gradient, and the other kernel reads it instead of dy and y.
    const bool stores = y.defined() && (wanted[0] || wanted[3]);
    const Tensor masked = stores ? images::empty_images(x.shape(), x.dtype(), x.device(), last) : Tensor{};
    Tensor sums;
    if (wanted[1] || wanted[2] || stores || (training && wanted[0])) {
      const Tensor parts = on_device(
          x.device(), [&](auto device) { return kernels::batch_norm_sums(device, arguments(dys, ys, relu), masked); });
      sums = sum(parts, {0});
    }
    Tensors results(4);
    if (wanted[0]) {
      results[0] = images::empty_images(x.shape(), x.dtype(), x.device(), last);
      Tensor means = training ? sums : Tensor{};
      double factor = 1.0 / static_cast<double>(layout.count());
      if (training && gather) {
        means = means_over_ranks(sums, layout.count());
        factor = 1;
      }
      const auto args = stores ? arguments(masked, none, false) : arguments(dys, none, relu);
      on_device(x.device(), [&](auto device) { kernels::batch_norm_dx(device, args, means, factor, results[0]); });
    }
    results[1] = wanted[1] ? select(sums, 0, 1).to(weight.dtype()) : Tensor{};
    results[2] = wanted[2] ? select(sums, 0, 0).to(bias.dtype()) : Tensor{};
    results[3] = wanted[3] ? masked : Tensor{};
    return results;
  }

  // Differentiates the same formulas, written as recorded ops.
  Tensors backward(autograd::Context& ctx, const Tensors& gradients) const {
    check(!gather || !training, "{}: second derivatives over ranks are not supported", kBatchNorm);
    const auto [dy, x, weight, bias, statistics, y] = ctx.saved<6>();
    const bool again = autograd::grad_enabled();
    const autograd::EnableGrad guard;
    Tensors inputs;
    // An input under a new name, since dy may have been computed from x.
    const auto input = [&](int i, const Tensor& t) {
      if (!ctx.needs_grad(i)) {
        return t.defined() ? t.detach() : t;
      }
      inputs.push_back(again ? t * 1.0 : t.detach().requires_grad_());
      return inputs.back();
    };
    const Tensor given_dy = input(0, dy);
    const Tensor given_x = input(1, x);
    const Tensor given_weight = input(2, weight);
    const Tensors known = input_gradients(given_dy, given_x, given_weight, bias, statistics, y);
    Tensors outputs;
    Tensors weights;
    for (int i = 0; i < 4; ++i) {
      if (gradients[i].defined() && known[i].requires_grad()) {
        outputs.push_back(known[i]);
        weights.push_back(gradients[i]);
      }
    }
    Tensors results(6);
    if (outputs.empty()) {
      return results;
    }
    const Tensors found = autograd::grad(outputs, inputs, weights, {.create_graph = again, .allow_unused = true});
    std::size_t next = 0;
    for (int i = 0; i < 3; ++i) {
      results[i] = ctx.needs_grad(i) ? found[next++] : Tensor{};
    }
    return results;
  }

 private:
  Tensor means_over_ranks(const Tensor& sums, std::int64_t count) const {
    const Tensor counts = full({1, sums.size(1)}, static_cast<double>(count), sums.dtype(), sums.device());
    const Tensor all = sum(gather(cat({sums, counts})), {0});
    return slice(all, 0, 0, 2) / slice(all, 0, 2, 3);
  }

  Tensors input_gradients(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& bias,
                          const Tensor& statistics, const Tensor& y) const {
    const DType dtype = accumulate_dtype(x.dtype());
    const auto column = [&](const Tensor& t) { return reshape(t.to(dtype), {-1, 1}); };
    const auto row_mean = [](const Tensor& t) { return mean(t, {1}, true); };
    const Tensor xs = by_channel(x.to(dtype));
    const Tensor centered = xs - (training ? row_mean(xs) : column(select(statistics, 0, 0)));
    const Tensor rstd = training ? rsqrt(row_mean(centered * centered) + eps) : column(select(statistics, 0, 1));
    const Tensor x_hat = centered * rstd;
    const Tensor scale = weight.defined() ? column(weight) * rstd : rstd;
    Tensor g = by_channel(dy.to(dtype));
    if (relu) {
      const Tensor weighted = weight.defined() ? x_hat * column(weight) : x_hat;
      const Tensor result = y.defined() ? by_channel(y) : bias.defined() ? weighted + column(bias) : weighted;
      g = g * gt(result.detach(), 0).to(dtype);
    }
    const Tensor dx = scale * (training ? g - row_mean(g) - x_hat * row_mean(g * x_hat) : g);
    const DType weight_dtype = weight.defined() ? weight.dtype() : dtype;
    return {from_channels(dx, x.shape()).to(x.dtype()), sum(g * x_hat, {1}).to(weight_dtype),
            sum(g, {1}).to(bias.defined() ? bias.dtype() : dtype), from_channels(g, x.shape()).to(dy.dtype())};
  }
};

// (x, weight, bias, residual) → y
struct BatchNorm {
  static constexpr bool composed = true;
  BatchNormOptions options;  // without the residual

  Tensor forward(autograd::Context& ctx, const Tensor& x, const Tensor& weight, const Tensor& bias,
                 const Tensor& residual) const {
    const bool last = images::is_last(x);
    const Tensor xs = in_layout(x, last);
    const Tensor residuals = in_layout(residual, last);
    const Tensor y = images::empty_images(x.shape(), x.dtype(), x.device(), last);
    const kernels::ChannelLayout layout = layout_of(xs, last);
    const Tensor statistics = statistics_of(xs, layout);
    const kernels::BatchNormForward args{.layout = layout,
                                         .x = xs,
                                         .residual = residuals,
                                         .weight = weight,
                                         .bias = bias,
                                         .statistics = statistics,
                                         .y = y,
                                         .relu = options.relu};
    on_device(x.device(), [&](auto device) { kernels::batch_norm_forward(device, args); });
    ctx.save_for_backward(x, weight, bias, statistics, options.relu && residual.defined() ? y : Tensor{});
    return y;
  }
  Tensors backward(autograd::Context& ctx, const Tensor& dy) const {
    const auto [x, weight, bias, statistics, y] = ctx.saved<5>();
    const bool masks_residual = options.relu && ctx.needs_grad(3);
    const BatchNormGradient gradient{
        .training = options.training,
        .eps = options.eps,
        .relu = options.relu,
        .gather = options.gather,
        .wanted = {ctx.needs_grad(0), ctx.needs_grad(1), ctx.needs_grad(2), masks_residual}};
    Tensors results = autograd::apply(gradient, dy, x, weight, bias, statistics, y);
    if (ctx.needs_grad(3) && !masks_residual) {
      results[3] = dy;
    }
    return results;
  }

 private:
  // The mean and 1 / √(var + eps) of each channel. Updates the running statistics.
  Tensor statistics_of(const Tensor& x, const kernels::ChannelLayout& layout) const {
    const DType dtype = accumulate_dtype(x.dtype());
    const Tensor statistics = empty({2, layout.channels}, dtype, x.device());
    const auto combine = [&](const Tensor& parts, const Tensor& merged) {
      const kernels::BatchStatistics args{
          .parts = parts,
          .merged = merged,
          .statistics = statistics,
          .running_mean = options.running_mean,
          .running_var = options.running_var,
          .num_batches_tracked = options.momentum ? Tensor{} : options.num_batches_tracked,
          .momentum = options.momentum.value_or(0),
          .eps = options.eps};
      on_device(x.device(), [&](auto device) { kernels::batch_statistics(device, args); });
    };
    if (!options.training) {
      combine({}, {});
      return statistics;
    }
    Tensor parts = on_device(x.device(), [&](auto device) {
      return kernels::batch_moments(device, layout, x, options.num_batches_tracked);
    });
    if (options.gather) {
      const Tensor merged = empty({3, layout.channels}, dtype, x.device());
      combine(parts, merged);
      parts = contiguous_data(options.gather(merged));
    }
    combine(parts, {});
    for (const Tensor& written : {options.running_mean, options.running_var, options.num_batches_tracked}) {
      if (written.defined()) {
        written.bump_version(kBatchNorm);
      }
    }
    return statistics;
  }
};

void check_channels(const Tensor& x, const Tensor& given, const char* name) {
  if (!given.defined()) {
    return;
  }
  const DType sums = accumulate_dtype(x.dtype());
  check(given.shape() == Shape{x.shape()[1]}, "{}: expected {} of shape [{}], got {}", kBatchNorm, name, x.shape()[1],
        given.shape());
  check(given.dtype() == x.dtype() || given.dtype() == sums, "{}: expected {} of {}{}{}, got {}", kBatchNorm, name,
        x.dtype(), sums == x.dtype() ? "" : " or ", sums == x.dtype() ? "" : name_of(sums), given.dtype());
  check(given.device() == x.device(), "{}: expected {} on {}, got it on {}", kBatchNorm, name, x.device(),
        given.device());
}

void check_estimates(const BatchNormOptions& options, const Tensor& x) {
  check_channels(x, options.running_mean, "running_mean");
  check_channels(x, options.running_var, "running_var");
  check(options.running_mean.defined() == options.running_var.defined(),
        "{}: expected both running_mean and running_var, or none", kBatchNorm);
  check(options.training || options.running_mean.defined(), "{}: expected running statistics, as it is not training",
        kBatchNorm);
  for (const Tensor& written : {options.running_mean, options.running_var}) {
    check(!written.defined() || written.is_contiguous(), "{}: expected contiguous running statistics", kBatchNorm);
  }
  const Tensor& batches = options.num_batches_tracked;
  check(!batches.defined() || (batches.dtype() == int64 && batches.numel() == 1 && batches.device() == x.device()),
        "{}: expected num_batches_tracked of one int64 on {}", kBatchNorm, x.device());
  check(options.momentum || batches.defined() || !options.training || !options.running_mean.defined(),
        "{}: expected num_batches_tracked, as there is no momentum", kBatchNorm);
}

}  // namespace

Tensor batch_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, const BatchNormOptions& options) {
  check(x.defined() && is_floating(x.dtype()) && x.dim() >= 2, "{}: expected a floating x of at least two axes, got {}",
        kBatchNorm, x.defined() ? fmt::format("{} {}", x.dtype(), x.shape()) : "an undefined one");
  check_channels(x, weight, "weight");
  check_channels(x, bias, "bias");
  check_estimates(options, x);
  check(options.eps >= 0, "{}: expected eps of at least 0, got {}", kBatchNorm, options.eps);
  const Tensor& residual = options.residual;
  check(!residual.defined() ||
            (residual.shape() == x.shape() && residual.dtype() == x.dtype() && residual.device() == x.device()),
        "{}: expected a residual like x, {} {} on {}", kBatchNorm, x.dtype(), x.shape(), x.device());
  if (x.numel() == 0) {  // an empty result that depends on all inputs
    Tensor y = x * 1.0;
    for (const Tensor& parameter : {weight, bias}) {
      y = parameter.defined() ? y * reshape(parameter.to(x.dtype()), by_axis_1(x)) : y;
    }
    return residual.defined() ? y + residual : y;
  }
  check(!options.training || options.gather || x.numel() > x.shape()[1],
        "{}: expected more than one element per channel in training, got x of shape {}", kBatchNorm, x.shape());
  BatchNormOptions rest = options;
  rest.residual = {};
  return autograd::apply(BatchNorm{rest}, x, weight.defined() ? contiguous(weight) : weight,
                         bias.defined() ? contiguous(bias) : bias, residual);
}

}  // namespace mica
