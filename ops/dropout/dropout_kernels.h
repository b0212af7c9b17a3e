#pragma once

#include <mica/core/dispatch.h>
#include <mica/core/philox.h>
#include <mica/core/tensor.h>

namespace mica::kernels {

/// y = x · scale where the element's random word is at least `threshold`, else 0. x and y row-major, of one shape.
struct Dropout {
  const Tensor& y;
  const Tensor& x;
  PhiloxKey key;
  std::uint32_t threshold;
  double scale;
};

void dropout(Cpu, const Dropout& args);
void dropout(Cuda, const Dropout& args);

}  // namespace mica::kernels
