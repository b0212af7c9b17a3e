// The RMS norm of a prompt's rows, as a dependent launch. A warp has a row. If row and weight fit into registers, the
// warp reads the weight before the previous kernel has ended, and the row once. Otherwise it reads the row twice, the
// second time from the cache.

#include <mica/core/cuda/launch.h>
#include <mica/core/cuda/pack.cuh>
#include <mica/core/cuda/ptx.cuh>
#include <mica/core/cuda/reduce.cuh>
#include <mica/ops/decode/detail/decode_kernels.h>

namespace mica::kernels {

namespace {

using cuda::kWarp;

constexpr int kThreads = 256;
constexpr int kRows = kThreads / kWarp;  // rows per block
constexpr int kPack = 8;

/// For rows of at most kHeld packs per lane.
template <class T, int kHeld>
__global__ void __launch_bounds__(kThreads)
    decode_norm_held_kernel(const T* x, const T* weight, T* y, std::int64_t rows, int columns, float eps) {
  const int first = static_cast<int>(threadIdx.x) % kWarp * kPack;
  cuda::Pack<T, kPack> weights[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int column = first + i * kWarp * kPack;
    weights[i] = column < columns ? cuda::load<kPack>(weight + column) : cuda::Pack<T, kPack>{};
  }
  cuda::allow_dependents();
  cuda::wait_for_previous_kernel();
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kRows + threadIdx.x / kWarp;
  if (row >= rows) {
    return;
  }
  x += row * columns;
  y += row * columns;
  cuda::Pack<T, kPack> held[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int column = first + i * kWarp * kPack;
    held[i] = column < columns ? cuda::load<kPack>(x + column) : cuda::Pack<T, kPack>{};
  }
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    float values[kPack];
    cuda::unpack(held[i], values);
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      squares += values[j] * values[j];
    }
  }
  const float inverse = rsqrtf(cuda::sum_lanes<kWarp>(squares) / static_cast<float>(columns) + eps);
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int column = first + i * kWarp * kPack;
    float values[kPack];
    float factors[kPack];
    cuda::unpack(held[i], values);
    cuda::unpack(weights[i], factors);
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      values[j] *= inverse * factors[j];
    }
    if (column < columns) {
      cuda::store(y + column, cuda::pack_of<T>(values));
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    decode_norm_kernel(const T* x, const T* weight, T* y, std::int64_t rows, int columns, float eps) {
  cuda::allow_dependents();
  cuda::wait_for_previous_kernel();
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kRows + threadIdx.x / kWarp;
  if (row >= rows) {
    return;
  }
  const int first = static_cast<int>(threadIdx.x) % kWarp * kPack;
  x += row * columns;
  y += row * columns;
  float squares = 0;
#pragma unroll 4
  for (int column = first; column < columns; column += kWarp * kPack) {
    float values[kPack];
    cuda::unpack(cuda::load<kPack>(x + column), values);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      squares += values[i] * values[i];
    }
  }
  const float inverse = rsqrtf(cuda::sum_lanes<kWarp>(squares) / static_cast<float>(columns) + eps);
#pragma unroll 4
  for (int column = first; column < columns; column += kWarp * kPack) {
    float values[kPack];
    float factors[kPack];
    cuda::unpack(cuda::load<kPack>(x + column), values);
    cuda::unpack(cuda::load<kPack>(weight + column), factors);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      values[i] *= inverse * factors[i];
    }
    cuda::store(y + column, cuda::pack_of<T>(values));
  }
}

}  // namespace

void decode_norm(Cuda, const DecodeNormArgs& args) {
  on_dtype(Types<Float16, BFloat16>{}, args.x.dtype(), "decode_norm", [&]<class T>() {
    const std::int64_t rows = args.x.size(0);
    const std::int64_t packs = (args.x.size(1) + kWarp * kPack - 1) / (kWarp * kPack);  // per lane
    auto kernel = packs <= 4   ? decode_norm_held_kernel<T, 4>
                  : packs <= 8 ? decode_norm_held_kernel<T, 8>
                               : decode_norm_kernel<T>;
    cuda::Launch(static_cast<unsigned>((rows + kRows - 1) / kRows), kThreads)
        .dependent()
        .run(kernel, "decode_norm_kernel", args.x.data<T>(), args.weight.data<T>(), args.y.data<T>(), rows,
             static_cast<int>(args.x.size(1)), static_cast<float>(args.eps));
  });
}

}  // namespace mica::kernels
