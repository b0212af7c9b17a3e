// Trains a transformer on the characters of a text, or on a file of tokens, and generates a sample.

#include <fcntl.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "examples/common/character_model.h"
#include "examples/common/peak.h"
#include "examples/common/program.h"
#include "examples/common/progress.h"
#include "examples/common/progress_bar.h"
#include "examples/common/ranks.h"
#include "examples/train_transformer/corpus.h"
#include "examples/train_transformer/loss_plot.h"
#include "examples/train_transformer/options.h"
#include "examples/train_transformer/resuming.h"
#include "examples/train_transformer/trainer.h"
#include <mica/autograd/profiler.h>
#include <mica/core/memory_stats.h>
#include <mica/core/parallel.h>
#include <mica/core/rng.h>
#include <mica/dist/group.h>
#include <mica/io/file.h>
#include <mica/io/json.h>
#include <mica/io/safetensors.h>
#include <mica/io/tensorboard.h>
#include <mica/io/text.h>
#include <mica/io/tokens.h>
#include <mica/nn/init.h>
#include <mica/ops/matmul/matmul.h>

using namespace mica;

namespace {

/// The folder that a run writes to. Only rank 0 writes; on the other ranks, functions do nothing.
class Results {
 public:
  /// `done`: the steps that the resumed run has already taken, whose metrics are kept.
  Results(const Options& options, std::int64_t done, const dist::Group& group)
      : folder_(options.out), writes_(group.rank() == 0) {
    on_rank_0(group, [&] { open(options, done); });
  }
  ~Results() { ::close(metrics_); }
  Results(const Results&) = delete;
  Results& operator=(const Results&) = delete;

  bool writes() const { return writes_; }
  std::filesystem::path file(const char* name) const { return folder_ / name; }

  /// `seconds` is the duration of the step.
  void add(std::int64_t number, const Step& step, const Speed& speed, double seconds,
           std::optional<double> validation_loss) {
    if (!writes_) {
      return;
    }
    nlohmann::ordered_json line{{"step", number},
                                {"train_loss", step.loss},
                                {"lr", step.lr},
                                {"grad_norm", step.grad_norm},
                                {"tokens_per_second", speed.tokens_per_second},
                                {"step_ms", 1e3 * seconds},
                                {"peak_memory_bytes", speed.peak_memory}};
    if (speed.share_of_peak) {
      line["share_of_peak"] = *speed.share_of_peak;
    }
    if (validation_loss) {
      line["val_loss"] = *validation_loss;
    }
    remember(number, step.loss, validation_loss);
    io::append("metrics", metrics_, line.dump() + '\n', file("metrics.jsonl"));
    if (events_) {
      events_->scalar("loss/train", step.loss, number);
      events_->scalar("lr", step.lr, number);
      events_->scalar("grad_norm", step.grad_norm, number);
      events_->scalar("tokens_per_second", speed.tokens_per_second, number);
      if (validation_loss) {
        events_->scalar("loss/validation", *validation_loss, number);
      }
    }
  }

  /// For TensorBoard: Markdown text, and histograms of a model's weights.
  void add_text(std::string_view tag, std::string_view text) {
    if (events_) {
      events_->text(tag, text, 0);
    }
  }
  void add_weights(const nn::GPT& gpt, std::int64_t number) {
    if (events_) {
      for (const auto& [name, parameter] : gpt.named_parameters()) {
        events_->histogram("weights/" + name, parameter.detach(), number);
      }
    }
  }

  void draw_losses() const {
    if (!writes_) {
      return;
    }
    const std::string svg = loss_plot(training_, validation_);
    io::AtomicFile picture(file("loss.svg"));
    picture.write(svg.data(), svg.size());
    picture.commit();
  }

