#include <algorithm>
#include <climits>

#include <mica/core/cuda/launch.h>
#include <mica/ops/norm/detail/norm_forward_staged_cuda.cuh>

// Staged rows of which a warp has several, or a block one.

namespace mica::kernels::norm_cuda {

namespace {

// How the moments of a row come from those of its threads. Rows of one segment, which a warp has several of, or those
// that a block shares, whose segments have K elements a lane.
template <class N, class T, int K, int kLanes, bool kBlock>
class RowMeeting {
 public:
  using S = Accumulate<T>;
  using Share = PairShare<kLanes>;
  static constexpr int kMostSegments = 16;

  struct Shared {
    Moments<S> segments[2][kMostSegments];
    S reciprocal_counts[K + 1];  // one over a number of a lane's elements: a table, as registers are scarce
    S reciprocal_segments[kMostSegments];
  };

  __device__ RowMeeting(Shared* shared, int columns) : shared_(shared) {
    const int i = threadIdx.y * blockDim.x + threadIdx.x;
    if (i <= K) {
      shared->reciprocal_counts[i] = reciprocal(static_cast<S>(i));
    }
    if (kBlock && i < kMostSegments) {
      shared->reciprocal_segments[i] = reciprocal(elements(i, columns));
    }
    __syncthreads();
  }

  /// The number of the thread's segment in its block.
  __device__ static int segment() { return threadIdx.x / (kLanes / 2); }

  /// One over numbers of a lane's elements.
  __device__ const S* reciprocal_counts() const { return shared_->reciprocal_counts; }

  /// The moments of the row, the same bits in each of its threads.
  __device__ Moments<S> combine(const Moments<S> (&mine)[2], const Share& share, int columns, S in_row) {
    const Moments<S> own = combine_pairs<N>(mine, share, kBlock ? shared_->reciprocal_segments[segment()] : in_row);
    if constexpr (!kBlock) {
      return own;
    } else {
      const int segments = (columns + K * kLanes - 1) / (K * kLanes);
      Moments<S>* const all = shared_->segments[turn_];
      turn_ ^= 1;  // so that one barrier a row is enough
      if (threadIdx.x % (kLanes / 2) == 0 && segment() < segments) {
        all[segment()] = own;
      }
      __syncthreads();
      const int i = threadIdx.x % kMostSegments;
      const Moments<S> other = i < segments ? all[i] : Moments<S>{0, 0};
      return N::kCentered ? combine_lanes<kMostSegments>(other, elements(i, columns), in_row)
                          : Moments<S>{0, sum_lanes<kMostSegments>(other.b)};
    }
  }

 private:
  // Of segment number i.
  __device__ static S elements(int i, int columns) {
    return static_cast<S>(max(0, min(K * kLanes, columns - i * (K * kLanes))));
  }

  Shared* shared_;
  int turn_ = 0;
};

// A team's threads wait for each other.
template <bool kBlock>
__device__ void sync() {
  kBlock ? __syncthreads() : __syncwarp();
}

// The tiles of a team: it fetches them, kDepth ahead, and writes them.
template <class T, class W, bool kBlock, int kDepth>
class TileStream {
 public:
  /// step: rows from a tile to the next.
  __device__ TileStream(const Forward<T, W>& a, const NormForwardPlan& p, const int& step, unsigned char* memory)
      : a_(a),
        p_(p),
        step_(step),
        memory_(memory + (kBlock ? 0 : threadIdx.y * (kDepth * p.tile_bytes))),
        row_(static_cast<int>(kBlock ? blockIdx.x : blockIdx.x * blockDim.y + threadIdx.y) * p.tile_rows) {
#pragma unroll 1
    for (int i = 0; i < kDepth; ++i) {
      fetch(i, row_ + i * step_);
    }
  }

  __device__ bool has_tile() const { return row_ < rows_in_all(); }
  __device__ int first_row() const { return row_; }
  __device__ int rows() const { return rows_from(row_); }

  /// Waits for the thread's copies. Returns the tile's first element.
  __device__ T* wait() const {
    cuda::wait_copies<kDepth - 1>();
    return at(place_).begin(a_.x + row_ * a_.columns);
  }

  /// Writes the tile to y, and goes on to the next.
  __device__ void write() {
    const std::int64_t begin = row_ * a_.columns;
    if (!at(place_).write(a_.y + begin, a_.x + begin, rows() * static_cast<int>(a_.columns))) {
      sync<kBlock>();
    }
    fetch(place_, row_ + kDepth * step_);
    place_ = place_ + 1 == kDepth ? 0 : place_ + 1;
    row_ += step_;
  }

