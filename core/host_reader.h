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
  virtual void start(const Tensor& x) = 0;
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
class HostReader {
 public:
  HostReader(Device device, std::int64_t count);

  /// Throws unless x is a contiguous int64 tensor of `count` elements on the device, and if two copies are pending.
  void start(const Tensor& x);
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
