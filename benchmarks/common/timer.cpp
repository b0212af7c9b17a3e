#include "benchmarks/common/timer.h"

#include <algorithm>
#include <chrono>

namespace benchmarks {

namespace {

constexpr int kWarmup = 3;

double wall_us(const Work& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
}

class WallTimeline final : public Timeline {
 public:
  void mark() override { marks_.push_back(std::chrono::steady_clock::now()); }
  std::vector<double> take_ms() override {
    std::vector<double> result;
    for (const auto& at : marks_) {
      result.push_back(std::chrono::duration<double, std::milli>(at - marks_.front()).count());
    }
    marks_.clear();
    return result;
  }

 private:
  std::vector<std::chrono::steady_clock::time_point> marks_;
};

}  // namespace

std::unique_ptr<Timeline> timeline(mica::Cpu) { return std::make_unique<WallTimeline>(); }

double median(std::vector<double> values) {
  const auto middle = values.begin() + values.size() / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::vector<double> times_us(mica::Cpu, int repeats, const Work& work) {
  for (int i = 0; i < kWarmup; ++i) {
    work();
  }
  std::vector<double> times(repeats);
  std::generate(times.begin(), times.end(), [&] { return wall_us(work); });
  return times;
}

std::vector<double> step_times_ms(mica::Cpu, int repeats, const Work& work) {
  std::vector<double> times(repeats);
  std::generate(times.begin(), times.end(), [&] { return wall_us(work) / 1e3; });
  return times;
}

double median_us(mica::Device device, int repeats, const Work& work) {
  return median(mica::on_device(device, [&](auto tag) { return times_us(tag, repeats, work); }));
}

double host_us(mica::Device device, int repeats, int calls, const Work& work) {
  std::vector<double> means;
  for (int i = 0; i < kWarmup + repeats; ++i) {
    mica::synchronize(device);
    means.push_back(wall_us([&] {
                      for (int call = 0; call < calls; ++call) {
                        work();
                      }
                    }) /
                    calls);
  }
  mica::synchronize(device);
  return median({means.begin() + kWarmup, means.end()});
}

}  // namespace benchmarks
