#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/ops/norm/detail/norm_forward_cuda.cuh>

// Forward for rows of any length. One block computes a row, and reads it again in each pass:
//
//   x ──▶ mean ──▶ squares ──▶ y        centered
//   x ──▶ squares ──▶ y                 not centered

namespace mica::kernels::norm_cuda {

namespace {

// A block's row, which is read as the differences scale · x − shift.
template <class T, class W, int V>
class LoopedRow {
 public:
  using S = Accumulate<T>;

  __device__ LoopedRow(const T* row, std::int64_t columns) : row_(row), columns_(columns) {}

  /// Sets the scale and, for centered norms, the shift: the scaled first element.
  __device__ void scale_by(S scale) {
    scale_ = scale;
    shift_ = static_cast<S>(row_[0]) * scale;
  }
  __device__ S scale() const { return scale_; }
  __device__ S shift() const { return shift_; }

  /// Calls f(column, differences) for each of the thread's packs.
  template <class F>
  __device__ void for_packs(const F& f) const {
#pragma unroll 4
    for (std::int64_t column = threadIdx.x * V; column < columns_; column += kForwardBlock * V) {
      S x[V];
      unpack(load<V>(row_ + column), x);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        x[j] = fma(x[j], scale_, -shift_);
      }
      f(column, x);
    }
  }

  /// Returns the sum of term(difference) over the row, with the same bits in each thread.
  template <class Threads, class F>
  __device__ S sum_of(Threads& threads, const F& term) const {
    S sum = 0;
    for_packs([&](std::int64_t, const S(&x)[V]) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        sum += term(x[j]);
      }
    });
    return threads.all_reduce({sum}).at[0];
  }

 private:
  const T* row_;
  std::int64_t columns_;
  S scale_ = 1;
  S shift_ = 0;
};

template <class N, class T, class W, int V>
__global__ void __launch_bounds__(kForwardBlock, 1) norm_forward_looped_kernel(const Forward<T, W> a) {
  using S = Accumulate<T>;
  using Threads = RowGroup<RowSums<S, 1>, Group::block, kWarp, /*kSeveral=*/false, /*kBuffers=*/2>;
  __shared__ typename Threads::Shared shared;
  Threads threads(shared);
  for (std::int64_t i = blockIdx.x; i < a.rows; i += gridDim.x) {
    LoopedRow<T, W, V> row(a.x + i * a.columns, a.columns);
    S mean = 0;
    S squares;
    if constexpr (N::kCentered) {
      row.scale_by(1);
#pragma unroll 1
      while (true) {
        mean = row.sum_of(threads, [](S x) { return x; }) * a.in_row;
        squares = row.sum_of(threads, [&](S x) { return (x - mean) * (x - mean); });
        if (row.scale() != 1 || isfinite(squares)) {
          break;
        }
        row.scale_by(kShrink<S>);
      }
    } else {
      squares = row.sum_of(threads, [](S x) { return x * x; });
    }
    const S rstd = rsqrt(squares * a.in_row + a.eps * row.scale() * row.scale());
    row.for_packs([&](std::int64_t column, S(&x)[V]) {
      S w[V];
      S b[V] = {};
      unpack(load_or<V>(a.weight, column, 1), w);
      if constexpr (N::kCentered) {
        unpack(load_or<V>(a.bias, column, 0), b);
      }
#pragma unroll
      for (int j = 0; j < V; ++j) {
        x[j] = fma((x[j] - mean) * rstd, w[j], b[j]);
      }
      store(a.y + i * a.columns + column, pack_of<T>(x));
    });
    if (threadIdx.x == 0) {
      write_statistics<N>(a, i, row.shift() + mean, mean_rounding(row.shift(), mean), rstd, row.scale());
    }
  }
}

template <class N, class T, class W, int V>
void launch(const Forward<T, W>& a) {
  norm_forward_looped_kernel<N, T, W, V><<<grid_of(a.rows), kForwardBlock, 0, cuda::current_stream()>>>(a);
  cuda::check_launch("norm_forward_looped_kernel");
}

}  // namespace

void forward_looped(const NormForward& args, const NormForwardPlan& plan) {
  on_norm<8>(args, [&]<class N, class T, class W>(const Forward<T, W>& a) {
    plan.pack == 1 ? launch<N, T, W, 1>(a) : launch<N, T, W, 16 / sizeof(T)>(a);
  });
}

}  // namespace mica::kernels::norm_cuda
