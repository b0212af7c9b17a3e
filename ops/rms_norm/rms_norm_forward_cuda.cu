#include <algorithm>

#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/ops/layer_norm/rows_cuda.cuh>
#include <mica/ops/rms_norm/rms_norm_kernels.h>

// T is the type of x and y, W that of weight, S that of sums: float, or double for double. V is the number of columns
// in a pack, P that of packs of a row that a thread holds.

namespace mica::kernels {

using namespace rows;

namespace {

constexpr int kBlock = 512;      // threads, at most
constexpr int kWarpTeams = 8;    // rows of a block, where a warp has each
constexpr int kNarrowLanes = 8;  // that share a row of at most 64 columns

// Results larger than this leave the L2 cache before anybody reads them. Then x is told to stay in it longest: what is
// written leaves in the order in which it came, which the memory takes faster.
constexpr std::size_t kLargeResult = std::size_t{40} << 20;  // bytes

template <class T, class W>
struct Forward {
  using S = Accumulate<T>;
  std::int64_t rows;
  std::int64_t columns;
  const T* x;
  const W* weight;  // null: 1
  S eps;
  S in_row;  // 1 / columns
  T* y;
  S* rstd;  // null: not wanted
  bool x_last_in_l2;
};

// Who shares a row.
enum class Team { lanes, warp, block };

// A thread's packs of a row as they were read, which takes the fewest registers; zeros where there are none.
template <class T, int V, int P>
class Packs {
 public:
  using S = Accumulate<T>;

  __device__ void load_from(const T* row, int first, int step, int columns, std::uint64_t policy) {
#pragma unroll
    for (int i = 0; i < P; ++i) {
      words_[i] = {};
      if (first + i * step < columns) {
        Pack<T, V> pack;
        if constexpr (sizeof(Pack<T, V>) == 16) {
          pack = load_streaming<V>(row + first + i * step, policy);
        } else {
          pack = load<V>(row + first + i * step);
        }
        words_[i] = reinterpret_cast<const Words&>(pack);
      }
    }
  }

  __device__ void values(int i, S (&x)[V]) const { unpack(reinterpret_cast<const Pack<T, V>&>(words_[i]), x); }

  /// Changes nothing, in a way that the compiler cannot know: it would keep what it has unpacked for the sum.
  __device__ void forget() {
    if constexpr (std::is_same_v<Words, uint4>) {
      const unsigned zero = threadIdx.z;
#pragma unroll
      for (Words& w : words_) {
        w = make_uint4(w.x | zero, w.y | zero, w.z | zero, w.w | zero);
      }
    }
  }

 private:
  // Words, where it is 16 bytes of 16-bit elements: the compiler would take those apart as soon as they are there.
  using Words = std::conditional_t<sizeof(T) == 2 && V == 8, uint4, Pack<T, V>>;

