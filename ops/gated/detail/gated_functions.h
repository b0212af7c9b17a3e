#pragma once

// The activations of gated units, each with its derivative, written once for both devices. T is the type of elements,
// S = Accumulate<T> that of arithmetic; what T rounds away need not be right in S.

#include <mica/core/dispatch.h>
#include <mica/core/math.h>
#include <mica/ops/elementwise/detail/functions.h>

namespace mica::functions::gated {

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
    // The product's rounding costs a · 6e-8 of the result, far below what 16 bits keep wherever it is not negligible.
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(a * -1.44269504f));
    return result;
  }
#endif
  return math::exp(-a);
}

/// 1 / x for x ≥ 1, to an ulp.
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

/// sigmoid(z) and 1 − sigmoid(z), the small one of them as exact as the other.
template <class S>
struct Logistic {
  S value;
  S rest;
};
template <class T, class S = Accumulate<T>>
MICA_HOST_DEVICE Logistic<S> logistic(S z) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 2) {
    // e⁻ᶻ without a case for each sign. At 2¹²⁷, value underflows to 0, and rest, a product with it, is 0 and not NaN.
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

struct Silu {
  static constexpr const char* name = "swiglu";
  template <class T, class S = Accumulate<T>>
  MICA_HOST_DEVICE static Activation<S> at(S x) {
    const Logistic<S> s = logistic<T>(x);
    const S value = x * s.value;
    return {value, s.value + value * s.rest};
  }
};

/// x · Φ(x), with Φ the normal distribution function and φ its density.
struct Gelu {
  static constexpr const char* name = "geglu";
  template <class T, class S = Accumulate<T>>
  MICA_HOST_DEVICE static Activation<S> at(S x) {
    const S size = x < S{0} ? -x : x;
    const S e = exp_minus<T>(S(0.5) * x * x);
    const S tail = tail_of(size, e);
    const S cdf = x < S{0} ? tail : S{1} - tail;
    return {x * cdf, cdf + x * (S(0.39894228040143268) * e)};  // 1 / √(2π)
  }

 private:
  // 1 − Φ(x) for x ≥ 0, where e = exp(−x² / 2). It is e · t · P(t) with t = 1 / (1 + 0.304 x), the form of Abramowitz
  // and Stegun 7.1.26; P fits with an error of at most 1.1e-7 of the tail itself, up to where e is 0.
  MICA_HOST_DEVICE static float tail_of(float x, float e) {
    const float t = reciprocal(1.0f + 0.304f * x);
    const float p = math::detail::polynomial(t, 0.036401916f, -0.15344755f, 0.18908434f, -0.040348575f, 0.12212075f,
                                             0.10284554f, 0.12210466f, 0.12123888f);
    return p * t * e;
  }
  MICA_HOST_DEVICE static double tail_of(double x, double) { return 0.5 * ::erfc(x * 0.70710678118654752); }
};

/// x · sigmoid(z), z = 2 √(2/π) (x + 0.044715 x³) = a x + b x³: GELU with Φ by tanh.
struct GeluTanh {
  static constexpr const char* name = "geglu";
  static constexpr double a = functions::GeluTanh::a;
  static constexpr double b = functions::GeluTanh::b;
  static constexpr double kLog2e = 1.4426950408889634;
  template <class T, class S = Accumulate<T>>
  MICA_HOST_DEVICE static Activation<S> at(S x) {
    const S square = x * x;
#if defined(__CUDA_ARCH__)
    if constexpr (sizeof(T) == 2) {
      // With constants for 2ˣ. The rest, 1 − s, is off by up to 6e-8.
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
};

}  // namespace mica::functions::gated
