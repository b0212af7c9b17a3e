#include <mica/core/cuda/launch.h>
#include <mica/ops/norm/detail/norm_forward_cuda.cuh>
#include <mica/ops/rows/row_loop.cuh>

// Forward for rows of any length and alignment. One block computes a row, which it reads twice:
//
//   x ──▶ moments of batches, joined, and reduced over the block        x ──▶ · rstd, weight, bias ──▶ y

namespace mica::kernels::norm_cuda {

namespace {

/// A row, which is read as the differences scale · x − shift. The shift is the scaled first element, or 0.
template <bool kCentered, class T, int V>
class LoopedRow {
 public:
  using S = Accumulate<T>;
  using Threads = RowGroup<std::conditional_t<kCentered, Moments<S>, RowSums<S, 1>>, Group::block, kWarp,
                           /*kSeveral=*/false, /*kBuffers=*/2>;

  __device__ LoopedRow(const T* row, std::int64_t columns) : row_(row), columns_(columns) {}

  __device__ S scale() const { return scale_; }
  __device__ S shift() const { return shift_; }

  /// Returns the row's moments. If its squares overflow, sets the scale, and computes them again.
  __device__ MeanAndSquares<S> find_moments(Threads& threads) {
    if constexpr (!kCentered) {
      RowSums<S, 1> mine{};
      for_packs<V>({row_}, columns_, [&](std::int64_t, const Pack<T, V>(&pack)[1]) {
        S x[V];
        unpack(pack[0], x);
#pragma unroll
        for (const S value : x) {
          mine.at[0] = fma(value, value, mine.at[0]);
        }
      });
      return {0, threads.all_reduce(mine).at[0]};
    } else {
      scale_by(1);
      MeanAndSquares<S> found = moments_at_scale(threads);
      if (!isfinite(found.squares)) {
        scale_by(kShrink<S>);
        found = moments_at_scale(threads);
      }
      return found;
    }
  }

  /// The differences of a pack.
  __device__ void differences(const Pack<T, V>& pack, S (&x)[V]) const {
    unpack(pack, x);
#pragma unroll
    for (S& value : x) {
      value = fma(value, scale_, -shift_);
    }
  }

 private:
  __device__ void scale_by(S scale) {
    scale_ = scale;
    shift_ = static_cast<S>(row_[0]) * scale;
  }

  __device__ MeanAndSquares<S> moments_at_scale(Threads& threads) const {
    constexpr int kBatchElements = kBatch<V> * V;
    Moments<S> mine{};
    for_batches<V>({row_}, columns_, [&](std::int64_t, const Pack<T, V>(&packs)[kBatch<V>][1], int count) {
      S x[kBatch<V>][V];
      S sum = 0;
#pragma unroll
      for (int i = 0; i < kBatch<V>; ++i) {
        differences(packs[i][0], x[i]);
#pragma unroll
        for (const S value : x[i]) {
          sum += i < count ? value : S(0);
        }
      }
      const S elements = static_cast<S>(count * V);
      const S mean = sum * (count == kBatch<V> ? S(1) / kBatchElements : reciprocal(elements));
      S squares = 0;
#pragma unroll
      for (int i = 0; i < kBatch<V>; ++i) {
#pragma unroll
        for (const S value : x[i]) {
          squares = i < count ? fma(value - mean, value - mean, squares) : squares;
        }
      }
      mine.join({mean, squares, elements});
    });
    const Moments<S> all = threads.all_reduce(mine);
    return {all.mean, all.squares};
  }

  const T* row_;
  std::int64_t columns_;
  S scale_ = 1;
  S shift_ = 0;
};

template <class N, class T, class W, int V>
__global__ void __launch_bounds__(kLoopThreads, V == 1 && sizeof(T) < 8 ? 2 : 1)
    norm_forward_looped_kernel(const Forward<T, W> a) {
  using S = Accumulate<T>;
  using Row = LoopedRow<N::kCentered, T, V>;
  __shared__ typename Row::Threads::Shared shared;
  cuda::allow_dependents();
  cuda::wait_for_previous_kernel();
  typename Row::Threads threads(shared);
  for (std::int64_t i = blockIdx.x; i < a.rows; i += gridDim.x) {
    const T* const x_row = a.x + i * a.columns;
    Row row(x_row, a.columns);
    const MeanAndSquares<S> m = row.find_moments(threads);
    const S rstd = rsqrt(m.squares * a.in_row + a.eps * row.scale() * row.scale());
    for_packs<V>({x_row}, a.columns, [&](std::int64_t column, const Pack<T, V>(&pack)[1]) {
      S x[V];
      S w[V];
      S b[V] = {};
      row.differences(pack[0], x);
      unpack(load_or<V>(a.weight, column, 1), w);
      if constexpr (N::kCentered) {
        unpack(load_or<V>(a.bias, column, 0), b);
      }
#pragma unroll
      for (int j = 0; j < V; ++j) {
        x[j] = fma((x[j] - m.mean) * rstd, w[j], b[j]);
      }
      store(a.y + i * a.columns + column, pack_of<T>(x));
    });
    if (threadIdx.x == 0) {
      write_statistics<N>(a, i, row.shift() + m.mean, mean_rounding(row.shift(), m.mean), rstd, row.scale());
    }
  }
}

template <class N, class T, class W, int V>
void launch(const Forward<T, W>& a) {
  cuda::Launch(grid_of(a.rows), kLoopThreads)
      .dependent()
      .run(norm_forward_looped_kernel<N, T, W, V>, "norm_forward_looped_kernel", a);
}

}  // namespace

void forward_looped(const NormForward& args, const NormForwardPlan& plan) {
  on_norm<8>(args, [&]<class N, class T, class W>(const Forward<T, W>& a) {
    plan.pack == 1 ? launch<N, T, W, 1>(a) : launch<N, T, W, 16 / sizeof(T)>(a);
  });
}

}  // namespace mica::kernels::norm_cuda
