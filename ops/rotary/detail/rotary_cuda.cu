// Rotary embedding. A thread computes a sine and a cosine for one pair of columns, j and j + D / 2, of 4 heads:
//
//     position · frequency j ──> cosine, sine ─┐
//                                              ├──> (u cosine − v sine, v cosine + u sine) ──> y
//     x: (u, v) of each head ──────────────────┘

#include <algorithm>

#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/core/dispatch.h>
#include <mica/ops/rotary/detail/rotary_kernels.h>
#include <mica/ops/rotary/detail/rotation_cuda.cuh>

namespace mica::kernels {

namespace {

constexpr int kThreads = 256;
constexpr int kHeads = 4;  // of a thread: they share a sine and a cosine

template <class T>
struct RotaryArguments {
  const T* x;
  T* y;
  const std::int64_t* positions;  // or null
  std::int64_t position_count;
  std::int64_t rows;
  std::int64_t steps;
  std::int64_t heads;
  std::int64_t offset;
  int half;
  double scale;
  double direction;  // 1 or -1
  float frequencies[kMostRotaryPairs];
};

// A thread rotates one pair of columns of kHeads heads.
template <class T>
__global__ void __launch_bounds__(kThreads) rotary_kernel(const __grid_constant__ RotaryArguments<T> a) {
  using S = Accumulate<T>;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  const std::int64_t first_head = static_cast<std::int64_t>(blockIdx.y) * kHeads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < a.rows * a.half;
       i += step) {
    const std::int64_t row = i / a.half;
    const int j = static_cast<int>(i - row * a.half);
    const std::int64_t position =
        a.positions != nullptr ? a.positions[row % a.position_count] : a.offset + row % a.steps;
    const auto [cosine, sine] =
        cosine_and_sine<S>(static_cast<float>(position), a.frequencies[j], a.scale, a.direction);
    const std::int64_t at = (row * a.heads + first_head) * 2 * a.half + j;
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      if (first_head + head < a.heads) {
        const std::int64_t left = at + static_cast<std::int64_t>(head) * 2 * a.half;
        const S u = static_cast<S>(a.x[left]);
        const S v = static_cast<S>(a.x[left + a.half]);
        a.y[left] = static_cast<T>(u * cosine - v * sine);
        a.y[left + a.half] = static_cast<T>(v * cosine + u * sine);
      }
    }
  }
}

}  // namespace

void rotary(Cuda, const Rotary& args) {
  on_dtype(FloatTypes{}, args.x.dtype(), "rotary", [&]<class T>() {
    RotaryArguments<T> a{.x = args.x.data<T>(),
                         .y = args.y.data<T>(),
                         .positions = args.positions.data_or_null<std::int64_t>(),
                         .position_count = args.positions.defined() ? args.positions.numel() : 0,
                         .rows = args.rows,
                         .steps = args.steps,
                         .heads = args.heads,
                         .offset = args.offset,
                         .half = static_cast<int>(args.frequencies.size()),
                         .scale = args.scale,
                         .direction = args.back ? -1.0 : 1.0,
                         .frequencies = {}};
    std::copy(args.frequencies.begin(), args.frequencies.end(), a.frequencies);
    const std::int64_t blocks = (args.rows * a.half + kThreads - 1) / kThreads;
    const dim3 grid(static_cast<unsigned>(std::min<std::int64_t>(blocks, 1 << 20)),
                    static_cast<unsigned>((args.heads + kHeads - 1) / kHeads));
    rotary_kernel<T><<<grid, kThreads, 0, cuda::current_stream()>>>(a);
    cuda::check_launch("rotary_kernel");
  });
}

}  // namespace mica::kernels
