#include <cmath>

#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/cross_entropy/detail/cross_entropy_steps.h>

namespace mica::detail {

void check_cross_entropy(const char* op, const Shape& logits, DType dtype, Device device, const Tensor& targets,
                         const CrossEntropyOptions& options) {
  check(is_floating(dtype), "{}: expected floating logits, got {}", op, dtype);
  check(!logits.empty(), "{}: expected logits of shape [..., classes], got a scalar", op);
  const Shape rows = logits.slice(0, logits.size() - 1);
  const std::int64_t classes = logits.back();
  check(classes > 0 || numel_of(rows) == 0, "{}: expected at least one class, got logits of shape {}", op, logits);
  if (is_floating(targets.dtype())) {
    check(targets.dtype() == dtype && targets.shape() == logits,
          "{}: expected labels of int64 or int32, or probabilities of the logits' dtype and shape, {} {}, got {} {}",
          op, dtype, logits, targets.dtype(), targets.shape());
  } else {
    check(targets.dtype() == int64 || targets.dtype() == int32, "{}: expected int64 or int32 targets, got {}", op,
          targets.dtype());
    check(targets.shape() == rows, "{}: expected targets of shape {} for logits of shape {}, got {}", op, rows, logits,
          targets.shape());
  }
  check(targets.device() == device, "{}: expected targets on {}, got {}", op, device, targets.device());

  const Tensor& weight = options.weight;
  if (weight.defined()) {
    check(weight.shape() == Shape{classes}, "{}: expected weight of shape [{}], got {}", op, classes, weight.shape());
    check(weight.dtype() == dtype || weight.dtype() == accumulate_dtype(dtype),
          "{}: expected weight of {} or {}, got {}", op, dtype, accumulate_dtype(dtype), weight.dtype());
    check(weight.device() == device, "{}: expected weight on {}, got {}", op, device, weight.device());
    check(!weight.requires_grad(), "{}: expected weight that requires no gradient, as it would get none", op);
  }
  check(options.reduction <= Reduction::sum, "{}: expected the reduction none, mean or sum, got {}", op,
        static_cast<int>(options.reduction));
  check(options.label_smoothing >= 0 && options.label_smoothing <= 1, "{}: expected label_smoothing in [0, 1], got {}",
        op, options.label_smoothing);
  check(std::isfinite(options.logit_scale), "{}: expected a finite logit_scale, got {}", op, options.logit_scale);
  check(options.softcap >= 0 && std::isfinite(options.softcap), "{}: expected a finite softcap of at least 0, got {}",
        op, options.softcap);
}

Tensor class_weights(const CrossEntropyOptions& options, DType logits_dtype) {
  return options.weight.defined() ? contiguous_data(options.weight.to(accumulate_dtype(logits_dtype))) : Tensor{};
}

Tensor packed(const Tensor& x, const Shape& shape) {
  const Tensor data = contiguous_data(x);
  return as_strided(data, shape, contiguous_strides(shape), data.handle()->offset);
}

Tensor packed_targets(const char* op, const Tensor& targets, std::int64_t rows, std::int64_t classes,
                      std::int64_t ignore_index) {
  if (is_floating(targets.dtype())) {
    return packed(targets, {rows, classes});
  }
  const Tensor labels = packed(targets, {rows});
  if (labels.device().is_cpu()) {
    on_dtype(kernels::IndexTypes{}, labels.dtype(), op, [&]<class Index>() {
      const Index* const data = labels.data<Index>();
      for (std::int64_t row = 0; row < rows; ++row) {
        const std::int64_t label = data[row];
        check(label == ignore_index || (label >= 0 && label < classes),
              "{}: expected targets in [0, {}) or ignore_index {}, got {} in row {}", op, classes, ignore_index, label,
              row);
      }
    });
  }
  return labels;
}

kernels::CrossEntropyTerms terms_of(const CrossEntropyOptions& options, const Tensor& logits, const Tensor& targets,
                                    const Tensor& weight) {
  return {.logits = logits,
          .targets = targets,
          .weight = weight,
          .ignore_index = options.ignore_index,
          .label_smoothing = options.label_smoothing,
          .logit_scale = options.logit_scale,
          .softcap = options.softcap};
}

Tensor mean_denominator(const CrossEntropyOptions& options, const Tensor& targets, const Tensor& weight,
                        DType logits_dtype) {
  if (options.reduction != Reduction::mean) {
    return {};
  }
  const DType sums = accumulate_dtype(logits_dtype);
  if (is_floating(targets.dtype())) {
    return full({1}, static_cast<double>(targets.size(0)), sums, targets.device());
  }
  const Tensor denominator = empty({1}, sums, targets.device());
  const kernels::CrossEntropyDenominator args{
      .targets = targets, .weight = weight, .ignore_index = options.ignore_index, .denominator = denominator};
  on_device(targets.device(), [&](auto device) { kernels::cross_entropy_denominator(device, args); });
  return denominator;
}

Tensor reduced(const CrossEntropyOptions& options, const Tensor& losses, const Tensor& denominator, const Shape& rows) {
  if (options.reduction == Reduction::none) {
    return packed(losses, rows);
  }
  const Tensor loss = empty({}, losses.dtype(), losses.device());
  const Tensor list = packed(loss, {1});
  const kernels::CrossEntropyReduce args{.losses = losses, .denominator = denominator, .loss = list};
  on_device(losses.device(), [&](auto device) { kernels::cross_entropy_reduce(device, args); });
  return loss;
}

void scale_gradient(const Tensor& gradient, const Tensor& factor) {
  if (gradient.numel() == 0) {
    return;
  }
  const std::int64_t columns = gradient.size(-1);
  const Tensor matrix = packed(gradient, {gradient.numel() / columns, columns});
  const Tensor factors = packed(factor, {factor.numel()});
  on_device(gradient.device(),
            [&](auto device) { kernels::cross_entropy_scale(device, {.gradient = matrix, .factor = factors}); });
}

}  // namespace mica::detail
