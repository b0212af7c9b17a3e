#pragma once

// Elementary functions for element-wise kernels, for float and double on both devices. The float versions for the CPU
// have no branches or calls, so that loops over them vectorize; their error is about 2 ulp at most
// (tests/core/math_test.cpp). The one-line functions call the platform's math library.

#include <bit>
#include <cmath>
#include <cstdint>

#include <mica/core/half.h>

namespace mica::math {

MICA_HOST_DEVICE inline double exp(double x) { return ::exp(x); }
MICA_HOST_DEVICE inline double log(double x) { return ::log(x); }
MICA_HOST_DEVICE inline double tanh(double x) { return ::tanh(x); }
MICA_HOST_DEVICE inline double erf(double x) { return ::erf(x); }
MICA_HOST_DEVICE inline double sqrt(double x) { return ::sqrt(x); }
MICA_HOST_DEVICE inline double pow(double x, double y) { return ::pow(x, y); }
MICA_HOST_DEVICE inline double log1p(double x) { return ::log1p(x); }
MICA_HOST_DEVICE inline double expm1(double x) { return ::expm1(x); }
MICA_HOST_DEVICE inline double sin(double x) { return ::sin(x); }
MICA_HOST_DEVICE inline double cos(double x) { return ::cos(x); }
MICA_HOST_DEVICE inline double fmod(double x, double y) { return ::fmod(x, y); }
MICA_HOST_DEVICE inline double floor(double x) { return ::floor(x); }
MICA_HOST_DEVICE inline double ceil(double x) { return ::ceil(x); }
MICA_HOST_DEVICE inline double trunc(double x) { return ::trunc(x); }
MICA_HOST_DEVICE inline float log1p(float x) { return ::log1pf(x); }
MICA_HOST_DEVICE inline float expm1(float x) { return ::expm1f(x); }
MICA_HOST_DEVICE inline float sin(float x) { return ::sinf(x); }
MICA_HOST_DEVICE inline float cos(float x) { return ::cosf(x); }
MICA_HOST_DEVICE inline float fmod(float x, float y) { return ::fmodf(x, y); }
MICA_HOST_DEVICE inline float floor(float x) { return ::floorf(x); }
MICA_HOST_DEVICE inline float ceil(float x) { return ::ceilf(x); }
MICA_HOST_DEVICE inline float trunc(float x) { return ::truncf(x); }
/// Rounds to the nearest integer, ties to even.
MICA_HOST_DEVICE inline double round_to_even(double x) { return ::rint(x); }
MICA_HOST_DEVICE inline float round_to_even(float x) { return ::rintf(x); }
MICA_HOST_DEVICE inline float sqrt(float x) { return ::sqrtf(x); }
MICA_HOST_DEVICE inline float pow(float x, float y) { return ::powf(x, y); }

namespace detail {

/// Horner's scheme; coefficients from the highest power down.
template <class... C>
MICA_HOST_DEVICE inline float polynomial(float x, float highest, C... rest) {
  float sum = highest;
  ((sum = sum * x + rest), ...);
  return sum;
}

}  // namespace detail

// eˣ = 2ⁿ · eʳ with n = round(x / ln 2), |r| ≤ ln 2 / 2. The coefficients here and below are minimax fits.
MICA_HOST_DEVICE inline float exp(float x) {
#if defined(__CUDA_ARCH__)
  return ::expf(x);
#else
  // Beyond these bounds the result is infinity or zero; NaN fails both comparisons and is kept.
  x = x > 89.0f ? 89.0f : x;
  x = x < -104.0f ? -104.0f : x;
  // Adding 1.5 · 2²³ rounds to an integer, in the low bits of the mantissa.
  const float shifted = x * 1.44269504f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  const std::int32_t power = std::bit_cast<std::int32_t>(shifted) - 0x4b400000;
  float r = x - n * 0.693145752f;  // ln 2 in two parts, the first short enough that the product is exact
  r = r - n * 1.42860677e-6f;
  const float p = detail::polynomial(r, 0.001395041953f, 0.008368970514f, 0.04166620666f, 0.1666651812f, 0.5000000095f);
  const float fraction = (r * r) * p + r + 1.0f;
  // 2ⁿ in two factors: n reaches 128 and, for subnormal results, -150.
  const std::int32_t half = power >> 1;
  const float first = std::bit_cast<float>(static_cast<std::uint32_t>(half + 127) << 23);
  const float second = std::bit_cast<float>(static_cast<std::uint32_t>(power - half + 127) << 23);
  return fraction * first * second;
#endif
}

// log x = e · ln 2 + log m with m in [√½, √2).
MICA_HOST_DEVICE inline float log(float x) {
#if defined(__CUDA_ARCH__)
  return ::logf(x);
#else
  const bool subnormal = x < 1.17549435e-38f;
  const float scaled = subnormal ? x * 8388608.0f : x;
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(scaled);
  // The exponent, for mantissas in [√½, √2).
  const std::int32_t e = static_cast<std::int32_t>(bits - 0x3f3504f3u) >> 23;
  const float m = std::bit_cast<float>(bits - (static_cast<std::uint32_t>(e) << 23));
  const float exponent = static_cast<float>(e) - (subnormal ? 23.0f : 0.0f);
  const float f = m - 1.0f;
  const float p = detail::polynomial(f, -0.07628393326f, 0.1275906848f, -0.131613158f, 0.1420217725f, -0.1662328185f,
                                     0.2000120724f, -0.2500082292f, 0.333333319f);
  const float square = f * f;
  float low = exponent * 1.42860677e-6f + square * f * p;
  low = low - 0.5f * square;
  const float finite = exponent * 0.693145752f + (f + low);
  const float infinity = std::bit_cast<float>(0x7f800000u);
  const float edge = x == 0.0f ? -infinity : x < 0.0f ? std::bit_cast<float>(0x7fc00000u) : x;
  return x > 0.0f && x < infinity ? finite : edge;
#endif
}

MICA_HOST_DEVICE inline float tanh(float x) {
#if defined(__CUDA_ARCH__)
  return ::tanhf(x);
#else
  const float size = std::fabs(x);
  const float square = x * x;
  const float p =
      detail::polynomial(square, -0.005678565983f, 0.02061738806f, -0.05373374532f, 0.133313801f, -0.3333328006f);
  const float small = square * x * p + x;
  const float large = 1.0f - 2.0f / (exp(2.0f * size) + 1.0f);
  return std::copysign(size < 0.625f ? small : large, x);
#endif
}

// x + x · P(x²) up to 1; beyond it 1 - exp(Q(|x|)), where Q fits log erfc.
MICA_HOST_DEVICE inline float erf(float x) {
#if defined(__CUDA_ARCH__)
  return ::erff(x);
#else
  const float size = std::fabs(x);
  const float square = x * x;
  const float p = detail::polynomial(square, 7.888807584e-5f, -0.0008020747894f, 0.005189524861f, -0.02685443918f,
                                     0.1128360005f, -0.3761262713f, 0.128379166f);
  const float capped = size > 4.0f ? 4.0f : size;  // where 1 - erfc rounds to 1
  const float q = detail::polynomial(capped, 0.0001864538864f, -0.002948368701f, 0.02184081964f, -0.103112339f,
                                     -0.6381385918f, -1.127092841f, -0.0003406491954f);
  const float large = 1.0f - exp(q);
  return std::copysign(size < 1.0f ? x * p + x : large, x);
#endif
}

/// 1 / (1 + e⁻ˣ), from e⁻|ˣ| so that nothing overflows and small results keep their digits.
template <class T>
MICA_HOST_DEVICE T sigmoid(T x) {
  const T e = exp(x < T{0} ? x : -x);
  return (x < T{0} ? e : T{1}) / (T{1} + e);
}

}  // namespace mica::math
