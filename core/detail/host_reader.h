#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>

namespace mica {

namespace detail {

// HostReader on CUDA: copies to pinned memory, and waits for them later.
class PinnedReader {
 public:
  virtual ~PinnedReader() = default;
  virtual void start(const Tensor& x) = 0;
  virtual void start_slot(std::size_t slot) = 0;
  virtual std::int64_t* slots() const = 0;
  virtual std::vector<std::int64_t> finish() = 0;
};
std::unique_ptr<PinnedReader> pinned_reader(Cuda, std::int64_t count);

}  // namespace detail

/// Reads int64 tensors of `count` elements on the host while the device keeps working: work launched after start() does
/// not delay finish(). On the CPU, start() copies at once.
///
///     HostReader reader(device, count);
///     reader.start(x);        // x may be overwritten by later work
///     …                       // launch more
///     reader.finish();        // x's elements as they were
///
/// A copy of a few elements keeps an H200 busy for 8 µs; a kernel can instead write them to pinned memory:
///
///     write(reader.slots());    // a kernel, to slots() + slot · count
///     reader.start_slot(slot);
class HostReader {
 public:
  HostReader(Device device, std::int64_t count);

  /// Throws unless x is a contiguous int64 tensor of `count` elements on the device, and if kSlots copies are pending.
  void start(const Tensor& x);
  /// Pinned memory that kernels can write: kSlots slots of `count` elements each; null on the CPU.
  std::int64_t* slots() const { return pinned_ == nullptr ? nullptr : pinned_->slots(); }
  static constexpr std::size_t kSlots = 2;
  /// Like start(), but reads what earlier work has written to a slot. That slot may be written again after finish().
  /// Throws on the CPU, unless slot < kSlots, and if kSlots copies are pending.
  void start_slot(std::size_t slot);
  /// The elements of the oldest pending copy. Throws if there is none.
  std::vector<std::int64_t> finish();
  std::size_t pending() const { return pending_; }

 private:
  Device device_;
  std::int64_t count_;
  std::size_t pending_ = 0;
  std::unique_ptr<detail::PinnedReader> pinned_;  // on CUDA
  std::deque<std::vector<std::int64_t>> values_;  // on the CPU
};

}  // namespace mica
