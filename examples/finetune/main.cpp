// Fine-tunes a Hugging Face language model with low-rank adapters (LoRA), optionally on quantized weights (QLoRA).

#include <fmt/core.h>
#include <fmt/ranges.h>

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

#include "examples/common/checkpoints.h"
#include "examples/common/program.h"
#include "examples/common/progress.h"
#include "examples/common/progress_bar.h"
#include "examples/common/ranks.h"
#include "examples/finetune/data.h"
#include "examples/finetune/options.h"
#include <mica/autograd/grad_mode.h>
#include <mica/core/creation.h>
#include <mica/core/memory_stats.h>
#include <mica/core/parallel.h>
#include <mica/core/progress.h>
#include <mica/core/rng.h>
#include <mica/io/adapter.h>
#include <mica/io/file.h>
#include <mica/io/json.h>
#include <mica/io/permutation.h>
#include <mica/io/pretrained.h>
#include <mica/io/pretrained_config.h>
#include <mica/io/tensorboard.h>
#include <mica/io/tokenizer.h>
#include <mica/nn/evaluation.h>
#include <mica/nn/lora.h>
#include <mica/nn/quantized_linear.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/inplace/inplace.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/optim/adamw.h>
#include <mica/optim/schedule.h>

using namespace mica;

namespace {

// The examples that training and validation use.

struct Split {
  std::vector<const Example*> training, validation;
};

/// Sets a fraction of the examples, evenly spaced, aside for validation.
Split split_of(const std::vector<Example>& examples, double part) {
  Split split;
  for (std::size_t i = 0; i < examples.size(); ++i) {
    const bool kept = std::floor(static_cast<double>(i + 1) * part) > std::floor(static_cast<double>(i) * part);
    (kept ? split.validation : split.training).push_back(&examples[i]);
  }
  check(part == 0 || !split.validation.empty(), "--validation: {} of {} examples is less than one example", part,
        examples.size());
  check(!split.training.empty(), "--validation: no example is left for training");
  return split;
}

/// An endless sequence of batches of examples, in a different order in each epoch.
class Batches {
 public:
  Batches(const std::vector<const Example*>& examples, const Options& options, Device device)
      : examples_(examples), batch_(options.batch), seed_(options.seed), pack_(options.pack), device_(device) {}

  /// The number of examples used so far, and skipping them in a resumed run.
  std::int64_t used() const { return used_; }
  void skip_to(std::int64_t used) { used_ = used; }

  TokenBatch next() {
    const auto size = static_cast<std::int64_t>(examples_.size());
    std::vector<const Example*> chosen;
    for (; static_cast<std::int64_t>(chosen.size()) < batch_; ++used_) {
      const io::Permutation order(size, io::mix_seeds(seed_, static_cast<std::uint64_t>(used_ / size)));
      chosen.push_back(examples_[static_cast<std::size_t>(order(used_ % size))]);
    }
    return batch_of(chosen, pack_, device_);
  }

