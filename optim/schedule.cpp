#include <cmath>
#include <numbers>

#include <mica/core/check.h>
#include <mica/optim/schedule.h>

namespace mica::optim {

namespace {

// Both fall from 1 at progress 0 to 0 at progress 1.
double half_cosine(double progress) { return 0.5 * (1 + std::cos(std::numbers::pi * progress)); }
double line(double progress) { return 1 - progress; }

// A linear warm-up to the peak, then a decay of shape f.
template <class Schedule, class F>
double with_warmup(const char* name, const Schedule& s, std::int64_t step, F f) {
  check(s.warmup >= 0 && s.warmup <= s.total, "{}: expected 0 <= warmup <= total, got warmup {} and total {}", name,
        s.warmup, s.total);
  check(step >= 0, "{}: expected step >= 0, got {}", name, step);
  if (step < s.warmup) {
    return s.peak * (static_cast<double>(step) + 1) / (static_cast<double>(s.warmup) + 1);
  }
  if (step >= s.total) {
    return s.floor;
  }
  return s.floor +
         (s.peak - s.floor) * f(static_cast<double>(step - s.warmup) / static_cast<double>(s.total - s.warmup));
}

}  // namespace

double CosineSchedule::lr(std::int64_t step) const { return with_warmup("CosineSchedule", *this, step, half_cosine); }

double LinearSchedule::lr(std::int64_t step) const { return with_warmup("LinearSchedule", *this, step, line); }

double OneCycleSchedule::lr(std::int64_t step) const {
  check(step >= 0, "OneCycleSchedule: expected step >= 0, got {}", step);
  check(total >= 1, "OneCycleSchedule: expected at least 1 step in total, got {}", total);
  check(rise >= 0 && rise <= 1, "OneCycleSchedule: expected a rise in [0, 1], got {}", rise);
  check(start_factor > 0 && end_factor > 0, "OneCycleSchedule: expected factors above 0, got {} and {}", start_factor,
        end_factor);
  const double first = peak / start_factor;
  const double last = first / end_factor;
  const auto top = rise * static_cast<double>(total) - 1;  // need not be an integer
  const auto end = static_cast<double>(total - 1);
  const auto at = static_cast<double>(step);
  const auto f = [&](double progress) { return linear ? line(progress) : half_cosine(progress); };
  if (top > 0 && at <= top) {
    return peak + (first - peak) * f(at / top);
  }
  return at >= end ? last : last + (peak - last) * f((at - top) / (end - top));
}

}  // namespace mica::optim