  Words words_[P];
};

// The sum over a row's threads. `warps` is shared.
template <Team kTeam, class S>
__device__ S sum_team(S mine, S* warps) {
  if constexpr (kTeam == Team::lanes) {
    return sum_lanes<kNarrowLanes>(mine);
  } else if constexpr (kTeam == Team::warp) {
    return sum_lanes<kWarp>(mine);
  } else {
    const S warp = sum_lanes<kWarp>(mine);
    const int lane = threadIdx.x % kWarp;
    if (lane == 0) {
      warps[threadIdx.x / kWarp] = warp;
    }
    __syncthreads();
    return sum_lanes<kWarp>(lane < static_cast<int>(blockDim.x) / kWarp ? warps[lane] : S(0));
  }
}

// Blocks that a multiprocessor has room for, at least: as many as possible such that nothing is spilled.
template <class T, int V, int P, Team kTeam>
constexpr int kLeastBlocks = [] {
  constexpr int kBytes = P * V * static_cast<int>(sizeof(T));  // of a row that a thread holds
  if (sizeof(T) == 8) {
    return 1;
  }
  if (V == 1) {
    return kTeam == Team::block ? 1 : 3;
  }
  return kTeam == Team::block ? 2 : kBytes <= 48 ? 6 : 4;
}();

// A row lies in its team's registers from the one time it is read until y is written. blockDim.x threads share a row,
// and blockDim.y rows a block.
template <class T, class W, int V, int P, Team kTeam>
__global__ void __launch_bounds__(kTeam == Team::block ? kBlock : kWarpTeams * kWarp, (kLeastBlocks<T, V, P, kTeam>))
    rms_norm_forward_kernel(const Forward<T, W> a) {
  using S = Accumulate<T>;
  __shared__ S warps[kTeam == Team::block ? kBlock / kWarp : 1];
  const std::int64_t row = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (kTeam == Team::warp && row >= a.rows) {
    return;  // fewer lanes stay, to take part in what warps do together
  }
  const bool present = kTeam != Team::lanes || row < a.rows;
  const int columns = present ? static_cast<int>(a.columns) : 0;
  const std::int64_t begin = present ? row * a.columns : 0;
  const int first = threadIdx.x * V;
  const int step = blockDim.x * V;
  Packs<T, V, P> packs;
  packs.load_from(a.x + begin, first, step, columns, a.x_last_in_l2 ? cuda::evict_last() : cuda::evict_normal());
  S squares = 0;
#pragma unroll
  for (int i = 0; i < P; ++i) {
    S x[V];
    packs.values(i, x);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      squares = fma(x[j], x[j], squares);
    }
  }
  const S rstd = rsqrt(sum_team<kTeam>(squares, warps) * a.in_row + a.eps);
  packs.forget();
#pragma unroll
  for (int i = 0; i < P; ++i) {
    const int column = first + i * step;
    if (column < columns) {
      S x[V];
      S w[V];
      packs.values(i, x);
      unpack(load_or<V>(a.weight, column, 1), w);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        x[j] *= rstd * w[j];
      }
      store(a.y + begin + column, pack_of<T>(x));
    }
  }
  if (a.rstd != nullptr && threadIdx.x == 0 && present) {
    a.rstd[row] = rstd;
  }
}

// Rows of any length, each read twice by one block.
template <class T, class W, int V>
__global__ void __launch_bounds__(kBlock, 2) rms_norm_forward_looped_kernel(const Forward<T, W> a) {
  using S = Accumulate<T>;
  __shared__ S warps[kBlock / kWarp];
  const std::int64_t row = blockIdx.x;
  const auto for_packs = [&](auto f) {  // f(column, x)
#pragma unroll 4
    for (std::int64_t column = threadIdx.x * V; column < a.columns; column += kBlock * V) {
      S x[V];
      unpack(load<V>(a.x + row * a.columns + column), x);
      f(column, x);
    }
  };
  S squares = 0;
  for_packs([&](std::int64_t, const S(&x)[V]) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      squares = fma(x[j], x[j], squares);
    }
  });
  const S rstd = rsqrt(sum_team<Team::block>(squares, warps) * a.in_row + a.eps);
  for_packs([&](std::int64_t column, S(&x)[V]) {
    S w[V];
    unpack(load_or<V>(a.weight, column, 1), w);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      x[j] *= rstd * w[j];
    }
    store(a.y + row * a.columns + column, pack_of<T>(x));
  });
  if (a.rstd != nullptr && threadIdx.x == 0) {
    a.rstd[row] = rstd;
  }
}

// On the host.

// Packs of a row that a thread holds, at most; a warp takes rows that then fit.
template <int V>
constexpr int kMostPacks = V == 8   ? 4
                           : V == 1 ? 16
                                    : 8;

template <class T, class W, int V, int P, Team kTeam>
void launch_team(const Forward<T, W>& a, dim3 block) {
  rms_norm_forward_kernel<T, W, V, P, kTeam>
      <<<grid_of((a.rows + block.y - 1) / block.y), block, 0, cuda::current_stream()>>>(a);
  cuda::check_launch("rms_norm_forward_kernel");
}

