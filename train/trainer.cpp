#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <utility>

#include <mica/core/creation.h>
#include <mica/core/memory_stats.h>
#include <mica/io/file.h>
#include <mica/io/safetensors.h>
#include <mica/train/detail/agreement.h>
#include <mica/train/detail/peak.h>
#include <mica/train/detail/profiling.h>
#include <mica/train/progress.h>
#include <mica/train/ranks.h>
#include <mica/train/stop_signals.h>
#include <mica/train/trainer.h>

namespace mica::train {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

TrainerOptions completed(TrainerOptions options) {
  check(options.steps >= 1 && options.eval_every >= 1,
        "Trainer: expected at least 1 step, and 1 between validations, got {} and {}", options.steps,
        options.eval_every);
  if (options.checkpoint.every == 0) {
    options.checkpoint.every = options.eval_every;
  }
  return options;
}

io::Metadata all_settings(const TrainerOptions& options, const nn::Module& model) {
  const auto text = [](auto value) { return fmt::format("{}", value); };
  const Tensor parameter = model.parameters().front();
  io::Metadata settings = options.settings;
  settings["steps"] = text(options.steps);
  settings["accumulate"] = text(options.step.accumulate);
  settings["clip"] = text(options.step.clip);
  settings["eval-every"] = text(options.eval_every);
  settings["dtype"] = text(parameter.dtype());
  settings["device"] = parameter.device().is_cpu() ? "cpu" : "cuda";
  if (options.step.ema > 0) {
    settings["ema"] = text(options.step.ema);
  }
  return settings;
}

/// " of rank 2"; empty if it concerns all ranks.
std::string of_ranks(const std::vector<int>& ranks, const distributed::Group& group) {
  if (ranks.empty() || static_cast<int>(ranks.size()) == group.size()) {
    return "";
  }
  return fmt::format(" of {} {}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranks, ", "));
}

std::string advice(const ProgramNames& names) {
  return fmt::format("a lower {} may help", names.prefix.empty() ? "learning rate" : names.prefix + "lr");
}

}  // namespace

Trainer::Trainer(nn::Module& model, Loss loss, Batches& batches, AnyOptimizer optimizer, TrainerOptions options)
    : model_(model),
      options_(completed(std::move(options))),
      training_(model, std::move(loss), batches, optimizer, options_.step, options_.group),
      checkpoints_(options_.checkpoint, all_settings(options_, model),
                   {.changed = {"steps", "eval-every"}, .kept = options_.kept_settings}, options_.names,
                   options_.group),
      peak_flops_(detail::peak_flops(training_.device(), model.parameters().front().dtype())) {
  resume();
  on_rank_0(options_.group, [&] { open_log(); });
}

void Trainer::resume() {
  resumed_ = checkpoints_.resume([&](io::TrainingCheckpoint& saved) {
    if (options_.on_resume) {
      options_.on_resume(saved);
    }
    const StateDict& best = saved.part("best");
    check(best.contains("step") && best.contains("loss"), "it was not written by {}", options_.names.program);
    training_.resume(saved);
    best_ = {.step = static_cast<std::int64_t>(best.at("step").item()), .loss = best.at("loss").item()};
  });
}

void Trainer::open_log() {
  const std::filesystem::path out = options_.out;
  if (!out.empty()) {
    io::make_folder(out, options_.names.program.c_str());
    io::remove_unfinished(out, [](const std::string& name) { return name == "model.safetensors"; });
  }
  const std::int64_t done = steps_done();
  MetricsOptions metrics{.folder = out, .tensorboard = options_.tensorboard, .unit = options_.unit, .steps_done = done};
  if (options_.checkpoint.resume) {
    // A validation before the first step is an event of step 0.
    metrics.resumed_at = done == 0 && options_.validate_first ? 0 : done + 1;
  }
  log_.emplace(std::move(metrics));
  check(out.empty() || !options_.validation || best_.step == 0 || io::is_there(model_file()),
        "{}, the best model until step {}, is missing: pass the {}out of the run to be resumed", model_file().string(),
        done, options_.names.prefix);
}

// The first lines of a run's output.
void Trainer::announce() {
  if (log_ && resumed_) {
    fmt::print("resumed after step {}\n{}", steps_done(), checkpoints_.changes());
  } else if (log_ && checkpoints_.on() && options_.checkpoint.resume) {
    fmt::print("{} has no complete checkpoint: starting at step 1\n", options_.checkpoint.folder);
  }
  if (options_.validation && options_.validate_first && steps_done() == 0) {
    const double loss = training_.mean_loss(options_.validation);
    if (log_) {
      fmt::print("validation loss before training: {:.4f}\n", loss);
      log_->scalar("loss/validation", loss, 0);
    }
  }
}

std::filesystem::path Trainer::model_file() const { return std::filesystem::path(options_.out) / "model.safetensors"; }

void Trainer::save_model() const {
  if (options_.save) {
    options_.save(options_.out.empty() ? "" : model_file());
  } else if (!options_.out.empty()) {
    io::save(model_file(), model_.state_dict());
  }
}

// Returns the validation loss, and saves the model if it is the best.
double Trainer::validate(std::int64_t step) {
  const TrainingStep::Averages averages(training_);
  const double loss = training_.mean_loss(options_.validation);
  if (best_.step == 0 || loss < best_.loss) {
    check(std::isfinite(loss), "the validation loss became {} at step {}; {}", loss, step, advice(options_.names));
    best_ = {.step = step, .loss = loss};
    if (log_) {
      save_model();
    }
  }
  return loss;
}

void Trainer::save_checkpoint() {
  io::TrainingCheckpoint checkpoint = training_.checkpoint();
  checkpoint.parts["best"] = {{"step", from_data({best_.step}, Shape{})},
                              {"loss", from_data<double>({best_.loss}, Shape{})}};
  if (options_.on_save) {
    options_.on_save(checkpoint);
  }
  checkpoints_.save(std::move(checkpoint));
}

// Waits for the steps up to `number` since `start`, and records them.
Trainer::Collected Trainer::collect(std::int64_t number, bool validates, Clock::time_point start) {
  const std::vector<StepResult> results = training_.finished();
  const double seconds = seconds_since(start);
  const auto count = static_cast<double>(results.size());
  std::int64_t step = number - static_cast<std::int64_t>(results.size()), units = 0;
  for (const StepResult& result : results) {
    ++step;
    units += result.units;
    check(std::isfinite(result.loss), "the loss{} became {} at step {}; {}", of_ranks(result.diverged, options_.group),
          result.loss, step, advice(options_.names));
  }
  Speed speed{.units_per_second = static_cast<double>(units) / seconds,
              .peak_memory = memory_stats(training_.device()).peak};
  if (peak_flops_ && options_.flops_per_unit > 0) {
    speed.share_of_peak = options_.flops_per_unit * speed.units_per_second / (*peak_flops_ * options_.group.size());
  }
  Collected collected{.train_loss = results.back().loss, .speed = speed};
  if (validates) {
    collected.validation_loss = validate(number);
    collected.report = options_.after_validation ? options_.after_validation(number) : "";
  } else if (!options_.validation) {
    best_ = {.step = number, .loss = collected.train_loss};
  }
  if (!log_) {
    return collected;
  }
  step = number - static_cast<std::int64_t>(results.size());
  for (const StepResult& result : results) {
    ++step;
    log_->add({.step = step,
               .train_loss = result.loss,
               .lr = result.lr,
               .grad_norm = result.grad_norm,
               .validation_loss = step == number ? collected.validation_loss : std::nullopt,
               .seconds = seconds / count,
               .speed = speed});
  }
  if (validates) {
    log_->draw_losses();
    if (options_.weight_histograms) {
      log_->histograms(model_, number);
    }
  }
  return collected;
}

bool Trainer::take_steps() {
  Progress progress(options_.steps, steps_done(), options_.unit);
  std::optional<detail::Profiling> profiling;
  if (options_.profile) {
    const std::filesystem::path out = options_.out, trace = log_ && !out.empty() ? out / "trace.json" : "";
    profiling.emplace(training_, options_.steps, options_.step.cuda_graph, log_.has_value(), trace);
  }
  bool done = steps_done() == options_.steps, stopped = false;
  Clock::time_point start = Clock::now();
  for (std::int64_t number = steps_done() + 1; !done; ++number) {
    if (profiling) {
      profiling->before_step(number);
    }
    training_.step();
    // Decisions that depend on time are made together: if one rank is asked to stop, all stop; rank 0 decides when to
    // show progress and when to save.
    const std::vector<bool> decided = detail::true_on_any(
        options_.group,
        {StopSignals::requested(), log_.has_value() && progress.wants(number), checkpoints_.is_due(number)});
    stopped = decided[0];
    const bool shows = decided[1];
    done = number == options_.steps || stopped;
    // A run that will be resumed validates at the same steps as an uninterrupted run, so that its best model is the
    // same.
    const bool ends = done && !(stopped && checkpoints_.on() && number < options_.steps);
    const bool validates = options_.validation && (ends || number % options_.eval_every == 0);
    const bool saves = decided[2] || (done && checkpoints_.on());
    if (profiling) {
      profiling->after_step(validates || done);
    }
    if (!validates && !saves && !done && !shows && !training_.full()) {
      continue;
    }
    // The host waits for a GPU only here.
    const Collected collected = collect(number, validates, start);
    if (saves) {
      save_checkpoint();
    }
    if (log_ && (validates || shows)) {
      progress.show(number, collected.train_loss, collected.validation_loss, collected.speed);
      progress.say(collected.report);
    }
    start = Clock::now();
  }
  return stopped;
}

Outcome Trainer::run() {
  const StopSignals signals;
  announce();
  const Clock::time_point start = Clock::now();
  const bool stopped = take_steps();
  if (!options_.validation && best_.step > 0 && log_) {
    const TrainingStep::Averages averages(training_);
    save_model();
    log_->draw_losses();
  }
  const double seconds = seconds_since(start);
  checkpoints_.finish();
  return {.best = best_, .steps = steps_done(), .stopped = stopped, .seconds = seconds};
}

std::string Trainer::summary(const Outcome& outcome) const {
  std::string text;
  if (!log_) {
    return text;
  }
  if (!training_.graph_error().empty()) {
    text += fmt::format("the steps were not replayed from a CUDA graph: {}\n", training_.graph_error());
  }
  text += fmt::format("{} after {:.0f} s", outcome.stopped ? "stopped" : "done", outcome.seconds);
  if (outcome.best.step > 0) {
    text += fmt::format("; {} loss {:.4f}, at step {}\n", options_.validation ? "best validation" : "training",
                        outcome.best.loss, outcome.best.step);
    if (!options_.out.empty()) {
      text += fmt::format("wrote {}, metrics.jsonl and loss.svg\n", model_file().string());
    }
  } else {
    text += ", before the first validation\n";
  }
  if (outcome.stopped && checkpoints_.on()) {
    text += fmt::format("stopped at step {}; ", outcome.steps);
    text += options_.names.prefix.empty()
                ? fmt::format("its checkpoint is in {}\n", options_.checkpoint.folder)
                : fmt::format("resume with the same command and {}resume\n", options_.names.prefix);
  }
  return text;
}

}  // namespace mica::train
