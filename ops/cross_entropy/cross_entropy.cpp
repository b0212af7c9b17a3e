#include <mica/autograd/autocast.h>
#include <mica/autograd/detail/inplace.h>
#include <mica/autograd/function.h>
#include <mica/core/creation.h>
#include <mica/ops/cross_entropy/cross_entropy.h>
#include <mica/ops/cross_entropy/detail/cross_entropy_steps.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/elementwise/where.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/softmax/detail/softmax_gradient.h>
#include <mica/ops/softmax/softmax.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

using detail::packed;
using detail::packed_targets;

// z, h = dz/dx and dh/dx (see README.md), by recorded ops. An ignored row may contain anything, even NaN, and is
// replaced by zeros. `curve`, which is dh/dx, is undefined if it is 0.
struct Transformed {
  Tensor z;
  Tensor h;
  Tensor curve;

  Transformed(const Tensor& logits, const Tensor& ignored, const CrossEntropyOptions& options) {
    const double s = options.logit_scale;
    const double cap = options.softcap;
    const Tensor wide = logits.to(accumulate_dtype(logits.dtype()));
    const Tensor x = ignored.defined() ? where(ignored, 0, wide) : wide;
    if (cap == 0) {
      z = s == 1 ? x : x * s;
      h = full({}, s, x.dtype(), x.device());
      return;
    }
    const Tensor part = tanh(x * (s / cap));
    z = part * cap;
    h = s * (1 - part * part);
    curve = part * h * (-2 * s / cap);
  }
};

// A mask (…, 1) that is true for ignored rows; undefined if no row can be ignored.
Tensor ignored_rows(const Tensor& targets, const CrossEntropyOptions& options) {
  return is_floating(targets.dtype()) ? Tensor{}
                                      : unsqueeze(eq(targets, static_cast<double>(options.ignore_index)), -1);
}

// u (…, V), see README.md, by recorded ops.
Tensor class_terms(const Tensor& targets, const Tensor& ignored, const Tensor& weight, std::int64_t classes,
                   DType dtype, const CrossEntropyOptions& options) {
  const double sharp = 1 - options.label_smoothing;
  const double even = options.label_smoothing / static_cast<double>(classes);
  const auto weighted = [&](const Tensor& t) { return weight.defined() ? t * weight : t; };
  if (!ignored.defined()) {
    return weighted(targets.to(dtype) * sharp + even);
  }
  const Tensor numbers = arange(0, static_cast<double>(classes), 1, targets.dtype(), targets.device());
  const Tensor hit = eq(unsqueeze(targets, -1), numbers);
  return masked_fill(weighted(where(hit, sharp + even, full({1}, even, dtype, targets.device()))), ignored, 0);
}

// What each row's gradient is multiplied by: dloss / denominator, (…, 1) or one number.
Tensor row_scale(const Tensor& dloss, const Tensor& denominator, DType dtype, const CrossEntropyOptions& options) {
  const Tensor wide = dloss.to(dtype);
  const Tensor scale = options.reduction == Reduction::none ? unsqueeze(wide, -1) : wide;
  return denominator.defined() ? scale / reshape(denominator, {}) : scale;
}

// Computes dlogits by the fused kernel. logsumexp, mass and denominator are functions of the inputs, not inputs.
// README.md derives the backward.
struct CrossEntropyGradient {
  static constexpr bool composed = true;
  CrossEntropyOptions options;

  Tensor forward(autograd::Context& ctx, const Tensor& dloss, const Tensor& logits, const Tensor& targets,
                 const Tensor& weight, const Tensor& logsumexp, const Tensor& mass, const Tensor& denominator) const {
    ctx.save_for_backward(dloss, logits, targets, weight, denominator);
    const Tensor dlogits = empty(logits.shape(), logits.dtype(), logits.device());
    if (logits.numel() == 0) {
      return dlogits;
    }
    const std::int64_t rows = logsumexp.numel();
    const std::int64_t classes = logits.size(-1);
    const Tensor matrix = packed(logits, {rows, classes});
    const Tensor row_targets = packed_targets("cross_entropy", targets, rows, classes, options.ignore_index);
    const Tensor scale = packed(dloss, {dloss.numel()});
    const Tensor out = packed(dlogits, {rows, classes});
    const kernels::CrossEntropyBackward args{.terms = detail::terms_of(options, matrix, row_targets, weight),
                                             .logsumexp = logsumexp,
                                             .mass = mass,
                                             .dloss = scale,
                                             .denominator = denominator,
                                             .dlogits = out};
    on_device(logits.device(), [&](auto device) { kernels::cross_entropy_backward(device, args); });
    return dlogits;
  }

