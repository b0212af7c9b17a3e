#include <algorithm>
#include <vector>

#include <mica/optim/clip_grad_kernels.h>
#include <mica/optim/update_cpu.h>

namespace mica::kernels {

namespace {

constexpr std::int64_t kChunk = 4096;  // elements whose squares are summed in one go
constexpr int kLanes = 16;             // sums beside each other, so that the loop vectorizes

template <class T>
double chunk_sum(const T* x, std::int64_t n) {
  double lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const auto value = static_cast<double>(static_cast<Accumulate<T>>(x[i + lane]));
      lanes[lane] += value * value;
    }
  }
  double sum = 0;
  for (const double lane : lanes) {
    sum += lane;
  }
  for (; i < n; ++i) {
    const auto value = static_cast<double>(static_cast<Accumulate<T>>(x[i]));
    sum += value * value;
  }
  return sum;
}

}  // namespace

void sum_of_squares(Cpu, const Tensor& x, const Tensor& out) {
  on_dtype(FloatTypes{}, x.dtype(), "sum_of_squares", [&]<class T>() {
    const T* const data = x.data<T>();
    const std::int64_t n = x.numel();
    std::vector<double> sums((n + kChunk - 1) / kChunk);
    parallel_for(static_cast<std::int64_t>(sums.size()), 4, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t chunk = begin; chunk < end; ++chunk) {
        sums[chunk] = chunk_sum(data + chunk * kChunk, std::min(kChunk, n - chunk * kChunk));
      }
    });
    double total = 0;
    for (const double sum : sums) {
      total += sum;
    }
    *out.data<double>() = total;
  });
}

void scale(Cpu device, const Tensor& x, double factor) { update<ScaleRule>(device, factor, "scale", x, x); }

}  // namespace mica::kernels