 private:
  const std::vector<const Example*>& examples_;
  std::int64_t batch_;
  std::uint64_t seed_;
  bool pack_;
  Device device_;
  std::int64_t used_ = 0;
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

/// The mean loss over all trained tokens.
template <class Model>
double evaluate(const Model& model, const std::vector<const Example*>& examples, const Options& options,
                Device device) {
  const nn::Evaluation guard;
  ProgressTask progress("evaluating", static_cast<std::int64_t>(examples.size()));
  double sum = 0;
  std::int64_t tokens = 0;
  for (std::size_t at = 0; at < examples.size();) {
    const std::size_t count = std::min(static_cast<std::size_t>(options.batch), examples.size() - at);
    const TokenBatch b = batch_of(std::span(examples).subspan(at, count), options.pack, device);
    sum += model.loss(b.inputs, b.targets, b.packed).item() * static_cast<double>(b.learned);
    tokens += b.learned;
    at += count;
    progress.advance(static_cast<std::int64_t>(count));
  }
  return sum / static_cast<double>(tokens);
}

struct Outcome {
  double loss = std::numeric_limits<double>::quiet_NaN();  // the best validation loss, or the last training loss
  std::int64_t step = 0;                                   // the step after which the adapter was saved
  bool complete = false;                                   // whether all steps were taken
  std::int64_t steps = 0;                                  // steps taken
};

/// Identifies a base model by its configuration and weights, independently of its folder.
template <class Model>
std::string fingerprint_of(const Model& model) {
  StateDict weights;
  for (const auto& [name, parameter] : model.named_parameters()) {
    weights.emplace(name, parameter);
  }
  return io::fingerprint(weights, {{"config", io::to_json({io::config_entries(model.config)})}});
}

/// The settings on which the adapter's bits depend. `base` is the fingerprint of the model without adapters.
template <class Model>
io::Metadata settings_of(const Model& model, const std::string& base, const Split& split, const Options& o,
                         const Schedule& schedule, std::int64_t eval_every, Device device) {
  const auto text = [](auto value) { return fmt::format("{}", value); };
  std::uint64_t sum = 0;
  for (const std::vector<const Example*>* const examples : {&split.training, &split.validation}) {
    for (const Example* const example : *examples) {
      sum = io::mix_seeds(sum, static_cast<std::uint64_t>(example->first));
      for (const std::int64_t token : example->tokens) {
        sum = io::mix_seeds(sum, static_cast<std::uint64_t>(token));
      }
    }
  }
  return {{"model", "configuration and weights of fingerprint " + base},
          {"dtype", text(model.parameters().front().dtype())},
          {"bits", text(o.bits.value_or(0))},
          {"device", device.is_cpu() ? "cpu" : "cuda"},
          {"rank", text(o.lora.rank)},
          {"alpha", text(o.lora.alpha)},
          {"dropout", text(o.lora.dropout)},
          {"target", fmt::format("{}", fmt::join(o.targets, ","))},
          {"steps", text(schedule.total)},
          {"batch", text(o.batch)},
          {"accumulate", text(o.accumulate)},
          {"pack", text(o.pack)},
          {"lr", text(o.lr)},
          {"schedule", o.schedule},
          {"warmup", text(schedule.warmup)},
          {"weight-decay", text(o.weight_decay)},
          {"clip", text(o.clip)},
          {"eval-every", text(eval_every)},
          {"seed", text(o.seed)},
          {"data", fmt::format("{} and {} examples, fingerprint {:016x}", split.training.size(),
                               split.validation.size(), sum)}};
}

/// The adapters' parameters, by their names in the model.
template <class Model>
StateDict trained_state(const Model& model) {
  StateDict state;
  for (const auto& [name, parameter] : model.named_parameters()) {
    if (parameter.requires_grad()) {
      state.emplace(name, parameter);
    }
  }
  return state;
}

double number_in(const StateDict& state, const char* name) {
  check(state.contains(name), "it was not written by finetune");
  return state.at(name).item();
}

template <class Model>
Outcome train(Model& model, const std::string& base, const Split& split, const Options& options, Device device,
              const std::function<void()>& save) {
  const std::int64_t per_step = options.batch * options.accumulate;
  const double all = options.epochs * static_cast<double>(split.training.size()) / static_cast<double>(per_step);
  const std::int64_t total = options.steps.value_or(std::max<std::int64_t>(1, std::llround(std::ceil(all))));
  const std::int64_t eval_every = options.eval_every.value_or(std::max<std::int64_t>(1, total / 10));
  Schedule schedule{options.schedule, options.lr, std::min(options.warmup.value_or(total * 3 / 100), total), total};
  const double clip = options.clip > 0 ? options.clip : std::numeric_limits<double>::infinity();

  optim::AdamW optimizer(nn::trainable_parameters(model), {.lr = options.lr, .weight_decay = options.weight_decay});
  Batches batches(split.training, options, device);
  const bool validates = !split.validation.empty();
  Outcome outcome;
  double best = std::numeric_limits<double>::infinity();

  CheckpointOptions checkpointing = options.checkpoint;
  checkpointing.every = options.checkpoint_every.value_or(eval_every);
  RunCheckpoints checkpoints(
      "finetune", checkpointing, settings_of(model, base, split, options, schedule, eval_every, device),
      {.changed = {"steps", "eval-every"},
       .kept = options.warmup ? std::vector<std::string>{} : std::vector<std::string>{"warmup"}});
  std::int64_t done = 0;
  checkpoints.resume([&](const io::TrainingCheckpoint& saved) {
    schedule.warmup = number_of(saved.settings, "warmup");
    check(schedule.warmup <= total, "expected at least as many steps as its warm-up has, {}, got {}", schedule.warmup,
          total);
    const StateDict& progress = saved.part("progress");
    outcome = {.loss = number_in(progress, "loss"), .step = static_cast<std::int64_t>(number_in(progress, "step"))};
    batches.skip_to(static_cast<std::int64_t>(number_in(progress, "examples")));
    const StateDict& adapter = saved.part("adapter");
    for (const auto& [name, parameter] : trained_state(model)) {
      check(adapter.contains(name) && adapter.at(name).shape() == parameter.shape(), "it lacks {} of shape {}", name,
            parameter.shape());
      const autograd::NoGrad no_grad;
      copy_(parameter, adapter.at(name));
    }
    optimizer.load_state_dict(saved.part("optimizer"));
    set_rng_state(saved.random);
    done = saved.step;
    best = validates && outcome.step > 0 ? outcome.loss : best;
  });
  const auto checkpoint_of = [&](std::int64_t step) {
    io::TrainingCheckpoint checkpoint{.step = step, .parts = {}, .random = rng_state(), .data = {}, .settings = {}};
    checkpoint.parts["adapter"] = trained_state(model);
    checkpoint.parts["optimizer"] = optimizer.state_dict();
    checkpoint.parts["progress"] = {{"loss", from_data({outcome.loss}, Shape{})},
                                    {"step", from_data({outcome.step}, Shape{})},
                                    {"examples", from_data({batches.used()}, Shape{})}};
    return checkpoint;
  };
  io::remove_unfinished(options.out, [](const std::string& name) {
    return name == "adapter_model.safetensors" || name == "adapter_config.json";
  });
  check(!validates || outcome.step == 0 || io::is_there(options.out),
        "{}, the best adapter until step {}, is missing: pass the --out of the run to be resumed", options.out, done);
  if (done > 0) {
    fmt::print("resumed after step {}\n{}", done, checkpoints.changes());
  } else if (options.checkpoint.resume) {
    fmt::print("{} has no complete checkpoint: starting at step 1\n", options.checkpoint.folder);
  }

  std::optional<io::EventWriter> events;
  if (!options.tensorboard.empty()) {
    const auto resumed_at = options.checkpoint.resume ? std::optional(done > 0 ? done + 1 : 0) : std::nullopt;
    events.emplace(options.tensorboard, io::EventWriterOptions{.resumed_at = resumed_at});
  }
  if (validates && done == 0) {
    const double before = evaluate(model, split.validation, options, device);
    fmt::print("validation loss before training: {:.4f}\n", before);
    if (events) {
      events->scalar("loss/validation", before, 0);
    }
  }
  model.train();
  Progress progress(total, done);
  bool complete = done == total, last = complete;
  outcome.steps = done;
  for (std::int64_t step = done + 1; !last; ++step) {
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
      // All tokens of the step have the same weight, whichever batch they are in.
      const double share = static_cast<double>(part.learned) / static_cast<double>(learned);
      const Tensor mean = model.loss(part.inputs, part.targets, part.packed);
      mean.backward(full({}, share, mean.dtype(), device));
      loss += share * mean.detach().item();
    }
    const double norm = optimizer.step({.max_grad_norm = clip}).item();
    check(std::isfinite(loss), "the loss became {} at step {}; a lower --lr may help", loss, step);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

    complete = step == total;
    last = complete || interrupted;
    // A run that will be resumed validates at the same steps as an uninterrupted run, so its best adapter is the same.
    const bool ends = complete || (last && !checkpoints.on());
    std::optional<double> validation;
    if (validates && (step % eval_every == 0 || ends)) {
      validation = evaluate(model, split.validation, options, device);
      if (*validation < best) {
        best = *validation;
        outcome = {.loss = best, .step = step};
        save();
      }
    }
    if (!validates) {
      outcome = {.loss = loss, .step = step};
    }
    outcome.steps = step;
    if (checkpoints.is_due(step) || (last && checkpoints.on())) {
      checkpoints.save(checkpoint_of(step));
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
  checkpoints.finish();
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
  fail("finetune: BERT is an encoder, which does not predict a next token");
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

  // The fingerprint reads all weights, so only runs with checkpoints compute it.
  const std::string base = options.checkpoint.folder.empty() ? "" : fingerprint_of(model);
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
  fmt::print("data: {}, {} examples for training, {} for validation{}, {} tokens to train on\n", options.data,
             split.training.size(), split.validation.size(),
             data.skipped > 0 ? fmt::format(", {} skipped", data.skipped) : "", learned);
  fmt::print("model: {}, {:.1f} MiB{}, on {}; {} adapters of rank {} with {} parameters\n", options.model,
             static_cast<double>(parameters) / 0x1p20,
             options.bits ? fmt::format(", linear layers in {} bits", *options.bits) : "", device, adapted.size(),
             options.lora.rank, trained);

  const Outcome outcome =
      train(model, base, split, options, device, [&] { io::save_adapter(model, options.out, options.model); });
  const char* const end = outcome.complete ? "done" : "stopped";
  if (outcome.step > 0) {
    fmt::print("{}; {} loss {:.4f} at step {}\nwrote {}\n", end,
               split.validation.empty() ? "training" : "best validation", outcome.loss, outcome.step, options.out);
  } else {
    fmt::print("{} before the first validation\n", end);
  }
  if (!outcome.complete && !options.checkpoint.folder.empty()) {
    fmt::print("stopped at step {}; resume with the same command and --resume\n", outcome.steps);
  }
}

void run(const Options& options) {
  refuse_ranks("finetune");
  if (options.threads > 0) {
    set_num_threads(options.threads);
  }
  const Device device = device_named(options.device);
  const ProgressBar progress;
  const io::Tokenizer tokenizer = io::Tokenizer::load(options.model);
  // Weights are quantized on the CPU, so that only the quantized ones are moved to a GPU.
  io::PretrainedModel model = io::load_pretrained(
      options.model, {.device = options.bits ? Device::cpu() : device, .dtype = dtype_named(options.dtype, device)});
  catch_interrupts();
  std::visit([&](auto& m) { tune(m, tokenizer, options, device); }, model);
}

}  // namespace

int main(int argc, char** argv) { return run_with_options(argc, argv, run); }
