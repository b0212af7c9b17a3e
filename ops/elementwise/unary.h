#pragma once

#include <mica/core/tensor.h>

namespace mica {

// Element-wise functions for float64, float32, float16 and bfloat16; other dtypes throw. The result has x's shape and
// dtype. Arithmetic on 16-bit floats is done in float32. All are differentiable.

/// -x. Also for int64 and int32, whose lowest value is its own negative (it wraps around).
Tensor neg(const Tensor& x);
inline Tensor operator-(const Tensor& x) { return neg(x); }

Tensor exp(const Tensor& x);
/// The natural logarithm.
Tensor log(const Tensor& x);
/// log(1 + x) and exp(x) − 1, exact to rounding also near 0.
Tensor log1p(const Tensor& x);
Tensor expm1(const Tensor& x);
/// Of angles in radians.
Tensor sin(const Tensor& x);
Tensor cos(const Tensor& x);
Tensor sqrt(const Tensor& x);
/// 1 / √x.
Tensor rsqrt(const Tensor& x);
/// x to the power of a number.
Tensor pow(const Tensor& x, double exponent);
Tensor tanh(const Tensor& x);
/// (2 / √π) ∫₀ˣ exp(-t²) dt.
Tensor erf(const Tensor& x);
/// 1 / (1 + e⁻ˣ).
Tensor sigmoid(const Tensor& x);
/// max(x, 0); its derivative at 0 is 0.
Tensor relu(const Tensor& x);
/// x if x > 0, else x · slope; its derivative at 0 is the slope.
Tensor leaky_relu(const Tensor& x, double slope = 0.01);
/// x if x > 0, else alpha · (eˣ − 1); its derivative at 0 is alpha.
Tensor elu(const Tensor& x, double alpha = 1);
/// log(1 + e^(beta · x)) / beta, and x where beta · x > threshold. Throws unless beta ≠ 0.
Tensor softplus(const Tensor& x, double beta = 1, double threshold = 20);
/// x · sigmoid(x).
Tensor silu(const Tensor& x);
/// |x|; its derivative at 0 is 0.
Tensor abs(const Tensor& x);
/// min(max(x, low), high); the derivative is 1 in [low, high], bounds included, and 0 outside. Throws unless low ≤
/// high. Use an infinity for no bound.
Tensor clamp(const Tensor& x, double low, double high);
/// The next integer below, above, and the nearest, halves to the even one. Their derivative is 0.
Tensor floor(const Tensor& x);
Tensor ceil(const Tensor& x);
Tensor round(const Tensor& x);

enum class GeluApproximation { none, tanh };

/// x · Φ(x) with Φ the normal distribution function (Hendrycks and Gimpel, arXiv:1606.08415). With ::tanh, Φ is
/// replaced by (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2, as in GPT-2.
Tensor gelu(const Tensor& x, GeluApproximation approximation = GeluApproximation::none);

}  // namespace mica
