// Fine-tunes a Hugging Face language model with low-rank adapters (LoRA), optionally on quantized weights (QLoRA).

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "examples/common/program.h"
#include "examples/common/ranks.h"
#include "examples/finetune/data.h"
#include "examples/finetune/options.h"
#include <mica/mica.h>

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

train::Batch batch_of(std::span<const Example* const> examples, const Options& options, Device device) {
  TokenBatch tokens = batch_of(examples, options.pack, device);
  // The loss is a mean over the learned tokens, all of which have the same weight, whichever batch they are in.
  train::Batch batch{.fields = {tokens.inputs, tokens.targets},
                     .weight = static_cast<double>(tokens.learned),
                     .units = tokens.inputs.numel()};
  if (options.pack) {
    batch.fields.push_back(tokens.packed.positions);
    batch.fields.push_back(tokens.packed.documents);
  }
  return batch;
}

/// An endless sequence of batches of examples, in a different order in each epoch.
class ExampleBatches : public train::Batches {
 public:
  ExampleBatches(const std::vector<const Example*>& examples, const Options& options, Device device)
      : examples_(examples), options_(options), device_(device) {}

  train::Batch next() override {
    const auto size = static_cast<std::int64_t>(examples_.size());
    std::vector<const Example*> chosen;
    for (; static_cast<std::int64_t>(chosen.size()) < options_.batch; ++used_) {
      const io::Permutation order(size, io::mix_seeds(options_.seed, static_cast<std::uint64_t>(used_ / size)));
      chosen.push_back(examples_[static_cast<std::size_t>(order(used_ % size))]);
    }
    return batch_of(chosen, options_, device_);
  }
  // The index counts the examples of all epochs.
  io::DataPosition position() const override { return {.index = used_}; }
  void seek(const io::DataPosition& position) override { used_ = position.index; }

 private:
  const std::vector<const Example*>& examples_;
  const Options& options_;
  Device device_;
  std::int64_t used_ = 0;
};

train::Validation validation_of(const std::vector<const Example*>& examples, const Options& options, Device device) {
  if (examples.empty()) {
    return {};
  }
  std::vector<train::Batch> batches;
  const auto batch = static_cast<std::size_t>(options.batch);
  for (std::size_t at = 0; at < examples.size(); at += batch) {
    const std::size_t count = std::min(batch, examples.size() - at);
    batches.push_back(batch_of(std::span(examples).subspan(at, count), options, device));
  }
  return train::Validation(std::move(batches));
}

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

/// Identifies a base model by its configuration and weights, independently of its folder.
template <class Model>
std::string fingerprint_of(const Model& model) {
  StateDict weights;
  for (const auto& [name, parameter] : model.named_parameters()) {
    weights.emplace(name, parameter);
  }
  for (const auto& [name, buffer] : model.named_buffers()) {
    weights.emplace(name, buffer);
  }
  return io::fingerprint(weights, {{"config", io::to_json({io::config_entries(model.config)})}});
}

/// The settings on which the adapter's bits depend, except for those that the trainer knows. `base` is the fingerprint
/// of the model without adapters.
io::Metadata settings_of(const std::string& base, const Split& split, const Options& o, const Schedule& schedule) {
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
          {"bits", text(o.bits.value_or(0))},
          {"rank", text(o.lora.rank)},
          {"alpha", text(o.lora.alpha)},
          {"dropout", text(o.lora.dropout)},
          {"target", fmt::format("{}", fmt::join(o.targets, ","))},
          {"batch", text(o.batch)},
          {"pack", text(o.pack)},
          {"lr", text(o.lr)},
          {"schedule", o.schedule},
          {"warmup", text(schedule.warmup)},
          {"weight-decay", text(o.weight_decay)},
          {"seed", text(o.seed)},
          {"data", fmt::format("{} and {} examples, fingerprint {:016x}", split.training.size(),
                               split.validation.size(), sum)}};
}

// The format of finetune's checkpoints: the trainer's "model" is the part "adapter", and "progress" has its "best" and
// the position in the data.

void to_own_format(io::TrainingCheckpoint& checkpoint) {
  checkpoint.parts["adapter"] = std::move(checkpoint.parts["model"]);
  StateDict& progress = checkpoint.parts["progress"] = std::move(checkpoint.parts["best"]);
  if (progress.at("step").item() == 0) {
    progress["loss"] = full({}, std::numeric_limits<double>::quiet_NaN(), float64);
  }
  progress["examples"] = from_data({checkpoint.data.index}, Shape{});
  checkpoint.data = {};
  checkpoint.parts.erase("model");
  checkpoint.parts.erase("best");
}

void from_own_format(io::TrainingCheckpoint& checkpoint) {
  StateDict& progress = checkpoint.parts["progress"];
  for (const char* const name : {"loss", "step", "examples"}) {
    check(progress.contains(name), "it was not written by finetune");
  }
  checkpoint.data.index = static_cast<std::int64_t>(progress.at("examples").item());
  checkpoint.parts["best"] = std::move(progress);
  checkpoint.parts["model"] = std::move(checkpoint.parts["adapter"]);
}