 private:
  __device__ int rows_in_all() const { return static_cast<int>(a_.rows); }
  __device__ int rows_from(int row) const { return min(p_.tile_rows, rows_in_all() - row); }
  __device__ Tile<T> at(int place) const {
    return {memory_ + place * p_.tile_bytes, static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x)};
  }
  __device__ void fetch(int place, int row) const {
    if (row < rows_in_all()) {
      at(place).fetch(a_.x + row * a_.columns, rows_from(row) * static_cast<int>(a_.columns),
                      a_.x + a_.rows * a_.columns);
    }
    cuda::commit_copies();  // also of nothing: they are counted
  }

  const Forward<T, W>& a_;
  const NormForwardPlan& p_;
  const int& step_;
  unsigned char* memory_;
  int row_;
  int place_ = 0;
};

// More blocks than have room at a time make up for multiprocessors that are slower than others, but each of them waits
// for its first rows and for the parameters.
template <class N, bool kBlock>
constexpr int kTurns = N::kCentered ? 1
                       : kBlock     ? 2
                                    : 8;

// A row of a tile, y over x. Returns whether it is not done, since its squares overflow or it is not finite.
template <bool kFull, class N, int K, int kSure, int kLanes, bool kBlock, class T, class W, class Parameters>
__device__ bool normalize_staged_row(const Forward<T, W>& a, T* staged, int row, bool present,
                                     const PairShare<kLanes>& share, const Parameters& parameters,
                                     RowMeeting<N, T, K, kLanes, kBlock>& meeting) {
  using S = Accumulate<T>;
  // Of a block's warps, one at most is not full: not worth the registers.
  const bool in_pairs =
      (kFull || !kBlock) && __all_sync(kAllLanes, cuda::shared_address(staged) % (2 * sizeof(T)) == 0);
  const T first = *staged;
  RowPairs<N, T, K, kFull ? K : kSure, kLanes, kBlock> pairs;
  const S shift = pairs.shift_of_row(first);
  pairs.load_from(staged, first, share, in_pairs);
  Moments<S> mine[2];
  pairs.find_moments(share, meeting.reciprocal_counts(), mine);
  const Moments<S> m = meeting.combine(mine, share, static_cast<int>(a.columns), a.in_row);
  const bool overflow = N::kCentered && !isfinite(m.b);
  __syncwarp();  // all have read the shift
  if (present && !overflow) {
    const S rstd = rsqrt(m.b * a.in_row + a.eps);
    if (threadIdx.x % (kBlock ? kStagedBlock : kLanes / 2) == 0) {
      write_statistics<N>(a, row, shift + m.a, mean_rounding(shift, m.a), rstd, S(1));
    }
    pairs.write(staged, row, share, in_pairs, m.a, rstd, parameters);
  }
  return overflow;
}

template <int K, int kLanes, bool kBlock>
__device__ PairShare<kLanes> share_of(int columns) {
  if constexpr (kBlock) {
    return share_of_block<K>(columns);
  } else {
    return {static_cast<int>(threadIdx.x) % (kLanes / 2) * 2, columns, K};
  }
}

// K: pairs of a row that a thread has, at most; of these, the first kSure in each thread.
template <class N, class T, class W, int K, int kSure, int kLanes, bool kBlock>
__global__ void __launch_bounds__(kBlock ? kStagedBlock : kStagedWarps* kWarp, kBlock ? 2 : 4)
    norm_forward_staged_kernel(const Forward<T, W> a, const NormForwardPlan p, const int step) {
  using Meeting = RowMeeting<N, T, K, kLanes, kBlock>;
  constexpr int kThreads = kLanes / 2;  // of a segment
  __shared__ typename Meeting::Shared shared;
  extern __shared__ __align__(16) unsigned char memory[];
  TileStream<T, W, kBlock, kStagedDepth> tiles(a, p, step, memory);
  const int columns = static_cast<int>(a.columns);
  const int segment = Meeting::segment();
  const PairParameters<N, W, K, kLanes> parameters(a.weight, a.bias, share_of<K, kLanes, kBlock>(columns));
  Meeting meeting(&shared, columns);
  const bool full = kBlock && static_cast<int>(threadIdx.x / kWarp + 1) * (2 * K * kLanes) <= columns;
  // A warp takes rows two apart at a time: so they begin at pairs, or none does.
  constexpr int kGroup = kBlock ? 1 : 2 * kWarp / kThreads;
#pragma unroll 1
  for (; tiles.has_tile(); tiles.write()) {
    const int first_row = tiles.first_row();
    const int rows = tiles.rows();
    T* const tile = tiles.wait();
    sync<kBlock>();
#pragma unroll 1
    for (int i = 0; i < rows; i += kBlock || i % 2 == 0 ? 1 : kGroup - 1) {
      const int r = kBlock ? i : i + segment * 2;
      const bool present = r < rows;
      T* const row = tile + (present ? r : 0) * columns;
      const PairShare<kLanes> share = share_of<K, kLanes, kBlock>(columns);
      const bool undone = kBlock && full ? normalize_staged_row<true, N, K, kSure, kLanes, kBlock>(
                                               a, row, first_row + r, present, share, parameters, meeting)
                                         : normalize_staged_row<false, N, K, kSure, kLanes, kBlock>(
                                               a, row, first_row + r, present, share, parameters, meeting);
      if constexpr (N::kCentered) {
        unsigned left = __ballot_sync(kAllLanes, undone && present && (kBlock || threadIdx.x % kThreads == 0));
        if constexpr (kBlock) {
          if (left != 0) {
            normalize_shrunk_row<N, kWarp>(a, first_row + r, row, 0, columns);
          }
        } else {
#pragma unroll 1
          for (; left != 0; left &= left - 1) {
            const int other = __shfl_sync(kAllLanes, r, __ffs(left) - 1);
            normalize_shrunk_row<N, kLanes>(a, first_row + other, tile + other * columns, 0, columns);
          }
        }
      }
    }
    sync<kBlock>();
  }
}

// On the host.

template <class N, class T, class W, int K, int kSure, int kLanes, bool kBlock>
void launch(const Forward<T, W>& a, const NormForwardPlan& p) {
  const auto kernel = norm_forward_staged_kernel<N, T, W, K, kSure, kLanes, kBlock>;
  cuda::Launch launch(1, dim3(p.threads, p.teams), p.teams * kStagedDepth * p.tile_bytes);
  const std::int64_t tile_rows = std::int64_t{p.tile_rows} * p.teams;  // of a block
  const std::int64_t most_blocks = std::int64_t{kTurns<N, kBlock>} * launch.resident(kernel);
  constexpr std::int64_t kMostRows = INT_MAX / 2;  // the kernel counts them in int
  for (std::int64_t begin = 0; begin < a.rows; begin += kMostRows) {
    const Forward<T, W> part = rows_of(a, begin, std::min(kMostRows, a.rows - begin));
    const std::int64_t blocks = std::min((part.rows + tile_rows - 1) / tile_rows, most_blocks);
    launch.grid(static_cast<unsigned>(blocks))
        .run(kernel, "norm_forward_staged_kernel", part, p, static_cast<int>(blocks * tile_rows));
  }
}

}  // namespace

