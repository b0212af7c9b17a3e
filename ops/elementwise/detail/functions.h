#pragma once

// The element-wise functions and their derivatives, shared by both devices. T is the type of arithmetic, which is float
// for 16-bit floats. Derivatives at kinks are chosen as in PyTorch.

#include <mica/core/detail/wrap.h>
#include <mica/core/dispatch.h>
#include <mica/core/math.h>

namespace mica::functions {

// Functions of one argument have operator()(x) and derivative(v), where v is the function's result if `from_output`,
// else its argument.

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
  static constexpr bool piecewise_linear = true;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return x <= T{0} ? T{0} : x;  // keeps NaN
  }
  template <class T>
  MICA_HOST_DEVICE T derivative(T y) const {
    return y <= T{0} ? T{0} : T{1};
  }
};

struct LeakyRelu {
  static constexpr const char* name = "leaky_relu";
  static constexpr bool from_output = false;
  static constexpr bool piecewise_linear = true;
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

// Smooth activations compute value and derivative together, as at<T>(x), where T is the type of elements. Arithmetic in
// S = Accumulate<T> need not be more accurate than T's rounding.

/// f(x) and f′(x).
template <class S>
struct Activation {
  S value;
  S slope;
};

/// e⁻ᵃ for a ≥ 0.
template <class T, class S = Accumulate<T>>
MICA_HOST_DEVICE S exp_minus(S a) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 2) {
    // Rounding the product causes a relative error of a · 6e-8: wherever e⁻ᵃ is not negligible, far below that of 16
    // bits.
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(a * -1.44269504f));
    return result;
  }
#endif
  return math::exp(-a);
}

/// 1 / x for x ≥ 1, with an error of at most one ulp.
template <class S>
MICA_HOST_DEVICE S reciprocal(S x) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(S) == 4) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
  }
#endif
  return S{1} / x;
}

/// sigmoid(z) and 1 − sigmoid(z), both with full relative accuracy, even if tiny.
template <class S>
struct Logistic {
  S value;
  S rest;
};
template <class T, class S = Accumulate<T>>
MICA_HOST_DEVICE Logistic<S> logistic(S z) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 2) {
    // One formula for both signs of z. e is limited to 2¹²⁷, so that `rest` is 0 and not NaN where `value` is 0.
    float e;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(fminf(z * -1.44269504f, 127.0f)));
    const float value = reciprocal(1.0f + e);
    return {value, e * value};
  }
#endif
  const bool negative = z < S{0};
  const S e = exp_minus<T>(negative ? -z : z);
  const S large = reciprocal(S{1} + e);
  const S small = e * large;
  return {negative ? small : large, negative ? large : small};
}

/// x · sigmoid(x).
struct Silu {
  static constexpr const char* name = "silu";
  static constexpr bool from_output = false;
  template <class T, class S = Accumulate<T>>
  MICA_HOST_DEVICE static Activation<S> at(S x) {
    const Logistic<S> s = logistic<T>(x);
    const S value = x * s.value;
    return {value, s.value + value * s.rest};
  }
  template <class S>
  MICA_HOST_DEVICE S operator()(S x) const {
    return at<S>(x).value;
  }
  template <class S>
  MICA_HOST_DEVICE S derivative(S x) const {
    return at<S>(x).slope;
  }
};

/// x · Φ(x), where Φ is the standard normal distribution function and φ its density.
struct Gelu {
  static constexpr const char* name = "gelu";
  static constexpr bool from_output = false;
  template <class T, class S = Accumulate<T>>
  MICA_HOST_DEVICE static Activation<S> at(S x) {
    const S size = x < S{0} ? -x : x;
    const S e = exp_minus<T>(S(0.5) * x * x);
    const S tail = tail_of(size, e);
    const S cdf = x < S{0} ? tail : S{1} - tail;
    return {x * cdf, cdf + x * (S(0.39894228040143268) * e)};  // 1 / √(2π)
  }

  template <class S>
  MICA_HOST_DEVICE S operator()(S x) const {
    return at<S>(x).value;
  }
  template <class S>
  MICA_HOST_DEVICE S derivative(S x) const {
    return at<S>(x).slope;
  }

 private:
  // 1 − Φ(x) for x ≥ 0, from e = exp(−x² / 2): e · t · P(t) with t = 1 / (1 + 0.304 x), in the form of Abramowitz and
  // Stegun, 7.1.26. P was fitted to a relative error of at most 1.1e-7 wherever e is not 0.
  MICA_HOST_DEVICE static float tail_of(float x, float e) {
    const float t = reciprocal(1.0f + 0.304f * x);
    const float p = math::detail::polynomial(t, 0.036401916f, -0.15344755f, 0.18908434f, -0.040348575f, 0.12212075f,
                                             0.10284554f, 0.12210466f, 0.12123888f);
    return p * t * e;
  }
  MICA_HOST_DEVICE static double tail_of(double x, double) { return 0.5 * ::erfc(x * 0.70710678118654752); }
};

