#pragma once

// The element-wise functions and their derivatives, shared by both devices. T is the type of arithmetic: float for
// 16-bit floats. Subgradients at kinks are PyTorch's.

#include <mica/core/dispatch.h>
#include <mica/core/math.h>
#include <mica/core/wrap.h>

namespace mica::functions {

// Of one argument: operator() and derivative(v), where v is the result if `from_output`, else the argument.

struct Exp {
  static constexpr const char* name = "exp";
  static constexpr bool from_output = true;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return math::exp(x);
  }
  template <class T>
  MICA_HOST_DEVICE T derivative(T y) const {
    return y;
  }
};

struct Log {
  static constexpr const char* name = "log";
  static constexpr bool from_output = false;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return math::log(x);
  }
  template <class T>
  MICA_HOST_DEVICE T derivative(T x) const {
    return T{1} / x;
  }
};

struct Log1p {
  static constexpr const char* name = "log1p";
  static constexpr bool from_output = false;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return math::log1p(x);
  }
  template <class T>
  MICA_HOST_DEVICE T derivative(T x) const {
    return T{1} / (T{1} + x);
  }
};

struct Expm1 {
  static constexpr const char* name = "expm1";
  static constexpr bool from_output = true;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return math::expm1(x);
  }
  template <class T>
  MICA_HOST_DEVICE T derivative(T y) const {
    return y + T{1};
  }
};

struct Sin {
  static constexpr const char* name = "sin";
  static constexpr bool from_output = false;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return math::sin(x);
  }
  template <class T>
  MICA_HOST_DEVICE T derivative(T x) const {
    return math::cos(x);
  }
};

struct Cos {
  static constexpr const char* name = "cos";
  static constexpr bool from_output = false;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return math::cos(x);
  }
  template <class T>
  MICA_HOST_DEVICE T derivative(T x) const {
    return -math::sin(x);
  }
};

struct Sqrt {
  static constexpr const char* name = "sqrt";
  static constexpr bool from_output = true;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return math::sqrt(x);
  }
  template <class T>
  MICA_HOST_DEVICE T derivative(T y) const {
    return T(0.5) / y;
  }
};

struct Rsqrt {
  static constexpr const char* name = "rsqrt";
  static constexpr bool from_output = true;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return T{1} / math::sqrt(x);
  }
  template <class T>
  MICA_HOST_DEVICE T derivative(T y) const {
    return T(-0.5) * y * y * y;
  }
};

struct Square {
  static constexpr const char* name = "pow";
  static constexpr bool from_output = false;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return x * x;
  }
  template <class T>
  MICA_HOST_DEVICE T derivative(T x) const {
    return T{2} * x;
  }
};

struct PowScalar {
  static constexpr const char* name = "pow";
  static constexpr bool from_output = false;
  double exponent;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return math::pow(x, static_cast<T>(exponent));
  }
  template <class T>
  MICA_HOST_DEVICE T derivative(T x) const {
    return exponent == 0 ? T{0} : static_cast<T>(exponent) * math::pow(x, static_cast<T>(exponent - 1));
  }
};

struct Tanh {
  static constexpr const char* name = "tanh";
  static constexpr bool from_output = true;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return math::tanh(x);
  }
  template <class T>
  MICA_HOST_DEVICE T derivative(T y) const {
    return (T{1} - y) * (T{1} + y);
  }
};

struct Erf {
  static constexpr const char* name = "erf";
  static constexpr bool from_output = false;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return math::erf(x);
  }
  template <class T>
  MICA_HOST_DEVICE T derivative(T x) const {
    return T(1.1283791670955126) * math::exp(-x * x);  // 2 / √π
  }
};

struct Sigmoid {
  static constexpr const char* name = "sigmoid";
  static constexpr bool from_output = true;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return math::sigmoid(x);
  }
  template <class T>
  MICA_HOST_DEVICE T derivative(T y) const {
    return y * (T{1} - y);
  }
};

