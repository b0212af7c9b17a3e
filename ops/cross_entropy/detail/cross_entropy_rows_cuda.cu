// Cross entropy with one warp or thread block per row of logits. Forward reads the row once. Backward reads it once and
// writes its gradient, possibly over the logits. Rows may have any length and alignment.

#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/ops/cross_entropy/detail/cross_entropy_cuda.cuh>

namespace mica::kernels {

namespace xent {

namespace {

using held::Exchange;
using rows::kWarp;

constexpr std::int64_t kWarpRow = 1024;  // the longest row that is processed by one warp
constexpr int kWarpRows = 8;             // such rows per block
constexpr int kBlockThreads = 512;       // the most threads of a block that processes one row
// Up to this length, blocks are small, so that several run on a multiprocessor: one loads while another computes.
constexpr std::int64_t kSmallBlockRow = 1 << 17;

constexpr int most_threads(Team team) { return team == Team::block ? kBlockThreads : kWarp * kWarpRows; }

/// The thread's row, and its index among the threads that share it.
template <Team kTeam>
struct RowOf {
  static constexpr bool kBlock = kTeam == Team::block;

  std::int64_t row = kBlock ? blockIdx.x : std::int64_t{blockIdx.x} * kWarpRows + threadIdx.x / kWarp;
  std::int64_t step = kBlock ? gridDim.x : std::int64_t{gridDim.x} * kWarpRows;  // to the thread's next row
  int t = static_cast<int>(kBlock ? threadIdx.x : threadIdx.x % kWarp);
  int threads = static_cast<int>(kBlock ? blockDim.x : kWarp);
};

/// The number of packs in flight per thread, and the minimum of blocks per multiprocessor (__launch_bounds__), which
/// limits the registers that they can take.
template <class T, Target kTarget>
constexpr int kAhead = kTarget == Target::label && sizeof(T) < 8 ? 4 : 2;
template <class T>
constexpr int least_blocks(Team team) {
  return sizeof(T) == 8 ? 1 : team == Team::block ? 2 : 3;
}

/// Calls f(pack, index) for thread t's packs of a row. Loads kAhead of them before it uses them.
template <int kAhead, class T, class F>
__device__ void for_packs(const T* row, const Span<T>& span, int t, int threads, const F& f) {
  constexpr int kPack = Span<T>::kPack;
  const T* const from = row + span.head;
  for (std::int64_t i = t; i < span.packs; i += std::int64_t{kAhead} * threads) {
    rows::Pack<T, kPack> packs[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const std::int64_t number = i + std::int64_t{a} * threads;
      if (number < span.packs) {
        packs[a] = rows::load<kPack>(from + number * kPack);
      }
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const std::int64_t number = i + std::int64_t{a} * threads;
      if (number < span.packs) {
        f(packs[a], number);
      }
    }
  }
}

template <class T, Target kTarget, bool kCap>
__device__ Found<T, kTarget, kCap> found_by_thread(const Problem<T>& p, std::int64_t row, int t, int threads) {
  using S = Accumulate<T>;
  const T* const x = p.logits + row * p.classes;
  const Span<T> span(x, p.classes);
  auto found = Found<T, kTarget, kCap>::nothing(p.unit());
  for_packs<kAhead<T, kTarget>>(x, span, t, threads, [&](const auto& pack, std::int64_t number) {
    S y[Span<T>::kPack];
    unpack_capped<kCap>(p, pack, y);
    found.raise_to(y);
    found.add(y, [&](int j) { return share_of<kTarget>(p, row, span.first(number) + j); });
  });
  for (int e = t; e < span.edges(); e += threads) {
    const std::int64_t i = span.edge(e);
    const S y[1] = {capped<kCap>(p, static_cast<S>(x[i]))};
    found.raise_to(y);
    found.add(y, [&](int) { return share_of<kTarget>(p, row, i); });
  }
  return found;
}

template <class T, Target kTarget, bool kCap, Team kTeam>
__global__ void __launch_bounds__(most_threads(kTeam), least_blocks<T>(kTeam))
    cross_entropy_rows(Problem<T> p, Accumulate<T>* logsumexp, Accumulate<T>* mass, Accumulate<T>* losses) {
  using S = Accumulate<T>;
  using FoundInRow = Found<T, kTarget, kCap>;
  __shared__ typename Exchange<FoundInRow, kTeam>::Shared shared;
  const RowOf<kTeam> at;
  const std::int64_t row = at.row;
  if (row >= p.rows) {
    return;
  }
  const Label<T, kTarget> label(p, row);
  if (label.ignored) {  // the same for all threads of the row
    if (at.t == 0) {
      logsumexp[row] = 0;
      mass[row] = 0;
      losses[row] = 0;
    }
    return;
  }
  const auto mine = found_by_thread<T, kTarget, kCap>(p, row, at.t, at.threads);
  const auto found = Exchange<FoundInRow, kTeam>(shared).joined(mine, 0);
  if (at.t == 0) {
    const bool look = kTarget != Target::given && label.valid;
    const S label_y = look ? capped<kCap>(p, static_cast<S>(p.logits[row * p.classes + label.index])) : S{0};
    const Outcome<T, kTarget> outcome(p, label, found, label_y);
    logsumexp[row] = p.span * found.largest + outcome.log_sum;
    mass[row] = outcome.mass;
    losses[row] = outcome.loss;
  }
}

template <class T, Target kTarget, bool kCap, Team kTeam>
__global__ void __launch_bounds__(most_threads(kTeam), least_blocks<T>(kTeam))
    cross_entropy_backward_rows(Problem<T> p, const Accumulate<T>* logsumexp, const Accumulate<T>* mass,
                                Incoming<T> incoming, T* dlogits) {
  const RowOf<kTeam> at;
  const std::int64_t row = at.row;
  if (row >= p.rows) {
    return;
  }
  const T* const x = p.logits + row * p.classes;
  T* const dx = dlogits + row * p.classes;
  const Label<T, kTarget> label(p, row);
  if (label.ignored) {
    for (std::int64_t i = at.t; i < p.classes; i += at.threads) {
      dx[i] = static_cast<T>(0.0f);
    }
    return;
  }
  const Gradient<T, kTarget, kCap> gradient(p, label, logsumexp[row], mass[row], incoming(row));
  const Span<T> span(x, p.classes);
  T* const to = dx + span.head;
  const bool aligned = reinterpret_cast<std::uintptr_t>(to) % 16 == 0;
  for_packs<kAhead<T, kTarget>>(x, span, at.t, at.threads, [&](const auto& pack, std::int64_t number) {
    const std::int64_t first = span.first(number);
    const std::int64_t ahead = label.index - first;
    const int label_at = ahead >= 0 && ahead < Span<T>::kPack ? static_cast<int>(ahead) : -1;
    const auto out = gradient_of(p, row, first, label_at, pack, gradient);
    T* const place = to + number * Span<T>::kPack;
    if (aligned) {
      rows::store_whole(place, out);
    } else {
#pragma unroll
      for (int j = 0; j < Span<T>::kPack; ++j) {
        place[j] = out.at[j];
      }
    }
  });
  for (int e = at.t; e < span.edges(); e += at.threads) {
    const std::int64_t i = span.edge(e);
    dx[i] = gradient_of_one(p, row, i, label.index, x[i], gradient);
  }
}

template <class T, Team kTeam>
__global__ void __launch_bounds__(most_threads(kTeam))
    cross_entropy_scale_rows(T* gradient, const Accumulate<T>* factors, bool per_row, std::int64_t rows,
                             std::int64_t classes) {
  using S = Accumulate<T>;
  if (!per_row && *factors == S{1}) {
    return;
  }
  const RowOf<kTeam> at;
  for (std::int64_t row = at.row; row < rows; row += at.step) {
    const S factor = factors[per_row ? row : 0];
    if (factor != S{1}) {
      T* const g = gradient + row * classes;
      const Span<T> span(g, classes);
      for_packs<2>(g, span, at.t, at.threads, [&](const auto& pack, std::int64_t number) {
        S values[Span<T>::kPack];
        rows::unpack(pack, values);
#pragma unroll
        for (S& value : values) {
          value *= factor;
        }
        rows::store(g + span.first(number), rows::pack_of<T>(values));
      });
      for (int e = at.t; e < span.edges(); e += at.threads) {
        T& value = g[span.edge(e)];
        value = static_cast<T>(static_cast<S>(value) * factor);
      }
    }
  }
}

/// Calls f.operator()<kTeam>(blocks, threads).
template <class F>
void for_teams(std::int64_t rows, std::int64_t classes, const F& f) {
  if (classes <= kWarpRow) {
    f.template operator()<Team::warp>(rows::grid_of((rows + kWarpRows - 1) / kWarpRows), kWarp * kWarpRows);
  } else {
    f.template operator()<Team::block>(rows::grid_of(rows),
                                       classes <= kSmallBlockRow ? kBlockThreads / 2 : kBlockThreads);
  }
}

}  // namespace

}  // namespace xent

void cross_entropy_forward(Cuda, const CrossEntropyForward& args) {
  const cudaStream_t stream = cuda::current_stream();
  const Tensor& logits = args.terms.logits;
  xent::for_kinds(args.terms, [&]<class T, xent::Target kTarget, bool kCap>() {
    using S = Accumulate<T>;
    xent::for_teams(logits.size(0), logits.size(1), [&]<Team kTeam>(unsigned blocks, int threads) {
      xent::cross_entropy_rows<T, kTarget, kCap, kTeam><<<blocks, threads, 0, stream>>>(
          xent::Problem<T>(args.terms), args.logsumexp.data<S>(), args.mass.data<S>(), args.losses.data<S>());
    });
  });
  cuda::check_launch("cross_entropy_rows");
}

void cross_entropy_backward(Cuda, const CrossEntropyBackward& args) {
  const cudaStream_t stream = cuda::current_stream();
  const Tensor& logits = args.terms.logits;
  xent::for_kinds(args.terms, [&]<class T, xent::Target kTarget, bool kCap>() {
    using S = Accumulate<T>;
    xent::for_teams(logits.size(0), logits.size(1), [&]<Team kTeam>(unsigned blocks, int threads) {
      xent::cross_entropy_backward_rows<T, kTarget, kCap, kTeam>
          <<<blocks, threads, 0, stream>>>(xent::Problem<T>(args.terms), args.logsumexp.data<S>(), args.mass.data<S>(),
                                           xent::Incoming<T>(args.dloss, args.denominator), args.dlogits.data<T>());
    });
  });
  cuda::check_launch("cross_entropy_backward_rows");
}

void cross_entropy_scale(Cuda, const CrossEntropyScale& args) {
  constexpr unsigned kMaxBlocks = 2048;  // few, since the factor is usually 1 and there is nothing to do
  const cudaStream_t stream = cuda::current_stream();
  on_dtype(FloatTypes{}, args.gradient.dtype(), "cross_entropy", [&]<class T>() {
    const std::int64_t rows = args.gradient.size(0);
    const std::int64_t classes = args.gradient.size(1);
    xent::for_teams(rows, classes, [&]<Team kTeam>(unsigned blocks, int threads) {
      xent::cross_entropy_scale_rows<T, kTeam><<<std::min(blocks, kMaxBlocks), threads, 0, stream>>>(
          args.gradient.data<T>(), args.factor.data<Accumulate<T>>(), args.factor.numel() > 1, rows, classes);
    });
  });
  cuda::check_launch("cross_entropy_scale_rows");
}

}  // namespace mica::kernels
