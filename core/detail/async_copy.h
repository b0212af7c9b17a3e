#pragma once

// Asynchronous copies between a GPU and the host. Needs no CUDA header. If the device is the CPU, each call copies at
// once.

#include <memory>

#include <mica/core/tensor.h>

namespace mica {

/// An uninitialized tensor on the CPU for copies to and from `device`. It is page-locked if that is a GPU, since only
/// such copies are asynchronous.
Tensor pinned_empty(const Shape& shape, DType dtype, Device device);

/// Copies started together by a CopyStream. A default-constructed one is complete.
class AsyncCopy {
 public:
  AsyncCopy() = default;
  // A move copies: an AsyncCopy that was moved from would be complete.
  AsyncCopy(const AsyncCopy&) = default;
  AsyncCopy& operator=(const AsyncCopy&) = default;

  /// Makes the calling thread wait until the copies are complete. May be called on any thread.
  void wait() const;
  /// Makes work that this thread launches from now on, on the device's current stream, wait for the copies. The thread
  /// itself does not wait.
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

  /// Starts to copy from[i] to to[i] for each i. One of the two is on the device, the other from pinned_empty(); both
  /// are contiguous and have the same shape and dtype. The copies begin after the work that this thread has launched so
  /// far on the current stream. All tensors must stay alive until the copies are complete; those on the device need
  /// only live until order() was called.
  AsyncCopy start(const Tensors& to, const Tensors& from) const;

 private:
  Device device_;
  std::shared_ptr<void> stream_;
};

}  // namespace mica