 private:
  void open(const Options& options, std::int64_t done) {
    const std::filesystem::path& folder = folder_;
    io::make_folder(folder, "train_transformer");
    io::remove_unfinished(folder, [](const std::string& name) {
      return name == "model.safetensors" || name == "metrics.jsonl" || name == "loss.svg";
    });
    keep_metrics(done);
    metrics_ = ::open(file("metrics.jsonl").c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
    check(metrics_ >= 0, "cannot write {}: {}", file("metrics.jsonl").string(), io::error_text(errno));
    if (!options.tensorboard.empty()) {
      events_.emplace(options.tensorboard,
                      io::EventWriterOptions{.resumed_at = options.resume ? std::optional(done + 1) : std::nullopt});
    }
  }

  // For the picture.
  void remember(std::int64_t step, double train_loss, std::optional<double> validation_loss) {
    const auto number = static_cast<double>(step);
    training_.push_back({number, train_loss});
    if (validation_loss) {
      validation_.push_back({number, *validation_loss});
    }
  }

  // Keeps the metrics of an earlier run up to step `done`, since later steps are repeated. Refuses a FIFO, since
  // opening one would block until it is read.
  void keep_metrics(std::int64_t done) {
    const std::filesystem::path path = file("metrics.jsonl");
    const std::string text = done > 0 && io::is_there(path) ? io::read_text(path) : "";
    std::size_t kept = 0;
    std::int64_t number = 0;
    // An incomplete last line was being written when the run was stopped.
    for (std::size_t end = 0; (end = text.find('\n', kept)) != std::string::npos; kept = end + 1) {
      const std::string where = fmt::format("{}, line {}", path.string(), ++number);
      constexpr std::size_t longest = 65536;
      check(end - kept <= longest, "{}: it has {} bytes, expected at most {}", where, end - kept, longest);
      const io::JsonValue line = io::parse_json(std::string_view(text).substr(kept, end - kept), where);
      const io::JsonValue* const entry = line.find("step");
      const auto* const step = entry != nullptr ? entry->as<std::int64_t>() : nullptr;
      check(step != nullptr && *step > 0, "{}: expected an integer \"step\" of at least 1", where);
      if (*step > done) {
        break;
      }
      const std::optional<double> train_loss = loss_in(line, "train_loss", where);
      check(train_loss.has_value(), "{}: \"train_loss\" is missing", where);
      remember(*step, *train_loss, loss_in(line, "val_loss", where));
    }
    io::AtomicFile file_of_kept(path);
    file_of_kept.write(text.data(), kept);
    file_of_kept.commit();
  }

  // A loss in a line of metrics; nothing if it is missing. JSON has no NaN and no infinities: they are null.
  static std::optional<double> loss_in(const io::JsonValue& line, const char* name, const std::string& where) {
    const io::JsonValue* const entry = line.find(name);
    if (entry == nullptr) {
      return std::nullopt;
    }
    if (entry->is_null()) {
      return std::numeric_limits<double>::quiet_NaN();
    }
    const auto* const whole = entry->as<std::int64_t>();
    const auto* const loss = entry->as<double>();
    check(whole != nullptr || loss != nullptr, "{}: expected a number \"{}\"", where, name);
    return whole != nullptr ? static_cast<double>(*whole) : *loss;
  }

  std::filesystem::path folder_;
  bool writes_;
  int metrics_ = -1;  // the open file
  std::optional<io::EventWriter> events_;
  std::vector<Point> training_, validation_;
};

/// The training data; its last tenth is used for validation.
struct Data {
  std::optional<io::CharTokenizer> tokenizer;  // for a text
  std::vector<std::int32_t> characters;        // the text's tokens
  std::unique_ptr<io::TokenFile> file;         // for a file of tokens
  std::int64_t vocab = 0;

