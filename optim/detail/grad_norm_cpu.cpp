#include <algorithm>
#include <vector>

#include <mica/optim/detail/grad_norm_kernels.h>
#include <mica/optim/detail/optimizer_step_cpu.h>

namespace mica::kernels {

namespace {

constexpr int kLanes = 16;  // independent sums, so that the loop vectorizes

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

void sums_of_squares(Cpu, const MultiTensorList& list, const Tensor& sums) {
  constexpr std::int64_t kChunk = MultiTensorList::kChunk;
  for (const MultiTensorPart& part : list.parts()) {
    const MultiTensorEntry* const first = list.table() + part.first_entry;
    double* const out = sums.data<double>();
    on_dtype(FloatTypes{}, part.dtype, "sums_of_squares", [&]<class T>() {
      parallel_for(part.chunks, 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t chunk = part.first_chunk + begin; chunk < part.first_chunk + end; ++chunk) {
          const MultiTensorEntry& entry =
              *(std::upper_bound(first, first + part.entries, chunk,
                                 [](std::int64_t c, const MultiTensorEntry& e) { return c < e.first_chunk; }) -
                1);
          const std::int64_t start = (chunk - entry.first_chunk) * kChunk;
          out[chunk] = chunk_sum(static_cast<const T*>(entry.grad) + start, std::min(kChunk, entry.numel - start));
        }
      });
    });
  }
}

void grad_norm(Cpu, const GradNorm& args) {
  double total = 0;
  for (std::int64_t i = 0; i < args.sums.numel(); ++i) {
    total += args.sums.data<double>()[i];
  }
  finish_grad_norm(total, args.max_norm, args.scaler.data_or_null<double>(), args.norm.data<double>(),
                   reinterpret_cast<StepControl*>(args.control.data<double>()));
}

void scale_gradients(Cpu device, const MultiTensorList& list, const Tensor& control) {
  const double factor = *control.data<double>();
  if (factor == 1) {
    return;
  }
  for (const MultiTensorPart& part : list.parts()) {
    on_part<ScaledGradient>("scale_gradients", part, [&]<class T, bool kMaster, int kStates>() {
      update_part<ScaledGradient, T, kMaster, kStates>(
          device, list, part, factor, [](const MultiTensorEntry&) { return ScaledGradient<Accumulate<T>>{}; });
    });
  }
}

}  // namespace mica::kernels
