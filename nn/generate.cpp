#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include <mica/autograd/grad_mode.h>
#include <mica/core/capture.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/cuda/graph.h>
#include <mica/core/host_reader.h>
#include <mica/core/philox.h>
#include <mica/core/progress.h>
#include <mica/nn/evaluation.h>
#include <mica/nn/generate.h>
#include <mica/ops/decode/draw.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/elementwise/where.h>
#include <mica/ops/index/index.h>
#include <mica/ops/join/join.h>
#include <mica/ops/rearrange/rearrange.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/scan/scan.h>
#include <mica/ops/sort/sort.h>
#include <mica/ops/view/view.h>

namespace mica::nn {

namespace {

using Tokens = std::vector<std::int64_t>;

constexpr std::int64_t kMaxTokens = std::int64_t{1} << 24;  // more would take days
constexpr std::int64_t kReserved = 8192;                    // new positions to reserve memory for at first

// The differences between the two models.
std::int64_t context_of(const GPT& gpt) { return gpt.config.context; }
std::int64_t context_of(const Llama&) { return INT64_MAX; }
const Tensor& embedding_of(const GPT& gpt) { return gpt.wte.weight; }
const Tensor& embedding_of(const Llama& llama) { return llama.model.embed_tokens.weight; }
bool can_decode(const GPT&, const KeyValueCache& cache) { return cache.can_decode(); }
bool can_decode(const Llama& llama, const KeyValueCache& cache) { return llama.model.can_decode(cache); }
bool replace_by_next_token(const GPT&, const Tensor&, KeyValueCache&, std::int64_t*) { return false; }
bool replace_by_next_token(const Llama& llama, const Tensor& token, KeyValueCache& cache, std::int64_t* on_host) {
  return llama.replace_by_next_token(token, cache, on_host);
}

// The texts of a batch, and the state needed to continue them.
template <class Model>
class Batch {
 public:
  Batch(const Model& model, const std::vector<Tokens>& prompts, const GenerateOptions& options)
      : model_(model),
        sampler_(options.sampling),
        texts_(prompts),
        count_(options.count),
        window_(options.window),
        device_(embedding_of(model).device()),
        graph_allowed_(options.cuda_graph && device_.is_cuda()),
        next_(empty({batch()}, int64, device_)),
        reader_(device_, batch()) {
    if (options.sampling.repetition_penalty != 1) {
      vocabulary_ = arange(static_cast<double>(embedding_of(model).size(0)), int64, device_);
      remember_prompts();
    }
  }

  /// Launches the computation of one more token of each text, without waiting for it.
  void step() {
    const std::int64_t length = cache_ ? cache_->length() : 0;
    if (!goes_on()) {
      graph_ = {};
      // Each token reads the whole text again: do not report that as a task.
      std::optional<ProgressObserver> none;
      if (cache_) {
        none.emplace(nullptr);
      }
      start();
    } else if (!graph_allowed_) {
      go_on();
    } else {
      replay();
    }
    if (is_on_host_) {
      reader_.start_slot(static_cast<std::size_t>(length) % HostReader::kSlots);
    } else {
      reader_.start(next_);
    }
  }
  /// The tokens of the oldest step that were not returned yet; waits for them.
  Tokens next() { return reader_.finish(); }

  void append(std::size_t text, std::int64_t token) { texts_[text].push_back(token); }

  /// Whether the next step can start before the host has read the last tokens.
  bool goes_on() const { return cache_ && cache_->length() < context_of(model_); }
  bool runs_ahead() const { return device_.is_cuda() && goes_on(); }

 private:
  std::int64_t batch() const { return static_cast<std::int64_t>(texts_.size()); }

  // Computes the text from its start, or its last tokens if it exceeds the context.
  void start() {
    is_on_host_ = false;
    cache_.emplace(model_.new_cache(batch(), window_));
    std::size_t length = 0;
    for (const Tokens& text : texts_) {
      length = std::max(length, text.size());
    }
    length = std::min(length, static_cast<std::size_t>(context_of(model_)));
    Tokens padded, padding;
    for (const Tokens& text : texts_) {
      const std::size_t used = std::min(length, text.size());
      padding.push_back(static_cast<std::int64_t>(length - used));
      padded.insert(padded.end(), length - used, 0);
      padded.insert(padded.end(), text.end() - static_cast<std::ptrdiff_t>(used), text.end());
    }
    const auto steps = static_cast<std::int64_t>(length);
    cache_->reserve(std::min(context_of(model_), steps + std::min(count_, kReserved)));
    cache_->set_padding(padding);
    draw(model_.next_token_logits(from_data(padded, {batch(), steps}, device_), *cache_));
    graph_allowed_ = graph_allowed_ && can_decode(model_, *cache_);
  }

