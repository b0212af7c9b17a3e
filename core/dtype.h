#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include <mica/core/check.h>
#include <mica/core/half.h>

namespace mica {

/// The type of a tensor's elements.
enum class DType : std::uint8_t { float64, float32, float16, bfloat16, int64, int32, uint8, boolean };

inline constexpr DType float64 = DType::float64;
inline constexpr DType float32 = DType::float32;
inline constexpr DType float16 = DType::float16;
inline constexpr DType bfloat16 = DType::bfloat16;
inline constexpr DType int64 = DType::int64;
inline constexpr DType int32 = DType::int32;
inline constexpr DType uint8 = DType::uint8;
inline constexpr DType boolean = DType::boolean;

/// Bytes of one element.
constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::float64:
    case DType::int64: return 8;
    case DType::float32:
    case DType::int32: return 4;
    case DType::float16:
    case DType::bfloat16: return 2;
    case DType::uint8:
    case DType::boolean: return 1;
  }
  return 0;
}

/// True for the dtypes that can carry a gradient.
constexpr bool is_floating(DType dtype) { return dtype <= DType::bfloat16; }

/// The dtype in which values of `dtype` are accumulated: float32 for 16-bit floats, else itself.
constexpr DType accumulate_dtype(DType dtype) {
  return dtype == DType::float16 || dtype == DType::bfloat16 ? DType::float32 : dtype;
}

std::string_view name_of(DType dtype);  ///< "float32", "bool", …

namespace detail {
template <class T>
struct DTypeOf;
template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::float64;
};
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::float32;
};
template <>
struct DTypeOf<Float16> {
  static constexpr DType value = DType::float16;
};
template <>
struct DTypeOf<BFloat16> {
  static constexpr DType value = DType::bfloat16;
};
template <>
struct DTypeOf<std::int64_t> {
  static constexpr DType value = DType::int64;
};
template <>
struct DTypeOf<std::int32_t> {
  static constexpr DType value = DType::int32;
};
template <>
struct DTypeOf<std::uint8_t> {
  static constexpr DType value = DType::uint8;
};
template <>
struct DTypeOf<bool> {
  static constexpr DType value = DType::boolean;
};

template <class T>
struct AccumulateOf {
  using type = T;
};
template <>
struct AccumulateOf<Float16> {
  using type = float;
};
template <>
struct AccumulateOf<BFloat16> {
  using type = float;
};
}  // namespace detail

/// The DType of a C++ element type: dtype_of<float> == float32.
template <class T>
inline constexpr DType dtype_of = detail::DTypeOf<T>::value;

/// The type in which arithmetic on T is done: float for Float16 and BFloat16, else T itself.
template <class T>
using Accumulate = typename detail::AccumulateOf<T>::type;

}  // namespace mica

template <>
struct fmt::formatter<mica::DType> : mica::detail::TextFormatter {
  template <class FormatContext>
  auto format(mica::DType dtype, FormatContext& context) const {
    return write(mica::name_of(dtype), context);
  }
};
