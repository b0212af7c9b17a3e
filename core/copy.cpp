#include <type_traits>

#include <mica/core/copy.h>
#include <mica/core/copy_kernels.h>
#include <mica/core/memory.h>

namespace mica {

namespace {

// Contiguous copy of one dtype between two devices, on the stream of the GPU.
void transfer(const Tensor& dst, const Tensor& src) {
  on_device(src.device().is_cuda() ? src.device() : dst.device(), [&]<class D>(D device) {
    if constexpr (std::is_same_v<D, Cuda>) {
      memory::copy(device, dst.raw_data(), dst.device(), src.raw_data(), src.device(), dst.bytes());
    }
  });
}

}  // namespace

void copy_into(const Tensor& dst, const Tensor& src) {
  check(dst.shape() == src.shape(), "copy: expected shape {}, got {}", dst.shape(), src.shape());
  if (dst.numel() == 0) {
    return;
  }
  if (dst.device() == src.device()) {
    on_device(dst.device(), [&](auto device) { kernels::copy(device, dst, src); });
    return;
  }
  // Convert on the source device, so that only dst's bytes are transferred; apply strides on the destination device.
  Tensor ready = src;
  if (!src.is_contiguous() || src.dtype() != dst.dtype()) {
    ready = empty(src.shape(), dst.dtype(), src.device());
    copy_into(ready, src);
  }
  if (dst.is_contiguous()) {
    transfer(dst, ready);
    return;
  }
  const Tensor landed = empty(dst.shape(), dst.dtype(), dst.device());
  transfer(landed, ready);
  copy_into(dst, landed);
}

Tensor contiguous_data(const Tensor& x) {
  if (x.is_contiguous()) {
    return x;
  }
  const Tensor result = empty(x.shape(), x.dtype(), x.device());
  copy_into(result, x);
  return result;
}

void fill_data(const Tensor& x, double value) {
  if (x.numel() > 0) {
    on_device(x.device(), [&](auto device) { kernels::fill(device, x, value); });
  }
}

void add_into(const Tensor& dst, const Tensor& src) {
  check(dst.shape() == src.shape() && dst.dtype() == src.dtype() && dst.device() == src.device(),
        "add_into: expected {} {} on {}, got {} {} on {}", dst.dtype(), dst.shape(), dst.device(), src.dtype(),
        src.shape(), src.device());
  if (dst.numel() > 0) {
    on_device(dst.device(), [&](auto device) { kernels::add_into(device, dst, src); });
  }
}

}  // namespace mica
