#pragma once

// Element-wise functions whose gradient is composed of other ops, shared by both devices: only the functions themselves
// have kernels. T is the type of arithmetic, which is float for 16-bit floats. `Dtypes` are the element types that a
// function is defined for.

#include <cmath>
#include <type_traits>

#include <mica/core/dispatch.h>
#include <mica/core/math.h>

namespace mica::functions {

struct Tan {
  static constexpr const char* name = "tan";
  using Dtypes = FloatTypes;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return std::tan(x);
  }
};

struct Asin {
  static constexpr const char* name = "asin";
  using Dtypes = FloatTypes;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return std::asin(x);
  }
};

struct Acos {
  static constexpr const char* name = "acos";
  using Dtypes = FloatTypes;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return std::acos(x);
  }
};

struct Atan {
  static constexpr const char* name = "atan";
  using Dtypes = FloatTypes;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return std::atan(x);
  }
};

struct Sinh {
  static constexpr const char* name = "sinh";
  using Dtypes = FloatTypes;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return std::sinh(x);
  }
};

struct Cosh {
  static constexpr const char* name = "cosh";
  using Dtypes = FloatTypes;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return std::cosh(x);
  }
};

struct Asinh {
  static constexpr const char* name = "asinh";
  using Dtypes = FloatTypes;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return std::asinh(x);
  }
};

struct Acosh {
  static constexpr const char* name = "acosh";
  using Dtypes = FloatTypes;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return std::acosh(x);
  }
};

struct Atanh {
  static constexpr const char* name = "atanh";
  using Dtypes = FloatTypes;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return std::atanh(x);
  }
};

struct Trunc {
  static constexpr const char* name = "trunc";
  using Dtypes = FloatTypes;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return math::trunc(x);
  }
};

struct Sign {
  static constexpr const char* name = "sign";
  using Dtypes = NumericTypes;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    if constexpr (std::is_unsigned_v<T>) {
      return static_cast<T>(x != T{0});
    } else {
      return static_cast<T>(static_cast<int>(x > T{0}) - static_cast<int>(x < T{0}));
    }
  }
};

using IntegerAndBoolTypes = Types<std::int64_t, std::int32_t, std::uint8_t, bool>;

struct BitNot {
  static constexpr const char* name = "bitwise_not";
  using Dtypes = IntegerAndBoolTypes;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    if constexpr (std::is_same_v<T, bool>) {
      return !x;
    } else {
      return static_cast<T>(~x);
    }
  }
};

struct Atan2 {
  static constexpr const char* name = "atan2";
  using Dtypes = FloatTypes;
  template <class T>
  MICA_HOST_DEVICE T operator()(T a, T b) const {
    return std::atan2(a, b);
  }
};

struct BitAnd {
  static constexpr const char* name = "bitwise_and";
  using Dtypes = IntegerAndBoolTypes;
  template <class T>
  MICA_HOST_DEVICE T operator()(T a, T b) const {
    return static_cast<T>(a & b);
  }
};

struct BitOr {
  static constexpr const char* name = "bitwise_or";
  using Dtypes = IntegerAndBoolTypes;
  template <class T>
  MICA_HOST_DEVICE T operator()(T a, T b) const {
    return static_cast<T>(a | b);
  }
};

struct BitXor {
  static constexpr const char* name = "bitwise_xor";
  using Dtypes = IntegerAndBoolTypes;
  template <class T>
  MICA_HOST_DEVICE T operator()(T a, T b) const {
    return static_cast<T>(a ^ b);
  }
};

// Shifts by a negative number or by all bits would be undefined; their results are those of an unlimited shift.

/// b as an unsigned number, which is large if b is negative.
template <class T>
MICA_HOST_DEVICE std::uint64_t shift_by(T b) {
  return static_cast<std::uint64_t>(b);
}

struct ShiftLeft {
  static constexpr const char* name = "bitwise_left_shift";
  using Dtypes = IntegerTypes;
  template <class T>
  MICA_HOST_DEVICE T operator()(T a, T b) const {
    // As an unsigned number, which may overflow.
    return shift_by(b) >= 8 * sizeof(T) ? T{0} : static_cast<T>(static_cast<std::uint64_t>(a) << shift_by(b));
  }
};

struct ShiftRight {
  static constexpr const char* name = "bitwise_right_shift";
  using Dtypes = IntegerTypes;
  template <class T>
  MICA_HOST_DEVICE T operator()(T a, T b) const {
    constexpr std::uint64_t kMost = 8 * sizeof(T) - 1;
    if (shift_by(b) > kMost) {
      return std::is_unsigned_v<T> ? T{0} : static_cast<T>(a >> kMost);
    }
    return static_cast<T>(a >> shift_by(b));
  }
};

}  // namespace mica::functions
