#pragma once

// The rotation of a pair of columns: what all kernels that rotate compute alike.

#include <type_traits>

namespace mica::kernels {

/// Times the scale of the rotation. S: float or double.
template <class S>
struct CosineAndSine {
  S cosine;
  S sine;
};

/// Of the angle position · frequency; direction = -1: of the negative angle. The scale is a float or a double.
template <class S, class Scale>
__device__ CosineAndSine<S> cosine_and_sine(float position, float frequency, const Scale& scale, double direction = 1) {
  constexpr double kOneOverPi = 0.31830988618379067;
  // Rounded to float32 by itself, as on the CPU.
  const float angle = __fmul_rn(position, frequency);
  const double half_turns = angle * (direction * kOneOverPi);
  S sine;
  S cosine;
  if constexpr (std::is_same_v<S, double>) {
    sincospi(half_turns, &sine, &cosine);
  } else {
    // float32 has enough bits for what is left after whole turns.
    sincospif(static_cast<float>(half_turns - 2 * rint(half_turns / 2)), &sine, &cosine);
  }
  return {static_cast<S>(scale) * cosine, static_cast<S>(scale) * sine};
}

}  // namespace mica::kernels