// With `packs` packs a thread, which is at least 1 and at most kMostPacks.
template <class T, class W, int V, Team kTeam>
void launch_packs(const Forward<T, W>& a, dim3 block, int packs) {
  constexpr int kMost = kMostPacks<V>;
  if constexpr (V == 8) {
    switch (packs) {
      case 1: return launch_team<T, W, V, 1, kTeam>(a, block);
      case 2: return launch_team<T, W, V, 2, kTeam>(a, block);
      case 3: return launch_team<T, W, V, 3, kTeam>(a, block);
      default: return launch_team<T, W, V, 4, kTeam>(a, block);
    }
  } else if (packs <= kMost / 4) {
    launch_team<T, W, V, kMost / 4, kTeam>(a, block);
  } else if (packs <= kMost / 2) {
    launch_team<T, W, V, kMost / 2, kTeam>(a, block);
  } else {
    launch_team<T, W, V, kMost, kTeam>(a, block);
  }
}

// Threads that share a row too long for a warp: of packs a thread, as many as leave the fewest threads without one.
template <int V>
int block_threads(std::int64_t columns) {
  const auto threads_with = [&](int packs) {
    const std::int64_t in_warp = std::int64_t{kWarp} * V * packs;
    return (columns + in_warp - 1) / in_warp * kWarp;
  };
  constexpr int kMost = kMostPacks<V>;
  constexpr int kFewer = V == 8 ? 3 : kMost / 2;
  const std::int64_t most = threads_with(kMost);
  const std::int64_t fewer = threads_with(kFewer);
  return static_cast<int>(fewer <= kBlock && fewer * kFewer < most * kMost ? fewer
                                                                           : std::min<std::int64_t>(most, kBlock));
}

template <class T, class W, int V>
void launch_forward(const Forward<T, W>& a) {
  const auto packs_of = [&](int threads) { return static_cast<int>((a.columns + threads * V - 1) / (threads * V)); };
  if (a.columns <= 64) {
    launch_team<T, W, V, std::max(1, 8 / V), Team::lanes>(a, dim3(kNarrowLanes, kWarpTeams * kWarp / kNarrowLanes));
  } else if (packs_of(kWarp) <= kMostPacks<V>) {
    launch_packs<T, W, V, Team::warp>(a, dim3(kWarp, kWarpTeams), packs_of(kWarp));
  } else if (a.columns <= std::int64_t{kBlock} * V * kMostPacks<V>) {
    const int threads = block_threads<V>(a.columns);
    launch_packs<T, W, V, Team::block>(a, threads, packs_of(threads));
  } else {
    rms_norm_forward_looped_kernel<T, W, V><<<grid_of(a.rows), kBlock, 0, cuda::current_stream()>>>(a);
    cuda::check_launch("rms_norm_forward_looped_kernel");
  }
}

}  // namespace

void rms_norm_forward(Cuda, const RMSNormForward& args) {
  const Tensor& parameter = args.weight.defined() ? args.weight : args.x;
  on_row_types(args.x.dtype(), parameter.dtype(), "rms_norm", [&]<class T, class W>() {
    using S = Accumulate<T>;
    const Forward<T, W> a{.rows = args.rows,
                          .columns = args.columns,
                          .x = args.x.data<T>(),
                          .weight = args.weight.defined() ? args.weight.data<W>() : nullptr,
                          .eps = static_cast<S>(args.eps),
                          .in_row = S(1) / static_cast<S>(args.columns),
                          .y = args.y.data<T>(),
                          .rstd = args.rstd.defined() ? args.rstd.data<S>() : nullptr,
                          .x_last_in_l2 = args.y.bytes() > kLargeResult};
    with_pack_size<T>(
        a.columns, [&]<int V>(std::integral_constant<int, V>) { launch_forward<T, W, V>(a); }, a.x, a.weight, a.y);
  });
}

}  // namespace mica::kernels