  io::TokenView tokens() const { return (file ? file->tokens() : io::TokenView(characters)).below(vocab); }
  std::int64_t split() const { return tokens().size() * 9 / 10; }
  io::TokenView training() const { return tokens().part(0, split()); }
  io::TokenView validation() const { return tokens().part(split(), tokens().size()); }
};

Data read_data(const Options& options) {
  Data data;
  std::string text;
  // Read errors name the file.
  if (trains_on_tokens(options)) {
    data.file = std::make_unique<io::TokenFile>(options.data);
  } else {
    text = options.data.empty() ? built_in_corpus() : io::read_text(options.data);
  }
  try {
    if (data.file) {
      data.vocab = nn::gpt2_config("124m").vocab;
    } else {
      check(!text.empty(), "expected text, got nothing");
      data.tokenizer = io::CharTokenizer::of(text);
      data.characters = data.tokenizer->encode(text);
      data.vocab = data.tokenizer->size();
    }
    check(data.validation().size() > options.context,
          "expected more than {} tokens for a context of {}, as a tenth is for validation; got {}",
          10 * options.context, options.context, data.tokens().size());
    return data;
  } catch (const Error& error) {
    fail("{}: {}", options.data.empty() ? "the built-in text" : options.data, error.what());
  }
}

/// A model trained on text stores its alphabet, so that generate can write text.
void save_model(const nn::GPT& gpt, const Data& data, const std::filesystem::path& path) {
  if (data.tokenizer) {
    save(gpt, *data.tokenizer, path);
  } else {
    io::Metadata metadata = metadata_of(gpt.config);
    metadata["vocab"] = std::to_string(gpt.config.vocab);
    io::save(path, gpt.state_dict(), metadata);
  }
}

DType dtype_named(const std::string& name, Device device) {
  if (name == "auto") {
    return has_fast_bfloat16(device) ? bfloat16 : float32;
  }
  return name == "float16" ? float16 : name == "bfloat16" ? bfloat16 : float32;
}

/// A model with random weights; initializing a large one takes seconds.
nn::GPT new_model(const nn::GPTConfig& config) {
  // Each layer has 12 · width² weights, which are filled twice: by its modules and then by the model.
  const auto width = static_cast<double>(config.width);
  const double rows =
      static_cast<double>(config.vocab + config.context) + 12 * static_cast<double>(config.layers) * width;
  const nn::init::Progress progress(static_cast<std::int64_t>(std::min(2 * width * rows, 0x1p62)));
  return nn::GPT(config);
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::string mebibytes(std::size_t bytes) { return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / 0x1p20); }

/// With --profile: measures ten steps without a CUDA graph after a warm-up (fewer if a validation comes first), and
/// prints the results.
class Profiling {
 public:
  /// `trace`: the file for the trace; empty: none.
  Profiling(const Options& options, Trainer& trainer, std::filesystem::path trace)
      : on_(options.profile),
        first_(std::min<std::int64_t>(6, options.steps)),
        graph_(options.cuda_graph),
        trainer_(trainer),
        trace_(std::move(trace)) {
    if (on_) {
      trainer_.allow_graph(false);
    }
  }

  void before_step(std::int64_t number, Device device) {
    if (on_ && number == first_) {
      synchronize(device);
      reset_peak_memory(device);
      profiler_.emplace(ProfilerOptions{.device = device.is_cuda(), .nvtx = true});
    }
  }

  /// `last`: no step follows directly.
  void after_step(bool last) {
    if (!profiler_) {
      return;
    }
    profiler_->step();
    if (profiler_->steps() < count && !last) {
      return;
    }
    profiler_->stop();
    if (!trace_.empty()) {
      profiler_->write_trace(trace_);
    }
    const MemoryUse memory = trainer_.memory();
    fmt::print(
        "{}\nmemory: weights {}, gradients {}, optimizer {}, workspace {}, activations and other {}; peak {}\nwrote "
        "{}\n",
        profiler_->table(), mebibytes(memory.weights), mebibytes(memory.gradients), mebibytes(memory.optimizer),
        mebibytes(memory.workspace), mebibytes(memory.others), mebibytes(memory.peak), trace_.string());
    profiler_.reset();
    trainer_.allow_graph(graph_);
  }

 private:
  static constexpr std::int64_t count = 10;

