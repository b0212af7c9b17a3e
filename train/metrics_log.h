#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <mica/io/tensorboard.h>
#include <mica/nn/module.h>
#include <mica/train/progress.h>

namespace mica::train {

namespace detail {
struct LossPoint;
}

struct MetricsOptions {
  std::filesystem::path folder{};       ///< for metrics.jsonl and loss.svg; empty: neither
  std::filesystem::path tensorboard{};  ///< folder for an event file of TensorBoard; empty: none
  std::string unit = "samples";         ///< of the speed: "tokens_per_second"
  /// The steps that a resumed run has already taken. Their lines of metrics.jsonl are kept and later ones removed,
  /// since those steps are repeated.
  std::int64_t steps_done = 0;
  /// EventWriterOptions::resumed_at
  std::optional<std::int64_t> resumed_at{};
};

/// The results of one step.
struct StepMetrics {
  std::int64_t step = 0;  ///< from 1
  double train_loss = 0;
  double lr = 0;
  double grad_norm = 0;
  std::optional<double> validation_loss{};
  double seconds = 0;  ///< that the step took
  Speed speed{};
};

/// The results of a run: metrics.jsonl has a line of JSON for each step, loss.svg a plot of the losses, and TensorBoard
/// shows both while the run goes on. Not for several ranks: create it on rank 0.
///
///     train::MetricsLog log({.folder = "out", .tensorboard = "out/events"});
///     log.add({.step = step, .train_loss = loss.item(), .lr = lr});
///     log.draw_losses();
class MetricsLog {
 public:
  /// Creates the folders. Throws an Error if an existing metrics.jsonl cannot be continued: it then names the line, and
  /// the file is unchanged.
  explicit MetricsLog(MetricsOptions options);
  ~MetricsLog();
  MetricsLog(const MetricsLog&) = delete;
  MetricsLog& operator=(const MetricsLog&) = delete;

  /// Writes a line and events. If the line cannot be written completely, nothing of it is, and an Error is thrown.
  void add(const StepMetrics& metrics);
  /// Writes loss.svg: the losses of all steps, including those before the run was resumed.
  void draw_losses() const;

  /// For TensorBoard; without it, they do nothing. Texts are Markdown; histograms are those of the parameters that are
  /// trained.
  void scalar(std::string_view tag, double value, std::int64_t step);
  void text(std::string_view tag, std::string_view text);
  void histograms(const nn::Module& model, std::int64_t step);

 private:
  void remember(std::int64_t step, double train_loss, std::optional<double> validation_loss);
  void keep_metrics();

  MetricsOptions options_;
  int file_ = -1;  // metrics.jsonl
  std::optional<io::EventWriter> events_;
  std::vector<detail::LossPoint> training_, validation_;
};

}  // namespace mica::train
