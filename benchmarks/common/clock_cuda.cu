#include <algorithm>
#include <vector>

#include "benchmarks/common/clock.h"
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>

namespace benchmarks {

namespace {

constexpr int kBlocksEach = 4;  // one-thread blocks, so that most multiprocessors get one

__global__ void mark_kernel(long long* marks, int multiprocessors) {
  unsigned number = 0;
  long long nanoseconds = 0;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(number));
  const long long cycles = clock64();
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
  if (number < static_cast<unsigned>(multiprocessors)) {
    marks[2 * number] = cycles;
    marks[2 * number + 1] = nanoseconds;
  }
}

}  // namespace

ClockMeter::ClockMeter(mica::Device device) {
  if (device.is_cuda()) {
    int count = 0;
    mica::cuda::check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device.index),
                      "cudaDeviceGetAttribute");
    marks_ = mica::zeros({2, count, 2}, mica::int64, device);
  }
}

void ClockMeter::mark(int which) {
  if (marks_.defined()) {
    const auto count = static_cast<int>(marks_.size(1));
    auto* const to = reinterpret_cast<long long*>(marks_.data<std::int64_t>()) + 2 * count * which;
    mark_kernel<<<kBlocksEach * count, 1, 0, mica::cuda::current_stream()>>>(to, count);
    mica::cuda::check_launch("mark_kernel");
  }
}

void ClockMeter::start() { mark(0); }
void ClockMeter::stop() { mark(1); }

double ClockMeter::mhz() const {
  if (!marks_.defined()) {
    return 0;
  }
  const std::vector<std::int64_t> marks = mica::to_vector<std::int64_t>(marks_);
  const std::size_t half = marks.size() / 2;
  std::vector<double> clocks;
  for (std::size_t i = 0; i < half; i += 2) {
    const std::int64_t cycles = marks[half + i] - marks[i];
    const std::int64_t nanoseconds = marks[half + i + 1] - marks[i + 1];
    if (marks[i + 1] != 0 && nanoseconds > 0 && cycles > 0) {
      clocks.push_back(1e3 * static_cast<double>(cycles) / static_cast<double>(nanoseconds));
    }
  }
  if (clocks.empty()) {
    return 0;
  }
  std::nth_element(clocks.begin(), clocks.begin() + static_cast<std::ptrdiff_t>(clocks.size() / 2), clocks.end());
  return clocks[clocks.size() / 2];
}

}  // namespace benchmarks
