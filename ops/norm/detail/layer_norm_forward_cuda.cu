#include <array>

#include <mica/core/creation.h>
#include <mica/core/cuda/device.h>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/ops/norm/detail/layer_norm_forward_cuda.cuh>
#include <mica/ops/norm/detail/layer_norm_kernels.h>
#include <mica/ops/norm/detail/layer_norm_moments_cuda.cuh>
#include <mica/ops/norm/detail/rms_norm_kernels.h>

// Forward for rows that do not stream.

namespace mica::kernels {

using namespace layer_norm_cuda;

namespace {

// A thread's packs of a row, zeros where there are none, and the beginning of the row. What is used of an element is
// its difference from a shift. Packs of 16 bits stay as they were read, which leaves registers to more threads.
template <class T, int V, int P, int kLanes>
class RowPacks {
 public:
  using S = Accumulate<T>;

  /// kPolicy: the loads follow `policy` for the L2 cache.
  template <bool kPolicy>
  __device__ void load_from(const T* x_row, std::int64_t at, const Share<V, P, kLanes>& share, std::uint64_t policy) {
    const T* const x = x_row + at;
#pragma unroll
    for (int i = 0; i < P; ++i) {
      packs_[i] = {};
      if (share.has(i)) {
        const T* const from = x + i * (kLanes * V);
        Pack<T, V> pack;
        if constexpr (kPolicy) {
          pack = load_streaming<V>(from, policy);
        } else {
          pack = load_streaming<V>(from);
        }
        packs_[i] = reinterpret_cast<const Held&>(pack);
      }
    }
    const First first = load<kFirst<T, V>>(x_row);
    first_ = reinterpret_cast<const Words<First>&>(first);
  }

  /// Makes a shift of the beginning of the row. To be called once.
  __device__ S find_shift(const Share<V, P, kLanes>& share) {
    shift_ = shift_of(reinterpret_cast<const First&>(first_));
    if constexpr (kInPlace) {
#pragma unroll
      for (int i = 0; i < P; ++i) {
        const S from = share.has(i) ? shift_ : S(0);
#pragma unroll
        for (T& x : reinterpret_cast<Pack<T, V>&>(packs_[i]).at) {
          x -= from;
        }
      }
    }
    return shift_;
  }

  /// The differences of pack number i from the shift; zeros if it is absent.
  __device__ void differences(int i, const Share<V, P, kLanes>& share, S (&values)[V]) const {
    unpack(reinterpret_cast<const Pack<T, V>&>(packs_[i]), values);
    if constexpr (!kInPlace) {
      const S from = share.has(i) ? shift_ : S(0);
#pragma unroll
      for (S& value : values) {
        value -= from;
      }
    }
  }

  /// Changes nothing, in a way that the compiler cannot know: it would keep the differences it has found, and spill.
  __device__ void forget() {
    if constexpr (!kInPlace && std::is_same_v<Held, uint4>) {
      const unsigned zero = threadIdx.z;
#pragma unroll
      for (Held& words : packs_) {
        words = make_uint4(words.x | zero, words.y | zero, words.z | zero, words.w | zero);
      }
    }
  }

 private:
  static constexpr bool kInPlace = std::is_same_v<T, S>;
  // Words, where it is 16 bytes: the compiler would take elements of 16 bits apart as soon as they are there, and wait.
  template <class Any>
  using Words = std::conditional_t<sizeof(Any) == 16 && sizeof(T) == 2, uint4, Any>;
  using First = Pack<T, kFirst<T, V>>;
  using Held = Words<Pack<T, V>>;

  Held packs_[P];
  Words<First> first_;
  S shift_;
};

// Σ (x − shift) of a thread and, if kSquares, Σ (x − shift)².
template <bool kSquares, int V, int P, int kLanes, class T, class S = Accumulate<T>>
__device__ Moments<S> sum_differences(const RowPacks<T, V, P, kLanes>& row, const Share<V, P, kLanes>& share) {
  Moments<S> sums{0, 0};
#pragma unroll
  for (int i = 0; i < P; ++i) {
    S values[V];
    row.differences(i, share, values);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      sums.a += values[j];
      if constexpr (kSquares) {
        sums.b = fma(values[j], values[j], sums.b);
      }
    }
  }
  return sums;
}

// Σ (x − shift − mean)² of a thread.
template <int V, int P, int kLanes, class T, class S>
__device__ S sum_squares(const RowPacks<T, V, P, kLanes>& row, const Share<V, P, kLanes>& share, S mean) {
  S sum = 0;
#pragma unroll
  for (int i = 0; i < P; ++i) {
    S values[V];
    row.differences(i, share, values);
    const S from = share.has(i) ? mean : S(0);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const S difference = values[j] - from;
      sum = fma(difference, difference, sum);
    }
  }
  return sum;
}

