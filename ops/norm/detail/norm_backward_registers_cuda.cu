#include <utility>

#include <mica/core/cuda/launch.h>
#include <mica/ops/norm/detail/norm_backward_registers_cuda.cuh>
#include <mica/ops/rows/detail/row_loop.cuh>

// Backward for rows that do not stream: short float32 rows in packs, and, one element at a time, unaligned rows,
// float64 and all other rows on GPUs before compute capability 9.0.
//
// Rows that fit in the registers of their threads (stage 1):
//
//     x, dy ──▶ registers ──▶ Σ g, Σ g · x̂ ──exchange──▶ dx
//                   └──▶ dweight, dbias of the thread's columns, for all rows of the block ──▶ a row of partials
//
// Longer rows are read twice for dx, and a separate kernel computes dweight and dbias.

namespace mica::kernels::norm_cuda {

namespace {

// The minimum number of blocks per multiprocessor (__launch_bounds__), which limits the registers.
template <class L>
constexpr int kLeastBlocks = L::kRows == 1 || L::kElements < 16 ? 1
                             : L::kThreads == kWarp             ? 2
                                                                : 3;

// Keeps rows in registers. Each block has a fixed set of rows, and a thread has the same columns of all its rows.
template <bool kCentered, class T, class W, class L, int V>
__global__ void __launch_bounds__(L::kBlock, kLeastBlocks<L>)
    norm_backward_registers_kernel(const BackwardRows<T, W> a) {
  using S = Accumulate<T>;
  using Sums = GradientSums<kCentered, S>;
  using Threads =
      RowGroup<Sums, L::kOneWarp ? Group::lanes : Group::block, L::kLanes, /*kSeveral=*/false, /*kBuffers=*/2>;
  __shared__ typename Threads::Exchange exchange;
  __shared__ S fold[L::kRows > 1 ? L::kWarps * L::kColumns : 1];
  Threads threads(exchange);
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
    load_packs_of<L, V>(a.dy + begin, columns, dys);
    load_packs_of<L, V>(a.x + begin, columns, xs);
    Pack<W, V> weights[L::kElements / V];
    if constexpr (kCentered || V == 1) {
      load_weights<L, V>(a.weight, columns, weights);
    } else {
      load_weights_at_once<L, V>(a.weight, columns, weights);
    }
    Elements<kCentered, T, L, V> elements;
    Sums mine{};
    elements.set(xs, dys, weights, statistics, mine, column_sums);
    Sums means = threads.all_reduce(mine);
    means.for_numbers([&](int, S& sum) { sum /= static_cast<S>(a.columns); });
    for_columns<L, V>(columns, [&](int i, int column, bool inside) {
      if (inside) {
        store(a.dx + begin + column, elements.dx_pack(i, means, statistics.rstd));
      }
    });
  }
  write_partials<kCentered, T, W, L, V>(a, column_sums, fold);
}

// Computes dx only. A block processes a whole row, which it reads twice.
template <class T, class W>
__global__ void __launch_bounds__(kLoopThreads, sizeof(T) < 8 ? 2 : 1)
    norm_backward_looped_kernel(const BackwardRows<T, W> a) {
  using S = Accumulate<T>;
  using Threads = RowGroup<RowSums<S, 2>, Group::block, kWarp, /*kSeveral=*/false, /*kBuffers=*/2>;
  __shared__ typename Threads::Exchange exchange;
  Threads threads(exchange);
  for (std::int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const auto statistics = a.any_statistics(row);
    const T* const rows[] = {a.x + row * a.columns, a.dy + row * a.columns};
    // Calls f(column, x̂, g) for each of the thread's elements.
    const auto for_terms = [&](const auto& f) {
      for_packs<1>(rows, a.columns, [&](std::int64_t column, const Pack<T, 1>(&packs)[2]) {
        const S w = a.weight == nullptr ? S(1) : static_cast<S>(a.weight[column]);
        f(column, statistics.x_hat(static_cast<S>(packs[0].at[0])), static_cast<S>(packs[1].at[0]) * w);
      });
    };
    RowSums<S, 2> sums{};
    for_terms([&](std::int64_t, S x_hat, S g) {
      sums.at[0] += g;
      sums.at[1] = fma(g, x_hat, sums.at[1]);
    });
    sums = threads.all_reduce(sums);
    const S g_mean = a.mean != nullptr ? sums.at[0] / static_cast<S>(a.columns) : S(0);
    const S gx_mean = sums.at[1] / static_cast<S>(a.columns);
    for_terms([&](std::int64_t column, S x_hat, S g) {
      a.dx[row * a.columns + column] = static_cast<T>((g - g_mean - x_hat * gx_mean) * statistics.rstd);
    });
  }
}

// On the host.

// Launches the kernel with the layout of register_layout(), which changes only after kEnds columns.
template <int V, bool kCentered, class T, class W, int... kEnds>
void launch_in_registers(const BackwardRows<T, W>& a, const NormBackwardPlan& plan,
                         std::integer_sequence<int, kEnds...>) {
  const auto launch = [&]<int kEnd>() {
    if (a.columns <= kEnd) {
      constexpr RegisterLayout kLayout = register_layout(kEnd, sizeof(T), (V > 1), kCentered);
      using L = BlockLayout<kLayout.threads, kLayout.block, kLayout.elements>;
      norm_backward_registers_kernel<kCentered, T, W, L, V>
          <<<grid_of(plan.partial_rows), L::kBlock, 0, cuda::current_stream()>>>(a);
      cuda::check_launch("norm_backward_registers_kernel");
    }
    return a.columns <= kEnd;
  };
  const bool done = (launch.template operator()<kEnds>() || ...);
  check(done, "norm_backward: there is no layout for rows of {}", a.columns);
}

}  // namespace

void backward_in_registers(const NormBackward& args, const NormBackwardPlan& plan, const Tensor& partials) {
  on_norm<8>(args, [&]<bool kCentered, class T, class W>() {
    const auto a = rows_of<T, W>(args, partials);
    if constexpr (sizeof(T) == 4) {
      if (plan.pack > 1) {
        return launch_in_registers<4, kCentered>(a, plan, std::integer_sequence<int, 64, 128, kShortRow>{});
      }
    }
    constexpr int kMost = kMostInRegisters<Accumulate<T>>;
    launch_in_registers<1, kCentered>(a, plan, std::integer_sequence<int, 32 * kMost, 128 * kMost, 512 * kMost>{});
  });
}

void backward_looped(const NormBackward& args) {
  on_norm<8>(args, [&]<bool, class T, class W>() {
    norm_backward_looped_kernel<T, W>
        <<<grid_of(args.rows), kLoopThreads, 0, cuda::current_stream()>>>(rows_of<T, W>(args, {}));
    cuda::check_launch("norm_backward_looped_kernel");
  });
}

}  // namespace mica::kernels::norm_cuda
