#pragma once

#include <mica/core/dispatch.h>
#include <mica/ops/elementwise/elementwise_kernels.h>
#include <mica/ops/matmul/layout.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/reduce/reduce_kernels.h>

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

/// f, unless it is none.
inline UnaryFunction function_of(Activation activation) {
  switch (activation) {
    case Activation::relu: return functions::Relu{};
    case Activation::leaky_relu: return functions::LeakyRelu{.slope = 0.01};
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

/// out = a · b and sums = Σ a along its rows, of one floating dtype; M, N and K are not 0. With a = dzᵀ, these are the
/// gradients of a linear layer's weight and bias.
struct MatmulSumsArgs {
  Tensor a;     // (M, K), readable
  Tensor b;     // (K, N), readable
  Tensor out;   // (M, N) contiguous
  Tensor sums;  // (M) contiguous
};

void matmul_sums(Cpu, const MatmulSumsArgs& args);
void matmul_sums(Cuda, const MatmulSumsArgs& args);

/// The same in two steps.
template <class On>
void matmul_then_sums(On device, const MatmulSumsArgs& args) {
  matmul(device, MatmulArgs{.a = args.a, .b = args.b, .bias = {}, .out = args.out});
  const std::int64_t rows = args.a.size(0);
  const Tensor columns =  // aᵀ, as it lies where rows of dz follow each other
      as_strided(args.a, {args.a.size(1), rows}, {args.a.strides()[1], args.a.strides()[0]}, args.a.handle()->offset);
  const Tensor sums = as_strided(args.sums, {1, rows}, {rows, 1}, args.sums.handle()->offset);
  sum(device, Sum{.x = columns, .divisor = 1, .y = sums});
}

/// sum += a · b, of one floating dtype; M, N and K are not 0.
struct MatmulAddArgs {
  Tensor a;    // (M, K), readable
  Tensor b;    // (K, N), readable
  Tensor sum;  // (M, N) contiguous, in the accumulate dtype
};

void matmul_add(Cpu, const MatmulAddArgs& args);
void matmul_add(Cuda, const MatmulAddArgs& args);

}  // namespace mica::kernels
