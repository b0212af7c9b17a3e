#pragma once

#include <mica/core/tensor.h>

namespace benchmarks {

/// The mean clock of a GPU's multiprocessors over an interval: cycle counts divided by time, both read on the device.
/// start() and stop() queue marks on the current stream, which take a few microseconds.
class ClockMeter {
 public:
  explicit ClockMeter(mica::Device device);

  void start();
  void stop();
  /// The clock between start() and stop() in MHz: the median over the multiprocessors. Waits for the device. 0 on the
  /// CPU.
  double mhz() const;

 private:
  void mark(int which);

  mica::Tensor marks_;  // (2, multiprocessors, 2) int64: cycles and nanoseconds; undefined on the CPU
};

}  // namespace benchmarks
