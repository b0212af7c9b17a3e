#include <cmath>
#include <limits>

#include <mica/core/dispatch.h>
#include <mica/ops/elementwise/operands.h>

namespace mica::detail {

Shape common_shape(const Tensor& a, const Tensor& b, const char* op) {
  check(a.dtype() == b.dtype(), "{}: expected tensors of one dtype, got {} and {}", op, a.dtype(), b.dtype());
  check(a.device() == b.device(), "{}: expected tensors on one device, got {} and {}", op, a.device(), b.device());
  return a.shape() == b.shape() ? a.shape() : broadcast_shapes(a.shape(), b.shape(), op);
}

void check_number(double value, DType dtype, const char* op) {
  if (is_floating(dtype)) {
    return;
  }
  on_dtype(Types<std::int64_t, std::int32_t, std::uint8_t, bool>{}, dtype, op, [&]<class T>() {
    // -2⁶³ and 2⁶³ are doubles, 2⁶³ - 1 is not.
    const double low = static_cast<double>(std::numeric_limits<T>::lowest());
    const double end =
        std::is_same_v<T, std::int64_t> ? 0x1p63 : static_cast<double>(std::numeric_limits<T>::max()) + 1;
    check(value >= low && value < end && value == std::trunc(value), "{}: {} is not a value of {}", op, value, dtype);
  });
}

double rounded(double value, DType dtype) {
  switch (dtype) {
    case DType::float32: return static_cast<float>(value);
    case DType::float16: return Half(static_cast<float>(value));
    case DType::bfloat16: return BFloat16(static_cast<float>(value));
    default: return value;
  }
}

}  // namespace mica::detail