struct Relu {
  static constexpr const char* name = "relu";
  static constexpr bool from_output = true;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return x <= T{0} ? T{0} : x;  // NaN stays
  }
  template <class T>
  MICA_HOST_DEVICE T derivative(T y) const {
    return y <= T{0} ? T{0} : T{1};
  }
};

struct LeakyRelu {
  static constexpr const char* name = "leaky_relu";
  static constexpr bool from_output = false;
  double slope;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return x > T{0} ? x : x * static_cast<T>(slope);
  }
  template <class T>
  MICA_HOST_DEVICE T derivative(T x) const {
    return x > T{0} ? T{1} : static_cast<T>(slope);
  }
};

struct Silu {
  static constexpr const char* name = "silu";
  static constexpr bool from_output = false;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return x * math::sigmoid(x);
  }
  template <class T>
  MICA_HOST_DEVICE T derivative(T x) const {
    const T s = math::sigmoid(x);
    return s * (T{1} + x * (T{1} - s));
  }
};

struct Gelu {
  static constexpr const char* name = "gelu";
  static constexpr bool from_output = false;
  template <class T>
  MICA_HOST_DEVICE static T cdf(T x) {
    return T(0.5) + T(0.5) * math::erf(x * T(0.70710678118654752));
  }
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return x * cdf(x);
  }
  template <class T>
  MICA_HOST_DEVICE T derivative(T x) const {
    return cdf(x) + x * (T(0.39894228040143268) * math::exp(T(-0.5) * x * x));  // x · density, 1 / √(2π)
  }
};

// 0.5 x (1 + tanh u) with u = √(2/π) (x + 0.044715 x³), as x · sigmoid(2u): the same number without cancellation.
struct GeluTanh {
  static constexpr const char* name = "gelu";
  static constexpr bool from_output = false;
  static constexpr double a = 1.5957691216057308;  // 2u = a x + b x³
  static constexpr double b = 0.071354816272600249;
  template <class T>
  MICA_HOST_DEVICE static T gate(T x) {
    return T{1} / (T{1} + math::exp(-x * (T(a) + T(b) * (x * x))));
  }
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return x * gate(x);
  }
  template <class T>
  MICA_HOST_DEVICE T derivative(T x) const {
    const T s = gate(x);
    return s + s * (T{1} - s) * x * (T(a) + T(0.21406444881780075) * (x * x));  // 3 b
  }
};

struct Abs {
  static constexpr const char* name = "abs";
  static constexpr bool from_output = false;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return x < T{0} ? -x : x + T{0};  // -0 becomes 0
  }
  template <class T>
  MICA_HOST_DEVICE T derivative(T x) const {
    return x > T{0} ? T{1} : x < T{0} ? T{-1} : T{0};
  }
};

struct Clamp {
  static constexpr const char* name = "clamp";
  static constexpr bool from_output = false;
  double low;
  double high;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    const T least = static_cast<T>(low);
    const T most = static_cast<T>(high);
    return x < least ? least : x > most ? most : x;  // NaN stays
  }
  template <class T>
  MICA_HOST_DEVICE T derivative(T x) const {
    return x >= static_cast<T>(low) && x <= static_cast<T>(high) ? T{1} : T{0};
  }
};

// log(1 + e^(beta x)) / beta, and x where beta x exceeds the threshold.
struct Softplus {
  static constexpr const char* name = "softplus";
  static constexpr bool from_output = false;
  double beta;
  double threshold;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    const T scaled = x * static_cast<T>(beta);
    return scaled > static_cast<T>(threshold) ? x : math::log1p(math::exp(scaled)) / static_cast<T>(beta);
  }
  template <class T>
  MICA_HOST_DEVICE T derivative(T x) const {
    const T scaled = x * static_cast<T>(beta);
    return scaled > static_cast<T>(threshold) ? T{1} : math::sigmoid(scaled);
  }
};