  void go_on() {
    is_on_host_ =
        sampler_.takes_largest() && !seen_.defined() && replace_by_next_token(model_, next_, *cache_, reader_.slots());
    if (is_on_host_) {
      return;
    }
    draw(model_.next_token_logits(unsqueeze(next_, 1), *cache_));
  }

  void draw(const Tensor& logits) {
    const Tensor tokens = sampler_.draw(logits, seen_);
    if (seen_.defined()) {
      copy_into(seen_, logical_or(seen_, eq(unsqueeze(tokens, 1), vocabulary_)));
    }
    copy_into(next_, tokens);
  }

  // The first step runs without a graph: it creates library handles and loads kernels.
  void replay() {
    if (!cache_->has_room()) {
      graph_ = {};
      cache_->reserve(cache_->length() + 1);
    }
    if (graph_.empty()) {
      if (!std::exchange(is_warm_, true)) {
        return go_on();
      }
      try {
        graph_ = cuda::capture([this] { go_on(); }, device_);
      } catch (const Error&) {
        // Nothing has run yet. If more than the capture is at fault, the step itself reports it.
        graph_allowed_ = false;
        return go_on();
      }
    }
    graph_.replay();
  }

  void remember_prompts() {
    Tensors rows;
    for (const Tokens& text : texts_) {
      const Tensor tokens = from_data(text, {static_cast<std::int64_t>(text.size())}, device_);
      rows.push_back(gt(scatter_add(zeros({embedding_of(model_).size(0)}, float32, device_), 0, tokens,
                                    ones(tokens.shape(), float32, device_)),
                        0));
    }
    seen_ = stack(rows);
  }

