#include <limits>

#include <mica/core/creation.h>
#include <mica/core/detail/random_kernels.h>

namespace mica {

namespace {

std::pair<std::int64_t, std::int64_t> integer_limits(DType dtype) {
  switch (dtype) {
    case DType::int32: return {INT32_MIN, INT32_MAX};
    case DType::uint8: return {0, UINT8_MAX};
    default: return {INT64_MIN, INT64_MAX};
  }
}

}  // namespace

Tensor rand(const Shape& shape, DType dtype, Device device) {
  check(is_floating(dtype), "rand: expected a floating dtype, got {}", dtype);
  const Tensor x = empty(shape, dtype, device);
  on_device(device, [&](auto d) { kernels::fill_uniform(d, x, next_philox_key()); });
  return x;
}

Tensor randn(const Shape& shape, DType dtype, Device device) {
  check(is_floating(dtype), "randn: expected a floating dtype, got {}", dtype);
  const Tensor x = empty(shape, dtype, device);
  on_device(device, [&](auto d) { kernels::fill_normal(d, x, next_philox_key()); });
  return x;
}

Tensor randint(std::int64_t low, std::int64_t high, const Shape& shape, DType dtype, Device device) {
  check(!is_floating(dtype) && dtype != boolean, "randint: expected an integer dtype, got {}", dtype);
  const auto [least, most] = integer_limits(dtype);
  check(low < high && low >= least && high - 1 <= most, "randint: expected low < high within {}, got low {}, high {}",
        dtype, low, high);
  const Tensor x = empty(shape, dtype, device);
  const std::uint64_t range = static_cast<std::uint64_t>(high) - static_cast<std::uint64_t>(low);
  on_device(device, [&](auto d) { kernels::fill_integers(d, x, next_philox_key(), low, range); });
  return x;
}

}  // namespace mica
