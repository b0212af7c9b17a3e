#pragma once

// Copies between a GPU and the host that neither of them waits for. Needs no CUDA header. With the CPU as the device,
// everything is done when a call returns.

#include <memory>

#include <mica/core/tensor.h>

namespace mica {

/// An uninitialized tensor on the CPU for copies to and from `device`: page-locked if that is a GPU, which only then
/// copies while the host goes on.
Tensor pinned_empty(const Shape& shape, DType dtype, Device device);

/// Copies started together by a CopyStream. A default-constructed one is complete.
class AsyncCopy {
 public:
  AsyncCopy() = default;

  /// The calling thread, which may be any, waits until the copies are complete.
  void wait() const;
  /// Work launched from now on by this thread, on the device's current stream, waits for the copies. The thread does
  /// not.
  void order() const;

 private:
  friend class CopyStream;
  AsyncCopy(Device device, std::shared_ptr<void> event) : device_(device), event_(std::move(event)) {}

  Device device_ = Device::cpu();
  std::shared_ptr<void> event_;
};

/// A stream of a GPU for copies only.
class CopyStream {
 public:
  explicit CopyStream(Device device);

  /// Starts to copy each tensor of `from` to the one of `to` at its place, one of which is on the device and the other
  /// one from pinned_empty(). Both are contiguous, of the same shape and dtype. The copies begin after the work that
  /// this thread has launched so far on the current stream. All tensors must stay alive until the copies are complete
  /// or, for tensors of the device, until order() was called.
  AsyncCopy start(const Tensors& to, const Tensors& from) const;

 private:
  Device device_;
  std::shared_ptr<void> stream_;
};

}  // namespace mica
