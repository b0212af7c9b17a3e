#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <mica/dist/group.h>
#include <mica/io/training_checkpoint.h>

struct CheckpointOptions {
  std::string folder;      // empty: none
  std::int64_t every = 0;  // steps
  int keep = 2;            // number of newest checkpoints to keep
  bool resume = false;     // continue from the newest checkpoint
};

/// Settings in which a resumed run may differ from its checkpoint.
struct ChangeableSettings {
  std::vector<std::string> changed;  // the run's values apply to the steps that are left
  std::vector<std::string> kept;     // the run has no values of its own; the checkpoint's apply
};

/// A setting that is a whole number. Throws if it is missing or something else.
std::int64_t number_of(const mica::io::Metadata& settings, const std::string& name);

/// The checkpoints of a program's run: --checkpoint, --checkpoint-every, --keep and --resume. Does nothing without a
/// folder. All ranks must call its functions; rank 0 reads and writes.
class RunCheckpoints {
 public:
  /// `settings` are all settings on which the results depend. Throws if the folder has checkpoints and --resume is not
  /// given.
  RunCheckpoints(const char* program, const CheckpointOptions& options, mica::io::Metadata settings,
                 ChangeableSettings changeable, const mica::dist::Group& group = {});

  /// If there is a checkpoint, passes the newest one to `restore` on each rank; returns whether there is one. Throws if
  /// other settings than the changeable ones differ, or if the run has fewer "steps" than were taken.
  bool resume(const std::function<void(const mica::io::TrainingCheckpoint&)>& restore);

  /// On rank 0, after resume(): a line for each setting that has changed, "steps: 12 in the checkpoint, 24 from now
  /// on".
  const std::string& changes() const { return changes_; }

  bool on() const { return !path_.empty(); }
  /// Whether to call save() after step `number`. If the last checkpoint is still being written then, it is postponed.
  /// Only rank 0 decides; on other ranks this is false.
  bool is_due(std::int64_t number);
  /// Starts to write a checkpoint with the settings.
  void save(mica::io::TrainingCheckpoint checkpoint);
  /// Waits for the last checkpoint. Throws if it could not be written.
  void finish();

 private:
  void accept(const mica::io::TrainingCheckpoint& saved);

  const char* program_;
  mica::dist::Group group_;
  std::string path_;
  std::optional<mica::io::CheckpointFolder> folder_;  // on rank 0 only
  mica::io::Metadata settings_;
  ChangeableSettings changeable_;
  std::string changes_;
  std::int64_t every_;
  bool due_ = false;
};