// y of a thread's packs. weight and bias are at the thread's first column too; kBoth: neither is absent.
template <bool kBoth, int V, int P, int kLanes, class T, class W, class S>
__device__ void write_packs(const RowPacks<T, V, P, kLanes>& row, const Share<V, P, kLanes>& share, S mean, S rstd,
                            const W* weight, const W* bias, T* y) {
  constexpr int kPart = std::min(V, static_cast<int>(8 / sizeof(W)));  // columns whose parameters are read at once
  const S offset = -mean * rstd;
#pragma unroll
  for (int i = 0; i < P; ++i) {
    if (share.has(i)) {
      S values[V];
      row.differences(i, share, values);
#pragma unroll
      for (int part = 0; part < V; part += kPart) {
        S w[kPart];
        S b[kPart];
        const int column = i * (kLanes * V) + part;
        unpack(kBoth ? load<kPart>(weight + column) : load_or<kPart>(weight, column, 1), w);
        unpack(kBoth ? load<kPart>(bias + column) : load_or<kPart>(bias, column, 0), b);
#pragma unroll
        for (int j = 0; j < kPart; ++j) {
          values[part + j] = fma(fma(values[part + j], rstd, offset), w[j], b[j]);
        }
      }
      store(y + i * (kLanes * V), pack_of<T>(values));
    }
  }
}

// A thread's share of a row whose squares overflow, or that is not finite.
template <class T, class W, int V, int P, int kLanes, Team kTeam>
__device__ void normalize_shrunk_row(const Forward<T, W>& a, const ForwardPlan& p, int block, bool mine) {
  using S = Accumulate<T>;
  // Not known to be the same as before, so that nothing that follows from them is kept until here.
  int lane = threadIdx.x;
  asm volatile("" : "+r"(lane), "+r"(block));
  const Place<V, P, kLanes, kTeam> place(p, a.rows, a.columns, lane, block);
  const T* const x_row = a.x + (place.present ? place.row : 0) * a.columns;
  const S shift = static_cast<S>(x_row[0]) * kShrink<S>;
  const Moments<S> m = shrunk_moments<kLanes>(x_row, a.columns, shift, a.in_row);
  if (!mine) {
    return;  // lanes of a row of its own
  }
  const S rstd = rsqrt(m.b * a.in_row + a.eps * kShrink<S> * kShrink<S>);
#pragma unroll 1
  for (int i = 0; i < P * V; ++i) {
    if (place.share.has(i / V)) {
      const std::int64_t column = place.at + i / V * (kLanes * V) + i % V;
      const S x = fma(static_cast<S>(x_row[column]), kShrink<S>, -shift);
      const S w = a.weight == nullptr ? S(1) : static_cast<S>(a.weight[column]);
      const S b = a.bias == nullptr ? S(0) : static_cast<S>(a.bias[column]);
      a.y[place.row * a.columns + column] = static_cast<T>(fma((x - m.a) * rstd, w, b));
    }
  }
  if (lane == 0 && place.rank == 0) {
    write_statistics(a, place.row, shift + m.a, mean_rounding(shift, m.a), rstd, kShrink<S>);
  }
}