struct Elu {
  static constexpr const char* name = "elu";
  static constexpr bool from_output = false;
  double alpha;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return x <= T{0} ? static_cast<T>(alpha) * math::expm1(x) : x;
  }
  template <class T>
  MICA_HOST_DEVICE T derivative(T x) const {
    return x <= T{0} ? static_cast<T>(alpha) * math::exp(x) : T{1};
  }
};

struct Floor {
  static constexpr const char* name = "floor";
  static constexpr bool from_output = false;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return math::floor(x);
  }
  template <class T>
  MICA_HOST_DEVICE T derivative(T) const {
    return T{0};
  }
};

struct Ceil {
  static constexpr const char* name = "ceil";
  static constexpr bool from_output = false;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return math::ceil(x);
  }
  template <class T>
  MICA_HOST_DEVICE T derivative(T) const {
    return T{0};
  }
};

struct Round {
  static constexpr const char* name = "round";
  static constexpr bool from_output = false;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return math::round_to_even(x);
  }
  template <class T>
  MICA_HOST_DEVICE T derivative(T) const {
    return T{0};
  }
};

// Of two arguments. `Dtypes` are those it is defined for; derivatives only if the op's backward is not composed of
// other ops.

struct Add {
  static constexpr const char* name = "add";
  using Dtypes = NumericTypes;
  template <class T>
  MICA_HOST_DEVICE T operator()(T a, T b) const {
    return wrapping_add(a, b);
  }
};

struct Sub {
  static constexpr const char* name = "sub";
  using Dtypes = NumericTypes;
  template <class T>
  MICA_HOST_DEVICE T operator()(T a, T b) const {
    return wrapping_sub(a, b);
  }
};

struct Mul {
  static constexpr const char* name = "mul";
  using Dtypes = NumericTypes;
  template <class T>
  MICA_HOST_DEVICE T operator()(T a, T b) const {
    return wrapping_mul(a, b);
  }
};

struct Div {
  static constexpr const char* name = "div";
  using Dtypes = FloatTypes;
  template <class T>
  MICA_HOST_DEVICE T operator()(T a, T b) const {
    return a / b;
  }
};

struct Pow {
  static constexpr const char* name = "pow";
  using Dtypes = FloatTypes;
  template <class T>
  MICA_HOST_DEVICE T operator()(T a, T b) const {
    return math::pow(a, b);
  }
  template <class T>
  MICA_HOST_DEVICE T derivative_a(T a, T b) const {
    return b == T{0} ? T{0} : b * math::pow(a, b - T{1});
  }
  template <class T>
  MICA_HOST_DEVICE T derivative_b(T a, T b) const {
    return a == T{0} && b >= T{0} ? T{0} : math::pow(a, b) * math::log(a);
  }
};

// The remainder of a / b with a's sign; that of integers by 0 is 0.
struct Fmod {
  static constexpr const char* name = "fmod";
  using Dtypes = NumericTypes;
  template <class T>
  MICA_HOST_DEVICE T operator()(T a, T b) const {
    if constexpr (std::is_integral_v<T>) {
      // The smallest number divided by -1 overflows.
      return b == T{0} || b == static_cast<T>(-1) ? T{0} : static_cast<T>(a % b);
    } else {
      return math::fmod(a, b);
    }
  }
  template <class T>
  MICA_HOST_DEVICE T derivative_a(T, T) const {
    return T{1};
  }
  template <class T>
  MICA_HOST_DEVICE T derivative_b(T a, T b) const {
    return -math::trunc(a / b);
  }
};

