#pragma once

// One sample's recursions (Graves et al., "Connectionist temporal classification", ICML 2006), shared by both devices.
//
// A target of L labels gives 2 L + 1 states: blanks at the even ones, the labels at the odd ones. A path through time
// stays in its state, goes to the next one, or skips a blank between two different labels:
//
//     state   0   1   2   3   4   5   6
//     label   –   c   –   a   –   t   –
//
// All values are logarithms, in float64: their errors add up over time.

#include <cmath>
#include <limits>

#include <mica/core/math.h>
#include <mica/ops/ctc/detail/ctc_kernels.h>

namespace mica::kernels {

template <class T>
struct CtcSample {
  const T* log_probs;  // those of time t begin at log_probs + t · stride
  const std::int64_t* labels;
  std::int64_t stride;
  std::int64_t classes;
  std::int64_t blank;
  std::int64_t times;
  std::int64_t length;

  static constexpr double kNone = -std::numeric_limits<double>::infinity();

  /// Sample n of the inputs, whose elements begin at the given pointers.
  MICA_HOST_DEVICE CtcSample(const T* all, const std::int64_t* targets, const std::int64_t* input_lengths,
                             const std::int64_t* target_lengths, std::int64_t n, std::int64_t samples,
                             std::int64_t classes, std::int64_t most_labels, std::int64_t blank)
      : log_probs(all + n * classes),
        labels(targets + n * most_labels),
        stride(samples * classes),
        classes(classes),
        blank(blank),
        times(input_lengths[n]),
        length(target_lengths[n]) {}

  MICA_HOST_DEVICE std::int64_t states() const { return 2 * length + 1; }
  MICA_HOST_DEVICE std::int64_t label(std::int64_t state) const { return state % 2 == 0 ? blank : labels[state / 2]; }
  MICA_HOST_DEVICE bool skips_to(std::int64_t state) const {
    return state % 2 == 1 && state >= 3 && label(state) != label(state - 2);
  }
  MICA_HOST_DEVICE double emitted(std::int64_t t, std::int64_t state) const {
    const std::int64_t c = label(state);
    const bool valid = c >= 0 && c < classes && (state % 2 == 0 || c != blank);
    return valid ? static_cast<double>(log_probs[t * stride + c]) : std::numeric_limits<double>::quiet_NaN();
  }

  MICA_HOST_DEVICE static double log_sum(double a, double b, double c) {
    double most = a > b ? a : b;
    most = most > c ? most : c;
    // NaN fails the comparison, and is kept.
    return most == kNone && a <= b && b <= c
               ? kNone
               : most + math::log(math::exp(a - most) + math::exp(b - most) + math::exp(c - most));
  }

  /// The forward variable of a state at time t, from those at t − 1.
  MICA_HOST_DEVICE double forward(const double* before, std::int64_t t, std::int64_t state) const {
    if (t == 0) {
      return state <= 1 ? emitted(0, state) : kNone;
    }
    return emitted(t, state) +
           log_sum(before[state], state >= 1 ? before[state - 1] : kNone, skips_to(state) ? before[state - 2] : kNone);
  }

  /// The backward variable of a state at time t, which does not include what is emitted at t, from those at t + 1.
  MICA_HOST_DEVICE double backward(const double* after, std::int64_t t, std::int64_t state) const {
    if (t == times - 1) {
      return state >= states() - 2 ? 0 : kNone;
    }
    const auto from = [&](std::int64_t next) { return after[next] + emitted(t + 1, next); };
    return log_sum(from(state), state + 1 < states() ? from(state + 1) : kNone,
                   state + 2 < states() && skips_to(state + 2) ? from(state + 2) : kNone);
  }

  /// The loss, from the forward variables of the last time.
  MICA_HOST_DEVICE double loss(const double* last) const {
    if (times == 0) {
      return length == 0 ? 0 : -kNone;
    }
    return -log_sum(last[states() - 1], length > 0 ? last[states() - 2] : kNone, kNone);
  }
};

}  // namespace mica::kernels
