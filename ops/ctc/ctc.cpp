#include <algorithm>
#include <limits>
#include <numeric>

#include <mica/autograd/autocast.h>
#include <mica/autograd/function.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/ctc/ctc.h>
#include <mica/ops/ctc/detail/ctc_kernels.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/where.h>
#include <mica/ops/index/index.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

struct CtcLoss {
  std::int64_t blank;

  Tensor forward(autograd::Context& ctx, const Tensor& log_probs, const Tensor& targets, const Tensor& input_lengths,
                 const Tensor& target_lengths) const {
    const std::int64_t samples = log_probs.shape()[1];
    const Tensor alpha =
        empty({samples, log_probs.shape()[0], 2 * targets.shape()[1] + 1}, float64, log_probs.device());
    const Tensor losses = empty({samples}, log_probs.dtype(), log_probs.device());
    const Tensor rows = contiguous_data(log_probs);
    const kernels::CtcForward args{
        .in = {rows, targets, input_lengths, target_lengths, blank}, .alpha = alpha, .losses = losses};
    on_device(log_probs.device(), [&](auto device) { kernels::ctc_forward(device, args); });
    ctx.save_for_backward(log_probs, targets, input_lengths, target_lengths, alpha);
    return losses;
  }
  Tensors backward(autograd::Context& ctx, const Tensor& dlosses) const {
    const auto [log_probs, targets, input_lengths, target_lengths, alpha] = ctx.saved<5>();
    const Tensor dlog_probs = zeros_like(log_probs);
    const Tensor rows = contiguous_data(log_probs), gradients = contiguous_data(dlosses);
    const kernels::CtcBackward args{.in = {rows, targets, input_lengths, target_lengths, blank},
                                    .alpha = alpha,
                                    .dlosses = gradients,
                                    .dlog_probs = dlog_probs};
    on_device(log_probs.device(), [&](auto device) { kernels::ctc_backward(device, args); });
    return {dlog_probs, {}, {}, {}};
  }
};

// Integers on x's device, as row-major int64.
Tensor ctc_integers(const char* name, const Tensor& x, const Tensor& integers) {
  check(integers.dtype() == int64 || integers.dtype() == int32, "ctc_loss: expected {} of int64 or int32, got {}", name,
        integers.dtype());
  check(integers.device() == x.device(), "ctc_loss: expected {} on {}, got {}", name, x.device(), integers.device());
  return contiguous_data(integers.to(int64));
}

// Targets one after the other as a matrix, with any labels after the end of a target.
Tensor padded_targets(const Tensor& targets, const Tensor& target_lengths) {
  const std::vector<std::int64_t> lengths = to_vector<std::int64_t>(target_lengths);
  std::int64_t longest = 0, total = 0;
  for (const std::int64_t length : lengths) {
    check(length >= 0 && length <= targets.numel() - total,
          "ctc_loss: expected target lengths of at least 0 that add up to at most {}, got {} after {} labels",
          targets.numel(), length, total);
    longest = std::max(longest, length);
    total += length;
  }
  check(total == targets.numel(), "ctc_loss: expected target lengths that add up to {}, got {}", targets.numel(),
        total);
  std::vector<std::int64_t> positions(lengths.size() * static_cast<std::size_t>(longest), 0);
  std::int64_t first = 0;
  auto row = positions.begin();
  for (const std::int64_t length : lengths) {
    std::iota(row, row + length, first);
    first += length;
    row += longest;
  }
  const auto samples = static_cast<std::int64_t>(lengths.size());
  const Tensor index = from_data(positions, {samples * longest}, targets.device());
  return reshape(index_select(targets, 0, index), {samples, longest});
}

}  // namespace

Tensor ctc_loss(const Tensor& log_probs, const Tensor& targets, const Tensor& input_lengths,
                const Tensor& target_lengths, const CtcOptions& options) {
  check(is_floating(log_probs.dtype()), "ctc_loss: expected a floating dtype, got {}", log_probs.dtype());
  check(log_probs.dim() == 2 || log_probs.dim() == 3,
        "ctc_loss: expected log_probs of shape (T, N, C) or (T, C), got {}", log_probs.shape());
  check(options.reduction <= Reduction::sum, "ctc_loss: expected the reduction none, mean or sum, got {}",
        static_cast<int>(options.reduction));
  const bool single = log_probs.dim() == 2;
  const Tensor x = single ? unsqueeze(log_probs, 1) : log_probs;
  const std::int64_t samples = x.shape()[1], classes = x.shape()[2];
  check(options.blank >= 0 && options.blank < classes, "ctc_loss: expected a blank from 0 to {}, got {}", classes - 1,
        options.blank);
  const auto lengths_of = [&](const char* name, const Tensor& lengths) {
    check(lengths.shape() == Shape{samples} || (single && lengths.dim() == 0),
          "ctc_loss: expected {} of shape [{}], got {}", name, samples, lengths.shape());
    return reshape(ctc_integers(name, x, lengths), {samples});
  };
  const Tensor times = lengths_of("input_lengths", input_lengths);
  const Tensor lengths = lengths_of("target_lengths", target_lengths);
  Tensor labels = ctc_integers("targets", x, targets);
  check(labels.dim() == 1 || (labels.dim() == 2 && labels.shape()[0] == samples),
        "ctc_loss: expected targets of shape ({}, S) or one axis, got {}", samples, labels.shape());
  if (labels.dim() == 1) {
    labels = single ? unsqueeze(labels, 0) : padded_targets(labels, lengths);
  }
  Tensor losses = autograd::apply(CtcLoss{options.blank}, x.to(accumulate_dtype(x.dtype())), labels, times, lengths);
  if (options.zero_infinity) {
    losses = where(eq(losses.detach(), std::numeric_limits<double>::infinity()), 0, losses);
  }
  if (options.reduction == Reduction::mean) {
    losses = mean(losses / maximum(lengths, 1).to(losses.dtype()));
  } else if (options.reduction == Reduction::sum) {
    losses = sum(losses);
  } else if (single) {
    losses = squeeze(losses, 0);
  }
  return autograd::autocast_widens(log_probs) ? losses : losses.to(log_probs.dtype());
}

}  // namespace mica