// A row that its team holds in registers. `moments` are shared. kBoth: weight and bias are known to be present.
template <bool kBoth, class T, class W, int V, int P, int kLanes, Team kTeam>
__device__ void normalize_row(const Forward<T, W>& a, const ForwardPlan& p, RowPacks<T, V, P, kLanes>& row,
                              const Place<V, P, kLanes, kTeam>& place, Moments<Accumulate<T>>* moments,
                              const SlabMeeting<Accumulate<T>>& slab_meeting, int block) {
  using S = Accumulate<T>;
  const S shift = row.find_shift(place.share);
  Moments<S> m = sum_differences<kOnePass<T, V>>(row, place.share);
  if constexpr (kOnePass<T, V>) {
    m = place.sum(m, moments, slab_meeting);
    const S mean = m.a * a.in_row;
    const S squares = fma(-m.a, mean, m.b);
    m = {mean, squares < 0 ? S(0) : squares};
  } else {
    m.a *= reciprocal(static_cast<S>(place.share.elements()));
    m.b = sum_squares(row, place.share, m.a);
    m = place.combine(a.columns, m, moments, slab_meeting);
  }
  row.forget();
  const bool overflow = !isfinite(m.b);
  if (__any_sync(kAllLanes, overflow)) {
    normalize_shrunk_row<T, W, V, P, kLanes, kTeam>(a, p, block, overflow);
    if (kLanes == kWarp) {
      return;  // of one row, all lanes agree
    }
  }
  if (place.present && !overflow) {
    const S rstd = rsqrt(m.b * a.in_row + a.eps);
    if (threadIdx.x == 0 && place.rank == 0) {
      write_statistics(a, place.row, shift + m.a, mean_rounding(shift, m.a), rstd, S(1));
    }
    T* const y = a.y + place.row * a.columns + place.at;
    if (kBoth || (a.weight != nullptr && a.bias != nullptr)) {
      write_packs<true>(row, place.share, m.a, rstd, a.weight + place.at, a.bias + place.at, y);
    } else {
      write_packs<false>(row, place.share, m.a, rstd, a.weight == nullptr ? nullptr : a.weight + place.at,
                         a.bias == nullptr ? nullptr : a.bias + place.at, y);
    }
  }
}

// Threads of a block, at most.
template <Team kTeam>
constexpr int kMostThreads = kTeam == Team::block ? kForwardBlock : kForwardBlock / 2;

// Blocks of so many that a multiprocessor has room for: as many as possible such that nothing is spilled.
template <class T, int V, int P, int kLanes, Team kTeam, bool kAhead>
constexpr int kLeastBlocks = [] {
  constexpr int kBytes = P * V * static_cast<int>(sizeof(T));  // of a row that a thread holds
  if (sizeof(T) == 8) {
    return 1;
  }
  if (V == 1 || kTeam == Team::blocks) {
    return kTeam == Team::block ? 2 : 3;
  }
  if (kTeam == Team::block) {
    return !kAhead && sizeof(T) == 2 ? 3 : 2;
  }
  if (kLanes < kWarp) {
    return 3;
  }
  return kBytes <= 16 ? 8 : kBytes <= 32 || (sizeof(T) == 4 && kBytes <= 64) ? 6 : 4;
}();

// Whether x may be told to stay in the L2 cache longest. What is written then leaves it in the order in which it came,
// which suits memory. Rows on their way while others are written gain nothing.
template <class T, int V, int P, Team kTeam, bool kAhead>
constexpr bool kPolicy =
    !kAhead && sizeof(Pack<T, V>) == 16 &&
    ((sizeof(T) == 2 && kTeam == Team::block) || (sizeof(T) == 4 && (P == 8 || (kTeam == Team::warp && P == 4))));

// The rows of a team: one or, if kAhead, one after another, of which the next is on its way while the team is at one.
template <bool kAhead, class T, class W, int V, int P, int kLanes, Team kTeam, int kTurns, int kWarps>
__device__ void normalize_rows(const Forward<T, W>& a, const ForwardPlan& p, Place<V, P, kLanes, kTeam>& place,
                               Moments<Accumulate<T>> (&moments)[kTurns][kWarps],
                               const SlabMeeting<Accumulate<T>>& slab_meeting, int block) {
  constexpr bool kByPolicy = kPolicy<T, V, P, kTeam, kAhead>;
  const std::uint64_t policy = !kByPolicy ? 0 : a.x_last_in_l2 ? cuda::evict_last() : cuda::evict_normal();
  RowPacks<T, V, P, kLanes> row;
  const T* x = a.x + (place.present ? place.row : 0) * a.columns;
  row.template load_from<kByPolicy>(x, place.at, place.share, policy);
  if constexpr (!kAhead) {
    normalize_row<false>(a, p, row, place, moments[0], slab_meeting, block);
  } else {
#pragma unroll 1
    for (int turn = 0;; turn ^= 1) {
      RowPacks<T, V, P, kLanes> current = row;
      const std::int64_t next = std::int64_t{place.row} + gridDim.x;
      x += gridDim.x * a.columns;
      if (next < a.rows) {
        row.template load_from<kByPolicy>(x, place.at, place.share, policy);
      }
      normalize_row<true>(a, p, current, place, moments[turn], slab_meeting, place.row);
      if (next >= a.rows) {
        return;
      }
      place.row = static_cast<int>(next);
    }
  }
}

