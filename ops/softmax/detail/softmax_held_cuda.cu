// Aligned rows of up to 16384 elements along the last axis: each stays in its threads' registers
// from the one time it is read.

#include <limits>

#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/core/math.h>
#include <mica/ops/detail/held_rows_cuda.cuh>
#include <mica/ops/softmax/detail/softmax_cuda.cuh>

namespace mica::kernels {

using namespace rows;

namespace {

// Results larger than this leave the L2 cache before anybody reads them. Then the inputs are told to stay in it
// longest: what is written leaves in the order in which it came, which the memory takes faster.
constexpr std::size_t kLargeResult = std::size_t{40} << 20;  // bytes

/// eˣ: of 16-bit elements by the chip's approximation of 2ˣ, with a relative error of 2⁻²² and what x · log₂e has lost.
template <class T>
__device__ float exp_of(float x) {
  if constexpr (sizeof(T) == 2) {
    return cuda::approximate_exp2(x * 1.44269504f);
  } else {
    return math::exp(x);
  }
}

struct Larger {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

/// A thread's place: its packs begin at columns first, first + step, … of its row.
template <Holder kHolder, int V>
struct Place {
  std::int64_t row = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  int first = static_cast<int>(threadIdx.x) * V;
  int step = static_cast<int>(blockDim.x) * V;
  int columns;

  // Lanes without a row stay, to take part in what warps do together.
  __device__ Place(std::int64_t rows, std::int64_t row_columns)
      : columns(row < rows ? static_cast<int>(row_columns) : 0) {
    row = row < rows ? row : 0;
  }
};

template <class T, int V, int P, Holder kHolder, bool kLog>
__global__ void __launch_bounds__(kMostHolderThreads<kHolder>)
    softmax_held_kernel(const T* x, T* y, std::int64_t rows, std::int64_t n, bool last_in_l2) {
  constexpr int kLanes = kSumLanes<kHolder>;
  __shared__ float warps[2][kHolder == Holder::block ? kHolderThreads / kWarp : 1];
  const Place<kHolder, V> at(rows, n);
  HeldPacks<T, V, P> packs;
  packs.load_from(x + at.row * n, at.first, at.step, at.columns,
                  last_in_l2 ? cuda::evict_last() : cuda::evict_normal());

  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  float values[P][V];
  float largest = kNothing;
#pragma unroll
  for (int i = 0; i < P; ++i) {
    packs.values(i, values[i]);
    const bool inside = at.first + i * at.step < at.columns;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      values[i][j] = inside ? values[i][j] : kNothing;
      largest = fmaxf(largest, values[i][j]);
    }
  }
  largest = over_threads<kLanes>(largest, warps[0], kNothing, Larger{});

  float sum = 0;
#pragma unroll
  for (int i = 0; i < P; ++i) {
    const bool inside = at.first + i * at.step < at.columns;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      values[i][j] -= largest;  // NaN where infinity meets infinity, also past the end
      const float e = exp_of<T>(values[i][j]);
      sum += inside ? e : 0.0f;
      if constexpr (!kLog) {
        values[i][j] = e;
      }
    }
  }
  sum = over_threads<kLanes>(sum, warps[1]);

  const float scale = kLog ? math::log(sum) : 1.0f / sum;
#pragma unroll
  for (int i = 0; i < P; ++i) {
    const int column = at.first + i * at.step;
    if (column < at.columns) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        values[i][j] = kLog ? values[i][j] - scale : values[i][j] * scale;
      }
      store(y + at.row * n + column, pack_of<T>(values[i]));
    }
  }
}

template <class T, int V, int P, Holder kHolder, bool kLog>
__global__ void __launch_bounds__(kMostHolderThreads<kHolder>)
    softmax_backward_held_kernel(const T* y, const T* dy, T* dx, std::int64_t rows, std::int64_t n, bool last_in_l2) {
  constexpr int kLanes = kSumLanes<kHolder>;
  __shared__ float warps[kHolder == Holder::block ? kHolderThreads / kWarp : 1];
  const Place<kHolder, V> at(rows, n);
  const std::uint64_t policy = last_in_l2 ? cuda::evict_last() : cuda::evict_normal();
  HeldPacks<T, V, P> outs;
  HeldPacks<T, V, P> gradients;
  outs.load_from(y + at.row * n, at.first, at.step, at.columns, policy);
  gradients.load_from(dy + at.row * n, at.first, at.step, at.columns, policy);

  float sum = 0;
#pragma unroll
  for (int i = 0; i < P; ++i) {
    float out[V];
    float gradient[V];
    outs.values(i, out);
    gradients.values(i, gradient);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      sum = kLog ? sum + gradient[j] : fmaf(gradient[j], out[j], sum);
    }
  }
  sum = over_threads<kLanes>(sum, warps);

  outs.forget();
  gradients.forget();
#pragma unroll
  for (int i = 0; i < P; ++i) {
    const int column = at.first + i * at.step;
    if (column < at.columns) {
      float out[V];
      float gradient[V];
      outs.values(i, out);
      gradients.values(i, gradient);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        gradient[j] = kLog ? fmaf(-exp_of<T>(out[j]), sum, gradient[j]) : out[j] * (gradient[j] - sum);
      }
      store(dx + at.row * n + column, pack_of<T>(gradient));
    }
  }
}

template <class T, class Kernels>
bool launch(std::int64_t rows, std::int64_t n, const Kernels& kernels, const T* a, const T* b, const T* c) {
  bool held = false;
  with_pack_size<T>(
      n,
      [&]<int V>(std::integral_constant<int, V>) {
        if constexpr (V > 1) {
          held = with_holder<V>(n, [&]<int P, Holder kHolder>(dim3 block) {
            kernels.template operator()<V, P, kHolder>(grid_of((rows + block.y - 1) / block.y), block);
          });
        }
      },
      a, b, c);
  return held;
}

}  // namespace

template <class T, bool kLog>
bool softmax_held(const T* x, T* y, std::int64_t rows, std::int64_t n) {
  const bool large = rows * n * sizeof(T) > kLargeResult;
  return launch<T>(
      rows, n,
      [&]<int V, int P, Holder kHolder>(unsigned blocks, dim3 block) {
        softmax_held_kernel<T, V, P, kHolder, kLog><<<blocks, block, 0, cuda::current_stream()>>>(x, y, rows, n, large);
      },
      x, y, static_cast<const T*>(nullptr));
}

template <class T, bool kLog>
bool softmax_backward_held(const T* y, const T* dy, T* dx, std::int64_t rows, std::int64_t n) {
  const bool large = rows * n * sizeof(T) > kLargeResult;
  return launch<T>(
      rows, n,
      [&]<int V, int P, Holder kHolder>(unsigned blocks, dim3 block) {
        softmax_backward_held_kernel<T, V, P, kHolder, kLog>
            <<<blocks, block, 0, cuda::current_stream()>>>(y, dy, dx, rows, n, large);
      },
      y, dy, dx);
}

#define MICA_INSTANTIATE(T, kLog)                                                \
  template bool softmax_held<T, kLog>(const T*, T*, std::int64_t, std::int64_t); \
  template bool softmax_backward_held<T, kLog>(const T*, const T*, T*, std::int64_t, std::int64_t)
MICA_INSTANTIATE(float, false);
MICA_INSTANTIATE(float, true);
MICA_INSTANTIATE(Half, false);
MICA_INSTANTIATE(Half, true);
MICA_INSTANTIATE(BFloat16, false);
MICA_INSTANTIATE(BFloat16, true);
#undef MICA_INSTANTIATE

}  // namespace mica::kernels
