#pragma once

// Dispatch from a run-time device or dtype to a compile-time one. Only this header depends on whether mica is built
// with CUDA: without it, no Cuda overload of a kernel is referenced, so none has to exist.

#include <mica/core/device.h>
#include <mica/core/dtype.h>

namespace mica {

/// Tags that select a kernel's overload.
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

/// Calls f(Cpu{}), or f(Cuda{}) with the GPU made current.
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

using FloatTypes = Types<float, double, Float16, BFloat16>;
using IntegerTypes = Types<std::int64_t, std::int32_t, std::uint8_t>;
using NumericTypes = Types<float, double, Float16, BFloat16, std::int64_t, std::int32_t, std::uint8_t>;
using AllTypes = Types<float, double, Float16, BFloat16, std::int64_t, std::int32_t, std::uint8_t, bool>;

/// Calls f.operator()<T>() with the element type T of `dtype`. Throws an error that starts with `op` if T is not in Ts.
template <class... Ts, class F>
void on_dtype(Types<Ts...>, DType dtype, const char* op, F&& f) {
  const bool found = ((dtype == dtype_of<Ts> && (f.template operator()<Ts>(), true)) || ...);
  check(found, "{}: dtype {} is not supported", op, dtype);
}

}  // namespace mica