template <class T, class W, int V, int P, int kLanes, Team kTeam, bool kAhead>
__global__ void __launch_bounds__(kMostThreads<kTeam>, (kLeastBlocks<T, V, P, kLanes, kTeam, kAhead>))
    layer_norm_forward_kernel(const Forward<T, W> a, const ForwardPlan p,
                              const SlabMeeting<Accumulate<T>> slab_meeting) {
  static_assert(!kAhead || kTeam == Team::block);
  __shared__ Moments<Accumulate<T>> moments[kAhead ? 2 : 1][kTeam == Team::warp ? 1 : kForwardBlock / kWarp];
  if (kTeam == Team::warp && kLanes == kWarp && std::int64_t{blockIdx.x} * p.teams + threadIdx.y >= a.rows) {
    return;  // fewer lanes stay, to take part in what warps do together
  }
  const int block = kTeam == Team::blocks ? slab_meeting.number() : blockIdx.x;
  Place<V, P, kLanes, kTeam> place(p, a.rows, a.columns, threadIdx.x, block);
  normalize_rows<kAhead>(a, p, place, moments, slab_meeting, block);
}

// Rows of any length, each by one block, in three passes over memory.
template <class T, class W, int V>
__global__ void __launch_bounds__(kForwardBlock, 1) layer_norm_forward_looped_kernel(const Forward<T, W> a) {
  using S = Accumulate<T>;
  __shared__ Moments<S> moments[kForwardBlock / kWarp];
  const Meeting<S> meeting(moments);
  for (std::int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const T* const x_row = a.x + row * a.columns;
    S scale = 1;
    S shift;
    const auto for_packs = [&](auto f) {  // f(column, differences from shift)
#pragma unroll 4
      for (std::int64_t column = threadIdx.x * V; column < a.columns; column += kForwardBlock * V) {
        S x[V];
        unpack(load<V>(x_row + column), x);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          x[j] = fma(x[j], scale, -shift);
        }
        f(column, x);
      }
    };
    const auto sum_of = [&](auto term) {  // over the row
      S sum = 0;
      for_packs([&](std::int64_t, const S(&x)[V]) {
#pragma unroll
        for (int j = 0; j < V; ++j) {
          sum += term(x[j]);
        }
      });
      __syncthreads();  // whoever read the last sum is done
      meeting.meet(sum_lanes<kWarp>(sum));
      return meeting.sum().a;
    };
    S mean;
    S squares;
#pragma unroll 1
    while (true) {
      shift = static_cast<S>(x_row[0]) * scale;
      mean = sum_of([](S x) { return x; }) * a.in_row;
      squares = sum_of([&](S x) { return (x - mean) * (x - mean); });
      if (scale != 1 || isfinite(squares)) {
        break;
      }
      scale = kShrink<S>;
    }
    const S rstd = rsqrt(squares * a.in_row + a.eps * scale * scale);
    for_packs([&](std::int64_t column, S(&x)[V]) {
      S w[V];
      S b[V];
      unpack(load_or<V>(a.weight, column, 1), w);
      unpack(load_or<V>(a.bias, column, 0), b);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        x[j] = fma((x[j] - mean) * rstd, w[j], b[j]);
      }
      store(a.y + row * a.columns + column, pack_of<T>(x));
    });
    if (threadIdx.x == 0) {
      write_statistics(a, row, shift + mean, mean_rounding(shift, mean), rstd, scale);
    }
  }
}

// On the host.

constexpr std::size_t kKeptInL2 = 40 << 20;  // bytes of a result that the L2 cache has room for

/// P packs a thread, and as many blocks a row as it then takes.
template <int V>
ForwardPlan forward_plan(std::int64_t columns, int packs, int most_threads) {
  ForwardPlan p{.packs = packs, .lanes = kWarp};
  const std::int64_t warp_columns = kWarp * V * packs;
  const std::int64_t warps = (columns + warp_columns - 1) / warp_columns;
  const std::int64_t most = most_threads / kWarp;
  p.slabs = static_cast<int>(std::min<std::int64_t>((warps + most - 1) / most, INT_MAX));
  p.threads = static_cast<int>((warps + p.slabs - 1) / p.slabs * kWarp);
  p.slab = static_cast<int>(p.threads / kWarp * warp_columns);
  p.teams = p.threads == kWarp ? 8 : 1;
  return p;
}

