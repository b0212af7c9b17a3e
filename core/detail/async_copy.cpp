#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/detail/async_copy.h>
#include <mica/core/detail/async_copy_kernels.h>
#include <mica/core/storage.h>

namespace mica {

namespace {

/// A storage in page-locked memory.
struct PinnedStorage {
  PinnedStorage(std::shared_ptr<std::byte> memory, std::size_t bytes)
      : memory(std::move(memory)), storage(this->memory.get(), bytes, Device::cpu()) {}

  std::shared_ptr<std::byte> memory;
  Storage storage;
};

void check_pair(const Tensor& to, const Tensor& from, Device device) {
  check(to.shape() == from.shape() && to.dtype() == from.dtype() && to.is_contiguous() && from.is_contiguous(),
        "CopyStream: expected two contiguous tensors of the same shape and dtype, got {} of {} and {} of {}",
        from.shape(), from.dtype(), to.shape(), to.dtype());
  const bool across = device.is_cpu() ? to.device().is_cpu() && from.device().is_cpu()
                                      : (to.device() == device && from.device().is_cpu()) ||
                                            (from.device() == device && to.device().is_cpu());
  check(across, "CopyStream: expected tensors on {} and the CPU, got them on {} and {}", device, from.device(),
        to.device());
}

}  // namespace

Tensor pinned_empty(const Shape& shape, DType dtype, Device device) {
  return on_device(device, [&]<class D>(D d) {
    if constexpr (std::is_same_v<D, Cpu>) {
      return empty(shape, dtype);
    } else {
      const std::size_t bytes = static_cast<std::size_t>(numel_of(shape)) * size_of(dtype);
      const auto pinned = std::make_shared<PinnedStorage>(memory::allocate_pinned(d, bytes), bytes);
      const Tensor tensor = from_blob(pinned->memory.get(), shape, dtype);
      tensor.handle()->storage = std::shared_ptr<Storage>(pinned, &pinned->storage);
      return tensor;
    }
  });
}

void AsyncCopy::wait() const {
  if (event_ != nullptr) {
    on_device(device_, [&]<class D>(D d) {
      if constexpr (std::is_same_v<D, Cuda>) {
        memory::wait_for_event(d, event_.get());
      }
    });
  }
}

void AsyncCopy::order() const {
  if (event_ != nullptr) {
    on_device(device_, [&]<class D>(D d) {
      if constexpr (std::is_same_v<D, Cuda>) {
        memory::order_after_event(d, event_.get());
      }
    });
  }
}

CopyStream::CopyStream(Device device) : device_(device) {
  on_device(device, [&]<class D>(D d) {
    if constexpr (std::is_same_v<D, Cuda>) {
      stream_ = memory::make_copy_stream(d);
    }
  });
}

AsyncCopy CopyStream::start(const Tensors& to, const Tensors& from) const {
  check(to.size() == from.size(), "CopyStream: expected as many tensors to copy to as from, got {} and {}", to.size(),
        from.size());
  std::vector<memory::Copy> copies;
  for (std::size_t i = 0; i < to.size(); ++i) {
    check_pair(to[i], from[i], device_);
    copies.push_back({.to = to[i].raw_data(), .from = from[i].raw_data(), .bytes = to[i].bytes()});
  }
  return on_device(device_, [&]<class D>(D d) -> AsyncCopy {
    if constexpr (std::is_same_v<D, Cuda>) {
      return {device_, memory::start_copies(d, stream_.get(), copies)};
    } else {
      for (std::size_t i = 0; i < to.size(); ++i) {
        copy_into(to[i], from[i]);
      }
      return {};
    }
  });
}

}  // namespace mica