/// GELU with tanh instead of Φ: x · sigmoid(z) with z = 2 √(2/π) (x + 0.044715 x³) = a x + b x³.
struct GeluTanh {
  static constexpr const char* name = "gelu";
  static constexpr bool from_output = false;
  static constexpr double a = 1.5957691216057308;
  static constexpr double b = 0.071354816272600249;
  static constexpr double kLog2e = 1.4426950408889634;
  template <class T, class S = Accumulate<T>>
  MICA_HOST_DEVICE static Activation<S> at(S x) {
    const S square = x * x;
#if defined(__CUDA_ARCH__)
    if constexpr (sizeof(T) == 2) {
      // The constants include log₂e, for 2ˣ instead of eˣ. The absolute error of 1 − s is at most 6e-8.
      float e;
      asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * (float(a * -kLog2e) + float(b * -kLog2e) * square)));
      const float s = reciprocal(1.0f + e);
      const float value = x * s;
      return {value, s + (value - value * s) * (float(a) + float(3 * b) * square)};
    }
#endif
    const Logistic<S> s = logistic<T>(x * (S(a) + S(b) * square));
    const S value = x * s.value;
    return {value, s.value + value * s.rest * (S(a) + S(3 * b) * square)};
  }
  template <class S>
  MICA_HOST_DEVICE S operator()(S x) const {
    return at<S>(x).value;
  }
  template <class S>
  MICA_HOST_DEVICE S derivative(S x) const {
    return at<S>(x).slope;
  }
};

struct Abs {
  static constexpr const char* name = "abs";
  static constexpr bool from_output = false;
  static constexpr bool piecewise_linear = true;
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
  static constexpr bool piecewise_linear = true;
  double low;
  double high;
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    const T least = static_cast<T>(low);
    const T most = static_cast<T>(high);
    return x < least ? least : x > most ? most : x;  // keeps NaN
  }
  template <class T>
  MICA_HOST_DEVICE T derivative(T x) const {
    return x >= static_cast<T>(low) && x <= static_cast<T>(high) ? T{1} : T{0};
  }
};

// log(1 + e^(beta x)) / beta; x itself where beta x exceeds the threshold.
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

/// Step functions. Their derivative is taken to be 0 at the jumps, too.
struct Stepwise {
  static constexpr bool from_output = false;
  static constexpr bool piecewise_linear = true;
  template <class T>
  MICA_HOST_DEVICE T derivative(T) const {
    return T{0};
  }
};

struct Floor : Stepwise {
  static constexpr const char* name = "floor";
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return math::floor(x);
  }
};

struct Ceil : Stepwise {
  static constexpr const char* name = "ceil";
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return math::ceil(x);
  }
};

struct Round : Stepwise {
  static constexpr const char* name = "round";
  template <class T>
  MICA_HOST_DEVICE T operator()(T x) const {
    return math::round_to_even(x);
  }
};

// Functions of two arguments. `Dtypes` are the element types they are defined for. Only those whose backward is not
// composed of other ops have derivatives.

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

// The remainder of a / b with a's sign; 0 for integers and b = 0.
struct Fmod {
  static constexpr const char* name = "fmod";
  using Dtypes = NumericTypes;
  template <class T>
  MICA_HOST_DEVICE T operator()(T a, T b) const {
    if constexpr (std::is_integral_v<T>) {
      // b = −1 is a special case because the smallest integer divided by −1 overflows.
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

// a / b rounded down; 0 for integers and b = 0.
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
      // Computed from the exact remainder, since a / b may round up to the next integer.
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

// NaN if either argument is; then both get the gradient. If both are equal, each gets half of it.
struct Maximum {
  static constexpr const char* name = "maximum";
  using Dtypes = NumericTypes;
  static constexpr bool piecewise_linear = true;
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
  static constexpr bool piecewise_linear = true;
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

// Comparisons. a > b and a ≥ b are computed as b < a and b ≤ a.

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

/// dy · slope, where `slope` is a derivative of F. If F is piecewise linear, a slope of 0 gives 0 even for an infinite
/// dy, as in sqrt(relu(x)) for x ≤ 0.
template <class F, class T>
MICA_HOST_DEVICE T times_slope(T dy, T slope) {
  if constexpr (requires { F::piecewise_linear; }) {
    return slope == T{0} ? T{0} : dy * slope;
  } else {
    return dy * slope;
  }
}

template <class F>
struct Backward {
  F f;
  template <class T>
  MICA_HOST_DEVICE T operator()(T dy, T v) const {
    return times_slope<F>(dy, f.derivative(v));
  }
};

template <class F>
struct BackwardA {
  F f;
  template <class T>
  MICA_HOST_DEVICE T operator()(T dy, T a, T b) const {
    return times_slope<F>(dy, f.derivative_a(a, b));
  }
};

template <class F>
struct BackwardB {
  F f;
  template <class T>
  MICA_HOST_DEVICE T operator()(T dy, T a, T b) const {
    return times_slope<F>(dy, f.derivative_b(a, b));
  }
};

}  // namespace mica::functions