// Rows of so many columns at most have a warp each; of so many, a block with so many packs a thread, which may stay.
template <int V>
constexpr int kWarpColumns = V == 8 ? 1024 : 512;
template <int V>
constexpr int kAheadColumns = V == 4   ? 2048
                              : V == 8 ? 2560
                                       : 0;
constexpr int kAheadPacks = 2;

/// The plan for rows of a length that can be read in packs of V; none for rows that are too long. may_stay: blocks may
/// stay for row after row.
template <int V>
ForwardPlan forward_plan(std::int64_t columns, bool may_stay) {
  if (columns <= 64) {
    return {.packs = std::max(1, 8 / V), .lanes = 8, .threads = 8, .teams = 16, .slab = 64};
  }
  if (columns > kWarpColumns<V> && columns <= kAheadColumns<V>) {
    ForwardPlan p = forward_plan<V>(columns, kAheadPacks, kMostThreads<Team::block>);
    p.ahead = may_stay;  // of no effect on the bits of a row
    return p;
  }
  if (V >= 4 && columns <= kWarpColumns<V>) {
    const int packs = static_cast<int>((columns + kWarp * V - 1) / (kWarp * V));
    return forward_plan<V>(columns, packs, kWarp);
  }
  // Of so many packs a thread, the first number that leaves the fewest threads without one.
  constexpr std::array<int, 4> kPacks = V == 8   ? std::array{4, 3, 3, 3}
                                        : V == 4 ? std::array{4, 8, 8, 8}
                                        : V == 2 ? std::array{8, 4, 2, 1}
                                                 : std::array{16, 8, 8, 8};
  ForwardPlan best;
  for (const int packs : kPacks) {
    const ForwardPlan p = forward_plan<V>(columns, packs, kMostThreads<Team::block>);
    if (p.slabs == 1 && (best.threads == 0 || p.threads * packs < best.threads * best.packs)) {
      best = p;
    }
  }
  if (best.threads == 0) {
    best = forward_plan<V>(columns, kMostPacks<V>, kMostThreads<Team::blocks>);
    if (best.slabs > kForwardSlabs) {
      best = {};
    }
  }
  return best;
}

