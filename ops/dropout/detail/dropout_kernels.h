#pragma once

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>
#include <mica/ops/dropout/detail/element_dropout.h>

namespace mica::kernels {

/// y = x · scale where the element is kept, else 0. x and y are row-major and have the same shape.
struct Dropout {
  const Tensor& y;
  const Tensor& x;
  ElementDropout dropout;
};

void dropout(Cpu, const Dropout& args);
void dropout(Cuda, const Dropout& args);

}  // namespace mica::kernels
