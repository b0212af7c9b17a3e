// Implements core/detail/finite.h.

#include <cmath>

#include <mica/autograd/grad_mode.h>
#include <mica/core/detail/finite.h>
#include <mica/ops/reduce/reduce.h>

namespace mica {

const char* first_fault(const Tensor& x) {
  if (x.numel() == 0) {
    return nullptr;
  }
  const autograd::InsideOp guard;
  // Both max and min return NaN if any element is NaN.
  const double largest = max(x).item();
  if (std::isnan(largest)) {
    return "NaN";
  }
  return std::isinf(largest) || std::isinf(min(x).item()) ? "Inf" : nullptr;
}

}  // namespace mica
