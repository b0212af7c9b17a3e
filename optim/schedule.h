#pragma once

#include <cstdint>

namespace mica::optim {

/// Linear warm-up to `peak`, then half a cosine down to `floor`:
///
///     lr(t) = peak · (t + 1) / (warmup + 1)                                   t < warmup
///     lr(t) = floor + (peak − floor) · (1 + cos(π (t − warmup) / (total − warmup))) / 2
///     lr(t) = floor                                                           t ≥ total
///
/// Call `optimizer.set_lr(schedule.lr(step))` before each step; steps count from 0.
struct CosineSchedule {
  double peak = 1e-3;
  double floor = 0;
  std::int64_t warmup = 0;
  std::int64_t total = 1;

  /// Throws unless step ≥ 0 and 0 ≤ warmup ≤ total.
  double lr(std::int64_t step) const;
};

/// Linear warm-up to `peak` as in CosineSchedule, then linear decay to `floor` at step `total`.
struct LinearSchedule {
  double peak = 1e-3;
  double floor = 0;
  std::int64_t warmup = 0;
  std::int64_t total = 1;

  /// Throws unless step ≥ 0 and 0 ≤ warmup ≤ total.
  double lr(std::int64_t step) const;
};

/// One cycle (Smith and Topin, 2018, arXiv:1708.07120), as PyTorch's OneCycleLR: half a cosine up from peak /
/// start_factor to `peak`, which step rise · total − 1 reaches, and another down to peak / start_factor / end_factor at
/// step total − 1.
struct OneCycleSchedule {
  double peak = 1e-3;
  std::int64_t total = 1;    ///< steps
  double rise = 0.3;         ///< the fraction of the steps that goes up
  double start_factor = 25;  ///< from peak to the first rate
  double end_factor = 1e4;   ///< from the first rate to the last
  bool linear = false;       ///< straight lines instead of cosines

  /// Constant after the last step. Throws unless step ≥ 0, total ≥ 1, 0 ≤ rise ≤ 1 and the factors are positive.
  double lr(std::int64_t step) const;
};

}  // namespace mica::optim
