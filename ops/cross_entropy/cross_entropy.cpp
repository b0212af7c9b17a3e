#include <mica/autograd/function.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/dispatch.h>
#include <mica/ops/cross_entropy/cross_entropy.h>
#include <mica/ops/cross_entropy/cross_entropy_kernels.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/where.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/softmax/softmax.h>
#include <mica/ops/softmax/softmax_ops.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

/// As rows of a matrix, or as a list: the elements in row-major order, without history.
Tensor packed(const Tensor& x, const Shape& shape) {
  const Tensor data = contiguous_data(x);
  return as_strided(data, shape, contiguous_strides(shape), data.handle()->offset);
}

// dlogits = (softmax(logits) − onehot(targets)) · dloss / count by the fused kernel. logsumexp and count follow from
// logits and targets, and are not arguments of their own. README.md derives what its backward computes.
struct CrossEntropyGradient {
  static constexpr bool composed = true;
  CrossEntropyOptions options;

  Tensor forward(autograd::Context& ctx, const Tensor& dloss, const Tensor& logits, const Tensor& targets,
                 const Tensor& logsumexp, const Tensor& count) const {
    ctx.save_for_backward(dloss, logits, targets, logsumexp, count);
    const Tensor dlogits = empty(logits.shape(), logits.dtype(), logits.device());
    if (logits.numel() > 0) {
      const std::int64_t rows = targets.numel();
      const Shape matrix_shape{rows, logits.shape().back()};
      const Tensor matrix = packed(logits, matrix_shape);
      const Tensor labels = packed(targets, {rows});
      const Tensor scale = packed(dloss, {dloss.numel()});
      const Tensor dmatrix = packed(dlogits, matrix_shape);
      const kernels::CrossEntropyBackward args{.logits = matrix,
                                               .targets = labels,
                                               .ignore_index = options.ignore_index,
                                               .logsumexp = logsumexp,
                                               .per_row = options.reduction == Reduction::none,
                                               .dloss = scale,
                                               .count = count,
                                               .dlogits = dmatrix};
      on_device(logits.device(), [&](auto d) { kernels::cross_entropy_backward(d, args); });
    }
    return dlogits;
  }

  // a: the gradient of dlogits.
  Tensors backward(autograd::Context& ctx, const Tensor& a) const {
    const auto [dloss, logits, targets, logsumexp, count] = ctx.saved<5>();
    const DType wide = accumulate_dtype(logits.dtype());
    const Tensor as = a.to(wide);
    const Tensor wide_logits = logits.to(wide);
    Tensors gradients(5);
    if (ctx.needs_grad(0)) {
      const CrossEntropyGradient of_each{{.ignore_index = options.ignore_index, .reduction = Reduction::none}};
      const Tensor ones = mica::ones(targets.shape(), wide, logits.device());
      const Tensor difference = autograd::apply(of_each, ones, wide_logits, targets, logsumexp, Tensor{});
      Tensor by_row = sum(as * difference, {-1});
      if (options.reduction != Reduction::none) {
        by_row = sum(by_row);
      }
      gradients[0] = (count.defined() ? by_row / reshape(count, {}) : by_row).to(dloss.dtype());
    }
    if (ctx.needs_grad(1)) {
      Tensor scale = dloss.to(wide);
      if (options.reduction == Reduction::none) {
        scale = unsqueeze(scale, -1);
      } else if (count.defined()) {
        scale = scale / count;
      }
      // An ignored row may hold anything, even NaN.
      const Tensor ignored = unsqueeze(eq(targets, static_cast<double>(options.ignore_index)), -1);
      const Tensor p = softmax(where(ignored, 0, wide_logits), -1);
      const Tensor u = as * where(ignored, 0, scale);
      gradients[1] = detail::softmax_gradient(u, p, p.dim() - 1).to(logits.dtype());
    }
    return gradients;
  }
};

struct CrossEntropy {
  static constexpr bool composed = true;
  CrossEntropyOptions options;

  Tensor forward(autograd::Context& ctx, const Tensor& logits, const Tensor& targets) const {
    const std::int64_t rows = targets.numel();
    const DType wide = accumulate_dtype(logits.dtype());
    const Device device = logits.device();
    const Tensor labels = packed(targets, {rows});
    const Tensor logsumexp = empty({rows}, wide, device);
    const Tensor losses = empty({rows}, wide, device);
    const Tensor matrix = packed(logits, {rows, logits.shape().back()});
    const kernels::CrossEntropyForward args{.logits = matrix,
                                            .targets = labels,
                                            .ignore_index = options.ignore_index,
                                            .logsumexp = logsumexp,
                                            .losses = losses};
    if (rows > 0) {
      on_device(device, [&](auto d) { kernels::cross_entropy_forward(d, args); });
    }
    Tensor count;
    Tensor loss;
    if (options.reduction == Reduction::none) {
      loss = empty(targets.shape(), logits.dtype(), device);
      copy_into(loss, packed(losses, targets.shape()));
    } else {
      if (options.reduction == Reduction::mean) {
        count = empty({1}, wide, device);
      }
      loss = empty({}, logits.dtype(), device);
      const Tensor total = packed(loss, {1});
      const kernels::CrossEntropyReduce reduce{
          .losses = losses, .targets = labels, .ignore_index = options.ignore_index, .count = count, .loss = total};
      on_device(device, [&](auto d) { kernels::cross_entropy_reduce(d, reduce); });
    }
    ctx.save_for_backward(logits, targets, logsumexp, count);
    return loss;
  }

  Tensors backward(autograd::Context& ctx, const Tensor& dloss) const {
    const auto [logits, targets, logsumexp, count] = ctx.saved<4>();
    return {autograd::apply(CrossEntropyGradient{options}, dloss, logits, targets, logsumexp, count), Tensor{}};
  }
};

}  // namespace

Tensor cross_entropy(const Tensor& logits, const Tensor& targets, const CrossEntropyOptions& options) {
  check(is_floating(logits.dtype()), "cross_entropy: expected floating logits, got {}", logits.dtype());
  check(targets.dtype() == int64 || targets.dtype() == int32, "cross_entropy: expected int64 or int32 targets, got {}",
        targets.dtype());
  check(logits.dim() >= 1, "cross_entropy: expected logits of shape [..., classes], got a scalar");
  check(targets.shape() == logits.shape().slice(0, logits.dim() - 1),
        "cross_entropy: expected targets of shape {} for logits of shape {}, got {}",
        logits.shape().slice(0, logits.dim() - 1), logits.shape(), targets.shape());
  check(targets.device() == logits.device(), "cross_entropy: expected targets on {}, got {}", logits.device(),
        targets.device());
  return autograd::apply(CrossEntropy{options}, logits, targets);
}

}  // namespace mica
