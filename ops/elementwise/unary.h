#pragma once

#include <mica/core/tensor.h>

namespace mica {

// Element-wise functions for float64, float32, float16 and bfloat16; other dtypes throw. The result has x's shape and
// dtype. 16-bit floats are computed in float32 and rounded once. All are differentiable.

/// −x. Also for int64 and int32, whose lowest value wraps around to itself.
Tensor neg(const Tensor& x);
inline Tensor operator-(const Tensor& x) { return neg(x); }

Tensor exp(const Tensor& x);
/// The natural logarithm.
Tensor log(const Tensor& x);
/// log(1 + x) and exp(x) − 1, without the cancellation that these formulas have near x = 0.
Tensor log1p(const Tensor& x);
Tensor expm1(const Tensor& x);
/// Sine and cosine of x in radians.
Tensor sin(const Tensor& x);
Tensor cos(const Tensor& x);
Tensor sqrt(const Tensor& x);
/// 1 / √x.
Tensor rsqrt(const Tensor& x);
/// x to the power `exponent`.
Tensor pow(const Tensor& x, double exponent);
Tensor tanh(const Tensor& x);
/// (2 / √π) ∫₀ˣ exp(-t²) dt.
Tensor erf(const Tensor& x);
/// 1 / (1 + e⁻ˣ).
Tensor sigmoid(const Tensor& x);
/// max(x, 0); its derivative at 0 is 0.
Tensor relu(const Tensor& x);
/// x if x > 0, else slope · x; its derivative at 0 is `slope`.
Tensor leaky_relu(const Tensor& x, double slope = 0.01);
/// x if x > 0, else alpha · (eˣ − 1); its derivative at 0 is alpha.
Tensor elu(const Tensor& x, double alpha = 1);
/// log(1 + e^(beta · x)) / beta; x itself where beta · x > threshold. Throws if beta is 0.
Tensor softplus(const Tensor& x, double beta = 1, double threshold = 20);
/// x · sigmoid(x).
Tensor silu(const Tensor& x);
/// |x|; its derivative at 0 is 0.
Tensor abs(const Tensor& x);
/// min(max(x, low), high); the derivative is 1 for x in [low, high], bounds included, and 0 outside. Pass ∓infinity for
/// no bound. Throws unless low ≤ high.
Tensor clamp(const Tensor& x, double low, double high);
/// x rounded down, up, and to the nearest integer (ties to even). The derivative is 0.
Tensor floor(const Tensor& x);
Tensor ceil(const Tensor& x);
Tensor round(const Tensor& x);

enum class GeluApproximation { none, tanh };

/// x · Φ(x), where Φ is the cumulative distribution function of the standard normal distribution (Hendrycks and Gimpel,
/// arXiv:1606.08415). With ::tanh, Φ(x) is approximated by (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2, as in GPT-2.
Tensor gelu(const Tensor& x, GeluApproximation approximation = GeluApproximation::none);

}  // namespace mica
