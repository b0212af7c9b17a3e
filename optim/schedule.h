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

}  // namespace mica::optim
