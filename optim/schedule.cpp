#include <cmath>
#include <numbers>

#include <mica/core/check.h>
#include <mica/optim/schedule.h>

namespace mica::optim {

double CosineSchedule::lr(std::int64_t step) const {
  check(warmup >= 0 && warmup <= total, "CosineSchedule: expected 0 <= warmup <= total, got warmup {} and total {}",
        warmup, total);
  check(step >= 0, "CosineSchedule: expected step >= 0, got {}", step);
  if (step < warmup) {
    return peak * (static_cast<double>(step) + 1) / (static_cast<double>(warmup) + 1);
  }
  if (step >= total) {
    return floor;
  }
  const double progress = static_cast<double>(step - warmup) / static_cast<double>(total - warmup);
  return floor + (peak - floor) * 0.5 * (1 + std::cos(std::numbers::pi * progress));
}

}  // namespace mica::optim
