#pragma once

// The rotation of a pair of columns, for all kernels that rotate.

#include <type_traits>

namespace mica::kernels {

/// A cosine and a sine, times the scale of the rotation. S is float or double.
template <class S>
struct CosineAndSine {
  S cosine;
  S sine;
};

/// The scaled cosine and sine of the angle position · frequency, or of the negative angle if `direction` is -1.
template <class S, class Scale>
__device__ CosineAndSine<S> cosine_and_sine(float position, float frequency, const Scale& scale, double direction = 1) {
  constexpr double kOneOverPi = 0.31830988618379067;
  // Rounded before the next product, as on the CPU.
  const float angle = __fmul_rn(position, frequency);
  const double half_turns = angle * (direction * kOneOverPi);
  S sine;
  S cosine;
  if constexpr (std::is_same_v<S, double>) {
    sincospi(half_turns, &sine, &cosine);
  } else {
    // Without whole turns, the angle has enough bits in float32.
    sincospif(static_cast<float>(half_turns - 2 * rint(half_turns / 2)), &sine, &cosine);
  }
  return {static_cast<S>(scale) * cosine, static_cast<S>(scale) * sine};
}

}  // namespace mica::kernels
