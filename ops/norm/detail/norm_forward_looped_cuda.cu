#include <mica/core/cuda/launch.h>
#include <mica/ops/norm/detail/norm_forward_cuda.cuh>
#include <mica/ops/rows/detail/row_loop.cuh>

// Forward for rows of any length and alignment. A block reads its row twice:
//
//   x ──▶ moments of batches, joined, and reduced over the block        x ──▶ · rstd, weight, bias ──▶ y

namespace mica::kernels::norm_cuda {

namespace {

/// Reads a row of x. Calls f(column, x) for each of the thread's elements.
template <class T, class F>
__device__ void for_elements(const T* row, std::int64_t columns, const F& f) {
  for_packs<1>({row}, columns, [&](std::int64_t column, const Pack<T, 1>(&pack)[1]) {
    f(column, static_cast<Accumulate<T>>(pack[0].at[0]));
  });
}

template <bool kCentered, class S>
using LoopedThreads = RowGroup<std::conditional_t<kCentered, Moments<S>, RowSums<S, 1>>, Group::block, kWarp,
                               /*kSeveral=*/false, /*kBuffers=*/2>;

/// The moments of a row, relative to `shift`.
template <class T, class S>
__device__ MeanAndSquares<S> find_moments(const T* row, std::int64_t columns, S shift,
                                          LoopedThreads<true, S>& threads) {
  constexpr int kElements = kBatch<1>;
  Moments<S> mine{};
  for_batches<1>({row}, columns, [&](std::int64_t, const Pack<T, 1>(&packs)[kElements][1], int count) {
    S x[kElements];
    S sum = 0;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      x[i] = static_cast<S>(packs[i][0].at[0]) - shift;
      sum += i < count ? x[i] : S(0);
    }
    const S elements = static_cast<S>(count);
    const S mean = sum * (count == kElements ? S(1) / kElements : reciprocal(elements));
    S squares = 0;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      squares = i < count ? fma(x[i] - mean, x[i] - mean, squares) : squares;
    }
    mine.join({mean, squares, elements});
  });
  const Moments<S> all = threads.all_reduce(mine);
  return {all.mean, all.squares};
}
template <class T, class S>
__device__ MeanAndSquares<S> find_moments(const T* row, std::int64_t columns, S, LoopedThreads<false, S>& threads) {
  RowSums<S, 1> mine{};
  for_elements(row, columns, [&](std::int64_t, S x) { mine.at[0] = fma(x, x, mine.at[0]); });
  return {0, threads.all_reduce(mine).at[0]};
}

template <class N, class T, class W>
__global__ void __launch_bounds__(kLoopThreads, sizeof(T) < 8 ? 2 : 1)
    norm_forward_looped_kernel(const Forward<T, W> a) {
  using S = Accumulate<T>;
  using Threads = LoopedThreads<N::kCentered, S>;
  __shared__ typename Threads::Exchange exchange;
  cuda::allow_dependents();
  cuda::wait_for_previous_kernel();
  Threads threads(exchange);
  for (std::int64_t i = blockIdx.x; i < a.rows; i += gridDim.x) {
    const T* const x_row = a.x + i * a.columns;
    const S shift = N::kCentered ? static_cast<S>(x_row[0]) : S(0);
    const MeanAndSquares<S> m = find_moments(x_row, a.columns, shift, threads);
    if (N::kCentered && !isfinite(m.squares)) {
      write_shrunk_row<N, kWarp>(a, x_row, i, a.eps, /*mine=*/true, threadIdx.x == 0, [&](const auto& write) {
        for_elements(x_row, a.columns, [&](std::int64_t column, S) { write(column); });
      });
      continue;
    }
    const S rstd = rsqrt(m.squares * a.in_row + a.eps);
    for_elements(x_row, a.columns, [&](std::int64_t column, S x) {
      const S w = a.weight == nullptr ? S(1) : static_cast<S>(a.weight[column]);
      const S b = !N::kCentered || a.bias == nullptr ? S(0) : static_cast<S>(a.bias[column]);
      a.y[i * a.columns + column] = static_cast<T>(fma((x - shift - m.mean) * rstd, w, b));
    });
    if (threadIdx.x == 0) {
      write_statistics<N>(a, i, shift + m.mean, mean_rounding(shift, m.mean), rstd, S(1));
    }
  }
}

}  // namespace

void forward_looped(const NormForward& args) {
  on_norm<8>(args, [&]<class N, class T, class W>(const Forward<T, W>& a) {
    cuda::Launch(grid_of(a.rows), kLoopThreads)
        .dependent()
        .run(norm_forward_looped_kernel<N, T, W>, "norm_forward_looped_kernel", a);
  });
}

}  // namespace mica::kernels::norm_cuda