template <class Model>
void train_adapter(Model& model, const std::string& base, const Split& split, const Options& o, Device device) {
  const std::int64_t per_step = o.batch * o.accumulate;
  const double all = o.epochs * static_cast<double>(split.training.size()) / static_cast<double>(per_step);
  const std::int64_t total = o.steps.value_or(std::max<std::int64_t>(1, std::llround(std::ceil(all))));
  Schedule schedule{o.schedule, o.lr, std::min(o.warmup.value_or(total * 3 / 100), total), total};
  optim::AdamW optimizer(nn::trainable_parameters(model), {.lr = o.lr, .weight_decay = o.weight_decay});
  ExampleBatches batches(split.training, o, device);
  const auto loss = [&](const Tensors& x) {
    return model.loss(x[0], x[1], x.size() > 2 ? nn::PackedDocuments{x[2], x[3]} : nn::PackedDocuments{});
  };

  train::TrainerOptions options{.steps = total,
                                .validation = validation_of(split.validation, o, device),
                                .eval_every = o.eval_every.value_or(std::max<std::int64_t>(1, total / 10)),
                                .validate_first = true,
                                .out = "",
                                .tensorboard = o.tensorboard,
                                .weight_histograms = false,
                                .checkpoint = o.checkpoint,
                                .settings = settings_of(base, split, o, schedule),
                                .unit = "tokens",
                                .names = {.program = "finetune", .prefix = "--"}};
  options.step = {.accumulate = o.accumulate,
                  .clip = o.clip,
                  .schedule = [&](std::int64_t step) { return schedule.lr(step); },
                  .cuda_graph = false,  // batches have different shapes
                  .trained_only = true};
  options.checkpoint.every = o.checkpoint_every.value_or(options.eval_every);
  if (!o.warmup) {
    options.kept_settings = {"warmup"};
  }
  options.save = [&](const std::filesystem::path&) { io::save_adapter(model, o.out, o.model); };
  options.on_save = to_own_format;
  options.on_resume = [&](io::TrainingCheckpoint& saved) {
    schedule.warmup = train::number_of(saved.settings, "warmup");
    check(schedule.warmup <= total, "expected at least as many steps as its warm-up has, {}, got {}", schedule.warmup,
          total);
    from_own_format(saved);
  };
  model.train();
  train::Trainer trainer(model, loss, batches, optimizer, options);
  io::remove_unfinished(o.out, [](const std::string& name) {
    return name == "adapter_model.safetensors" || name == "adapter_config.json";
  });
  const bool validates = !split.validation.empty();
  check(!validates || trainer.best().step == 0 || io::is_there(o.out),
        "{}, the best adapter until step {}, is missing: pass the --out of the run to be resumed", o.out,
        trainer.steps_done());

  const train::Outcome outcome = trainer.run();
  const char* const end = outcome.steps == total ? "done" : "stopped";
  if (outcome.best.step > 0) {
    fmt::print("{}; {} loss {:.4f} at step {}\nwrote {}\n", end, validates ? "best validation" : "training",
               outcome.best.loss, outcome.best.step, o.out);
  } else {
    fmt::print("{} before the first validation\n", end);
  }
  if (outcome.steps < total && !o.checkpoint.folder.empty()) {
    fmt::print("stopped at step {}; resume with the same command and --resume\n", outcome.steps);
  }
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

template <class Model>
void set_recompute(Model& model) {
  if constexpr (requires { model.model.checkpoint; }) {
    model.model.checkpoint = true;
  } else {
    model.config.checkpoint = true;
  }
}

template <class Model>
void tune(Model&, const io::Tokenizer&, const Options&, Device) {
  fail("finetune: the model is an encoder, which does not predict a next token");
}

template <infer::CachedModel Model>
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
    nn::quantize(model, static_cast<int>(*options.bits));
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

  train_adapter(model, base, split, options, device);
}

void run(const Options& options) {
  refuse_ranks("finetune");
  if (options.threads > 0) {
    set_num_threads(options.threads);
  }
  const Device device = device_named(options.device);
  const train::ProgressBar progress;
  const io::Tokenizer tokenizer = io::Tokenizer::load(options.model);
  // Weights are quantized on the CPU, so that only the quantized ones are moved to a GPU.
  io::PretrainedModel model = io::load_pretrained(options.model, {.device = options.bits ? Device::cpu() : device,
                                                                  .dtype = dtype_named(options.dtype, device),
                                                                  .packed = !options.bits.has_value()});
  const train::StopSignals signals;
  std::visit([&](auto& m) { tune(m, tokenizer, options, device); }, model);
}

}  // namespace

int main(int argc, char** argv) { return run_with_options(argc, argv, run); }
