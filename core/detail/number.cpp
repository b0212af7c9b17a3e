#include <cmath>
#include <limits>
#include <type_traits>

#include <mica/core/detail/number.h>
#include <mica/core/dispatch.h>

namespace mica::detail {

void check_number(double value, DType dtype, const char* op) {
  if (is_floating(dtype)) {
    return;
  }
  on_dtype(Types<std::int64_t, std::int32_t, std::uint8_t, bool>{}, dtype, op, [&]<class T>() {
    // A double represents -2⁶³ and 2⁶³ exactly, but not 2⁶³ - 1, so the upper bound is exclusive.
    const double low = static_cast<double>(std::numeric_limits<T>::lowest());
    const double end =
        std::is_same_v<T, std::int64_t> ? 0x1p63 : static_cast<double>(std::numeric_limits<T>::max()) + 1;
    check(value >= low && value < end && value == std::trunc(value), "{}: {} is not representable in {}", op, value,
          dtype);
  });
}

}  // namespace mica::detail
