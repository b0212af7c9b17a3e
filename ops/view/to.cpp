// Tensor::to. Defined here, not in core, because it is a differentiable op.

#include <mica/autograd/function.h>
#include <mica/core/channels_last.h>
#include <mica/core/copy.h>
#include <mica/core/detail/strided.h>

namespace mica {

namespace {

// A view of x with its axes in y's order in memory. A copy to another device is direct if both are row-major.
Tensor in_memory_order(const Tensor& x, const Tensor& y) {
  const Dims order = memory_order(y);
  if (order.empty()) {
    return x;
  }
  Shape shape = x.shape();
  Strides strides = x.strides();
  for (int i = 0; i < order.size(); ++i) {
    shape[i] = x.shape()[static_cast<int>(order[i])];
    strides[i] = x.strides()[static_cast<int>(order[i])];
  }
  return as_strided(x, shape, strides, x.handle()->offset);
}

struct Cast {
  static constexpr bool composed = true;
  Device device;
  DType dtype;
  // The source's device and dtype, for backward.
  Device from_device;
  DType from_dtype;

  Tensor forward(autograd::Context&, const Tensor& x) const {
    const Tensor y = empty_in_layout(x.shape(), dtype, device, {&x});
    copy_into(in_memory_order(y, y), in_memory_order(x, y));
    return y;
  }

  Tensor backward(autograd::Context&, const Tensor& dy) const { return dy.to(from_device, from_dtype); }
};

}  // namespace

Tensor Tensor::to(Device device, DType dtype) const {
  if (device == this->device() && dtype == this->dtype()) {
    return *this;
  }
  return autograd::apply(Cast{device, dtype, this->device(), this->dtype()}, *this);
}

Tensor Tensor::to(Device device) const { return to(device, dtype()); }
Tensor Tensor::to(DType dtype) const { return to(device(), dtype); }

}  // namespace mica
