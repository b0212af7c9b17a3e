#pragma once

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>

namespace mica::kernels {

// x and dx have any strides. Results (y, values, indices) and scratch are row-major and have x's shape, except that
// reduced axes have length 1. dy has the results' shape and any strides. Scratch has the accumulate dtype.

/// y = Σ x / divisor. y has x's dtype if that is floating, else int64 (and divisor is 1).
struct Sum {
  const Tensor& x;
  double divisor;
  const Tensor& y;
};
void sum(Cpu, const Sum& args);
void sum(Cuda, const Sum& args);

/// mean = Σ x / count = first + offset, y = Σ (x - mean)² / divisor
struct Var {
  const Tensor& x;
  double count;
  double divisor;
  const Tensor& first;   // one element of each row, no matter which, in x's dtype
  const Tensor& offset;  // scratch; saved for backward
  const Tensor& y;
};
void var(Cpu, const Var& args);
void var(Cuda, const Var& args);

/// dx = 2 dy (x - mean) / divisor
struct VarBackward {
  const Tensor& x;
  const Tensor& first;
  const Tensor& offset;
  const Tensor& dy;
  double divisor;
  const Tensor& dx;
};
void var_backward(Cpu, const VarBackward& args);
void var_backward(Cuda, const VarBackward& args);

/// y = log Σ exp(x)
struct LogSumExp {
  const Tensor& x;
  const Tensor& largest;  // scratch
  const Tensor& y;
};
void logsumexp(Cpu, const LogSumExp& args);
void logsumexp(Cuda, const LogSumExp& args);

/// dx = dy exp(x - y)
struct LogSumExpBackward {
  const Tensor& x;
  const Tensor& y;
  const Tensor& dy;
  const Tensor& dx;
};
void logsumexp_backward(Cpu, const LogSumExpBackward& args);
void logsumexp_backward(Cuda, const LogSumExpBackward& args);

/// values = the largest (or smallest) x, or NaN if any x is NaN. indices, if defined, is its first position along the
/// reduced axis.
struct Extreme {
  const Tensor& x;
  bool largest;
  const Tensor& values;
  const Tensor& indices;
};
void extreme(Cpu, const Extreme& args);
void extreme(Cuda, const Extreme& args);

/// dx = dy / count where x is the extreme, else 0; count is the number of such x.
struct ExtremeBackward {
  const Tensor& x;
  const Tensor& values;
  const Tensor& dy;
  const Tensor& count;  // scratch
  const Tensor& dx;
};
void extreme_backward(Cpu, const ExtremeBackward& args);
void extreme_backward(Cuda, const ExtremeBackward& args);

/// dx = dy where positions == indices, else 0. positions is 0, 1, … along the reduced axis and broadcasts to dx.
struct ScatterAlongAxis {
  const Tensor& positions;
  const Tensor& indices;
  const Tensor& dy;
  const Tensor& dx;
};
void scatter_along_axis(Cpu, const ScatterAlongAxis& args);
void scatter_along_axis(Cuda, const ScatterAlongAxis& args);

}  // namespace mica::kernels
