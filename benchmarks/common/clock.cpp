#include "benchmarks/common/clock.h"

// Without CUDA there is no such clock.

namespace benchmarks {

ClockMeter::ClockMeter(mica::Device) {}
void ClockMeter::mark(int) {}
void ClockMeter::start() {}
void ClockMeter::stop() {}
double ClockMeter::mhz() const { return 0; }

}  // namespace benchmarks
