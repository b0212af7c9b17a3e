#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <mica/distributed/group.h>
#include <mica/io/training_checkpoint.h>

namespace mica::train {

/// Which checkpoints a run writes, and whether it resumes from one.
struct CheckpointOptions {
  std::string folder{};    ///< empty: none
  std::int64_t every = 0;  ///< steps
  int keep = 2;            ///< number of newest checkpoints to keep
  bool resume = false;     ///< continue from the newest checkpoint, if there is one
};

/// Settings in which a resumed run may differ from its checkpoint.
struct ChangeableSettings {
  std::vector<std::string> changed{};  ///< the run's values apply to the steps that are left
  std::vector<std::string> kept{};     ///< the run has no values of its own; the checkpoint's apply
};

/// How messages refer to a program and to its settings.
struct ProgramNames {
  std::string program = "train";  ///< messages on stderr begin with it
  std::string prefix{};           ///< of the names of settings: "--" if they are options of a command line
};

/// A setting that is a whole number. Throws if it is missing or something else.
std::int64_t number_of(const io::Metadata& settings, const std::string& name);

/// The checkpoints of a run, which are written in the background: see io::CheckpointFolder. Does nothing without a
/// folder. All ranks must call its functions; rank 0 reads and writes. A damaged checkpoint that was skipped, and a
/// write that failed, are reported on stderr, and the run continues.
///
///     train::Checkpoints checkpoints({.folder = "checkpoints", .every = 100, .resume = true}, settings);
///     checkpoints.resume([&](const io::TrainingCheckpoint& saved) { … });
///     for (…) {
///       …
///       if (checkpoints.is_due(step)) checkpoints.save(state());
///     }
///     checkpoints.finish();
class Checkpoints {
 public:
  /// `settings` are all settings on which the results depend; "steps", if it is among them, is the number of the run's
  /// steps. Throws if the folder has checkpoints and options.resume is false, and unless options.every ≥ 1.
  Checkpoints(const CheckpointOptions& options, io::Metadata settings, ChangeableSettings changeable = {},
              ProgramNames names = {}, const distributed::Group& group = {});

  /// If there is a checkpoint, passes the newest one to `restore` on each rank, with its tensors on the CPU; returns
  /// whether there is one. Throws if other settings than the changeable ones differ, or if the run has fewer steps than
  /// were taken. Errors of `restore` get the name of the checkpoint.
  bool resume(const std::function<void(io::TrainingCheckpoint&)>& restore);

  /// On rank 0, after resume(): a line for each setting that has changed, "steps: 12 in the checkpoint, 24 from now
  /// on".
  const std::string& changes() const { return changes_; }

  bool on() const { return !path_.empty(); }
  /// Whether to call save() after step `number`. If the last checkpoint is still being written then, it is postponed.
  /// Only rank 0 decides; on other ranks this is false.
  bool is_due(std::int64_t number);
  /// Starts to write a checkpoint, with the settings.
  void save(io::TrainingCheckpoint checkpoint);
  /// Waits for the last checkpoint. Throws if it could not be written.
  void finish();

 private:
  void accept(const io::TrainingCheckpoint& saved);

  ProgramNames names_;
  distributed::Group group_;
  std::string path_;
  std::optional<io::CheckpointFolder> folder_;  // on rank 0 only
  io::Metadata settings_;
  ChangeableSettings changeable_;
  std::string changes_;
  std::int64_t every_;
  bool due_ = false;
};

}  // namespace mica::train
