#pragma once

#include <concepts>
#include <memory>
#include <optional>

#include <mica/autograd/detail/thread_state.h>
#include <mica/core/detail/nesting.h>
#include <mica/core/tensor.h>

namespace mica::autograd {

namespace detail {

class CastCache;

struct AutocastState {
  DType dtype = float32;       // float32: off
  CastCache* cache = nullptr;  // of the outermost guard
};

extern thread_local constinit AutocastState autocast_state;

}  // namespace detail

/// Mixed precision for models that are kept in float32: until the end of scope, on this thread,
///
///   linear, matmul, convolutions, attention        take float32 operands in 16 bits and return 16 bits
///   layer_norm, rms_norm, add_layer_norm, softmax, log_softmax, logsumexp, cross_entropy
///                                                  take 16-bit operands in float32 and return float32
///   add, sub, mul, div, maximum, minimum           of float32 and 16 bits: in float32
///
/// All other ops compute in the dtype of their operands; float64 and integers are unchanged. Gradients have the dtype
/// of their tensors, so those of float32 parameters are float32:
///
///     Tensor loss;
///     {
///       autograd::Autocast guard(bfloat16);
///       loss = cross_entropy(model(x), targets);
///     }
///     loss.backward();
///     optimizer.step();
///
/// A parameter is converted at its first use, and again after an in-place write such as an optimizer step. The
/// converted copies live until the outermost guard ends. While a CUDA graph is captured, every use converts anew.
///
/// backward() uses the dtypes chosen in forward, inside or outside a guard. Checkpointed functions are recomputed under
/// their original guard. float16 needs a loss scale: see optim::GradScaler.
class Autocast {
 public:
  /// float16 or bfloat16; nullopt turns it off inside another guard. Throws for other dtypes.
  explicit Autocast(std::optional<DType> dtype = bfloat16);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  mica::detail::Nested<Autocast> nested_{"autograd::Autocast"};
  detail::AutocastState previous_;
  std::unique_ptr<detail::CastCache> cache_;
};

/// The dtype of this thread's innermost guard; nullopt without one.
std::optional<DType> autocast_dtype();

// For ops, which check at their start and call themselves with converted operands. Ops inside an op never convert.

inline bool autocast_active() { return detail::autocast_state.dtype != float32 && !thread_state.inside_op; }

/// Whether an operand must be narrowed() to 16 bits.
template <std::same_as<Tensor>... T>
bool autocast_narrows(const T&... operands) {
  return autocast_active() && ((operands.defined() && operands.dtype() == float32) || ...);
}
/// Converts float32 to the 16-bit dtype of the guard; returns other dtypes and undefined tensors unchanged.
Tensor narrowed(const Tensor& x);

/// Whether an operand must be widened() to float32.
template <std::same_as<Tensor>... T>
bool autocast_widens(const T&... operands) {
  return autocast_active() && ((operands.defined() && size_of(operands.dtype()) == 2) || ...);
}
/// Converts 16-bit floats to float32; returns other dtypes and undefined tensors unchanged.
Tensor widened(const Tensor& x);

/// Whether one operand is wider than the other, so that both must be widened().
inline bool autocast_promotes(const Tensor& a, const Tensor& b) {
  return autocast_active() && a.dtype() != b.dtype() && (size_of(a.dtype()) == 2 || size_of(b.dtype()) == 2);
}

}  // namespace mica::autograd
