#pragma once

#include <initializer_list>
#include <span>
#include <vector>

#include <mica/core/tensor.h>

namespace mica {

/// A new tensor filled with 0, 1 or `value`. Throws if an integer dtype or bool cannot hold the value.
Tensor zeros(const Shape& shape, DType dtype = float32, Device device = Device::cpu());
Tensor ones(const Shape& shape, DType dtype = float32, Device device = Device::cpu());
Tensor full(const Shape& shape, double value, DType dtype = float32, Device device = Device::cpu());

/// start, start + step, … up to but not including end. Throws if an integer dtype or bool cannot hold all of them.
Tensor arange(double start, double end, double step = 1, DType dtype = int64, Device device = Device::cpu());
inline Tensor arange(double end, DType dtype = int64, Device device = Device::cpu()) {
  return arange(0, end, 1, dtype, device);
}

/// rand: uniform in [0, 1). randn: standard normal. randint: uniform integers in [low, high). All use the generator of
/// core/rng.h: the same seed gives the same numbers on every device.
Tensor rand(const Shape& shape, DType dtype = float32, Device device = Device::cpu());
Tensor randn(const Shape& shape, DType dtype = float32, Device device = Device::cpu());
Tensor randint(std::int64_t low, std::int64_t high, const Shape& shape, DType dtype = int64,
               Device device = Device::cpu());

/// A new tensor of the shape, dtype and device of `x`.
Tensor empty_like(const Tensor& x);
Tensor zeros_like(const Tensor& x);
Tensor ones_like(const Tensor& x);
Tensor full_like(const Tensor& x, double value);
Tensor rand_like(const Tensor& x);
Tensor randn_like(const Tensor& x);

/// A copy of `values`, in row-major order, of their type: vectors of double become float64. Throws unless their number
/// matches the shape.
template <class T>
Tensor from_data(std::span<const T> values, const Shape& shape, Device device = Device::cpu());
template <class T>
Tensor from_data(const std::vector<T>& values, const Shape& shape, Device device = Device::cpu()) {
  return from_data(std::span<const T>(values), shape, device);
}
template <class T>
Tensor from_data(std::initializer_list<T> values, const Shape& shape, Device device = Device::cpu()) {
  return from_data(std::span<const T>(values.begin(), values.size()), shape, device);
}
/// One axis: from_data({1.f, 2.f}).
template <class T>
Tensor from_data(std::initializer_list<T> values, Device device = Device::cpu()) {
  return from_data<T>(values, {static_cast<std::int64_t>(values.size())}, device);
}
/// A list of doubles, such as from_data({1.0, 2.0}), of values of different types, such as from_data({1.0, INFINITY}),
/// and of no values becomes float32, as in PyTorch. from_data<double>({1.0, 2.0}) is float64.
Tensor from_data(std::initializer_list<double> values, const Shape& shape, Device device = Device::cpu());
inline Tensor from_data(std::initializer_list<double> values, Device device = Device::cpu()) {
  return from_data(values, {static_cast<std::int64_t>(values.size())}, device);
}

/// Wraps row-major memory on `device` without a copy. The caller owns it and keeps it alive; its size is not checked,
/// nor that bools are 0 or 1.
Tensor from_blob(void* data, const Shape& shape, DType dtype, Device device = Device::cpu());

/// The elements in row-major order, converted to T, on the host.
template <class T>
std::vector<T> to_vector(const Tensor& x);

}  // namespace mica
