#include <algorithm>
#include <cmath>
#include <type_traits>

#include <mica/autograd/grad_mode.h>
#include <mica/core/capture.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/cuda/device.h>
#include <mica/core/philox.h>
#include <mica/infer/kernels/detail/sample_kernels.h>
#include <mica/infer/sample.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/elementwise/where.h>
#include <mica/ops/index/index.h>
#include <mica/ops/rearrange/rearrange.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/scan/scan.h>
#include <mica/ops/sort/sort.h>
#include <mica/ops/view/view.h>

namespace mica::infer {

namespace {

// The tokens by one kernel; undefined if there is none for these logits.
Tensor by_kernel(const Tensor& logits, const SamplingOptions& options, const Tensor& uniforms, const Tensor& seen) {
  return on_device(logits.device(), [&](auto device) {
    if constexpr (std::is_same_v<decltype(device), Cuda>) {
      const std::int64_t rows = logits.size(0);
      if (logits.dtype() != float64 && rows >= 1 && rows <= kernels::kMostSampleRows &&
          logits.size(1) <= kernels::kMostSampleColumns && cuda::device_has_clusters()) {
        const Tensor ready = contiguous_data(logits);
        const Tensor ready_seen = seen.defined() && options.repetition_penalty != 1 ? contiguous_data(seen) : Tensor{};
        const Tensor tokens = empty({rows}, int64, logits.device());
        kernels::sample_tokens(device, {.logits = ready,
                                        .options = options,
                                        .uniforms = options.takes_largest() ? Tensor{} : uniforms,
                                        .seen = ready_seen,
                                        .tokens = tokens});
        return tokens;
      }
    }
    return Tensor{};
  });
}

// For each row, the total probability of the tokens that top_p keeps: those before which the running sum is less than
// `top_p` of the whole. `sums` are the running sums of sorted probabilities.
Tensor kept_sum(const Tensor& sums, double top_p) {
  const std::int64_t n = sums.size(1);
  const Tensor before = pad(slice(sums, 1, 0, n - 1), 1, 1, 0);
  const Tensor kept = lt(before, slice(sums, 1, n - 1, n) * top_p);
  return amax(where(kept, sums, 0), {1}, true);
}

// Samples a token of each row of scores, (B, 1). `largest` has the largest score of each row, (B, 1).
Tensor sample_composed(Tensor scores, const Tensor& largest, const SamplingOptions& options, const Tensor& uniforms) {
  // The candidates: all tokens in order of their number or, with top_k or top_p, by descending probability.
  const std::int64_t vocab = scores.size(1);
  Tensor order;
  if ((options.top_k > 0 && options.top_k < vocab) || options.top_p < 1) {
    const auto [values, indices] = topk(scores, options.top_k == 0 ? vocab : std::min(options.top_k, vocab));
    scores = values;
    order = indices;
  }
  const Tensor sums = cumsum(exp((scores - largest) / options.temperature), 1);
  const std::int64_t n = sums.size(1);
  const Tensor total = options.top_p < 1 ? kept_sum(sums, options.top_p) : slice(sums, 1, n - 1, n);
  // The first candidate at which the running sum reaches a random fraction of the total.
  const Tensor index = minimum(sum(lt(sums, uniforms * total), {1}, true), static_cast<double>(n - 1));
  return order.defined() ? gather(order, 1, index) : index;
}

}  // namespace

Tensor sample(const Tensor& logits, const SamplingOptions& options, const Tensor& uniforms, const Tensor& seen) {
  check(logits.dim() == 2 && logits.size(1) >= 1 && is_floating(logits.dtype()),
        "sample: expected floating logits of shape (B, vocab), got {} {}", logits.dtype(), logits.shape());
  const Shape one_each{logits.size(0), 1};
  check(options.takes_largest() || (uniforms.defined() && uniforms.shape() == one_each && uniforms.dtype() == float64 &&
                                    uniforms.device() == logits.device() && uniforms.is_contiguous()),
        "sample: expected contiguous uniforms of float64 and shape {} on {}", one_each, logits.device());
  if (seen.defined()) {
    check(seen.shape() == logits.shape() && seen.dtype() == boolean && seen.device() == logits.device(),
          "sample: expected seen of bool and shape {} on {}, got {} {} on {}", logits.shape(), logits.device(),
          seen.dtype(), seen.shape(), seen.device());
  }
  const autograd::NoGrad no_grad;
  if (const Tensor tokens = by_kernel(logits, options, uniforms, seen); tokens.defined()) {
    return tokens;
  }
  Tensor scores = logits.to(float64);
  if (seen.defined() && options.repetition_penalty != 1) {
    const double penalty = options.repetition_penalty;
    scores = where(seen, where(gt(scores, 0), scores / penalty, scores * penalty), scores);
  }
  const Tensor largest = amax(scores, {1}, true);
  const Tensor tokens =
      options.takes_largest() ? argmax(scores, 1, true) : sample_composed(scores, largest, options, uniforms);
  return squeeze(where(isfinite(largest), tokens, -1), 1);
}

Sampler::Sampler(SamplingOptions options) : options_(options) {
  check(options.temperature >= 0 && std::isfinite(options.temperature), "Sampler: expected temperature >= 0, got {}",
        options.temperature);
  check(options.top_k >= 0, "Sampler: expected top_k >= 0, got {}", options.top_k);
  check(options.top_p > 0 && options.top_p <= 1, "Sampler: expected top_p in (0, 1], got {}", options.top_p);
  check(options.repetition_penalty > 0 && std::isfinite(options.repetition_penalty),
        "Sampler: expected repetition_penalty > 0, got {}", options.repetition_penalty);
}

const Tensor& Sampler::draw_uniforms(std::int64_t rows, Device device) {
  if (!uniforms_.defined() || uniforms_.size(0) != rows || uniforms_.device() != device) {
    uniforms_ = empty({rows, 1}, float64, device);
  }
  on_each_replay([seed = options_.seed, draws = draws_, to = uniforms_] {
    const PhiloxKey key{.seed = seed, .offset = 4 * (*draws)++};
    std::vector<double> values;  // in (0, 1]
    for (std::int64_t row = 0; row < to.size(0); ++row) {
      values.push_back(PhiloxReals<double>::uniform(philox_block(key, static_cast<std::uint64_t>(row)), 0));
    }
    copy_into(to, from_data(values, to.shape()));
  });
  return uniforms_;
}

Tensor Sampler::draw(const Tensor& logits, const Tensor& seen) {
  check(logits.dim() == 2, "Sampler: expected logits of shape (B, vocab), got {}", logits.shape());
  return sample(logits, options_, options_.takes_largest() ? Tensor{} : draw_uniforms(logits.size(0), logits.device()),
                seen);
}

std::vector<std::int64_t> Sampler::operator()(const Tensor& logits, const Tensor& seen) {
  const std::vector<std::int64_t> tokens = to_vector<std::int64_t>(draw(logits, seen));
  for (std::size_t row = 0; row < tokens.size(); ++row) {
    check(tokens[row] >= 0, "Sampler: row {} of the logits is not finite", row);
  }
  return tokens;
}

}  // namespace mica::infer
