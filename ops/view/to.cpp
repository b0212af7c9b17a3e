// Tensor::to. Defined here, not in core, because it is a differentiable op.

#include <mica/autograd/function.h>
#include <mica/core/copy.h>

namespace mica {

namespace {

struct Cast {
  static constexpr bool composed = true;
  Device device;
  DType dtype;
  // The source's device and dtype, for backward.
  Device from_device;
  DType from_dtype;

  Tensor forward(autograd::Context&, const Tensor& x) const {
    const Tensor y = empty(x.shape(), dtype, device);
    copy_into(y, x);
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