template <class N, class T, class W>
void forward_staged(const Forward<T, W>& a, const NormForwardPlan& p) {
  if (p.team == RowTeam::lanes) {
    return launch<N, T, W, 8, 0, 8, false>(a, p);
  }
  if (p.team == RowTeam::warp) {
    switch (p.packs) {
      case 4: return launch<N, T, W, 4, 2, kWarp, false>(a, p);
      case 6: return launch<N, T, W, 6, 4, kWarp, false>(a, p);
      case 8: return launch<N, T, W, 8, 6, kWarp, false>(a, p);
    }
  }
  if constexpr (sizeof(T) == 2) {
    if (p.team == RowTeam::cluster) {
      return forward_staged_cluster<N>(a, p);
    }
    if (p.team == RowTeam::block) {
      return p.packs == 8 ? launch<N, T, W, 8, 0, kWarp, true>(a, p) : launch<N, T, W, 16, 0, kWarp, true>(a, p);
    }
    switch (p.packs) {
      case 10: return launch<N, T, W, 10, 8, kWarp, false>(a, p);
      case 12: return launch<N, T, W, 12, 10, kWarp, false>(a, p);
      case 14: return launch<N, T, W, 14, 12, kWarp, false>(a, p);
      case 16: return launch<N, T, W, 16, 14, kWarp, false>(a, p);
    }
  }
  check(false, "norm: there is no staged forward with {} pairs a thread", p.packs);
}

#define MICA_INSTANTIATE(T, W)                                                            \
  template void forward_staged<Norm<true>>(const Forward<T, W>&, const NormForwardPlan&); \
  template void forward_staged<Norm<false>>(const Forward<T, W>&, const NormForwardPlan&)
MICA_FOR_FLOAT_SUM_ROW_TYPES(MICA_INSTANTIATE);

}  // namespace mica::kernels::norm_cuda
