#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

#include <mica/profiler/profiler.h>
#include <mica/train/training_step.h>

namespace mica::train::detail {

/// Measures ten steps without a CUDA graph after a warm-up (fewer if a validation comes first), and prints the results.
class Profiling {
 public:
  /// `steps`: of the run. `graph`: whether the other steps may be replayed. `prints`: false on ranks other than 0.
  /// `trace`: the file for the trace; empty: none.
  Profiling(TrainingStep& training, std::int64_t steps, bool graph, bool prints, std::filesystem::path trace);

  void before_step(std::int64_t number);
  /// `last`: no step follows directly.
  void after_step(bool last);

 private:
  TrainingStep& training_;
  std::int64_t first_;
  bool graph_;
  bool prints_;
  std::filesystem::path trace_;
  std::optional<Profiler> profiler_;
};

}  // namespace mica::train::detail
