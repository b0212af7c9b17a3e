// Trains a transformer on the characters of a text, or on a file of tokens, and generates a sample.

#include <fmt/core.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>

#include "examples/common/character_model.h"
#include "examples/common/program.h"
#include "examples/train_transformer/corpus.h"
#include "examples/train_transformer/options.h"
#include <mica/mica.h>

using namespace mica;

namespace {

/// The training data; its last tenth is used for validation.
struct Data {
  std::optional<io::CharTokenizer> tokenizer;  // for a text
  std::vector<std::int32_t> characters;        // the text's tokens
  std::unique_ptr<io::TokenFile> file;         // for a file of tokens
  std::int64_t vocab = 0;

  io::TokenView tokens() const { return (file ? file->tokens() : io::TokenView(characters)).below(vocab); }
  io::TokenView training() const { return tokens().part(0, tokens().size() * 9 / 10); }
  io::TokenView validation() const { return tokens().part(tokens().size() * 9 / 10, tokens().size()); }
};

Data read_data(const Options& o) {
  Data data;
  std::string text;
  // Read errors name the file.
  if (o.has_tokens()) {
    data.file = std::make_unique<io::TokenFile>(o.data);
  } else {
    text = o.data.empty() ? built_in_corpus() : io::read_text(o.data);
  }
  try {
    if (!data.file) {
      check(!text.empty(), "expected text, got nothing");
      data.tokenizer = io::CharTokenizer::of(text);
      data.characters = data.tokenizer->encode(text);
    }
    data.vocab = data.file ? nn::gpt2_config("124m").vocab : data.tokenizer->size();
    check(data.validation().size() > o.model.context,
          "expected more than {} tokens for a context of {}, as a tenth is for validation; got {}",
          10 * o.model.context, o.model.context, data.tokens().size());
    return data;
  } catch (const Error& error) {
    fail("{}: {}", o.data.empty() ? "the built-in text" : o.data, error.what());
  }
}

/// A model with random weights; initializing a large one takes seconds.
nn::GPT new_model(nn::GPTConfig config, std::int64_t vocab) {
  config.vocab = vocab;
  // Each layer has 12 · width² weights, which are filled twice: by its modules and then by the model.
  const double width = config.width, elements = 2 * width * (vocab + config.context + 12 * config.layers * width);
  const nn::init::Progress progress(static_cast<std::int64_t>(std::min(elements, 0x1p62)));
  return nn::GPT(config);
}

void run(const Options& o) {
  const distributed::Group group = distributed::world();
  train::share_cores(group);
  set_num_threads(o.threads > 0 ? o.threads : num_threads());
  set_float32_matmul_precision(o.tf32 ? MatmulPrecision::tf32 : MatmulPrecision::float32);
  const Device device = device_named(o.device);
  const DType dtype = dtype_named(o.dtype, device);
  const train::ProgressBar progress(group.rank() == 0);
  const Data data = read_data(o);
  manual_seed(o.seed);
  nn::GPT gpt = new_model(o.model, data.vocab);
  gpt.to(device, dtype);
  const auto loss = [&](const Tensors& x) {
    return gpt.loss(x[0], x[1], x.size() > 2 ? nn::PackedDocuments{x[2], x[3]} : nn::PackedDocuments{});
  };

  const std::int64_t context = o.model.context, end_of_text = 50256;  // GPT-2's <|endoftext|>
  const io::TokenWindowsOptions windows{.context = context,
                                        .seed = o.seed,
                                        .separator = o.documents == "none" ? std::nullopt : std::optional(end_of_text),
                                        .separator_begins = o.documents == "begin"};
  const io::TokenWindows training(data.training(), windows);
  train::DatasetBatches batches(training, {.batch = o.batch, .seed = o.seed, .workers = o.workers, .device = device},
                                group, context);
  // All of a small text's last tenth, but only a part of a large one's.
  const io::EvenWindows validation(data.validation(), windows, std::max<std::int64_t>(1, (1 << 17) / context));

  train::TrainerOptions options = o.train;
  const auto groups = optim::AdamW::decay_matrices(gpt.parameters(), o.adamw);
  optim::AdamW adamw(groups);
  std::optional<distributed::ShardedAdamW> sharded;
  if (o.zero) {
    const distributed::ShardingOptions sharding{.reduce_dtype = options.step.parallel.reduce_dtype,
                                                .overlap = true,
                                                .overlap_gather = true,
                                                .check_gradients = options.step.parallel.check_gradients};
    sharded.emplace(groups, group, sharding);
  }
  optim::CosineSchedule schedule = o.schedule;
  options.step.schedule = [&](std::int64_t step) { return schedule.lr(step); };
  options.on_resume = [&](const io::TrainingCheckpoint& saved) {
    schedule.warmup = train::number_of(saved.settings, "warmup");
    check(schedule.warmup <= schedule.total, "expected at least as many steps as its warm-up has, {}, got --steps {}",
          schedule.warmup, schedule.total);
  };
  options.validation = train::Validation(validation, {.batch = o.batch, .device = device, .keep = true}, group);
  options.save = [&](const std::filesystem::path& file) { save(gpt, data.tokenizer, file); };
  options.settings["vocab"] = fmt::format("{}", data.vocab);
  options.settings["data"] = data.tokens().fingerprint();
  options.group = group;
  // As in the paper on PaLM: 6 operations per parameter and token, plus those of attention.
  const std::int64_t parameters = nn::parameter_count(gpt);
  options.flops_per_unit = static_cast<double>(6 * parameters + 12 * o.model.layers * o.model.width * context);
  train::Trainer trainer(gpt, loss, batches, o.zero ? train::AnyOptimizer(*sharded) : adamw, options);

  const std::string model =
      fmt::format("{} layers, {} heads, width {}, context {}, {} parameters, in {} on {}", o.model.layers,
                  o.model.heads, o.model.width, context, parameters, dtype, device);
  const std::string name = o.data.empty() ? "mica's own sources and documents" : o.data;
  fmt::print("{}", data.tokenizer
                       ? fmt::format("text: {}, {} characters, {} distinct\n", name, data.tokens().size(), data.vocab)
                       : fmt::format("tokens: {}, {} of {} bits, vocabulary {}\n", name, data.tokens().size(),
                                     8 * data.file->bytes_per_token(), data.vocab));
  fmt::print("model: {}\n", model);
  if (group.size() > 1) {
    fmt::print("ranks: {}, each with {} of the {} sequences of a batch\n", group.size(), o.batch / group.size(),
               o.batch);
  }
  if (train::MetricsLog* const log = trainer.log()) {
    log->text("model", model);
  }
  const train::Outcome outcome = trainer.run();
  put(trainer.summary(outcome));
  if (o.sample > 0 && !outcome.stopped && group.rank() == 0) {
    CharacterModel kept = load_character_model(o.train.out + "/model.safetensors", device);
    put("\n--- a sample ---\n");
    write_text(kept, "", {.count = o.sample, .sampling = {.temperature = 0.8, .seed = o.seed}}, put);
    fmt::print("\n----------------\nmore: generate --model {}\n", o.train.out);
  }
}

}  // namespace

int main(int argc, char** argv) { return run_with_options(argc, argv, run); }
