// Fine-tunes a language model of Hugging Face by low-rank adapters (LoRA), on quantized weights if asked to (QLoRA).

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "examples/common/program.h"
#include "examples/common/progress.h"
#include "examples/common/progress_bar.h"
#include "examples/finetune/data.h"
#include "examples/finetune/options.h"
#include <mica/autograd/grad_mode.h>
#include <mica/core/creation.h>
#include <mica/core/memory_stats.h>
#include <mica/core/parallel.h>
#include <mica/core/progress.h>
#include <mica/core/rng.h>
#include <mica/io/adapter.h>
#include <mica/io/permutation.h>
#include <mica/io/pretrained.h>
#include <mica/io/tensorboard.h>
#include <mica/io/tokenizer.h>
#include <mica/nn/lora.h>
#include <mica/nn/quantized_linear.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/optim/adamw.h>
#include <mica/optim/schedule.h>

using namespace mica;

namespace {

// The examples that training and validation use.

struct Split {
  std::vector<const Example*> training, validation;
};

/// Keeps a part of the examples, evenly spaced, for validation.
Split split_of(const std::vector<Example>& examples, double part) {
  Split split;
  for (std::size_t i = 0; i < examples.size(); ++i) {
    const bool kept = std::floor(static_cast<double>(i + 1) * part) > std::floor(static_cast<double>(i) * part);
    (kept ? split.validation : split.training).push_back(&examples[i]);
  }
  check(part == 0 || !split.validation.empty(), "--validation: {} of {} examples is none", part, examples.size());
  check(!split.training.empty(), "--validation: no example is left for training");
  return split;
}

/// Batches of examples, in another order in each epoch, without an end.
class Batches {
 public:
  Batches(const std::vector<const Example*>& examples, std::int64_t batch, std::uint64_t seed, Device device)
      : examples_(examples), batch_(batch), seed_(seed), device_(device) {}

  TokenBatch next() {
    const auto size = static_cast<std::int64_t>(examples_.size());
    std::vector<const Example*> chosen;
    for (; static_cast<std::int64_t>(chosen.size()) < batch_; ++used_) {
      const io::Permutation order(size, io::mix_seeds(seed_, static_cast<std::uint64_t>(used_ / size)));
      chosen.push_back(examples_[static_cast<std::size_t>(order(used_ % size))]);
    }
    return batch_of(chosen, device_);
  }

 private:
  const std::vector<const Example*>& examples_;
  std::int64_t batch_;
  std::uint64_t seed_;
  Device device_;
  std::int64_t used_ = 0;  // examples so far
};

// Training.

struct Schedule {
  std::string name;
  double peak;
  std::int64_t warmup, total;