template <class T, class W, int V>
void launch_forward(const Forward<T, W>& a, Device device) {
  using S = Accumulate<T>;
  // Blocks that stay read no x by policy, and need both parameters: the other way would be code to fetch.
  const bool may_stay = a.weight != nullptr && a.bias != nullptr && (sizeof(T) > 2 || !a.x_last_in_l2);
  const ForwardPlan p = forward_plan<V>(a.columns, may_stay);
  // Blocks that share a row wait for each other, so all must have room at a time, also beside other work.
  const bool has_room = p.slabs == 1 || p.slabs <= cuda::multiprocessor_count() / 2;
  if (p.threads == 0 || !has_room) {
    layer_norm_forward_looped_kernel<T, W, V><<<grid_of(a.rows), kForwardBlock, 0, cuda::current_stream()>>>(a);
    cuda::check_launch("layer_norm_forward_looped_kernel");
    return;
  }
  const auto launch = [&]<int P, int kLanes, Team kTeam, bool kAhead = false>() {
    // A grid has at most INT_MAX blocks.
    const std::int64_t most = INT_MAX / p.slabs * std::int64_t{p.teams};
    Forward<T, W> part = a;
    for (std::int64_t begin = 0; begin < a.rows; begin += most) {
      part.rows = std::min(most, a.rows - begin);
      part.x = a.x + begin * a.columns;
      part.y = a.y + begin * a.columns;
      part.mean = a.mean == nullptr ? nullptr : a.mean + begin;
      part.mean_rest = a.mean_rest == nullptr ? nullptr : a.mean_rest + begin;
      part.rstd = a.rstd == nullptr ? nullptr : a.rstd + begin;
      Tensor counts;
      Tensor moments;
      SlabMeeting<S> meeting{};
      if constexpr (kTeam == Team::blocks) {
        counts = empty({part.rows + 1}, int32, device);
        moments = empty({part.rows, p.slabs, 2}, dtype_of<S>, device);
        meeting.begun = counts.data<std::int32_t>();
        meeting.arrivals = meeting.begun + 1;
        meeting.moments = reinterpret_cast<Moments<S>*>(moments.data<S>());
        cuda::check(cudaMemsetAsync(meeting.begun, 0, counts.numel() * sizeof(std::int32_t), cuda::current_stream()),
                    "cudaMemsetAsync");
      }
      auto blocks = static_cast<unsigned>((part.rows + p.teams - 1) / p.teams * p.slabs);
      if constexpr (kAhead) {
        const int resident = kLeastBlocks<T, V, P, kLanes, kTeam, kAhead> * kMostThreads<kTeam> / p.threads;
        blocks = std::min<unsigned>(blocks, resident * cuda::multiprocessor_count());
      }
      layer_norm_forward_kernel<T, W, V, P, kLanes, kTeam, kAhead>
          <<<blocks, dim3(p.threads, p.teams), 0, cuda::current_stream()>>>(part, p, meeting);
      cuda::check_launch(kAhead                 ? "layer_norm_forward_kernel<block, ahead>"
                         : kTeam == Team::warp  ? "layer_norm_forward_kernel<warp>"
                         : kTeam == Team::block ? "layer_norm_forward_kernel<block>"
                                                : "layer_norm_forward_kernel<blocks>");
    }
  };
  const auto launch_packs = [&]<int P>() {
    if constexpr (P <= kMostPacks<V>) {
      if (p.threads == kWarp) {
        if constexpr (V < 4 || P * kWarp * V <= kWarpColumns<V>) {
          launch.template operator()<P, kWarp, Team::warp>();
        }
      } else if constexpr (V < 4 || P >= kAheadPacks) {
        launch.template operator()<P, kWarp, Team::block>();
      }
    }
  };
  if (p.ahead) {
    if constexpr (kAheadColumns < V >> 0) {
      launch.template operator()<kAheadPacks, kWarp, Team::block, true>();
    }
  } else if (p.lanes < kWarp) {
    launch.template operator()<std::max(1, 8 / V), 8, Team::warp>();
  } else if (p.slabs > 1) {
    launch.template operator()<kMostPacks<V>, kWarp, Team::blocks>();
  } else if constexpr (V == 1) {
    p.packs == 8 ? launch_packs.template operator()<8>() : launch_packs.template operator()<16>();
  } else {
    switch (p.packs) {
      case 1: launch_packs.template operator()<1>(); break;
      case 2: launch_packs.template operator()<2>(); break;
      case 3: launch_packs.template operator()<3>(); break;
      case 4: launch_packs.template operator()<4>(); break;
      default: launch_packs.template operator()<8>();
    }
  }
}

}  // namespace

void norm_forward(Cuda, const NormForward& args) {
  if (!args.centered) {
    return rms_norm_forward(Cuda{}, args);
  }
  const Tensor& parameter = args.weight.defined() ? args.weight : args.bias.defined() ? args.bias : args.x;
  on_row_types(args.x.dtype(), parameter.dtype(), "layer_norm", [&]<class T, class W>() {
    const Forward<T, W> a{.rows = args.rows,
                          .columns = args.columns,
                          .x = args.x.data<T>(),
                          .weight = args.weight.data_or_null<W>(),
                          .bias = args.bias.data_or_null<W>(),
                          .eps = static_cast<Accumulate<T>>(args.eps),
                          .in_row = Accumulate<T>(1) / static_cast<Accumulate<T>>(args.columns),
                          .y = args.y.data<T>(),
                          .mean = args.mean.data_or_null<Accumulate<T>>(),
                          .mean_rest = mean_rest_of<Accumulate<T>>(args.mean),
                          .rstd = args.rstd.data_or_null<Accumulate<T>>(),
                          // What the next kernel reads of a smaller y is better found there than x.
                          .x_last_in_l2 = args.y.bytes() > kKeptInL2};
    if constexpr (sizeof(T) <= sizeof(float)) {
      if (forward_stream(a)) {
        return;
      }
    }
    with_pack_size<T>(
        a.columns, [&]<int V>(std::integral_constant<int, V>) { launch_forward<T, W, V>(a, args.x.device()); }, a.x,
        a.weight, a.bias, a.y);
  });
}

}  // namespace mica::kernels
