#pragma once

#include <mica/core/dispatch.h>
#include <mica/ops/elementwise/detail/elementwise_kernels.h>
#include <mica/ops/matmul/detail/layout.h>
#include <mica/ops/matmul/matmul.h>

namespace mica::kernels {

/// out = f(a · b + bias). All tensors have the same floating dtype; M, N, K and the leading axes are not 0.
struct MatmulArgs {
  Tensor a;                                  // (…, M, K), readable (layout.h); leading axes broadcast to those of out
  Tensor b;                                  // (…, K, N), readable; leading axes as a's
  Tensor bias;                               // (N) contiguous, or undefined
  Tensor out;                                // (…, M, N) contiguous
  Activation activation = Activation::none;  // f
  Tensor sums{};                             // out, of out's shape: a · b + bias, f's argument; undefined: not needed
  Tensor slopes{};                           // out, instead of sums: f′(a · b + bias); only if gives_slopes()
  bool accumulate = false;                   // out += a · b; on CUDA only, for matrices, without bias and activation
};

void matmul(Cpu, const MatmulArgs& args);
void matmul(Cuda, const MatmulArgs& args);

/// Whether matmul() can compute `slopes` for these arguments.
inline bool gives_slopes(Cpu, const MatmulArgs&) { return false; }
bool gives_slopes(Cuda, const MatmulArgs& args);

inline constexpr double kLeakySlope = 0.01;

/// The activation as a function; it must not be none.
inline UnaryFunction function_of(Activation activation) {
  switch (activation) {
    case Activation::relu: return functions::Relu{};
    case Activation::leaky_relu: return functions::LeakyRelu{.slope = kLeakySlope};
    case Activation::gelu: return functions::Gelu{};
    default: return functions::GeluTanh{};
  }
}

/// Whether f′ can be computed from f's result, so that backward does not need the sums.
inline bool has_slope_from_output(Activation activation) {
  return activation == Activation::relu || activation == Activation::leaky_relu;
}

/// The activation as a pass of its own, after a product: out = f(sums), possibly in place.
template <class On>
void activate(On device, Activation activation, const Tensor& sums, const Tensor& out) {
  if (activation != Activation::none) {
    unary(device, function_of(activation), out, sums);
  }
}

/// dz = dy · f′ and dbias = the sum of dz's rows, in one pass: the first step of a linear layer's backward. All tensors
/// have the same floating dtype; dy, v and dz are (M, N) and contiguous; M and N are not 0.
struct ActivationBackward {
  Activation activation;  // f
  const Tensor& dy;
  const Tensor& v;      // f's result if has_slope_from_output(), else its argument; undefined if f is none
  const Tensor& dz;     // undefined if f is none, as it equals dy
  const Tensor& dbias;  // (N) contiguous
};

void activation_backward(Cpu, const ActivationBackward& args);
void activation_backward(Cuda, const ActivationBackward& args);

/// out = (a · b) ⊙ f′ and dbias = the sum of out's rows. This is the gradient dz of a linear layer's sums, if a is the
/// gradient of the next layer and b that layer's weight. All tensors have the same floating dtype and are not empty.
struct MatmulActivationBackward {
  Tensor a;               // (M, K), readable
  Tensor b;               // (K, N), readable
  Activation activation;  // f
  Tensor v;               // (M, N) contiguous, as ActivationBackward's; undefined with slopes
  Tensor slopes;          // (M, N) contiguous: f′, or undefined
  Tensor out;             // (M, N) contiguous
  Tensor dbias;           // (N) contiguous, or undefined
};

void matmul_activation_backward(Cpu, const MatmulActivationBackward& args);
void matmul_activation_backward(Cuda, const MatmulActivationBackward& args);

/// Computes a MatmulActivationBackward by a product and an element-wise pass.
template <class On>
void matmul_activation_backward_in_steps(On device, const MatmulActivationBackward& args) {
  const bool has_function = args.activation != Activation::none;
  const Tensor product = has_function ? empty(args.out.shape(), args.out.dtype(), args.out.device()) : args.out;
  matmul(device, {.a = args.a, .b = args.b, .bias = {}, .out = product});
  if (args.slopes.defined()) {
    binary(device, functions::Mul{}, args.out, product, args.slopes);
    if (args.dbias.defined()) {
      activation_backward(device,
                          {.activation = Activation::none, .dy = args.out, .v = {}, .dz = {}, .dbias = args.dbias});
    }
  } else if (args.dbias.defined()) {
    activation_backward(
        device, {.activation = args.activation, .dy = product, .v = args.v, .dz = args.out, .dbias = args.dbias});
  } else if (has_function) {
    unary_backward(device, function_of(args.activation), args.out, product, args.v);
  }
}

bool has_fast_bfloat16(Cpu);
bool has_fast_bfloat16(Cuda);

/// Conversion of the current device's MatmulTuning::timed algorithms to and from text.
std::string timed_algorithms(Cpu);
std::string timed_algorithms(Cuda);
void set_timed_algorithms(Cpu, std::string_view text);
void set_timed_algorithms(Cuda, std::string_view text);

/// sum += a · b, for a and b of the same floating dtype; M, N and K are not 0.
struct MatmulAddArgs {
  Tensor a;    // (M, K), readable
  Tensor b;    // (K, N), readable
  Tensor sum;  // (M, N) contiguous, in the accumulate dtype
};

void matmul_add(Cpu, const MatmulAddArgs& args);
void matmul_add(Cuda, const MatmulAddArgs& args);

}  // namespace mica::kernels