  bool on_;
  std::int64_t first_;
  bool graph_;
  Trainer& trainer_;
  std::filesystem::path trace_;
  std::optional<Profiler> profiler_;
};

/// " of rank 2"; empty if it concerns all ranks.
std::string of_ranks(const std::vector<int>& ranks, const dist::Group& group) {
  if (ranks.empty() || static_cast<int>(ranks.size()) == group.size()) {
    return "";
  }
  return fmt::format(" of {} {}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranks, ", "));
}

/// How the training ended.
struct Outcome {
  Best best;
  bool stopped;  // by a signal
};

/// Trains until the last step or Ctrl-C, and saves the model with the best validation loss. `best` is the best loss of
/// the steps already taken. All ranks take the same steps and the same decisions.
Outcome train(Trainer& trainer, const nn::GPT& gpt, const Data& data, const Options& options, const dist::Group& group,
              Results& results, Checkpoints& checkpoints, Best best) {
  catch_interrupts();
  std::int64_t collected = trainer.steps_done();
  Progress progress(options.steps, collected);
  const Tensor weight = gpt.parameters().front();
  const Device device = weight.device();
  const std::optional<double> peak = peak_flops(device, weight.dtype(), options.tf32);
  Profiling profiling(options, trainer, results.writes() ? results.file("trace.json") : std::filesystem::path());
  bool done = collected == options.steps, stopped = false;
  auto start = std::chrono::steady_clock::now();
  for (std::int64_t number = collected + 1; !done; ++number) {
    profiling.before_step(number, device);
    trainer.step();
    // Decisions that depend on time are made together: if one rank is asked to stop, all stop; rank 0 decides when to
    // show progress and when to save.
    const std::vector<bool> decided =
        true_on_any(group, {interrupted != 0, results.writes() && progress.wants(number), checkpoints.is_due(number)});
    stopped = decided[0];
    const bool shows = decided[1];
    done = number == options.steps || stopped;
    // A run that will be resumed validates at the same steps as an uninterrupted run, so that its best model is the
    // same.
    const bool validates =
        (done && !(stopped && checkpoints.on() && number < options.steps)) || number % options.eval_every == 0;
    const bool saves = decided[2] || (done && checkpoints.on());
    profiling.after_step(validates);
    if (!validates && !saves && !trainer.full() && !shows) {
      continue;
    }

    // Only here the host waits for a GPU.
    const std::vector<Step> steps = trainer.finished();
    const double seconds = seconds_since(start) / static_cast<double>(steps.size());
    Speed speed{.tokens_per_second = static_cast<double>(trainer.tokens_per_step()) / seconds,
                .share_of_peak = {},
                .peak_memory = memory_stats(device).peak};
    if (peak) {
      speed.share_of_peak = trainer.flops_per_step() / seconds / (*peak * group.size());
    }
    for (std::size_t i = 0; i < steps.size(); ++i) {
      check(std::isfinite(steps[i].loss), "the loss{} became {} at step {}; a lower --lr may help",
            of_ranks(steps[i].diverged, group), steps[i].loss, collected + static_cast<std::int64_t>(i) + 1);
    }
    std::optional<double> validation_loss;
    if (validates) {
      const Trainer::Averages averages(trainer);
      validation_loss = trainer.validate();
      if (best.step == 0 || *validation_loss < best.loss) {
        check(std::isfinite(*validation_loss), "the validation loss became {} at step {}; a lower --lr may help",
              *validation_loss, number);
        best = {number, *validation_loss};
        if (results.writes()) {
          save_model(gpt, data, results.file("model.safetensors"));
        }
      }
    }
    for (const Step& step : steps) {
      ++collected;
      results.add(collected, step, speed, seconds, collected == number ? validation_loss : std::nullopt);
    }
    if (validation_loss) {
      results.draw_losses();
      results.add_weights(gpt, number);
    }
    if (saves) {
      checkpoints.save(trainer, best);
    }
    if (validates || shows) {
      progress.show(number, steps.back().loss, validation_loss, speed);
    }
    start = std::chrono::steady_clock::now();
  }
  return {best, stopped};
}

/// The options of a rank: only rank 0 writes.
Options options_of(int rank, Options options) {
  if (rank > 0) {
    options.draw_graph.clear();
    options.tensorboard.clear();
    options.sample = 0;
  }
  return options;
}

void run(const Options& of_all) {
  const dist::Group group = dist::world();
  const Options options = options_of(group.rank(), of_all);
  share_cores(group);
  if (options.threads > 0) {
    set_num_threads(options.threads);
  }
  set_float32_matmul_precision(options.tf32 ? MatmulPrecision::tf32 : MatmulPrecision::float32);
  const Device device = device_named(options.device);
  const ProgressBar progress;
  const Data data = read_data(options);
  manual_seed(options.seed);
  nn::GPT gpt = new_model({.vocab = data.vocab,
                           .context = options.context,
                           .layers = options.layers,
                           .heads = options.heads,
                           .width = options.width,
                           .dropout = options.dropout,
                           .bias = options.bias,
                           .checkpoint = options.recompute});
  const DType dtype = dtype_named(options.dtype, device);
  gpt.to(device, dtype);
  set_rng_state(random_stream_of(group.rank(), rng_state()));
  Trainer trainer(gpt, data.training(), data.validation(), options, group);
  Checkpoints checkpoints(options, settings_of(options, dtype, device, data.tokens(), data.vocab), group);
  const std::optional<Best> resumed = checkpoints.resume(trainer);
  Results results(options, trainer.steps_done(), group);
  on_rank_0(group, [&] {
    check(!resumed || resumed->step == 0 || io::is_there(results.file("model.safetensors")),
          "{}, the best model until step {}, is missing: pass the --out of the run to be resumed",
          results.file("model.safetensors").string(), trainer.steps_done());
  });

  std::int64_t parameters = 0;
  for (const Tensor& parameter : gpt.parameters()) {
    parameters += parameter.numel();
  }
  if (data.tokenizer) {
    const std::string name = options.data.empty() ? "mica's own sources and documents" : options.data;
    fmt::print("text: {}, {} characters, {} distinct\n", name, data.characters.size(), data.vocab);
  } else {
    fmt::print("tokens: {}, {} of {} bits, vocabulary {}\n", options.data, data.tokens().size(),
               8 * data.file->bytes_per_token(), data.vocab);
  }
  const std::string model_text =
      fmt::format("{} layers, {} heads, width {}, context {}, {} parameters, in {} on {}", options.layers,
                  options.heads, options.width, options.context, parameters, dtype, device);
  fmt::print("model: {}\n", model_text);
  if (group.size() > 1) {
    fmt::print("ranks: {}, each with {} of the {} sequences of a batch\n", group.size(), options.batch / group.size(),
               options.batch);
  }
  results.add_text("model", model_text);

  if (resumed) {
    fmt::print("resumed after step {}\n{}", trainer.steps_done(), checkpoints.changes());
  } else if (options.resume) {
    fmt::print("{} has no complete checkpoint: starting at step 1\n", options.checkpoint);
  }

  const auto start = std::chrono::steady_clock::now();
  const auto [best, stopped] =
      train(trainer, gpt, data, options, group, results, checkpoints, resumed.value_or(Best{}));
  if (!trainer.graph_error().empty()) {
    fmt::print("the steps were not replayed from a CUDA graph: {}\n", trainer.graph_error());
  }
  const char* const end = stopped ? "stopped" : "done";
  if (best.step > 0) {
    fmt::print("{} after {:.0f} s; best validation loss {:.4f}, at step {}\n", end, seconds_since(start), best.loss,
               best.step);
    fmt::print("wrote {}, metrics.jsonl and loss.svg\n", results.file("model.safetensors").string());
  } else {
    fmt::print("{} after {:.0f} s, before the first validation\n", end, seconds_since(start));
  }
  checkpoints.finish();
  if (stopped && checkpoints.on()) {
    fmt::print("stopped at step {}; resume with the same command and --resume\n", trainer.steps_done());
  }

  if (options.sample > 0 && !stopped) {
    CharacterModel kept = load_character_model(results.file("model.safetensors"), device);
    fmt::print("\n--- a sample ---\n");
    write_text(kept, "", {.count = options.sample, .sampling = {.temperature = 0.8, .seed = options.seed}}, put);
    fmt::print("\n----------------\nmore: generate --model {}\n", options.out);
  }
}

}  // namespace

int main(int argc, char** argv) { return run_with_options(argc, argv, run); }
