#include <algorithm>
#include <cmath>

#include <mica/core/capture.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/detail/copy_kernels.h>
#include <mica/core/detail/number.h>

namespace mica {

Tensor full(const Shape& shape, double value, DType dtype, Device device) {
  detail::check_number(value, dtype, "full");
  const Tensor x = empty(shape, dtype, device);
  fill_data(x, value);
  return x;
}

Tensor zeros(const Shape& shape, DType dtype, Device device) { return full(shape, 0, dtype, device); }
Tensor ones(const Shape& shape, DType dtype, Device device) { return full(shape, 1, dtype, device); }

Tensor arange(double start, double end, double step, DType dtype, Device device) {
  check(step != 0 && std::isfinite(start) && std::isfinite(end) && std::isfinite(step),
        "arange: expected finite bounds and a step that is not 0, got start {}, end {}, step {}", start, end, step);
  const double count = std::max(0.0, std::ceil((end - start) / step));
  check(count < 0x1p60, "arange: from {} to {} by {} is too long", start, end, step);
  const auto n = static_cast<std::int64_t>(count);
  if (!is_floating(dtype) && n > 0) {
    detail::check_number(start, dtype, "arange");
    if (n > 1) {
      detail::check_number(start + static_cast<double>(n - 1) * step, dtype, "arange");
      detail::check_number(step, int64, "arange");
    }
  }
  const Tensor values = empty({n}, is_floating(dtype) ? float64 : int64, device);
  if (n > 0) {
    on_device(device, [&](auto tag) { kernels::fill_sequence(tag, values, start, n > 1 ? step : 0); });
  }
  if (values.dtype() == dtype) {
    return values;
  }
  const Tensor x = empty({n}, dtype, device);
  copy_into(x, values);
  return x;
}

Tensor empty_like(const Tensor& x) { return empty(x.shape(), x.dtype(), x.device()); }
Tensor zeros_like(const Tensor& x) { return zeros(x.shape(), x.dtype(), x.device()); }
Tensor ones_like(const Tensor& x) { return ones(x.shape(), x.dtype(), x.device()); }
Tensor full_like(const Tensor& x, double value) { return full(x.shape(), value, x.dtype(), x.device()); }
Tensor rand_like(const Tensor& x) { return rand(x.shape(), x.dtype(), x.device()); }
Tensor randn_like(const Tensor& x) { return randn(x.shape(), x.dtype(), x.device()); }

template <class T>
Tensor from_data(std::span<const T> values, const Shape& shape, Device device) {
  check(static_cast<std::int64_t>(values.size()) == numel_of(shape),
        "from_data: expected {} values for shape {}, got {}", numel_of(shape), shape, values.size());
  const Tensor host = empty(shape, dtype_of<T>);
  std::copy(values.begin(), values.end(), host.data<T>());
  if (device.is_cpu()) {
    return host;
  }
  const Tensor x = empty(shape, dtype_of<T>, device);
  copy_into(x, host);
  return x;
}

Tensor from_data(std::initializer_list<double> values, const Shape& shape, Device device) {
  std::vector<float> rounded;
  for (const double value : values) {
    rounded.push_back(static_cast<float>(value));
  }
  return from_data(rounded, shape, device);
}

Tensor from_blob(void* data, const Shape& shape, DType dtype, Device device) {
  check(data != nullptr || numel_of(shape) == 0, "from_blob: expected memory for shape {}, got a null pointer", shape);
  check(size_of(dtype) > 0, "from_blob: expected a dtype, got number {}", static_cast<int>(dtype));
  auto impl = std::make_shared<detail::TensorImpl>();
  impl->numel = numel_of(shape);
  check(impl->numel <= INT64_MAX / static_cast<std::int64_t>(size_of(dtype)), "from_blob: {} of {} has too many bytes",
        shape, dtype);
  impl->storage = std::make_shared<Storage>(static_cast<std::byte*>(data),
                                            static_cast<std::size_t>(impl->numel) * size_of(dtype), device);
  impl->shape = shape;
  impl->strides = contiguous_strides(shape);
  impl->dtype = dtype;
  return Tensor(std::move(impl));
}

template <class T>
std::vector<T> to_vector(const Tensor& x) {
  if (x.device().is_cuda()) {
    check_not_capturing("to_vector");
  }
  const Tensor host = empty(x.shape(), dtype_of<T>);
  copy_into(host, x);
  const T* data = host.data<T>();
  return std::vector<T>(data, data + host.numel());
}

double Tensor::item() const {
  check(numel() == 1, "item: expected a tensor of one element, got shape {}", shape());
  if (device().is_cuda()) {
    check_not_capturing("item");
  }
  if (dtype() == int64) {
    const std::int64_t value = to_vector<std::int64_t>(*this)[0];
    const auto rounded = static_cast<double>(value);
    check(rounded < 0x1p63 && static_cast<std::int64_t>(rounded) == value,
          "item: expected a number that a double can hold, got {}; read it by to_vector<std::int64_t>()", value);
    return rounded;
  }
  const Tensor host = empty({}, float64);
  copy_into(host, as_strided(*this, {}, {}, impl().offset));
  return *host.data<double>();
}

template Tensor from_data(std::span<const double>, const Shape&, Device);
template Tensor from_data(std::span<const float>, const Shape&, Device);
template Tensor from_data(std::span<const Float16>, const Shape&, Device);
template Tensor from_data(std::span<const BFloat16>, const Shape&, Device);
template Tensor from_data(std::span<const std::int64_t>, const Shape&, Device);
template Tensor from_data(std::span<const std::int32_t>, const Shape&, Device);
template Tensor from_data(std::span<const std::uint8_t>, const Shape&, Device);
template Tensor from_data(std::span<const bool>, const Shape&, Device);

template std::vector<double> to_vector(const Tensor&);
template std::vector<float> to_vector(const Tensor&);
template std::vector<Float16> to_vector(const Tensor&);
template std::vector<BFloat16> to_vector(const Tensor&);
template std::vector<std::int64_t> to_vector(const Tensor&);
template std::vector<std::int32_t> to_vector(const Tensor&);
template std::vector<std::uint8_t> to_vector(const Tensor&);
template std::vector<bool> to_vector(const Tensor&);

}  // namespace mica
