#pragma once

// Vectorized conversion between 16-bit floats and float. Included by *_cpu.cpp only.

#include <algorithm>
#include <cstdint>

#include <mica/core/half.h>

namespace mica {

inline void widen(const Float16* from, std::int64_t n, float* to) {
  std::int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(bits));
  }
#endif
  for (; i < n; ++i) {
    to[i] = from[i];
  }
}

inline void narrow(const float* from, std::int64_t n, Float16* to) {
  std::int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8) {
    const __m128i bits = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), bits);
  }
#endif
  for (; i < n; ++i) {
    to[i] = Float16(from[i]);
  }
}

inline void widen(const BFloat16* from, std::int64_t n, float* to) {
  for (std::int64_t i = 0; i < n; ++i) {
    to[i] = from[i];
  }
}

inline void narrow(const float* from, std::int64_t n, BFloat16* to) {
  for (std::int64_t i = 0; i < n; ++i) {
    to[i] = BFloat16(from[i]);
  }
}

// Types that need no conversion, for generic code.

template <class T>
void widen(const T* from, std::int64_t n, T* to) {
  std::copy_n(from, n, to);
}

template <class T>
void narrow(const T* from, std::int64_t n, T* to) {
  std::copy_n(from, n, to);
}

}  // namespace mica
