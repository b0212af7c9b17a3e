#include "benchmarks/common/clock.h"

// Stubs for builds without CUDA.

namespace benchmarks {

ClockMeter::ClockMeter(mica::Device) {}
void ClockMeter::mark(int) {}
void ClockMeter::start() {}
void ClockMeter::stop() {}
double ClockMeter::mhz() const { return 0; }

}  // namespace benchmarks
