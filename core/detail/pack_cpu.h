#pragma once

// A register of numbers, on which arithmetic works element by element: 64 bytes with AVX-512, 32 with AVX, else 16. GCC
// 12 also takes vectors of several registers, but keeps them in memory: a decoder's step took twice as long with AVX2.
// Vectors of GCC and Clang (https://gcc.gnu.org/onlinedocs/gcc/Vector-Extensions.html). Included by *_cpu.cpp only.

#include <cstdint>
#include <cstring>
#include <type_traits>

#include <mica/core/half.h>

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace mica {

// GCC warns that the ABI for passing such vectors depends on the target. They are never passed between files.
#pragma GCC diagnostic ignored "-Wpsabi"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wignored-attributes"
#endif

#if defined(__AVX512F__)
inline constexpr std::int64_t kPackBytes = 64;
inline constexpr int kPackRegisters = 32;
#elif defined(__AVX__)
inline constexpr std::int64_t kPackBytes = 32;
inline constexpr int kPackRegisters = 16;
#else
inline constexpr std::int64_t kPackBytes = 16;
inline constexpr int kPackRegisters = 16;
#endif

namespace detail {

template <class S>
struct PackOf {
  typedef S Type __attribute__((vector_size(kPackBytes)));
};

}  // namespace detail

template <class S>
using Pack = typename detail::PackOf<S>::Type;
template <class S>
inline constexpr std::int64_t kPackWidth = kPackBytes / sizeof(S);

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
  const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  const __m256i wide = _mm256_slli_epi32(bits, 16);
#else
  typedef std::uint16_t Bits __attribute__((vector_size(kPackBytes / 2)));
  Bits bits;
  std::memcpy(&bits, from, sizeof(bits));
  const Pack<std::uint32_t> wide = __builtin_convertvector(bits, Pack<std::uint32_t>) << 16;
#endif
  std::memcpy(&x, &wide, sizeof(x));
  return x;
}

inline Pack<float> load_pack(const Float16* from) {
  Pack<float> x;
#if defined(__AVX512F__)
  const __m512 wide = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  std::memcpy(&x, &wide, sizeof(x));
#elif defined(__AVX__) && defined(__F16C__)
  const __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  std::memcpy(&x, &wide, sizeof(x));
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

/// a · b + c, rounded once if the CPU has FMA. It is explicit, since GCC fuses the two only in some loops, and results
/// must not depend on which loop has computed them.
inline Pack<float> multiply_add(const Pack<float>& a, const Pack<float>& b, const Pack<float>& c) {
#if defined(__AVX512F__)
  return (Pack<float>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX__) && defined(__FMA__)
  return (Pack<float>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

inline Pack<double> multiply_add(const Pack<double>& a, const Pack<double>& b, const Pack<double>& c) {
#if defined(__AVX512F__)
  return (Pack<double>)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__AVX__) && defined(__FMA__)
  return (Pack<double>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
  return a * b + c;
#endif
}

/// A pack whose elements are all `value`.
template <class S>
Pack<S> filled_pack(S value) {
  return value - Pack<S>{};  // not a sum, which would lose the sign of −0 and take an addition
}

/// The sum of a vector's elements, by pairwise summation: halves are added until one number is left.
template <class V>
auto sum_of(const V& x) {
  using S = std::remove_cvref_t<decltype(x[0])>;
  if constexpr (sizeof(x) == 16 && sizeof(S) == 4) {
    return (x[0] + x[2]) + (x[1] + x[3]);
  } else if constexpr (sizeof(x) == 16) {
    return x[0] + x[1];
  } else {
    typedef S Half __attribute__((vector_size(sizeof(V) / 2)));
    Half halves[2];
    std::memcpy(halves, &x, sizeof(x));
    const Half sum = halves[0] + halves[1];
    return sum_of(sum);
  }
}

}  // namespace mica
