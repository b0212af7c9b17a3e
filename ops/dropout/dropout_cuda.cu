#include <mica/core/cuda/elementwise.cuh>
#include <mica/ops/dropout/dropout_kernels.h>

namespace mica::kernels {

namespace {

constexpr int kThreads = 256;

// One thread per Philox block, that is, per four neighboring elements. `aligned`: they are loaded and stored in one
// access.
template <class T>
__global__ void __launch_bounds__(kThreads)
    dropout_kernel(T* y, const T* x, std::int64_t n, bool aligned, PhiloxKey key, std::uint32_t threshold,
                   Accumulate<T> scale) {
  const std::int64_t b = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t first = 4 * b;
  if (first >= n) {
    return;
  }
  const PhiloxBlock block = philox_block(key, static_cast<std::uint64_t>(b));
  const auto drop = [&](T value, int lane) {
    return block.word[lane] >= threshold ? static_cast<T>(static_cast<Accumulate<T>>(value) * scale)
                                         : static_cast<T>(Accumulate<T>{0});
  };
  if (aligned && first + 4 <= n) {
    auto pack = *reinterpret_cast<const cuda::Pack<T, 4>*>(x + first);
#pragma unroll
    for (int lane = 0; lane < 4; ++lane) {
      pack.values[lane] = drop(pack.values[lane], lane);
    }
    *reinterpret_cast<cuda::Pack<T, 4>*>(y + first) = pack;
    return;
  }
#pragma unroll
  for (int lane = 0; lane < 4; ++lane) {
    if (first + lane < n) {
      y[first + lane] = drop(x[first + lane], lane);
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
    constexpr std::uintptr_t kAlignment = alignof(cuda::Pack<T, 4>);
    const bool aligned =
        reinterpret_cast<std::uintptr_t>(x) % kAlignment == 0 && reinterpret_cast<std::uintptr_t>(y) % kAlignment == 0;
    const auto blocks = static_cast<unsigned>((n + 4 * kThreads - 1) / (4 * kThreads));
    dropout_kernel<T><<<blocks, kThreads, 0, cuda::current_stream()>>>(y, x, n, aligned, args.key, args.threshold,
                                                                       static_cast<Accumulate<T>>(args.scale));
    cuda::check_launch("dropout_kernel");
  });
}

}  // namespace mica::kernels
