#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>

namespace mica {

namespace detail {

// Copies to pinned memory, awaited later.
class PinnedReader {
 public:
  virtual ~PinnedReader() = default;
  virtual void start(const Tensor* x, std::size_t slot) = 0;  // of x or, if it is null, of the slot
  virtual std::int64_t* slots() const = 0;
  virtual std::vector<std::int64_t> finish() = 0;
};
std::unique_ptr<PinnedReader> pinned_reader(Cuda, std::int64_t count);

}  // namespace detail

/// Reads int64 tensors of `count` elements on the host while the device goes on: what was computed after start() does
/// not delay finish(). On the CPU, start() copies at once.
///
///     HostReader reader(device, count);
///     reader.start(x);        // x may be overwritten by later work
///     …                       // launch more
///     reader.finish();        // x's elements as they were
///
/// A copy of a few elements takes an H200 8 µs, in which it does nothing else. A kernel can write them itself instead:
///
///     write(reader.slots());    // a kernel, to slots() + slot · count
///     reader.start_slot(slot);
class HostReader {
 public:
  HostReader(Device device, std::int64_t count);

  /// Throws unless x is a contiguous int64 tensor of `count` elements on the device, and if two copies are pending.
  void start(const Tensor& x);
  /// Pinned memory that kernels can write, kSlots times `count` elements; null on the CPU.
  std::int64_t* slots() const { return pinned_ == nullptr ? nullptr : pinned_->slots(); }
  static constexpr std::size_t kSlots = 2;
  /// Like start(), of what earlier work has put into a slot. That slot may be written again after finish(). Throws on
  /// the CPU, for other slots, and if two are pending.
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
