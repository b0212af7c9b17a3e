#pragma once

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>

namespace mica::kernels {

// All tensors are row-major and not empty. They are viewed as (outer, n, inner), where n is the length of the axis.

struct SoftmaxForward {
  const Tensor& x;
  int axis;
  const Tensor& y;
};
void softmax(Cpu, const SoftmaxForward& args);
void softmax(Cuda, const SoftmaxForward& args);
void log_softmax(Cpu, const SoftmaxForward& args);
void log_softmax(Cuda, const SoftmaxForward& args);

/// softmax: dx = y (dy - Σ dy y); log_softmax: dx = dy - exp(y) Σ dy
struct SoftmaxBackward {
  const Tensor& y;
  const Tensor& dy;
  int axis;
  const Tensor& dx;
};
void softmax_backward(Cpu, const SoftmaxBackward& args);
void softmax_backward(Cuda, const SoftmaxBackward& args);
void log_softmax_backward(Cpu, const SoftmaxBackward& args);
void log_softmax_backward(Cuda, const SoftmaxBackward& args);

/// The shape (outer, n, inner) of a row-major tensor whose axis `axis` has length n.
struct AxisSplit {
  std::int64_t outer = 1;
  std::int64_t n = 1;
  std::int64_t inner = 1;

  AxisSplit(const Shape& shape, int axis) {
    for (int i = 0; i < shape.size(); ++i) {
      (i < axis ? outer : i == axis ? n : inner) *= shape[i];
    }
  }
};

}  // namespace mica::kernels