  // `a` is the gradient with respect to dlogits, as in README.md.
  Tensors backward(autograd::Context& ctx, const Tensor& a) const {
    const auto [dloss, logits, targets, weight, denominator] = ctx.saved<5>();
    const DType wide = accumulate_dtype(logits.dtype());
    const Tensor ignored = ignored_rows(targets, options);
    const Transformed at(logits, ignored, options);
    const Tensor p = softmax(at.z, -1);
    const Tensor u = class_terms(targets, ignored, weight, logits.size(-1), wide, options);
    const Tensor mass = sum(u, {-1}, true);
    const Tensor as = a.to(wide);
    const Tensor phi = as * at.h;
    const Tensor mean_phi = sum(phi * p, {-1}, true);
    Tensors gradients(7);
    if (ctx.needs_grad(0)) {
      Tensor by_row = squeeze(mass * mean_phi - sum(phi * u, {-1}, true), -1);
      if (options.reduction != Reduction::none) {
        by_row = sum(by_row);
      }
      gradients[0] = (denominator.defined() ? by_row / reshape(denominator, {}) : by_row).to(dloss.dtype());
    }
    const Tensor g = row_scale(dloss, denominator, wide, options);
    if (ctx.needs_grad(1)) {
      Tensor dx = mass * detail::softmax_gradient(phi, p, p.dim() - 1) * at.h;
      if (at.curve.defined()) {
        dx = dx + as * (mass * p - u) * at.curve;
      }
      gradients[1] = (g * dx).to(logits.dtype());
    }
    if (ctx.needs_grad(2)) {
      const Tensor du = g * (mean_phi - phi) * (1 - options.label_smoothing);
      gradients[2] = (weight.defined() ? du * weight : du).to(targets.dtype());
    }
    return gradients;
  }
};

struct CrossEntropy {
  static constexpr bool composed = true;
  CrossEntropyOptions options;

  Tensor forward(autograd::Context& ctx, const Tensor& logits, const Tensor& targets, const Tensor& weight) const {
    const Shape rows = logits.shape().slice(0, logits.dim() - 1);
    const std::int64_t count = numel_of(rows);
    const DType wide = accumulate_dtype(logits.dtype());
    const Tensor logsumexp = empty({count}, wide, logits.device());
    const Tensor mass = empty_like(logsumexp);
    const Tensor losses = empty_like(logsumexp);
    const Tensor matrix = packed(logits, {count, logits.size(-1)});
    const Tensor row_targets = packed_targets("cross_entropy", targets, count, logits.size(-1), options.ignore_index);
    if (count > 0) {
      const kernels::CrossEntropyForward args{.terms = detail::terms_of(options, matrix, row_targets, weight),
                                              .logsumexp = logsumexp,
                                              .mass = mass,
                                              .losses = losses};
      on_device(logits.device(), [&](auto device) { kernels::cross_entropy_forward(device, args); });
    }
    const Tensor denominator = detail::mean_denominator(options, row_targets, weight, logits.dtype());
    ctx.save_for_backward(logits, targets, weight, logsumexp, mass, denominator);
    return detail::reduced(options, losses, denominator, rows);
  }

  Tensors backward(autograd::Context& ctx, const Tensor& dloss) const {
    const auto [logits, targets, weight, logsumexp, mass, denominator] = ctx.saved<6>();
    Tensors gradients(3);
    if (ctx.needs_grad(0)) {
      gradients[0] =
          autograd::apply(CrossEntropyGradient{options}, dloss, logits, targets, weight, logsumexp, mass, denominator);
    }
    if (ctx.needs_grad(1)) {
      gradients[1] = of_probabilities(dloss, logits, targets, weight, denominator);
    }
    return gradients;
  }

 private:
  Tensor of_probabilities(const Tensor& dloss, const Tensor& logits, const Tensor& targets, const Tensor& weight,
                          const Tensor& denominator) const {
    const DType wide = accumulate_dtype(logits.dtype());
    const Tensor du = row_scale(dloss, denominator, wide, options) *
                      log_softmax(Transformed(logits, {}, options).z, -1) * (options.label_smoothing - 1);
    return (weight.defined() ? du * weight : du).to(targets.dtype());
  }
};

// How errors of in_place end, for callers that have not chosen it themselves.
constexpr const char* kTurnOff =
    "turn it off, or instead of a model's loss() call cross_entropy(model(tokens), targets)";

// The backward of CrossEntropyInPlace. The gradient is already in the memory of the logits; multiplies it by dloss.
struct InPlaceGradient {
  static constexpr bool composed = true;