// a / b rounded down; that of integers by 0 is 0.
struct FloorDivide {
  static constexpr const char* name = "floor_divide";
  using Dtypes = NumericTypes;
  template <class T>
  MICA_HOST_DEVICE T operator()(T a, T b) const {
    if constexpr (std::is_unsigned_v<T>) {
      return b == T{0} ? T{0} : static_cast<T>(a / b);
    } else if constexpr (std::is_integral_v<T>) {
      if (b == T{0}) {
        return T{0};
      }
      if (b == T{-1}) {
        return wrapping_sub(T{0}, a);  // the smallest number is its own negative
      }
      const T quotient = a / b;
      return a % b != 0 && (a < 0) != (b < 0) ? quotient - 1 : quotient;
    } else {
      // From the exact remainder: a / b may round up to an integer.
      if (b == T{0}) {
        return a / b;
      }
      const T rest = math::fmod(a, b);
      const T quotient = (a - rest) / b;
      const T down = rest != T{0} && (rest < T{0}) != (b < T{0}) ? quotient - T{1} : quotient;
      const T whole = math::floor(down);
      return down - whole > T(0.5) ? whole + T{1} : whole;
    }
  }
};

// A NaN in either argument propagates, and both get the gradient; in a tie each gets half of it.
struct Maximum {
  static constexpr const char* name = "maximum";
  using Dtypes = NumericTypes;
  template <class T>
  MICA_HOST_DEVICE T operator()(T a, T b) const {
    return a > b || a != a ? a : b;  // NOLINT(misc-redundant-expression)
  }
  template <class T>
  MICA_HOST_DEVICE T derivative_a(T a, T b) const {
    return a < b ? T(0) : a == b ? T(0.5) : T(1);
  }
  template <class T>
  MICA_HOST_DEVICE T derivative_b(T a, T b) const {
    return derivative_a(b, a);
  }
};

struct Minimum {
  static constexpr const char* name = "minimum";
  using Dtypes = NumericTypes;
  template <class T>
  MICA_HOST_DEVICE T operator()(T a, T b) const {
    return a < b || a != a ? a : b;  // NOLINT(misc-redundant-expression)
  }
  template <class T>
  MICA_HOST_DEVICE T derivative_a(T a, T b) const {
    return a > b ? T(0) : a == b ? T(0.5) : T(1);
  }
  template <class T>
  MICA_HOST_DEVICE T derivative_b(T a, T b) const {
    return derivative_a(b, a);
  }
};

// Comparisons. > and ≥ are < and ≤ with exchanged arguments.

struct Equal {
  template <class T>
  MICA_HOST_DEVICE bool operator()(T a, T b) const {
    return a == b;
  }
};

struct NotEqual {
  template <class T>
  MICA_HOST_DEVICE bool operator()(T a, T b) const {
    return a != b;
  }
};

struct Less {
  template <class T>
  MICA_HOST_DEVICE bool operator()(T a, T b) const {
    return a < b;
  }
};

struct LessEqual {
  template <class T>
  MICA_HOST_DEVICE bool operator()(T a, T b) const {
    return a <= b;
  }
};

// Logical functions on bool.

struct And {
  MICA_HOST_DEVICE bool operator()(bool a, bool b) const { return a && b; }
};

struct Or {
  MICA_HOST_DEVICE bool operator()(bool a, bool b) const { return a || b; }
};

struct Not {
  MICA_HOST_DEVICE bool operator()(bool a) const { return !a; }
};

struct Select {
  template <class T>
  MICA_HOST_DEVICE T operator()(bool condition, T a, T b) const {
    return condition ? a : b;
  }
};

// Gradients: dy times the derivative.

template <class F>
struct Backward {
  F f;
  template <class T>
  MICA_HOST_DEVICE T operator()(T dy, T v) const {
    return dy * f.derivative(v);
  }
};

template <class F>
struct BackwardA {
  F f;
  template <class T>
  MICA_HOST_DEVICE T operator()(T dy, T a, T b) const {
    return dy * f.derivative_a(a, b);
  }
};

template <class F>
struct BackwardB {
  F f;
  template <class T>
  MICA_HOST_DEVICE T operator()(T dy, T a, T b) const {
    return dy * f.derivative_b(a, b);
  }
};

}  // namespace mica::functions
