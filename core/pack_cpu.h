#pragma once

// 64 bytes of numbers, on which arithmetic works element by element: one register with AVX-512, several elsewhere.
// Vectors of GCC and Clang (https://gcc.gnu.org/onlinedocs/gcc/Vector-Extensions.html). Included by *_cpu.cpp only.

#include <cstdint>
#include <cstring>

#include <mica/core/half.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace mica {

// GCC warns that the ABI for passing such vectors depends on the target. They are never passed between files.
#pragma GCC diagnostic ignored "-Wpsabi"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wignored-attributes"
#endif

namespace detail {

template <class S>
struct PackOf {
  typedef S Type __attribute__((vector_size(64)));
};

}  // namespace detail

template <class S>
using Pack = typename detail::PackOf<S>::Type;
template <class S>
inline constexpr std::int64_t kPackWidth = 64 / sizeof(S);

inline Pack<float> load_pack(const float* from) {
  Pack<float> x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

inline Pack<double> load_pack(const double* from) {
  Pack<double> x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

inline Pack<float> load_pack(const BFloat16* from) {
  Pack<float> x;
#if defined(__AVX512F__)
  const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  const __m512i wide = _mm512_slli_epi32(bits, 16);
#elif defined(__AVX2__)
  const __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  const __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 8)));
  const __m256i wide[2] = {_mm256_slli_epi32(low, 16), _mm256_slli_epi32(high, 16)};
#else
  typedef std::uint16_t Bits __attribute__((vector_size(32)));
  Bits bits;
  std::memcpy(&bits, from, sizeof(bits));
  const Pack<std::uint32_t> wide = __builtin_convertvector(bits, Pack<std::uint32_t>) << 16;
#endif
  std::memcpy(&x, &wide, sizeof(x));
  return x;
}

inline Pack<float> load_pack(const Half* from) {
  Pack<float> x;
#if defined(__AVX512F__)
  const __m512 wide = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  std::memcpy(&x, &wide, sizeof(x));
#elif defined(__F16C__)
  const __m256 wide[2] = {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))),
                          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 8)))};
  std::memcpy(&x, wide, sizeof(x));
#else
  for (int i = 0; i < kPackWidth<float>; ++i) {
    x[i] = from[i];
  }
#endif
  return x;
}

/// Loads the first `count` elements of a pack and sets the others to 0.
template <class T>
auto load_part(const T* from, std::int64_t count) {
  T values[sizeof(load_pack(from)) / sizeof(load_pack(from)[0])] = {};
  std::memcpy(values, from, static_cast<std::size_t>(count) * sizeof(T));
  return load_pack(values);
}

template <class S>
void store_pack(S* to, const Pack<S>& x) {
  std::memcpy(to, &x, sizeof(x));
}

/// The sum of a pack's elements, by pairwise summation: halves are added until one number is left.
inline float sum_of(const Pack<float>& x) {
  typedef float Half8 __attribute__((vector_size(32)));
  typedef float Half4 __attribute__((vector_size(16)));
  Half8 eight[2];
  std::memcpy(eight, &x, sizeof(eight));
  const Half8 sum8 = eight[0] + eight[1];
  Half4 four[2];
  std::memcpy(four, &sum8, sizeof(four));
  const Half4 sum4 = four[0] + four[1];
  return (sum4[0] + sum4[2]) + (sum4[1] + sum4[3]);
}

inline double sum_of(const Pack<double>& x) {
  typedef double Half4 __attribute__((vector_size(32)));
  Half4 four[2];
  std::memcpy(four, &x, sizeof(four));
  const Half4 sum4 = four[0] + four[1];
  return (sum4[0] + sum4[2]) + (sum4[1] + sum4[3]);
}

}  // namespace mica