  const Model& model_;
  Sampler sampler_;
  std::vector<Tokens> texts_;
  std::int64_t count_;
  std::int64_t window_;
  Device device_;
  bool graph_allowed_;
  bool is_warm_ = false;
  Tensor next_;  // (B)
  HostReader reader_;
  bool is_on_host_ = false;  // the last step has written its token to a slot of the reader
  std::optional<KeyValueCache> cache_;
  Tensor vocabulary_;  // with a repetition penalty: all tokens,
  Tensor seen_;        // and which of them each text contains, (B, vocab) bool
  cuda::Graph graph_;  // of go_on()
};

template <class Model>
void check_arguments(const Model& model, const std::vector<Tokens>& prompts, const GenerateOptions& options) {
  check(options.count >= 0 && options.count <= kMaxTokens, "generate: expected from 0 to {} new tokens, got {}",
        kMaxTokens, options.count);
  const std::int64_t vocab = embedding_of(model).size(0);
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    check(!prompts[i].empty(), "generate: expected at least one token in each prompt, got none in number {}", i);
    for (const std::int64_t token : prompts[i]) {
      check(token >= 0 && token < vocab, "generate: expected tokens in [0, {}), got {} in prompt {}", vocab, token, i);
    }
  }
}

template <class Model>
std::vector<Tokens> generate_all(const Model& model, const std::vector<Tokens>& prompts,
                                 const GenerateOptions& options) {
  check_arguments(model, prompts, options);
  std::vector<Tokens> results(prompts.size());
  if (prompts.empty()) {
    return results;
  }
  const Evaluation guard;
  Batch<Model> batch(model, prompts, options);
  std::vector<bool> ended(prompts.size());
  std::int64_t started = 0;
  for (std::int64_t i = 0; i < options.count && std::find(ended.begin(), ended.end(), false) != ended.end(); ++i) {
    // Launch this step, and also the next one before the host waits for this one's tokens.
    while (started <= std::min(i + 1, options.count - 1) && (started == i || batch.runs_ahead())) {
      batch.step();
      ++started;
    }
    const Tokens tokens = batch.next();
    for (std::size_t text = 0; text < tokens.size(); ++text) {
      const std::int64_t token = tokens[text];
      // A text that has ended continues as padding, for the sake of the others.
      batch.append(text, std::max<std::int64_t>(token, 0));
      if (ended[text]) {
        continue;
      }
      check(token >= 0, "generate: the logits after {} tokens of text {} are not finite", prompts[text].size() + i,
            text);
      results[text].push_back(token);
      const bool stops =
          std::find(options.stop_tokens.begin(), options.stop_tokens.end(), token) != options.stop_tokens.end();
      const bool goes_on = !options.on_token || options.on_token(text, token);
      ended[text] = stops || !goes_on;
    }
  }
  return results;
}

template <class Model>
Tensor extended(const Model& model, const Tensor& tokens, std::int64_t count, const SamplingOptions& sampling) {
  check(tokens.dim() == 2 && tokens.size(1) >= 1, "generate: expected tokens of shape (B, T), T >= 1, got {}",
        tokens.shape());
  const std::int64_t length = tokens.size(1);
  const Tokens all = to_vector<std::int64_t>(tokens.to(int64));
  std::vector<Tokens> texts;
  for (auto row = all.begin(); row != all.end(); row += length) {
    texts.emplace_back(row, row + length);
  }
  const std::vector<Tokens> added = generate_all(model, texts, {.count = count, .sampling = sampling});
  Tokens joined;
  for (std::size_t i = 0; i < texts.size(); ++i) {
    joined.insert(joined.end(), texts[i].begin(), texts[i].end());
    joined.insert(joined.end(), added[i].begin(), added[i].end());
  }
  return from_data(joined, {tokens.size(0), length + count}, tokens.device());
}

// For each row, the total probability of the tokens that top_p keeps: those before which the running sum is less than
// `top_p` of the whole. `sums` are the running sums of sorted probabilities.
Tensor kept_sum(const Tensor& sums, double top_p) {
  const std::int64_t n = sums.size(1);
  const Tensor before = pad(slice(sums, 1, 0, n - 1), 1, 1, 0);
  const Tensor kept = lt(before, slice(sums, 1, n - 1, n) * top_p);
  return amax(where(kept, sums, 0), {1}, true);
}

}  // namespace

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
  check(logits.dim() == 2 && logits.size(1) >= 1, "Sampler: expected logits of shape (B, vocab), got {}",
        logits.shape());
  const autograd::NoGrad no_grad;
  const std::int64_t rows = logits.size(0), vocab = logits.size(1);
  if (has_draw_kernel(logits)) {
    return draw_tokens(logits,
                       {.temperature = options_.temperature,
                        .top_k = options_.top_k,
                        .top_p = options_.top_p,
                        .repetition_penalty = options_.repetition_penalty},
                       takes_largest() ? Tensor{} : draw_uniforms(rows, logits.device()), seen);
  }
  Tensor scores = logits.to(float64);
  if (seen.defined() && options_.repetition_penalty != 1) {
    check(seen.dtype() == boolean && seen.shape() == logits.shape(), "Sampler: expected seen of bool and {}, got {} {}",
          logits.shape(), seen.dtype(), seen.shape());
    const double penalty = options_.repetition_penalty;
    scores = where(seen, where(gt(scores, 0), scores / penalty, scores * penalty), scores);
  }
  const Tensor largest = amax(scores, {1}, true);
  Tensor tokens;  // (B, 1)
  if (takes_largest()) {
    tokens = argmax(scores, 1, true);
  } else {
    // The candidates: all tokens in order of their number or, with top_k or top_p, by descending probability.
    Tensor order;
    if ((options_.top_k > 0 && options_.top_k < vocab) || options_.top_p < 1) {
      const auto [values, indices] = topk(scores, options_.top_k == 0 ? vocab : std::min(options_.top_k, vocab));
      scores = values;
      order = indices;
    }
    const Tensor sums = cumsum(exp((scores - largest) / options_.temperature), 1);
    const std::int64_t n = sums.size(1);
    const Tensor total = options_.top_p < 1 ? kept_sum(sums, options_.top_p) : slice(sums, 1, n - 1, n);
    // Draw the first candidate at which the running sum reaches a random fraction of the total.
    const Tensor target = draw_uniforms(rows, logits.device()) * total;
    tokens = minimum(sum(lt(sums, target), {1}, true), static_cast<double>(n - 1));
    if (order.defined()) {
      tokens = gather(order, 1, tokens);
    }
  }
  return squeeze(where(isfinite(largest), tokens, -1), 1);
}

std::vector<std::int64_t> Sampler::operator()(const Tensor& logits, const Tensor& seen) {
  const std::vector<std::int64_t> tokens = to_vector<std::int64_t>(draw(logits, seen));
  for (std::size_t row = 0; row < tokens.size(); ++row) {
    check(tokens[row] >= 0, "Sampler: row {} of the logits is not finite", row);
  }
  return tokens;
}

std::vector<Tokens> generate(const GPT& gpt, const std::vector<Tokens>& prompts, const GenerateOptions& options) {
  return generate_all(gpt, prompts, options);
}

std::vector<Tokens> generate(const Llama& llama, const std::vector<Tokens>& prompts, const GenerateOptions& options) {
  return generate_all(llama, prompts, options);
}

Tensor generate(const GPT& gpt, const Tensor& tokens, std::int64_t count, SamplingOptions options) {
  return extended(gpt, tokens, count, options);
}

Tensor generate(const Llama& llama, const Tensor& tokens, std::int64_t count, SamplingOptions options) {
  return extended(llama, tokens, count, options);
}

}  // namespace mica::nn
