#pragma once

// Checkpoints of training runs. A run that resumes from one computes the same bits as a run that was never stopped.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include <mica/core/rng.h>
#include <mica/io/data_loader.h>
#include <mica/io/safetensors.h>

namespace mica::io {

/// What a run needs to resume exactly, between two steps: the states of its parts and its position in the data.
///
///     io::TrainingCheckpoint now{.step = step, .random = rng_state(), .data = loader.position(), .settings = {…}};
///     now.parts["model"] = model.state_dict();
///     now.parts["optimizer"] = optimizer.state_dict();  // with the master weights
///     now.parts["ema"] = ema.state_dict();
///
/// A schedule that is a function of the step needs only its settings.
struct TrainingCheckpoint {
  std::int64_t step = 0;                     ///< steps taken
  std::map<std::string, StateDict> parts{};  ///< by name; names contain no dot
  PhiloxKey random{};                        ///< rng_state()
  DataPosition data{};                       ///< DataLoader::position()
  Metadata settings{};                       ///< must be the same when the run resumes

  /// The state of a part; empty if there is none, such as that of an optimizer before its first step.
  const StateDict& part(const std::string& name) const;
};

/// Writes a checkpoint as one safetensors file: the tensors as PART.NAME, the rest as text in the metadata, with a
/// checksum of everything. As with save(), an existing file is replaced once the new one is on disk.
void save_training_checkpoint(const std::filesystem::path& path, const TrainingCheckpoint& checkpoint);

/// Reads a checkpoint, onto the CPU. Throws an Error that names the file and the problem: incomplete, damaged, not a
/// checkpoint, another version.
TrainingCheckpoint load_training_checkpoint(const std::filesystem::path& path);

/// A checksum of the names, dtypes, shapes and elements of tensors, and of `about`: 16 hexadecimal digits, the same on
/// every device. For data that a run depends on but its checkpoints do not contain, such as frozen weights: stored in
/// the settings, it lets check_settings() detect that they have changed. It protects against mistakes, not against
/// forgery. Every element is read once; tensors that are not on the CPU, or not contiguous, are copied one at a time.
std::string fingerprint(const StateDict& tensors, const Metadata& about = {});

/// Throws an Error that lists each setting that differs, is missing or is new.
void check_settings(const Metadata& saved, const Metadata& current);

/// A folder with the checkpoints of one run, checkpoint-STEP.safetensors, written in the background.
///
///     io::CheckpointFolder folder("checkpoints", {.keep = 3});
///     if (const auto saved = folder.newest(print)) { … }  // resume from it
///     for (…) {
///       step();
///       if (due && !folder.is_writing()) folder.save(checkpoint());
///     }
///     folder.finish();
///
/// However the process ends, no complete checkpoint is lost: a file gets its name only after its contents are on disk,
/// and older ones are removed after that. A process that opens the folder removes unfinished files of earlier
/// processes.
class CheckpointFolder {
 public:
  struct Options {
    int keep = 2;  ///< the newest complete checkpoints; older ones are removed. At least 1
  };

  /// Creates the folder if needed and locks it for the lifetime of this object. Throws an Error if `path` is not a
  /// folder or another process has locked it.
  CheckpointFolder(const std::filesystem::path& path, Options options);
  /// Waits for a write in progress.
  ~CheckpointFolder();
  CheckpointFolder(const CheckpointFolder&) = delete;
  CheckpointFolder& operator=(const CheckpointFolder&) = delete;

  const std::filesystem::path& path() const;

  /// Whether there are files with the name of a checkpoint, complete or not.
  bool has_files() const;

  /// The newest complete checkpoint, if there is one. Passes a message to `skipped` for each newer file that is
  /// incomplete or damaged.
  std::optional<TrainingCheckpoint> newest(const std::function<void(std::string_view)>& skipped) const;

  /// Takes a snapshot of the tensors in host memory and returns; a thread writes it and then removes all but the `keep`
  /// newest checkpoints. The tensors may be changed at once: from a GPU, the snapshot is copied in the order of the
  /// current stream to page-locked memory, which is kept for the next snapshot, and the host does not wait. Waits for
  /// an earlier write in progress, as finish() does. Throws an Error if the snapshot does not fit in memory.
  void save(const TrainingCheckpoint& checkpoint);

  /// Whether a write is in progress, so that save() would wait.
  bool is_writing() const;

  /// The error message of the last failed write since the last call; empty if none failed. A failed write leaves all
  /// checkpoints as they were.
  std::string take_error();

  /// Waits for a write in progress, and reports its progress (core/progress.h). Throws an Error if the last write
  /// failed, so that the last checkpoint is not in the folder.
  void finish();

 private:
  class Writer;

  std::filesystem::path path_;
  int lock_ = -1;  // the folder's descriptor
  std::unique_ptr<Writer> writer_;
};

}  // namespace mica::io
