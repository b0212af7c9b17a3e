// Dropout, the same mask as on the CPU:
//
//     (key, thread) ──> Philox4x32-7: 128 bits ──> which elements of a group are kept
//                                                     │
//     x, one group of elements per thread ────────────┴──> x · scale, or 0 ──> y

#include <mica/core/cuda/elementwise.cuh>
#include <mica/ops/dropout/detail/dropout_kernels.h>

namespace mica::kernels {

namespace {

constexpr int kThreads = 256;

constexpr int kGroup = detail::kDropoutGroup;

// One thread per Philox block. `aligned`: whether elements can be loaded and stored 16 bytes at a time.
template <class T>
__global__ void __launch_bounds__(kThreads)
    dropout_kernel(T* y, const T* x, std::int64_t n, bool aligned, PhiloxKey key, std::uint32_t threshold,
                   Accumulate<T> scale) {
  const std::int64_t group = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t first = kGroup * group;
  if (first >= n) {
    return;
  }
  const auto drop = [&](T value, const PhiloxBlock& bits, int i) {
    return detail::is_kept(bits, i, threshold) ? static_cast<T>(static_cast<Accumulate<T>>(value) * scale)
                                               : static_cast<T>(Accumulate<T>{0});
  };
  if (aligned && first + kGroup <= n) {
    auto pack = cuda::load<kGroup>(x + first);
    const PhiloxBlock bits = detail::draw_dropout_group(absolute_key(key), static_cast<std::uint64_t>(group));
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      pack.at[i] = drop(pack.at[i], bits, i);
    }
    cuda::store(y + first, pack);
    return;
  }
  const PhiloxBlock bits = detail::draw_dropout_group(absolute_key(key), static_cast<std::uint64_t>(group));
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    if (first + i < n) {
      y[first + i] = drop(x[first + i], bits, i);
    }
  }
}

}  // namespace

void dropout(Cuda, const Dropout& args) {
  const std::int64_t n = args.x.numel();
  if (n == 0) {
    return;
  }
  on_dtype(FloatTypes{}, args.x.dtype(), "dropout", [&]<class T>() {
    T* const y = args.y.data<T>();
    const T* const x = args.x.data<T>();
    constexpr std::uintptr_t kAlignment = alignof(cuda::Pack<T, kGroup>);
    const bool aligned =
        reinterpret_cast<std::uintptr_t>(x) % kAlignment == 0 && reinterpret_cast<std::uintptr_t>(y) % kAlignment == 0;
    const auto blocks = static_cast<unsigned>((n + kGroup * kThreads - 1) / (kGroup * kThreads));
    dropout_kernel<T><<<blocks, kThreads, 0, cuda::current_stream()>>>(
        y, x, n, aligned, args.dropout.key, args.dropout.threshold, static_cast<Accumulate<T>>(args.dropout.scale()));
    cuda::check_launch("dropout_kernel");
  });
}

}  // namespace mica::kernels
