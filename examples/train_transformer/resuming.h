#pragma once

#include <cstdint>
#include <optional>

#include "examples/common/checkpoints.h"
#include "examples/train_transformer/options.h"
#include "examples/train_transformer/trainer.h"
#include <mica/io/tokens.h>

/// The best validation loss so far.
struct Best {
  std::int64_t step = 0;  // 0: none
  double loss = 0;
};

/// The checkpoints of a run: see RunCheckpoints.
class Checkpoints {
 public:
  Checkpoints(const Options& options, mica::io::Metadata settings, const mica::dist::Group& group);

  /// With --resume: restores the trainer from the newest checkpoint and returns the best validation loss until then.
  /// Returns nothing if there is no checkpoint.
  std::optional<Best> resume(Trainer& trainer);

  /// RunCheckpoints::changes().
  const std::string& changes() const { return run_.changes(); }

  bool on() const { return run_.on(); }
  bool is_due(std::int64_t number) { return run_.is_due(number); }
  void save(const Trainer& trainer, const Best& best);
  void finish() { run_.finish(); }

 private:
  RunCheckpoints run_;
};

/// The settings on which the weights' bits depend. The number of ranks is not among them, although bits depend on it,
/// so that any number of ranks can resume. `dtype` and `device` are those chosen for "auto".
mica::io::Metadata settings_of(const Options& options, mica::DType dtype, mica::Device device,
                               const mica::io::TokenView& tokens, std::int64_t vocab);
