#pragma once

// The two 16-bit floating types, for host and device. They are storage types: they convert implicitly to float, in
// which arithmetic is done, and explicitly from float, rounding to nearest even.

#include <bit>
#include <cstdint>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define MICA_HOST_DEVICE __host__ __device__
#else
#define MICA_HOST_DEVICE
#endif
#if defined(__F16C__) && !defined(__CUDA_ARCH__)
#include <immintrin.h>
#endif

namespace mica {

namespace detail {

MICA_HOST_DEVICE inline float half_to_float(std::uint16_t bits) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(bits));
#elif defined(__F16C__)
  return _cvtsh_ss(bits);
#else
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t exponent = (bits >> 10) & 0x1fu;
  const std::uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: the value is mantissa · 2⁻²⁴
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  const std::uint32_t wide = exponent == 0x1f ? 0xffu : exponent + 112;
  return std::bit_cast<float>(sign | (wide << 23) | (mantissa << 13));
#endif
}

MICA_HOST_DEVICE inline std::uint16_t float_to_half(float value) {
#if defined(__CUDA_ARCH__)
  return __half_as_ushort(__float2half_rn(value));
#elif defined(__F16C__)
  // Not _cvtss_sh, which in clang's header is a macro that only C compiles without a warning.
  return static_cast<std::uint16_t>(_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(value), _MM_FROUND_TO_NEAREST_INT)));
#else
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {  // NaN
    return sign | 0x7e00u | static_cast<std::uint16_t>((magnitude >> 13) & 0x3ffu);
  }
  if (magnitude >= 0x477ff000u) {  // rounds to 2¹⁶ or more
    return sign | 0x7c00u;
  }
  if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 leaves mantissa · 2⁻²⁴ in the low bits, rounded
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return sign | static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u);
  }
  const std::uint32_t odd = (magnitude >> 13) & 1u;
  return sign | static_cast<std::uint16_t>((magnitude - 0x38000000u + 0xfffu + odd) >> 13);
#endif
}

MICA_HOST_DEVICE inline float bfloat16_to_float(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

MICA_HOST_DEVICE inline std::uint16_t float_to_bfloat16(float value) {
#if defined(__CUDA_ARCH__)
  return __bfloat16_as_ushort(__float2bfloat16_rn(value));
#else
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {  // a NaN must not round to infinity
    return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  }
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
}

}  // namespace detail

/// IEEE binary16.
struct Float16 {
  std::uint16_t bits;

  Float16() = default;
  MICA_HOST_DEVICE explicit Float16(float value) : bits(detail::float_to_half(value)) {}
  MICA_HOST_DEVICE operator float() const { return detail::half_to_float(bits); }
};

/// The upper 16 bits of a float32.
struct BFloat16 {
  std::uint16_t bits;

  BFloat16() = default;
  MICA_HOST_DEVICE explicit BFloat16(float value) : bits(detail::float_to_bfloat16(value)) {}
  MICA_HOST_DEVICE operator float() const { return detail::bfloat16_to_float(bits); }
};

static_assert(sizeof(Float16) == 2 && sizeof(BFloat16) == 2);

}  // namespace mica