  Tensor forward(autograd::Context&, const Tensor& dloss, const Tensor& gradient) const {
    detail::scale_gradient(gradient, dloss);
    gradient.bump_version("cross_entropy's backward");
    return gradient.detach();
  }
  Tensors backward(autograd::Context&, const Tensor&) const {
    fail("cross_entropy: with in_place there is no second derivative, since the logits are overwritten; {}", kTurnOff);
  }
};

// Returns the loss and the logits' memory, which now holds their gradient.
struct CrossEntropyInPlace {
  static constexpr bool composed = true;
  CrossEntropyOptions options;
  bool spent = false;

  Tensors forward(autograd::Context& ctx, const Tensor& logits, const Tensor& targets, const Tensor& weight) const {
    ctx.set_materialize_grads(false);
    const Shape rows = logits.shape().slice(0, logits.dim() - 1);
    const std::int64_t count = numel_of(rows);
    const Tensor losses = empty({count}, accumulate_dtype(logits.dtype()), logits.device());
    const Tensor matrix = packed(logits, {count, logits.size(-1)});
    const Tensor row_targets = packed_targets("cross_entropy", targets, count, logits.size(-1), options.ignore_index);
    const Tensor denominator = detail::mean_denominator(options, row_targets, weight, logits.dtype());
    if (count > 0) {
      const Tensor one;
      const kernels::CrossEntropyInPlace args{.terms = detail::terms_of(options, matrix, row_targets, weight),
                                              .dloss = one,
                                              .denominator = denominator,
                                              .losses = losses};
      on_device(logits.device(), [&](auto device) { kernels::cross_entropy_in_place(device, args); });
    }
    logits.bump_version("cross_entropy");
    const Tensor gradient = logits.detach();
    ctx.save_for_backward(gradient);
    return {detail::reduced(options, losses, denominator, rows), gradient};
  }

  Tensors backward(autograd::Context& ctx, const Tensor& dloss, const Tensor& dlogits) {
    check(!dlogits.defined(),
          "cross_entropy: its logits were used after in_place overwrote them with their gradient, and cannot be "
          "differentiated there; use them before, or turn it off");
    check(!spent,
          "cross_entropy: with in_place, backward can run only once, since the logits' memory holds the gradient; {}",
          kTurnOff);
    spent = true;
    const auto [gradient] = ctx.saved<1>();
    return {autograd::apply(InPlaceGradient{}, dloss, gradient), Tensor{}, Tensor{}};
  }
};

Tensor cross_entropy_in_place(const Tensor& logits, const Tensor& targets, const Tensor& weight,
                              const CrossEntropyOptions& options) {
  const auto& base = logits.handle()->base;
  const bool is_leaf = logits.is_leaf() || (base != nullptr && Tensor(base).is_leaf() && Tensor(base).requires_grad());
  check(!is_leaf,
        "cross_entropy: in_place overwrites the logits with their gradient, but these, of shape {}, are a leaf that "
        "requires a gradient or a view of one; turn it off",
        logits.shape());
  check(logits.is_contiguous(),
        "cross_entropy: in_place overwrites the logits with their gradient, so they must be row-major without gaps, "
        "got shape "
        "{} and strides {}; pass contiguous(logits), or turn it off",
        logits.shape(), logits.strides());
  autograd::check_writable("cross_entropy", logits);
  check(!targets.requires_grad(),
        "cross_entropy: expected probabilities that require no gradient for in_place, which computes none");
  const Tensors results = autograd::apply(CrossEntropyInPlace{options}, logits, targets, weight);
  autograd::adopt_history(logits, results[1]);
  return results[0];
}

}  // namespace

Tensor cross_entropy(const Tensor& logits, const Tensor& targets, const CrossEntropyOptions& options) {
  // 16-bit logits need no conversion, since their loss is computed in float32 anyway, but probabilities must have their
  // dtype.
  if (is_floating(targets.dtype()) && (autograd::autocast_widens(logits) || autograd::autocast_widens(targets))) {
    return cross_entropy(autograd::widened(logits), autograd::widened(targets), options);
  }
  detail::check_cross_entropy("cross_entropy", logits.shape(), logits.dtype(), logits.device(), targets, options);
  const Tensor weight = detail::class_weights(options, logits.dtype());
  CrossEntropyOptions rest = options;
  rest.weight = {};  // passed as an input of the op instead
  if (options.in_place && autograd::grad_enabled() && logits.requires_grad()) {
    return cross_entropy_in_place(logits, targets, weight, rest);
  }
  return autograd::apply(CrossEntropy{rest}, logits, targets, weight);
}

}  // namespace mica
