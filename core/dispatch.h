#pragma once

// From a run-time device or dtype to a compile-time one. This header is the only place that asks whether
// CUDA was built in: without it, the Cuda overload of a kernel is never named, so it need not exist.

#include <mica/core/device.h>
#include <mica/core/dtype.h>

namespace mica {

/// Tags that choose a kernel's overload.
struct Cpu {};
struct Cuda {};

/// Makes `device` the calling thread's CUDA device until the end of scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(Device device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  [[maybe_unused]] int previous_ = -1;  // -1: nothing to restore
};

/// Calls f(Cpu{}) or, with the right GPU current, f(Cuda{}).
template <class F>
decltype(auto) on_device(Device device, F&& f) {
#if MICA_WITH_CUDA
  if (device.is_cuda()) {
    const DeviceGuard guard(device);
    return f(Cuda{});
  }
#else
  check(device.is_cpu(), "mica was built without CUDA, so there is no device {}", device);
#endif
  return f(Cpu{});
}

/// A list of element types.
template <class... Ts>
struct Types {};

using FloatTypes = Types<float, double, Half, BFloat16>;
using IntegerTypes = Types<std::int64_t, std::int32_t, std::uint8_t>;
using NumericTypes = Types<float, double, Half, BFloat16, std::int64_t, std::int32_t, std::uint8_t>;
using AllTypes = Types<float, double, Half, BFloat16, std::int64_t, std::int32_t, std::uint8_t, bool>;

/// Calls f.operator()<T>() with the element type T of `dtype`; throws if it is none of Ts.
/// `op` names the caller in that error.
template <class... Ts, class F>
void on_dtype(Types<Ts...>, DType dtype, const char* op, F&& f) {
  const bool found = ((dtype == dtype_of<Ts> && (f.template operator()<Ts>(), true)) || ...);
  check(found, "{}: dtype {} is not supported", op, dtype);
}

}  // namespace mica
