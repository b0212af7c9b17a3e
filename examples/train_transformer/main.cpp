// Trains a small transformer on text, character by character, and samples from it.

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <vector>

#include "examples/common/character_model.h"
#include "examples/common/program.h"
#include "examples/train_transformer/corpus.h"
#include "examples/train_transformer/loss_plot.h"
#include "examples/train_transformer/options.h"
#include "examples/train_transformer/progress.h"
#include "examples/train_transformer/trainer.h"
#include <mica/core/parallel.h>
#include <mica/core/rng.h>
#include <mica/io/file.h>
#include <mica/ops/matmul/matmul.h>

using namespace mica;

namespace {

volatile std::sig_atomic_t interrupted = 0;

void interrupt(int signal) {
  interrupted = 1;
  std::signal(signal, SIG_DFL);  // asked twice, it ends at once
}

/// The folder that a run writes to.
class Results {
 public:
  explicit Results(const std::filesystem::path& folder) : folder_(folder) {
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    check(!error, "cannot make the folder {}: {}", folder.string(), error.message());
    metrics_.open(file("metrics.jsonl"), std::ios::trunc);
    check(metrics_.is_open(), "cannot write to {}", file("metrics.jsonl").string());
  }

  std::filesystem::path file(const char* name) const { return folder_ / name; }

  void add(std::int64_t number, const Step& step, double tokens_per_second, double seconds,
           std::optional<double> validation_loss) {
    nlohmann::ordered_json line{{"step", number},
                                {"train_loss", step.loss},
                                {"lr", step.lr},
                                {"grad_norm", step.grad_norm},
                                {"tokens_per_second", tokens_per_second},
                                {"step_ms", 1e3 * seconds}};
    training_.push_back({static_cast<double>(number), step.loss});
    if (validation_loss) {
      line["val_loss"] = *validation_loss;
      validation_.push_back({static_cast<double>(number), *validation_loss});
    }
    metrics_ << line.dump() << std::endl;
    check(metrics_.good(), "cannot write to {}", file("metrics.jsonl").string());
  }

  void draw_losses() const {
    const std::string svg = loss_plot(training_, validation_);
    io::AtomicFile picture(file("loss.svg"));
    picture.write(svg.data(), svg.size());
    picture.commit();
  }

 private:
  std::filesystem::path folder_;
  std::ofstream metrics_;
  std::vector<Point> training_, validation_;
};

/// The text as tokens; its last tenth is for validation.
struct Data {
  io::CharTokenizer tokenizer;
  std::vector<std::int32_t> tokens;

  std::span<const std::int32_t> training() const { return std::span(tokens).first(tokens.size() * 9 / 10); }
  std::span<const std::int32_t> validation() const { return std::span(tokens).subspan(tokens.size() * 9 / 10); }
};

Data read_data(const Options& options) {
  const std::string name = options.data.empty() ? "the built-in text" : options.data;
  const std::string text = options.data.empty() ? built_in_corpus() : io::read_text(options.data);
  check(!text.empty(), "{}: expected text, got nothing", name);
  try {
    Data data{io::CharTokenizer::of(text), {}};
    data.tokens = data.tokenizer.encode(text);
    check(static_cast<std::int64_t>(data.validation().size()) > options.context,
          "expected more than {} characters for a context of {}, as a tenth is for validation; got {}",
          10 * options.context, options.context, data.tokens.size());
    return data;
  } catch (const Error& error) {
    fail("{}: {}", name, error.what());
  }
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

struct Best {
  std::int64_t step = 0;
  double loss = std::numeric_limits<double>::infinity();
};

/// Trains until the steps are done or Ctrl-C, and keeps the model that was best on the validation text.
Best train(Trainer& trainer, const CharacterModel& model, const Options& options, Results& results) {
  std::signal(SIGINT, interrupt);
  std::signal(SIGTERM, interrupt);
  Best best;
  Progress progress(options.steps);
  bool done = false;
  for (std::int64_t number = 1; !done; ++number) {
    const auto start = std::chrono::steady_clock::now();
    const Step step = trainer.step();
    const double seconds = seconds_since(start);
    const double tokens_per_second = static_cast<double>(options.batch * options.context) / seconds;
    check(std::isfinite(step.loss), "the loss became {} at step {}; a lower --lr may help", step.loss, number);

    done = number == options.steps || interrupted;
    std::optional<double> validation_loss;
    if (done || number % options.eval_every == 0) {
      validation_loss = trainer.validate();
      if (*validation_loss < best.loss) {
        best = {number, *validation_loss};
        save(model, results.file("model.safetensors"));
      }
    }
    results.add(number, step, tokens_per_second, seconds, validation_loss);
    if (validation_loss) {
      results.draw_losses();
    }
    if (done || validation_loss || progress.wants(number)) {
      progress.show(number, step.loss, validation_loss, tokens_per_second);
    }
  }
  check(best.step > 0, "the validation loss is not a number; a lower --lr may help");
  return best;
}

void run(const Options& options) {
  if (options.threads > 0) {
    set_num_threads(options.threads);
  }
  set_float32_matmul_precision(options.tf32 ? MatmulPrecision::tf32 : MatmulPrecision::float32);
  const Device device = device_named(options.device);
  const Data data = read_data(options);
  manual_seed(options.seed);
  CharacterModel model{data.tokenizer, nn::GPT(character_config(data.tokenizer, options.context, options.layers,
                                                                options.heads, options.width, options.dropout))};
  model.gpt.config.checkpoint = options.checkpoint;
  model.gpt.to(device);
  Trainer trainer(model, data.training(), data.validation(), options);
  Results results(options.out);

  std::int64_t parameters = 0;
  for (const Tensor& parameter : model.gpt.parameters()) {
    parameters += parameter.numel();
  }
  const std::string name = options.data.empty() ? "mica's own sources and documents" : options.data;
  fmt::print("text: {}, {} characters, {} of them different\n", name, data.tokens.size(), data.tokenizer.size());
  fmt::print("model: {} layers, {} heads, width {}, context {}, {} parameters, on {}\n", options.layers, options.heads,
             options.width, options.context, parameters, device);

  const auto start = std::chrono::steady_clock::now();
  const Best best = train(trainer, model, options, results);
  fmt::print("{} after {:.0f} s; best validation loss {:.4f}, at step {}\n", interrupted ? "stopped" : "done",
             seconds_since(start), best.loss, best.step);
  fmt::print("wrote {}, metrics.jsonl and loss.svg\n", results.file("model.safetensors").string());

  if (options.sample > 0 && !interrupted) {
    CharacterModel kept = load_character_model(results.file("model.safetensors"), device);
    fmt::print("\n--- a sample ---\n");
    write_text(kept, "", options.sample, {.temperature = 0.8, .seed = options.seed}, put);
    fmt::print("\n----------------\nmore: generate --model {}\n", options.out);
  }
}

}  // namespace

int main(int argc, char** argv) { return run_with_options(argc, argv, run); }
