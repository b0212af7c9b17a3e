#pragma once

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>

namespace mica::kernels {

/// y[r, j] = Σ x[r, i] over i ≤ j or, if `reverse`, over i ≥ j.
struct Cumsum {
  const Tensor& x;  // (rows, n), row-major, n ≥ 1, floating or int64
  const Tensor& y;  // of the same shape and dtype, row-major
  bool reverse;
};

using ScannedTypes = Types<float, double, Float16, BFloat16, std::int64_t>;

void cumsum(Cpu, const Cumsum& args);
void cumsum(Cuda, const Cumsum& args);

}  // namespace mica::kernels
