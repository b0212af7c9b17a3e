#include <algorithm>
#include <cmath>
#include <numeric>

#include <mica/autograd/grad_mode.h>
#include <mica/core/creation.h>
#include <mica/core/philox.h>
#include <mica/nn/generate.h>
#include <mica/ops/join/join.h>
#include <mica/ops/view/view.h>

namespace mica::nn {

namespace {

// In evaluation mode until the end of scope.
class EvalGuard {
 public:
  explicit EvalGuard(Module& module) : module_(module), was_training_(module.is_training()) { module_.eval(); }
  ~EvalGuard() { module_.train(was_training_); }
  EvalGuard(const EvalGuard&) = delete;
  EvalGuard& operator=(const EvalGuard&) = delete;

 private:
  Module& module_;
  bool was_training_;
};

}  // namespace

Sampler::Sampler(SamplingOptions options) : options_(options) {
  check(options.temperature >= 0 && std::isfinite(options.temperature), "Sampler: expected temperature >= 0, got {}",
        options.temperature);
  check(options.top_k >= 0, "Sampler: expected top_k >= 0, got {}", options.top_k);
}

std::vector<std::int64_t> Sampler::operator()(const Tensor& logits) {
  check(logits.dim() == 2 && logits.size(1) >= 1, "Sampler: expected logits of shape (B, vocab), got {}",
        logits.shape());
  const std::int64_t vocab = logits.size(1);
  const std::vector<double> values = to_vector<double>(logits);
  const PhiloxKey key{.seed = options_.seed, .offset = 4 * draws_++};

  std::vector<std::int64_t> result;
  std::vector<std::int64_t> order(vocab);  // of the candidates
  for (std::int64_t row = 0; row < logits.size(0); ++row) {
    const double* const x = values.data() + row * vocab;
    const double largest = *std::max_element(x, x + vocab);
    check(std::isfinite(largest) && std::none_of(x, x + vocab, [](double v) { return std::isnan(v); }),
          "Sampler: row {} of the logits is not finite", row);
    std::int64_t candidates = options_.top_k == 0 ? vocab : std::min(options_.top_k, vocab);
    if (options_.temperature == 0) {
      candidates = 1;
    }
    std::iota(order.begin(), order.end(), 0);
    if (candidates < vocab) {
      std::partial_sort(order.begin(), order.begin() + candidates, order.end(),
                        [x](std::int64_t a, std::int64_t b) { return x[a] != x[b] ? x[a] > x[b] : a < b; });
    }
    const auto weight = [&](std::int64_t token) {
      return candidates == 1 ? 1.0 : std::exp((x[token] - largest) / options_.temperature);
    };
    double total = 0;
    for (std::int64_t i = 0; i < candidates; ++i) {
      total += weight(order[i]);
    }
    const PhiloxBlock block = philox_block(key, static_cast<std::uint64_t>(row));
    const double target = PhiloxReals<double>::uniform(block, 0) * total;  // in (0, total]
    double sum = 0;
    std::int64_t chosen = order[0];
    for (std::int64_t i = 0; i < candidates && sum < target; ++i) {
      const double next = weight(order[i]);
      if (next > 0) {
        chosen = order[i];
      }
      sum += next;
    }
    result.push_back(chosen);
  }
  return result;
}

Tensor generate(GPT& gpt, const Tensor& tokens, std::int64_t count, SamplingOptions options) {
  check(tokens.dim() == 2 && tokens.size(1) >= 1, "generate: expected tokens of shape (B, T), T >= 1, got {}",
        tokens.shape());
  constexpr std::int64_t kMaxTokens = std::int64_t{1} << 24;  // more would take days
  check(count >= 0 && count <= kMaxTokens, "generate: expected from 0 to {} new tokens, got {}", kMaxTokens, count);
  const autograd::NoGrad no_grad;
  const EvalGuard eval(gpt);
  Sampler sampler(options);
  Tensor sequence = tokens.to(int64);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t start = std::max<std::int64_t>(sequence.size(1) - gpt.config.context, 0);
    const Tensor logits = gpt.next_token_logits(slice(sequence, 1, start, sequence.size(1)));
    sequence = cat({sequence, from_data(sampler(logits), {tokens.size(0), 1}, tokens.device())}, 1);
  }
  return sequence;
}

}  // namespace mica::nn
