#pragma once

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>

namespace mica::kernels {

/// The indices of each row's first k elements in sorted order.
struct Argsort {
  const Tensor& x;        // (rows, n), row-major, n ≥ 1
  const Tensor& indices;  // (rows, k) int64, row-major
  bool descending;
};

void argsort(Cpu, const Argsort& args);
void argsort(Cuda, const Argsort& args);

}  // namespace mica::kernels
