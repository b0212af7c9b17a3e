#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <mica/distributed/group.h>
#include <mica/io/training_checkpoint.h>
#include <mica/nn/module.h>
#include <mica/train/batches.h>
#include <mica/train/checkpoints.h>
#include <mica/train/metrics_log.h>
#include <mica/train/training_step.h>

namespace mica::train {

/// What a run does. With several ranks, all of them pass the same options; rank 0 alone writes and prints.
struct TrainerOptions {
  std::int64_t steps = 1000;
  StepOptions step{};  ///< accumulation, clipping, learning rates, averages, CUDA graph

  Validation validation{};
  std::int64_t eval_every = 250;  ///< steps between validations; there is one after the last step, too
  bool validate_first = false;    ///< also before the first step

  /// Folder for the best model (model.safetensors), metrics.jsonl, loss.svg and trace.json; empty: none of these.
  std::string out = "out";
  std::string tensorboard{};       ///< folder for an event file of TensorBoard; empty: none
  bool weight_histograms = true;   ///< with TensorBoard, after each validation
  CheckpointOptions checkpoint{};  ///< with `every` = 0, one after each `eval_every` steps

  /// All settings on which the results depend, except for "steps", "accumulate", "clip", "ema", "eval-every", "dtype"
  /// and "device", which are added. A run resumes only with the same settings.
  io::Metadata settings{};
  /// Settings that, in a resumed run, are those of the checkpoint, whatever `settings` has: see ChangeableSettings.
  std::vector<std::string> kept_settings{};

  std::string unit = "samples";  ///< what Batch::units counts, for the speed
  double flops_per_unit = 0;     ///< of the model's matrix products; for the share of the device's peak, if not 0
  bool profile = false;          ///< print a table of the time and memory of ten steps and write trace.json
  distributed::Group group{};    ///< the ranks that train together
  ProgramNames names{};          ///< for messages

  /// Called on rank 0 to save the best model so far as OUT/model.safetensors (without a folder OUT, wherever it likes).
  /// If there are averages of the weights, the model has them then. By default, io::save() of its state.
  std::function<void(const std::filesystem::path& file)> save{};
  /// Called on each rank after each validation in the run. Rank 0 prints the text that it returns, such as an accuracy
  /// that the loss has counted, on a line of its own.
  std::function<std::string(std::int64_t step)> after_validation{};
  /// Called with each checkpoint before it is saved, and after it is loaded, on each rank: for state of the program,
  /// and for checkpoints in a format of its own. `on_resume` is called before anything else reads the checkpoint.
  std::function<void(io::TrainingCheckpoint&)> on_save{};
  std::function<void(io::TrainingCheckpoint&)> on_resume{};
};

/// The best model so far. Without validation, that of the last step, with its training loss.
struct Best {
  std::int64_t step = 0;  ///< 0: none
  double loss = 0;
};

/// How a run ended.
struct Outcome {
  Best best{};
  std::int64_t steps = 0;  ///< taken, including those before it was resumed
  bool stopped = false;    ///< by a signal
  double seconds = 0;
};

/// Trains a model for a number of steps and, on the way, validates it, keeps the best model, writes checkpoints and
/// metrics, and shows its progress with the time left. SIGINT (Ctrl-C), SIGTERM and SIGUSR1 stop it after the current
/// step. docs/training.md has a whole program:
///
///     train::DatasetBatches batches(training_data, {.batch = 32, .seed = 1});
///     optim::AdamW optimizer(model.parameters());
///     train::Trainer trainer(model, loss, batches, optimizer,
///                            {.steps = 2000,
///                             .step = {.clip = 1},
///                             .validation = train::Validation(validation_data, {.batch = 32}),
///                             .checkpoint = {.folder = "checkpoints", .resume = true},
///                             .settings = {{"batch", "32"}, {"seed", "1"}}});
///     const train::Outcome outcome = trainer.run();
///
/// A run that is stopped in any way and resumed gives the same bits as a run that was never stopped: weights, optimizer
/// states, metrics and best model. If `steps` or `eval_every` differ in the resumed run, they apply to the steps that
/// are left.
///
/// Checkpoints contain TrainingStep::checkpoint() and the part "best".
class Trainer {
 public:
  /// Everything that is passed by reference must outlive the trainer, except for the options. Resumes from the newest
  /// checkpoint, if options.checkpoint says so. Throws if options are out of range, if a checkpoint does not fit, if
  /// there are checkpoints of another run, and if a folder cannot be written; and on a resumed run without its best
  /// model.
  Trainer(nn::Module& model, Loss loss, Batches& batches, AnyOptimizer optimizer, TrainerOptions options = {});

  /// Takes the steps that are left. Throws if a loss is not finite, naming the step and the ranks whose loss is not.
  Outcome run();

  /// A text for the end of a run: its best loss, where it was reached, and what was written. Empty on other ranks than
  /// 0.
  std::string summary(const Outcome& outcome) const;

  /// The number of steps taken, including those before the run was resumed.
  std::int64_t steps_done() const { return training_.steps_done(); }
  const Best& best() const { return best_; }
  /// Where rank 0 writes metrics, for more of them; null on other ranks.
  MetricsLog* log() { return log_ ? &*log_ : nullptr; }

 private:
  /// The results of the steps since the last collection.
  struct Collected {
    double train_loss;
    std::optional<double> validation_loss{};
    std::string report{};  // of after_validation
    Speed speed;
  };

  void resume();
  void open_log();
  void announce();
  bool take_steps();
  Collected collect(std::int64_t number, bool validates, std::chrono::steady_clock::time_point start);
  double validate(std::int64_t step);
  std::filesystem::path model_file() const;
  void save_model() const;
  void save_checkpoint();

  nn::Module& model_;
  TrainerOptions options_;
  TrainingStep training_;
  Checkpoints checkpoints_;
  std::optional<MetricsLog> log_;  // on rank 0 only
  std::optional<double> peak_flops_;
  Best best_;
  bool resumed_ = false;
};

}  // namespace mica::train
