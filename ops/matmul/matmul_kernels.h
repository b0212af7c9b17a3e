#pragma once

#include <mica/core/dispatch.h>
#include <mica/ops/elementwise/elementwise_kernels.h>
#include <mica/ops/matmul/layout.h>
#include <mica/ops/matmul/matmul.h>

namespace mica::kernels {

/// out = f(a · b + bias), of one floating dtype; M, N, K and the batch are not empty.
struct MatmulArgs {
  Tensor a;                                  // (…, M, K), readable; leading axes broadcast to those of out
  Tensor b;                                  // (…, K, N), readable; likewise
  Tensor bias;                               // (N) contiguous, or undefined
  Tensor out;                                // (…, M, N) contiguous
  Activation activation = Activation::none;  // f
  Tensor sums{};                             // as out: a · b + bias, what f is of; or undefined: not wanted
};

void matmul(Cpu, const MatmulArgs& args);
void matmul(Cuda, const MatmulArgs& args);

inline constexpr double kLeakySlope = 0.01;

/// f, unless it is none.
inline UnaryFunction function_of(Activation activation) {
  switch (activation) {
    case Activation::relu: return functions::Relu{};
    case Activation::leaky_relu: return functions::LeakyRelu{.slope = kLeakySlope};
    case Activation::gelu: return functions::Gelu{};
    default: return functions::GeluTanh{};
  }
}

/// Whether f′ is known from f alone, so that backward needs no sums.
inline bool has_slope_from_output(Activation activation) {
  return activation == Activation::relu || activation == Activation::leaky_relu;
}

/// The last step of a matmul that has computed `sums`: out = f(sums), perhaps in place.
template <class On>
void activate(On device, Activation activation, const Tensor& sums, const Tensor& out) {
  if (activation != Activation::none) {
    unary(device, function_of(activation), out, sums);
  }
}

/// dz = dy · f′ and dbias = the sum of dz's rows, in one pass: the first step of a linear layer's backward. All of one
/// floating dtype, dy, v and dz (M, N) contiguous; M and N are not 0.
struct ActivationBackward {
  Activation activation;  // f
  const Tensor& dy;
  const Tensor& v;      // f's result, if has_slope_from_output() says so, else its argument; undefined if f is none
  const Tensor& dz;     // likewise, as it is dy
  const Tensor& dbias;  // (N) contiguous
};

void activation_backward(Cpu, const ActivationBackward& args);
void activation_backward(Cuda, const ActivationBackward& args);

/// sum += a · b, of one floating dtype; M, N and K are not 0.
struct MatmulAddArgs {
  Tensor a;    // (M, K), readable
  Tensor b;    // (K, N), readable
  Tensor sum;  // (M, N) contiguous, in the accumulate dtype
};

void matmul_add(Cpu, const MatmulAddArgs& args);
void matmul_add(Cuda, const MatmulAddArgs& args);

}  // namespace mica::kernels
