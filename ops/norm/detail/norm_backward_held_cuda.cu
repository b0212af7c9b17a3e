#include <mica/core/cuda/launch.h>
#include <mica/ops/norm/detail/norm_backward_held_rows_cuda.cuh>

// Backward for rows that do not stream: short float32 rows, unaligned short rows, unaligned rows of small matrices,
// float64, and all rows on GPUs before compute capability 9.0.
//
// Rows that fit in the registers of their threads (stage 1):
//
//     x, dy ──▶ registers ──▶ Σ g, Σ g · x̂ ──exchange──▶ dx
//                   └──▶ dweight, dbias of the thread's columns, for all rows of the block ──▶ a row of partials
//
// Longer rows are read twice for dx, piece by piece, and a separate kernel computes dweight and dbias.

namespace mica::kernels::norm_cuda {

namespace {

// The minimum of blocks per multiprocessor (__launch_bounds__), which limits the registers.
template <class L>
constexpr int kHeldBlocks = L::kRows > 1 && L::kElements == 16 ? 3 : 1;

// Holds rows in registers. Each block has a fixed set of rows, and a thread has the same columns of all its rows.
template <bool kCentered, class T, class W, class L, int V>
__global__ void __launch_bounds__(L::kBlock, kHeldBlocks<L>) norm_backward_held_kernel(const BackwardRows<T, W> a) {
  using S = Accumulate<T>;
  __shared__ typename RowMeans<kCentered, S, L>::Shared shared;
  __shared__ S fold[L::kRows > 1 ? L::kWarps * L::kColumns : 1];
  RowMeans<kCentered, S, L> row_means(shared);
  ColumnSums<kCentered, S, L> column_sums;
  const std::int64_t step = std::int64_t{gridDim.x} * L::kRows;
  for (std::int64_t first = std::int64_t{blockIdx.x} * L::kRows; first < a.rows; first += step) {
    const std::int64_t row = first + threadIdx.x / L::kThreads;
    const bool present = L::kRows == 1 || row < a.rows;  // otherwise the thread only takes part in shuffles
    const std::int64_t columns = present ? a.columns : 0;
    const std::int64_t begin = row * a.columns;
    const auto statistics = a.template statistics<kCentered>(row, present);
    Pack<T, V> dys[L::kElements / V];
    Pack<T, V> xs[L::kElements / V];
    load_share<L, V>(a.dy + begin, columns, dys);
    load_share<L, V>(a.x + begin, columns, xs);
    Pack<W, V> weights[L::kElements / V];
    if constexpr (kCentered || V == 1) {
      load_weights<L, V>(a.weight, 0, columns, weights);
    } else {
      load_weights_at_once<L, V>(a.weight, columns, weights);
    }
    Elements<kCentered, T, L, V> elements;
    Sums<S> mine{0, 0};
    elements.set(xs, dys, weights, statistics, mine, column_sums);
    const Sums<S> means = row_means.of(mine, a.columns);
    for_packs<L, V>(columns, [&](int i, int column, bool inside) {
      if (inside) {
        store(a.dx + begin + column, elements.dx_pack(i, means, statistics.rstd));
      }
    });
  }
  write_partials<kCentered, T, W, L, V>(a, column_sums, fold);
}

// Computes dx only. A block processes a whole row, which it reads twice, piece by piece.
template <bool kCentered, class T, class W, class L, int V>
__global__ void __launch_bounds__(L::kBlock, 1) norm_backward_looped_kernel(const BackwardRows<T, W> a) {
  using S = Accumulate<T>;
  __shared__ typename RowMeans<kCentered, S, L>::Shared shared;
  RowMeans<kCentered, S, L> row_means(shared);
  for (std::int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const auto statistics = a.template statistics<kCentered>(row);
    const auto load_piece = [&](std::int64_t begin, Elements<kCentered, T, L, V>& elements) {
      Pack<T, V> dys[L::kElements / V];
      Pack<T, V> xs[L::kElements / V];
      Pack<W, V> weights[L::kElements / V];
      load_share<L, V>(a.dy + row * a.columns + begin, a.columns - begin, dys);
      load_share<L, V>(a.x + row * a.columns + begin, a.columns - begin, xs);
      load_weights<L, V>(a.weight, begin, a.columns - begin, weights);
      Sums<S> sums{0, 0};
      NoColumnSums none;
      elements.set(xs, dys, weights, statistics, sums, none);
      return sums;
    };
    Sums<S> mine{0, 0};
    for (std::int64_t begin = 0; begin < a.columns; begin += L::kColumns) {
      Elements<kCentered, T, L, V> elements;
      const Sums<S> piece = load_piece(begin, elements);
      mine.g += piece.g;
      mine.gx += piece.gx;
    }
    const Sums<S> means = row_means.of(mine, a.columns);
    for (std::int64_t begin = 0; begin < a.columns; begin += L::kColumns) {
      Elements<kCentered, T, L, V> elements;
      load_piece(begin, elements);
      for_packs<L, V>(a.columns - begin, [&](int i, int column, bool inside) {
        if (inside) {
          store(a.dx + row * a.columns + begin + column, elements.dx_pack(i, means, statistics.rstd));
        }
      });
    }
  }
}

// On the host.

// Calls f.operator()<L>() with the layout that held_layout() chooses.
template <class T, bool kInPacks, bool kCentered, class F>
void with_layout(std::int64_t columns, const F& f) {
  constexpr int kMost = kMostHeld<Accumulate<T>>;
  const HeldLayout layout = held_layout(columns, sizeof(T), kInPacks, kCentered);
  const auto one_of = [&]<class... L>() {
    return ((layout == HeldLayout{L::kThreads, L::kBlock, L::kElements} && (f.template operator()<L>(), true)) || ...);
  };
  bool done = one_of.template operator()<Layout<8, 256, 8>, Layout<32, 256, 8>, Layout<128, 128, 8>,
                                         Layout<256, 256, kMost>, Layout<512, 512, kMost>>();
  if constexpr (kInPacks && kCentered && sizeof(T) == 2) {
    done = done || one_of.template operator()<Layout<16, 256, 8>>();
  } else if constexpr (kInPacks && kCentered && sizeof(T) == 4) {
    done = done || one_of.template operator()<Layout<32, 256, 4>>();
  } else if constexpr (kInPacks) {
    done = done || one_of.template operator()<Layout<128 / kMost, 256, kMost>, Layout<256 / kMost, 256, kMost>>();
  }
  check(done, "norm_backward: there is no layout for rows of {}", columns);
}

template <int V, bool kCentered, class T, class W>
void launch(const BackwardRows<T, W>& a, const NormBackwardPlan& plan) {
  if (plan.kernel == NormBackwardKernel::looped) {
    using L = Layout<1024, 1024, 8>;
    norm_backward_looped_kernel<kCentered, T, W, L, V><<<grid_of(a.rows), L::kBlock, 0, cuda::current_stream()>>>(a);
    cuda::check_launch("norm_backward_looped_kernel");
  } else {
    with_layout<T, (V > 1), kCentered>(a.columns, [&]<class L>() {
      norm_backward_held_kernel<kCentered, T, W, L, V>
          <<<grid_of(plan.partial_rows), L::kBlock, 0, cuda::current_stream()>>>(a);
      cuda::check_launch("norm_backward_held_kernel");
    });
  }
}

}  // namespace

void backward_not_streamed(const NormBackward& args, const NormBackwardPlan& plan, const Tensor& partials) {
  on_norm<8>(args, [&]<bool kCentered, class T, class W>() {
    const auto a = rows_of<T, W>(args, partials);
    plan.pack == 1 ? launch<1, kCentered>(a, plan) : launch<16 / sizeof(T), kCentered>(a, plan);
  });
}

}  // namespace mica::kernels::norm_cuda
