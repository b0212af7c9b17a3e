#pragma once

#include <cstdint>
#include <optional>

#include "examples/train_transformer/options.h"
#include "examples/train_transformer/trainer.h"
#include <mica/io/tokens.h>
#include <mica/io/training_checkpoint.h>

/// The best validation loss so far.
struct Best {
  std::int64_t step = 0;  // 0: none
  double loss = 0;
};

/// The checkpoints of a run: --checkpoint, --checkpoint-every, --keep and --resume. Without a folder, it does nothing.
class Checkpoints {
 public:
  /// `settings` are those that determine the run's bits. Throws if the folder has checkpoints and --resume is not
  /// given.
  Checkpoints(const Options& options, mica::io::Metadata settings);

  /// With --resume: sets the trainer to the newest checkpoint and returns the best validation loss until then. Nothing
  /// if there is none.
  std::optional<Best> resume(Trainer& trainer);

  bool on() const { return folder_.has_value(); }
  /// Whether to call save() after step `number`. If the last checkpoint is still being written then, it is postponed.
  bool is_due(std::int64_t number);
  /// Starts to write a checkpoint.
  void save(const Trainer& trainer, const Best& best);
  /// Waits for the last checkpoint. Throws if it could not be written.
  void finish();

 private:
  void report();

  std::optional<mica::io::CheckpointFolder> folder_;
  mica::io::Metadata settings_;
  std::int64_t every_;
  bool due_ = false;
};

/// The settings on which the weights' bits depend. `dtype` and `device` are those chosen for "auto".
mica::io::Metadata settings_of(const Options& options, mica::DType dtype, mica::Device device,
                               const mica::io::TokenView& tokens, std::int64_t vocab);
