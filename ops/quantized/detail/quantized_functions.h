#pragma once

// Code shared in this folder: sizes derived from a weight's format, and checks.

#include <cstdint>
#include <string>

#include <mica/core/check.h>
#include <mica/ops/quantized/quantized.h>

namespace mica::quantized {

inline constexpr int kWordBits = 32;

/// The number of words that hold `rows` integers of a column.
inline std::int64_t words_of(std::int64_t rows, int bits) {
  const int per_word = kWordBits / bits;
  return rows / per_word + (rows % per_word > 0 ? 1 : 0);  // rows + per_word might overflow
}

/// The number of rows in a group. Never 0, even for an empty column, since it is used as a divisor.
inline std::int64_t rows_of_group(std::int64_t rows, std::int64_t group_size) {
  return group_size == kWholeColumn ? (rows > 0 ? rows : 1) : group_size;
}
inline std::int64_t groups_of(std::int64_t rows, std::int64_t group_size) {
  const std::int64_t size = rows_of_group(rows, group_size);
  return rows / size + (rows % size > 0 ? 1 : 0);
}

/// Throws unless `mode` is one of the enumerators, since a cast could make another value.
inline void check_mode(const char* op, QuantizationMode mode) {
  check(mode <= QuantizationMode::fused_multiply_add, "{}: expected one of the {} quantization modes, got {}", op,
        static_cast<int>(QuantizationMode::fused_multiply_add) + 1, static_cast<int>(mode));
}

inline bool has_scale(QuantizationMode mode) {
  return mode != QuantizationMode::packed && mode != QuantizationMode::shift;
}
inline bool has_zero(QuantizationMode mode) {
  return mode != QuantizationMode::packed && mode != QuantizationMode::scale;
}

inline void check_bits(const char* op, int bits) {
  check(bits == 8 || bits == 4 || bits == 2 || bits == 1, "{}: expected 8, 4, 2 or 1 bits, got {}", op, bits);
}

/// Groups of 16 would share words of 1 bit.
inline void check_group_size(const char* op, std::int64_t size, int bits) {
  check((size == 16 && bits != 1) || size == 32 || size == 64 || size == 128 || size == kWholeColumn,
        "{}: expected a group size of {}32, 64, 128 or kWholeColumn, got {}", op, bits != 1 ? "16, " : "", size);
}

/// The rows that share a scale_factor or zero_factor, and the value of a uint8 scale that stands for 0.
inline constexpr std::int64_t kFactorRows = 256;
inline constexpr int kFactorZero = 128;

/// "float32 [2, 3] on cpu", for errors.
inline std::string described(const Tensor& x) {
  return x.defined() ? fmt::format("{} {} on {}", x.dtype(), x.shape(), x.device()) : "an undefined tensor";
}

/// Calls f.operator()<bits>(). `bits` must have been checked.
template <class F>
void on_bits(int bits, const F& f) {
  switch (bits) {
    case 8: f.template operator()<8>(); break;
    case 4: f.template operator()<4>(); break;
    case 2: f.template operator()<2>(); break;
    default: f.template operator()<1>(); break;
  }
}

}  // namespace mica::quantized
