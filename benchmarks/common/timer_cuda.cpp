#include <cuda_runtime_api.h>

#include <cstddef>

#include "benchmarks/common/timer.h"
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/core/tensor.h>

namespace benchmarks {

namespace {

constexpr int kWarmup = 20;
constexpr int kQueued = 20;                                 // calls in flight, so that the GPU never waits for the host
constexpr std::int64_t kFlushed = std::int64_t{256} << 20;  // bytes; several times any L2 cache

class Event {
 public:
  Event() { mica::cuda::check(cudaEventCreate(&event_), "cudaEventCreate"); }
  ~Event() { (void)cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record() { mica::cuda::check(cudaEventRecord(event_, mica::cuda::current_stream()), "cudaEventRecord"); }
  // Waits for `end` to complete.
  static double us_between(const Event& start, const Event& end) {
    float ms = 0;
    mica::cuda::check(cudaEventSynchronize(end.event_), "cudaEventSynchronize");
    mica::cuda::check(cudaEventElapsedTime(&ms, start.event_, end.event_), "cudaEventElapsedTime");
    return ms * 1e3;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

class EventTimeline final : public Timeline {
 public:
  void mark() override {
    if (used_ == events_.size()) {
      events_.push_back(std::make_unique<Event>());
    }
    events_[used_++]->record();
  }
  std::vector<double> take_ms() override {
    std::vector<double> result;
    for (std::size_t i = 0; i < used_; ++i) {
      result.push_back(i == 0 ? 0 : Event::us_between(*events_[0], *events_[i]) / 1e3);
    }
    used_ = 0;
    return result;
  }

 private:
  std::vector<std::unique_ptr<Event>> events_;
  std::size_t used_ = 0;
};

}  // namespace

std::unique_ptr<Timeline> timeline(mica::Cuda) { return std::make_unique<EventTimeline>(); }

std::vector<double> times_us(mica::Cuda, int repeats, const Work& work) {
  int device = 0;
  mica::cuda::check(cudaGetDevice(&device), "cudaGetDevice");
  const mica::Tensor flush = mica::empty({kFlushed}, mica::uint8, mica::Device::cuda(device));
  std::vector<Event> starts(kQueued);
  std::vector<Event> ends(kQueued);
  std::vector<double> times;
  for (int i = 0; i < kWarmup + repeats + kQueued; ++i) {
    // An event is read just before it is recorded again.
    if (i >= kWarmup + kQueued) {
      times.push_back(Event::us_between(starts[i % kQueued], ends[i % kQueued]));
    }
    if (i < kWarmup + repeats) {
      mica::cuda::check(cudaMemsetAsync(flush.raw_data(), i % 251, kFlushed, mica::cuda::current_stream()),
                        "cudaMemsetAsync");
      starts[i % kQueued].record();
      work();
      ends[i % kQueued].record();
    }
  }
  return times;
}

std::vector<double> step_times_ms(mica::Cuda, int repeats, const Work& work) {
  std::vector<Event> ends(static_cast<std::size_t>(repeats) + 1);
  ends[0].record();
  for (int i = 0; i < repeats; ++i) {
    work();
    ends[static_cast<std::size_t>(i) + 1].record();
  }
  std::vector<double> times;
  for (std::size_t i = 0; i + 1 < ends.size(); ++i) {
    times.push_back(Event::us_between(ends[i], ends[i + 1]) / 1e3);
  }
  return times;
}

}  // namespace benchmarks
