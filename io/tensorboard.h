#pragma once

// Event files of TensorBoard: tensorboard --logdir FOLDER shows them.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include <mica/core/tensor.h>

namespace mica::io {

struct EventWriterOptions {
  /// The time of an event in seconds since 1970; the system's clock if empty.
  std::function<double()> clock{};
  /// The first step of a run that resumes from a checkpoint. TensorBoard then hides the events of earlier files in the
  /// folder at this step and later: the run had gone on after its last checkpoint, and now repeats those steps.
  std::optional<std::int64_t> resumed_at{};
};

/// Writes the scalars, texts and histograms of one run to a new file in a folder. An event has been handed to the
/// operating system when the call returns, so TensorBoard sees it at once and a crash of the program loses nothing.
///
///     io::EventWriter events("runs/first");
///     events.scalar("loss/train", loss.item(), step);
///     events.histogram("grad/" + name, parameter.grad(), step);
///
/// Tags and texts are UTF-8; TensorBoard groups tags by what precedes a slash. Steps may be any number. If an event
/// cannot be written completely, the file is cut back to the events before it, and an Error names the file.
///
/// May be used by one thread at a time.
class EventWriter {
 public:
  /// Creates the folder if needed. Throws an Error that names the file.
  explicit EventWriter(const std::filesystem::path& folder, EventWriterOptions options = {});
  ~EventWriter();
  EventWriter(const EventWriter&) = delete;
  EventWriter& operator=(const EventWriter&) = delete;

  /// Stored as float32; NaN and infinities are shown as such.
  void scalar(std::string_view tag, double value, std::int64_t step);
  /// `text` is Markdown.
  void text(std::string_view tag, std::string_view text, std::int64_t step);
  /// The distribution of the finite elements of `values`, in 30 equal intervals from the smallest to the largest. Any
  /// numeric dtype and device; waits for a GPU.
  void histogram(std::string_view tag, const Tensor& values, std::int64_t step);

  const std::filesystem::path& path() const { return path_; }

 private:
  void write_value(const std::string& value, std::int64_t step);
  void write_session_start(std::int64_t step);
  void write_event(std::int64_t step, int field, const std::string& what);
  void write_record(const std::string& data);

  std::filesystem::path path_;
  std::function<double()> clock_;
  int descriptor_ = -1;
};

}  // namespace mica::io
