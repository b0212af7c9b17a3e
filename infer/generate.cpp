#include <algorithm>
#include <optional>
#include <utility>

#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/cuda_graph.h>
#include <mica/core/detail/host_reader.h>
#include <mica/core/progress.h>
#include <mica/infer/generate.h>
#include <mica/nn/evaluation.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/index/index.h>
#include <mica/ops/join/join.h>
#include <mica/ops/view/view.h>

namespace mica::infer {

namespace {

using Tokens = std::vector<std::int64_t>;

constexpr std::int64_t kMaxTokens = std::int64_t{1} << 24;  // more would take days
constexpr std::int64_t kReserved = 8192;                    // new positions to reserve memory for at first

// The texts of a batch, and the state needed to continue them.
class Texts {
 public:
  Texts(Decoder& decoder, const std::vector<Tokens>& prompts, const GenerateOptions& options)
      : decoder_(decoder),
        sampler_(options.sampling),
        texts_(prompts),
        count_(options.count),
        graph_allowed_(options.cuda_graph && decoder.device().is_cuda()),
        next_(empty({decoder.batch()}, int64, decoder.device())),
        reader_(decoder.device(), decoder.batch()) {
    if (options.sampling.repetition_penalty != 1) {
      vocabulary_ = arange(static_cast<double>(decoder.vocab()), int64, decoder.device());
      remember_prompts();
    }
  }

  /// Launches the computation of one more token of each text, without waiting for it.
  void step() {
    const std::int64_t length = decoder_.length();
    if (!goes_on()) {
      graph_ = {};
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
  bool runs_ahead() const { return decoder_.device().is_cuda() && goes_on(); }

 private:
  bool goes_on() const { return has_started_ && decoder_.length() < decoder_.context(); }

  // Computes the text from its start, or its last tokens if it exceeds the context.
  void start() {
    // If the whole text is read again for each token, that is not reported as a task.
    std::optional<ProgressObserver> none;
    if (std::exchange(has_started_, true)) {
      none.emplace(nullptr);
    }
    is_on_host_ = false;
    std::size_t length = 0;
    for (const Tokens& text : texts_) {
      length = std::max(length, text.size());
    }
    length = std::min(length, static_cast<std::size_t>(decoder_.context()));
    Tokens padded, padding;
    for (const Tokens& text : texts_) {
      const std::size_t used = std::min(length, text.size());
      padding.push_back(static_cast<std::int64_t>(length - used));
      padded.insert(padded.end(), length - used, 0);
      padded.insert(padded.end(), text.end() - static_cast<std::ptrdiff_t>(used), text.end());
    }
    const auto steps = static_cast<std::int64_t>(length);
    decoder_.reserve(std::min(decoder_.context(), steps + std::min(count_, kReserved)));
    choose(decoder_.prefill(from_data(padded, {decoder_.batch(), steps}, decoder_.device()), padding));
  }

  void go_on() {
    if (sampler_.options().takes_largest() && !seen_.defined()) {
      is_on_host_ = decoder_.replace(next_, reader_.slots());
    } else {
      choose(decoder_.step(next_));
    }
  }

  void choose(const Tensor& logits) {
    const Tensor tokens = sampler_.draw(logits, seen_);
    if (seen_.defined()) {
      copy_into(seen_, logical_or(seen_, eq(unsqueeze(tokens, 1), vocabulary_)));
    }
    copy_into(next_, tokens);
  }

  // The first step runs without a graph: it creates library handles and loads kernels.
  void replay() {
    if (decoder_.reserve(decoder_.length() + 1)) {
      graph_ = {};
    }
    if (graph_.empty()) {
      if (!std::exchange(is_warm_, true)) {
        return go_on();
      }
      try {
        graph_ = cuda::capture([this] { go_on(); }, decoder_.device());
      } catch (const Error&) {
        // The step needs host values, and nothing has run yet. Any other error is reported by the step itself.
        graph_allowed_ = false;
        return go_on();
      }
    }
    graph_.replay();
  }

  void remember_prompts() {
    Tensors rows;
    for (const Tokens& text : texts_) {
      const Tensor tokens = from_data(text, {static_cast<std::int64_t>(text.size())}, decoder_.device());
      rows.push_back(gt(scatter_add(zeros({decoder_.vocab()}, float32, decoder_.device()), 0, tokens,
                                    ones(tokens.shape(), float32, decoder_.device())),
                        0));
    }
    seen_ = stack(rows);
  }

  Decoder& decoder_;
  Sampler sampler_;
  std::vector<Tokens> texts_;
  std::int64_t count_;
  bool graph_allowed_;
  bool has_started_ = false;
  bool is_warm_ = false;
  Tensor next_;  // (B)
  HostReader reader_;
  bool is_on_host_ = false;  // the last step has written its tokens to a slot of the reader
  Tensor vocabulary_;        // with a repetition penalty: all tokens
  Tensor seen_;              // with a repetition penalty: the tokens that each text contains, (B, vocab) bool
  cuda::Graph graph_;        // of go_on()
};

void check_arguments(const Decoder& decoder, const std::vector<Tokens>& prompts, const GenerateOptions& options) {
  check(options.count >= 0 && options.count <= kMaxTokens, "generate: expected from 0 to {} new tokens, got {}",
        kMaxTokens, options.count);
  check(prompts.empty() || std::ssize(prompts) == decoder.batch(),
        "generate: expected {} prompts, the decoder's texts, got {}", decoder.batch(), prompts.size());
  check(options.window == 0 || options.window == decoder.window(),
        "generate: expected the decoder's window, {}, got {}", decoder.window(), options.window);
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    check(!prompts[i].empty(), "generate: expected at least one token in each prompt, got none in number {}", i);
    for (const std::int64_t token : prompts[i]) {
      check(token >= 0 && token < decoder.vocab(), "generate: expected tokens in [0, {}), got {} in prompt {}",
            decoder.vocab(), token, i);
    }
  }
}

}  // namespace

std::vector<Tokens> generate(Decoder& decoder, const std::vector<Tokens>& prompts, const GenerateOptions& options) {
  check_arguments(decoder, prompts, options);
  std::vector<Tokens> results(prompts.size());
  if (prompts.empty()) {
    return results;
  }
  const nn::Evaluation guard;
  Texts texts(decoder, prompts, options);
  std::vector<bool> ended(prompts.size());
  std::int64_t started = 0;
  for (std::int64_t i = 0; i < options.count && std::find(ended.begin(), ended.end(), false) != ended.end(); ++i) {
    // Launch this step, and also the next one before the host waits for this one's tokens.
    while (started <= std::min(i + 1, options.count - 1) && (started == i || texts.runs_ahead())) {
      texts.step();
      ++started;
    }
    const Tokens tokens = texts.next();
    for (std::size_t text = 0; text < tokens.size(); ++text) {
      const std::int64_t token = tokens[text];
      // A text that has ended continues as padding, for the sake of the others.
      texts.append(text, std::max<std::int64_t>(token, 0));
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

}  // namespace mica::infer
