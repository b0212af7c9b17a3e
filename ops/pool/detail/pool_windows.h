#pragma once

#include <cstdint>
#include <utility>

#include <mica/core/half.h>

namespace mica::kernels {

/// n / d for n ≥ 0, without a division for the usual strides and dilations.
MICA_HOST_DEVICE inline int quotient_of(int n, int d) { return d == 1 ? n : d == 2 ? n >> 1 : n / d; }

/// The windows of a pooling along one spatial axis: output o is computed from inputs first(o) + k · dilation, for its
/// taps k, of which only those inside the input count.
struct PoolAxis {
  int in = 1;
  int out = 1;
  int size = 1;  // taps of a window; adaptive: of the longest
  int stride = 1;
  int padding = 0;
  int dilation = 1;
  bool adaptive = false;  // window o is [⌊o · in / out⌋, ⌈(o + 1) · in / out⌉); in · out fits in 31 bits

  MICA_HOST_DEVICE int first(int o) const { return adaptive ? o * in / out : o * stride - padding; }
  /// The position behind the last tap, which may be outside of the input.
  MICA_HOST_DEVICE int end(int o) const {
    return adaptive ? ((o + 1) * in + out - 1) / out : o * stride - padding + (size - 1) * dilation + 1;
  }
  MICA_HOST_DEVICE int first_tap(int o) const {
    const int from = first(o);
    return from >= 0 ? 0 : quotient_of(dilation - 1 - from, dilation);
  }
  MICA_HOST_DEVICE int end_tap(int o) const {
    const int to = end(o) < in ? end(o) : in;
    return quotient_of(to - first(o) + dilation - 1, dilation);
  }
  /// The outputs whose windows can contain input i: [first_output(i), end_output(i)).
  MICA_HOST_DEVICE int first_output(int i) const {
    if (adaptive) {
      return i * out / in;
    }
    const int from = i + padding - (size - 1) * dilation;
    return from <= 0 ? 0 : quotient_of(from + stride - 1, stride);
  }
  MICA_HOST_DEVICE int end_output(int i) const {
    const int to = adaptive ? ((i + 1) * out + in - 1) / in : quotient_of(i + padding, stride) + 1;
    return to < out ? to : out;
  }
  /// The outputs [first, second) whose tap k is inside of the input. Not for adaptive windows.
  std::pair<int, int> outputs_with_tap(int k) const {
    const int from = k * dilation - padding;  // the input of output 0
    const int begin = from >= 0 ? 0 : (stride - 1 - from) / stride;
    const int to = from >= in ? 0 : (in - 1 - from) / stride + 1;
    const int limit = to < out ? to : out;
    return {begin < limit ? begin : limit, limit};
  }
  /// The tap of output o at input i; −1 if there is none.
  MICA_HOST_DEVICE int tap(int o, int i) const {
    const int distance = i - first(o);
    const int k = distance < 0 || i >= end(o) ? -1 : quotient_of(distance, dilation);
    return k * dilation == distance ? k : -1;
  }
};

struct PoolWindows {
  PoolAxis axes[3];

  MICA_HOST_DEVICE int taps() const { return axes[0].size * axes[1].size * axes[2].size; }
  MICA_HOST_DEVICE int number(int a, int b, int c) const { return (a * axes[1].size + b) * axes[2].size + c; }

  /// Calls f(number of the tap, its position…) for the taps of the window of output `o` that are inside the input.
  template <class F>
  MICA_HOST_DEVICE void for_taps(const int (&o)[3], const F& f) const {
    const int end_a = axes[0].end_tap(o[0]), end_b = axes[1].end_tap(o[1]), end_c = axes[2].end_tap(o[2]);
    const int first_b = axes[1].first_tap(o[1]), first_c = axes[2].first_tap(o[2]);
    const int from[3] = {axes[0].first(o[0]), axes[1].first(o[1]), axes[2].first(o[2])};
    for (int a = axes[0].first_tap(o[0]); a < end_a; ++a) {
      for (int b = first_b; b < end_b; ++b) {
        for (int c = first_c; c < end_c; ++c) {
          f(number(a, b, c), from[0] + a * axes[0].dilation, from[1] + b * axes[1].dilation,
            from[2] + c * axes[2].dilation);
        }
      }
    }
  }

  /// Calls f(number of the tap, output…) for the taps at input `i`.
  template <class F>
  MICA_HOST_DEVICE void for_outputs(const int (&i)[3], const F& f) const {
    const int end_a = axes[0].end_output(i[0]), end_b = axes[1].end_output(i[1]), end_c = axes[2].end_output(i[2]);
    const int first_b = axes[1].first_output(i[1]), first_c = axes[2].first_output(i[2]);
    for (int a = axes[0].first_output(i[0]); a < end_a; ++a) {
      const int tap_a = axes[0].tap(a, i[0]);
      for (int b = first_b; b < end_b && tap_a >= 0; ++b) {
        const int tap_b = axes[1].tap(b, i[1]);
        for (int c = first_c; c < end_c && tap_b >= 0; ++c) {
          const int tap_c = axes[2].tap(c, i[2]);
          if (tap_c >= 0) {
            f(number(tap_a, tap_b, tap_c), a, b, c);
          }
        }
      }
    }
  }
};

}  // namespace mica::kernels
