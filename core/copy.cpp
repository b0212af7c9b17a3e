#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>
#include <vector>

#include <mica/core/copy.h>
#include <mica/core/detail/copy_kernels.h>
#include <mica/core/detail/memory.h>

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

void copy_all_into(const Tensors& dst, const Tensors& src) {
  check(dst.size() == src.size(), "copy: expected as many sources as destinations, got {} and {}", src.size(),
        dst.size());
  struct Kind {
    DType to, from;
    Device device;
    bool operator==(const Kind&) const = default;
  };
  std::vector<std::pair<Kind, std::array<Tensors, 2>>> together;
  for (std::size_t i = 0; i < dst.size(); ++i) {
    const Tensor& to = dst[i];
    const Tensor& from = src[i];
    const bool fits = to.shape() == from.shape() && to.numel() > 0 && to.device() == from.device() &&
                      to.device().is_cuda() && to.is_contiguous() && from.is_contiguous() &&
                      (to.dtype() == from.dtype() ||
                       (to.dtype() == float32 && (from.dtype() == float16 || from.dtype() == bfloat16)));
    if (!fits) {
      copy_into(to, from);
      continue;
    }
    const Kind kind{to.dtype(), from.dtype(), to.device()};
    auto at = std::find_if(together.begin(), together.end(), [&](const auto& known) { return known.first == kind; });
    if (at == together.end()) {
      at = together.insert(at, {kind, {}});
    }
    at->second[0].push_back(to);
    at->second[1].push_back(from);
  }
  for (const auto& [kind, tensors] : together) {
    on_device(kind.device, [&tensors = tensors]<class D>(D device) {
      if constexpr (std::is_same_v<D, Cuda>) {
        kernels::copy_many(device, tensors[0], tensors[1]);
      }
    });
  }
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
