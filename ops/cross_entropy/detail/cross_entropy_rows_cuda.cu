// Cross entropy with one warp or thread block per row of logits. Forward reads the row once. Backward reads it once and
// writes its gradient, possibly over the logits. Rows may have any length and alignment.

#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/ops/cross_entropy/detail/cross_entropy_cuda.cuh>

namespace mica::kernels {

namespace xent {

namespace {

using rows::Group;
using rows::kWarp;
using rows::RowGroup;

constexpr std::int64_t kWarpRow = 1024;  // the longest row that is processed by one warp
constexpr int kWarpRows = 8;             // such rows per block
constexpr int kBlockThreads = 512;       // the most threads of a block that processes one row
// Up to this length, blocks are small, so that one loads while another on the same multiprocessor computes.
constexpr std::int64_t kSmallBlockRow = 1 << 17;

constexpr int most_threads(Group group) { return group == Group::block ? kBlockThreads : kWarp * kWarpRows; }

/// The thread's row, and its index among the threads that share it.
template <Group kGroup>
struct RowOf {
  static constexpr bool kBlock = kGroup == Group::block;

  std::int64_t row = kBlock ? blockIdx.x : std::int64_t{blockIdx.x} * kWarpRows + threadIdx.x / kWarp;
  std::int64_t step = kBlock ? gridDim.x : std::int64_t{gridDim.x} * kWarpRows;  // to the thread's next row
  int t = static_cast<int>(kBlock ? threadIdx.x : threadIdx.x % kWarp);
  int threads = static_cast<int>(kBlock ? blockDim.x : kWarp);
};

/// The number of packs in flight per thread, and the minimum number of blocks per multiprocessor (__launch_bounds__).
template <class T, Target kTarget>
constexpr int kAhead = kTarget == Target::label && sizeof(T) < 8 ? 4 : 2;
template <class T>
constexpr int least_blocks(Group group) {
  return sizeof(T) == 8 ? 1 : group == Group::block ? 2 : 3;
}

template <class T, Target kTarget, bool kCap, Group kGroup>
__global__ void __launch_bounds__(most_threads(kGroup), least_blocks<T>(kGroup))
    cross_entropy_rows(Problem<T> p, Accumulate<T>* logsumexp, Accumulate<T>* mass, Accumulate<T>* losses) {
  using S = Accumulate<T>;
  using FoundInRow = Found<T, kTarget, kCap>;
  __shared__ typename RowGroup<FoundInRow, kGroup>::Exchange exchange;
  const RowOf<kGroup> at;
  const std::int64_t row = at.row;
  if (row >= p.rows) {
    return;
  }
  const Label<T, kTarget> label(p, row);
  if (label.ignored()) {  // the same for all threads of the row
    if (at.t == 0) {
      logsumexp[row] = 0;
      mass[row] = 0;
      losses[row] = 0;
    }
    return;
  }
  auto mine = FoundInRow::nothing(p.unit());
  rows::for_peeled_packs<kAhead<T, kTarget>>(
      p.logits + row * p.classes, p.classes, at.t, at.threads,
      [&](const auto& pack, std::int64_t i) { add_pack(p, row, i, pack, mine); });
  const auto found = RowGroup<FoundInRow, kGroup>(exchange).all_reduce(mine);
  if (at.t == 0) {
    const S label_y =
        label.is_class() ? capped<kCap>(p, static_cast<S>(p.logits[row * p.classes + label.index])) : S{0};
    const Outcome<T> outcome(p, label, found, label_y);
    logsumexp[row] = outcome.logsumexp;
    mass[row] = outcome.mass;
    losses[row] = outcome.loss;
  }
}

template <class T, Target kTarget, bool kCap, Group kGroup>
__global__ void __launch_bounds__(most_threads(kGroup), least_blocks<T>(kGroup))
    cross_entropy_backward_rows(Problem<T> p, const Accumulate<T>* logsumexp, const Accumulate<T>* mass,
                                Incoming<T> incoming, T* dlogits) {
  const RowOf<kGroup> at;
  const std::int64_t row = at.row;
  if (row >= p.rows) {
    return;
  }
  const T* const x = p.logits + row * p.classes;
  T* const dx = dlogits + row * p.classes;
  const Label<T, kTarget> label(p, row);
  if (label.ignored()) {
    for (std::int64_t i = at.t; i < p.classes; i += at.threads) {
      dx[i] = static_cast<T>(0.0f);
    }
    return;
  }
  const Gradient<T, kTarget, kCap> gradient(p, row, logsumexp[row], mass[row], label.u, incoming(row));
  const bool same_offset = reinterpret_cast<std::uintptr_t>(dx + rows::PeeledRow<T>(x, p.classes).head) % 16 == 0;
  rows::for_peeled_packs<kAhead<T, kTarget>>(
      x, p.classes, at.t, at.threads, [&]<int V>(const rows::Pack<T, V>& pack, std::int64_t i) {
        const std::int64_t ahead = label.index - i;
        const auto out = gradient(pack, i, ahead >= 0 && ahead < V ? static_cast<int>(ahead) : -1);
        if (V == 1 || !same_offset) {
#pragma unroll
          for (int j = 0; j < V; ++j) {
            dx[i + j] = out.at[j];
          }
        } else if constexpr (V > 1) {
          rows::store_whole(dx + i, out);
        }
      });
}

template <class T, Group kGroup>
__global__ void __launch_bounds__(most_threads(kGroup))
    cross_entropy_scale_rows(T* gradient, const Accumulate<T>* factors, bool per_row, std::int64_t rows,
                             std::int64_t classes) {
  using S = Accumulate<T>;
  if (!per_row && *factors == S{1}) {
    return;
  }
  const RowOf<kGroup> at;
  for (std::int64_t row = at.row; row < rows; row += at.step) {
    const S factor = factors[per_row ? row : 0];
    if (factor != S{1}) {
      T* const g = gradient + row * classes;
      rows::for_peeled_packs<2>(g, classes, at.t, at.threads, [&]<int V>(const rows::Pack<T, V>& pack, std::int64_t i) {
        S values[V];
        rows::unpack(pack, values);
#pragma unroll
        for (S& value : values) {
          value *= factor;
        }
        rows::store(g + i, rows::pack_of<T>(values));
      });
    }
  }
}

/// Calls f.operator()<kGroup>(blocks, threads).
template <class F>
void for_groups(const Tensor& logits, const F& f) {
  const std::int64_t rows = logits.size(0);
  const std::int64_t classes = logits.size(1);
  if (classes <= kWarpRow) {
    f.template operator()<Group::warp>(rows::grid_of((rows + kWarpRows - 1) / kWarpRows), kWarp * kWarpRows);
  } else {
    f.template operator()<Group::block>(rows::grid_of(rows),
                                        classes <= kSmallBlockRow ? kBlockThreads / 2 : kBlockThreads);
  }
}

}  // namespace

}  // namespace xent

void cross_entropy_forward(Cuda, const CrossEntropyForward& args) {
  xent::for_kinds(args.terms, [&]<class T, xent::Target kTarget, bool kCap>() {
    using S = Accumulate<T>;
    xent::for_groups(args.terms.logits, [&]<rows::Group kGroup>(unsigned blocks, int threads) {
      xent::cross_entropy_rows<T, kTarget, kCap, kGroup><<<blocks, threads, 0, cuda::current_stream()>>>(
          xent::Problem<T>(args.terms), args.logsumexp.data<S>(), args.mass.data<S>(), args.losses.data<S>());
    });
  });
  cuda::check_launch("cross_entropy_rows");
}

void cross_entropy_backward(Cuda, const CrossEntropyBackward& args) {
  xent::for_kinds(args.terms, [&]<class T, xent::Target kTarget, bool kCap>() {
    using S = Accumulate<T>;
    xent::for_groups(args.terms.logits, [&]<rows::Group kGroup>(unsigned blocks, int threads) {
      xent::cross_entropy_backward_rows<T, kTarget, kCap, kGroup><<<blocks, threads, 0, cuda::current_stream()>>>(
          xent::Problem<T>(args.terms), args.logsumexp.data<S>(), args.mass.data<S>(),
          xent::Incoming<T>(args.dloss, args.denominator), args.dlogits.data<T>());
    });
  });
  cuda::check_launch("cross_entropy_backward_rows");
}

void cross_entropy_scale(Cuda, const CrossEntropyScale& args) {
  constexpr unsigned kMaxBlocks = 2048;  // few, since the factor is usually 1 and there is nothing to do
  const Tensor& g = args.gradient;
  on_dtype(FloatTypes{}, g.dtype(), "cross_entropy", [&]<class T>() {
    xent::for_groups(g, [&]<rows::Group kGroup>(unsigned blocks, int threads) {
      xent::cross_entropy_scale_rows<T, kGroup><<<std::min(blocks, kMaxBlocks), threads, 0, cuda::current_stream()>>>(
          g.data<T>(), args.factor.data<Accumulate<T>>(), args.factor.numel() > 1, g.size(0), g.size(1));
    });
  });
  cuda::check_launch("cross_entropy_scale_rows");
}

}  // namespace mica::kernels