  double lr(std::int64_t step) const {
    if (name == "linear") {
      return optim::LinearSchedule{.peak = peak, .warmup = warmup, .total = total}.lr(step);
    }
    if (name == "constant") {
      return optim::LinearSchedule{.peak = peak, .floor = peak, .warmup = warmup, .total = total}.lr(step);
    }
    return optim::CosineSchedule{.peak = peak, .warmup = warmup, .total = total}.lr(step);
  }
};

/// The mean loss of all tokens that are learned.
template <class Model>
double evaluate(Model& model, const std::vector<const Example*>& examples, std::int64_t batch, Device device) {
  const autograd::NoGrad no_grad;
  model.eval();
  ProgressTask progress("evaluating", static_cast<std::int64_t>(examples.size()));
  double sum = 0;
  std::int64_t tokens = 0;
  for (std::size_t at = 0; at < examples.size();) {
    const std::size_t count = std::min(static_cast<std::size_t>(batch), examples.size() - at);
    const TokenBatch b = batch_of(std::span(examples).subspan(at, count), device);
    sum += model.loss(b.inputs, b.targets).item() * static_cast<double>(b.learned);
    tokens += b.learned;
    at += count;
    progress.advance(static_cast<std::int64_t>(count));
  }
  model.train();
  return sum / static_cast<double>(tokens);
}

struct Outcome {
  double loss = std::numeric_limits<double>::quiet_NaN();  // the best validation loss, or the last training loss
  std::int64_t step = 0;                                   // after which the adapter was saved
  bool complete = false;                                   // all steps were taken
};

template <class Model>
Outcome train(Model& model, const Split& split, const Options& options, Device device,
              const std::function<void()>& save) {
  const std::int64_t per_step = options.batch * options.accumulate;
  const double all = options.epochs * static_cast<double>(split.training.size()) / static_cast<double>(per_step);
  const std::int64_t total = options.steps.value_or(std::max<std::int64_t>(1, std::llround(std::ceil(all))));
  const std::int64_t eval_every = options.eval_every.value_or(std::max<std::int64_t>(1, total / 10));
  const Schedule schedule{options.schedule, options.lr, std::min(options.warmup.value_or(total * 3 / 100), total),
                          total};
  const double clip = options.clip > 0 ? options.clip : std::numeric_limits<double>::infinity();

  std::optional<io::EventWriter> events;
  if (!options.tensorboard.empty()) {
    events.emplace(options.tensorboard);
  }
  optim::AdamW optimizer(nn::trainable_parameters(model), {.lr = options.lr, .weight_decay = options.weight_decay});
  Batches batches(split.training, options.batch, options.seed, device);
  const bool validates = !split.validation.empty();
  Outcome outcome;
  double best = std::numeric_limits<double>::infinity();
  if (validates) {
    const double before = evaluate(model, split.validation, options.batch, device);
    fmt::print("validation loss before training: {:.4f}\n", before);
    if (events) {
      events->scalar("loss/validation", before, 0);
    }
  }
  model.train();
  Progress progress(total);
  bool complete = false, last = false;
  for (std::int64_t step = 1; !last; ++step) {
    const auto start = std::chrono::steady_clock::now();
    std::vector<TokenBatch> parts;
    std::int64_t learned = 0, read = 0;
    for (std::int64_t i = 0; i < options.accumulate; ++i) {
      parts.push_back(batches.next());
      learned += parts.back().learned;
      read += parts.back().inputs.numel();
    }
    optimizer.set_lr(schedule.lr(step - 1));
    optimizer.zero_grad();
    double loss = 0;
    for (const TokenBatch& part : parts) {
      // Each token counts the same, whichever batch it is in.
      const double share = static_cast<double>(part.learned) / static_cast<double>(learned);
      const Tensor mean = model.loss(part.inputs, part.targets);
      mean.backward(full({}, share, mean.dtype(), device));
      loss += share * mean.detach().item();
    }
    const double norm = optimizer.step({.max_grad_norm = clip}).item();
    check(std::isfinite(loss), "the loss became {} at step {}; a lower --lr may help", loss, step);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

    complete = step == total;
    last = complete || interrupted;
    std::optional<double> validation;
    if (validates && (step % eval_every == 0 || last)) {
      validation = evaluate(model, split.validation, options.batch, device);
      if (*validation < best) {
        best = *validation;
        outcome = {.loss = best, .step = step};
        save();
      }
    }
    if (!validates) {
      outcome = {.loss = loss, .step = step};
    }
    if (events) {
      events->scalar("loss/train", loss, step);
      events->scalar("lr", schedule.lr(step - 1), step);
      events->scalar("grad_norm", norm, step);
      if (validation) {
        events->scalar("loss/validation", *validation, step);
      }
    }
    if (validation || last || progress.wants(step)) {
      progress.show(step, loss, validation,
                    {.tokens_per_second = static_cast<double>(read) / seconds,
                     .share_of_peak = {},
                     .peak_memory = memory_stats(device).peak});
    }
  }
  if (!validates) {
    save();
  }
  outcome.complete = complete;
  return outcome;
}

// The model.

std::vector<std::string> targets_of(nn::Module& model, const std::vector<std::string>& patterns) {
  if (!patterns.empty()) {
    return patterns;
  }
  std::vector<std::string> names;
  for (const nn::AdaptedLayer& layer : nn::linear_layers(model)) {
    if (layer.name != "lm_head") {
      names.push_back(layer.name);
    }
  }
  return names;
}

DType dtype_named(const std::string& name, Device device) {
  if (name == "auto") {
    return has_fast_bfloat16(device) ? bfloat16 : float32;
  }
  return name == "bfloat16" ? bfloat16 : float32;
}

void set_recompute(nn::GPT& model) { model.config.checkpoint = true; }
void set_recompute(nn::Llama& model) { model.model.checkpoint = true; }

void tune(nn::Bert&, const io::Tokenizer&, const Options&, Device) {
  fail("finetune: BERT is an encoder, which predicts no next token");
}

template <class Model>
void tune(Model& model, const io::Tokenizer& tokenizer, const Options& options, Device device) {
  const std::int64_t positions = model.config.context;
  const std::int64_t context = options.context.value_or(std::min<std::int64_t>(1024, positions));
  if (context > positions) {
    throw UsageError(fmt::format("--context: expected at most the model's {} positions, got {}", positions, context));
  }
  check(tokenizer.vocabulary_size() <= model.config.vocab, "{}: the tokenizer has {} tokens, but the model only {}",
        options.model, tokenizer.vocabulary_size(), model.config.vocab);
  const Examples data = read_examples(options.data, tokenizer, {.context = context, .skip_long = options.skip_long});
  const Split split = split_of(data.examples, options.validation);

  if (options.bits) {
    nn::quantize(model, {.bits = static_cast<int>(*options.bits)});
  }
  model.to(device);
  if (options.recompute) {
    set_recompute(model);
  }
  manual_seed(options.seed);
  const std::vector<std::string> adapted = nn::add_lora(model, targets_of(model, options.targets), options.lora);

  std::int64_t learned = 0, trained = 0, parameters = 0;
  for (const Example* const example : split.training) {
    learned += example->learned();
  }
  for (const Tensor& parameter : nn::trainable_parameters(model)) {
    trained += parameter.numel();
  }
  for (const auto& [name, tensor] : model.state_dict()) {
    parameters += static_cast<std::int64_t>(tensor.bytes());
  }
  fmt::print("data: {}, {} examples for training, {} for validation{}, {} tokens to learn\n", options.data,
             split.training.size(), split.validation.size(),
             data.skipped > 0 ? fmt::format(", {} skipped", data.skipped) : "", learned);
  fmt::print("model: {}, {:.1f} MiB{}, on {}; {} adapters of rank {} with {} parameters\n", options.model,
             static_cast<double>(parameters) / 0x1p20,
             options.bits ? fmt::format(", linear layers in {} bits", *options.bits) : "", device, adapted.size(),
             options.lora.rank, trained);

  const Outcome outcome =
      train(model, split, options, device, [&] { io::save_adapter(model, options.out, options.model); });
  fmt::print("{}; {} loss {:.4f} at step {}\nwrote {}\n", outcome.complete ? "done" : "stopped",
             split.validation.empty() ? "training" : "best validation", outcome.loss, outcome.step, options.out);
}

void run(const Options& options) {
  if (options.threads > 0) {
    set_num_threads(options.threads);
  }
  const Device device = device_named(options.device);
  const ProgressBar progress;
  const io::Tokenizer tokenizer = io::Tokenizer::load(options.model);
  // Weights are quantized on the CPU, so only the small ones are moved to a GPU.
  io::PretrainedModel model = io::load_pretrained(
      options.model, {.device = options.bits ? Device::cpu() : device, .dtype = dtype_named(options.dtype, device)});
  catch_interrupts();
  std::visit([&](auto& m) { tune(m, tokenizer, options, device); }, model);
}

}  // namespace

int main(int argc, char** argv) { return run_with_options(argc, argv, run); }
