#include <algorithm>

#include <mica/core/cuda/launch.h>
#include <mica/ops/norm/detail/norm_forward_staged_cuda.cuh>

// Staged rows that no block holds. A cluster stays with row after row, each block with the same columns of all of them:
//
//   x ──packs, rows ahead──▶ chunk ──first look──▶ moments: segments, slabs, ──▶ blocks of the cluster meet
//                              │                                                              │
//   y ◀──packs── chunk ◀──second look · rstd, weight, bias ◀──────────────────────────────────┘
//
// Between a row's two looks lies the first look at the next one, so that nobody waits for the blocks to meet.
//
// norm_forward_held_kernel gives such a row to blocks of up to 8 warps. Their slabs of its columns are those whose
// moments are joined here, two in each block.

namespace mica::kernels::norm_cuda {

namespace {

constexpr int kPairs = 16;                // that a thread has
constexpr int kSegment = kPairs * kWarp;  // columns
constexpr int kMostSegments = 16;         // of a block
constexpr int kChunkSlabs = 2;            // of a block
constexpr int kMostClusterBlocks = 16;    // that share a row
constexpr int kHeaderBytes = 128;         // before a chunk: the row's first element

// A block's part of a row.
struct Chunk {
  int rank;
  int slab;   // columns of a slab
  int begin;  // column
  int columns;

  __device__ Chunk(const NormForwardPlan& p, std::int64_t row_columns)
      : rank(cuda::cluster_rank()), slab(p.slab), begin(rank * kChunkSlabs * p.slab) {
    columns = max(0, min(kChunkSlabs * p.slab, static_cast<int>(row_columns) - begin));
  }

  __device__ static int dealt(int columns, int part, int i) { return max(0, min(part, columns - i * part)); }
  __device__ int in_slab(int i) const { return dealt(columns, slab, i); }
  /// Of segment number i of slab number j.
  __device__ int in_segment(int j, int i) const { return dealt(in_slab(j), kSegment, i); }
};

// The chunks of a block, in a ring.
template <class T, class W>
class ChunkStream {
 public:
  __device__ ChunkStream(const Forward<T, W>& a, const NormForwardPlan& p, const Chunk& chunk, unsigned char* memory)
      : a_(a), p_(p), chunk_(chunk), memory_(memory) {}

  /// Starts copying a row's chunk, if there is one, and its first element.
  __device__ void fetch(int place, int row) const {
    if (row < static_cast<int>(a_.rows)) {
      const T* const from = a_.x + row * a_.columns;
      tile(place).fetch(from + chunk_.begin, chunk_.columns, a_.x + a_.rows * a_.columns);
      if (threadIdx.x == 0) {
        cuda::copy_async<4>(header(place), from - reinterpret_cast<std::uintptr_t>(from) / sizeof(T) % (4 / sizeof(T)));
      }
    }
    cuda::commit_copies();  // also of nothing: they are counted
  }

  /// Whether each thread has written packs of its own: as Tile.
  __device__ bool write(int place, int row) const {
    const std::int64_t begin = row * a_.columns + chunk_.begin;
    return tile(place).write(a_.y + begin, a_.x + begin, chunk_.columns);
  }

  /// The first of the chunk's elements.
  __device__ T* at(int place, int row) const { return tile(place).begin(a_.x + row * a_.columns + chunk_.begin); }

  /// The first of the row's.
  __device__ T first(int place, int row) const {
    const T* const from = a_.x + row * a_.columns;
    return reinterpret_cast<const T*>(
        header(place))[reinterpret_cast<std::uintptr_t>(from) / sizeof(T) % (4 / sizeof(T))];
  }

  __device__ static int next(int place) { return place + 1 == kStagedClusterDepth ? 0 : place + 1; }
  __device__ static int before(int place) { return place == 0 ? kStagedClusterDepth - 1 : place - 1; }

 private:
  __device__ unsigned char* header(int place) const { return memory_ + place * p_.tile_bytes; }
  __device__ Tile<T> tile(int place) const {
    return {header(place) + kHeaderBytes, static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x)};
  }

  const Forward<T, W>& a_;
  const NormForwardPlan& p_;
  const Chunk& chunk_;
  unsigned char* memory_;
};

// Where the blocks of a cluster meet: each sends the moments of its slabs to all of them. A block may be two rows ahead
// of another one, and a row is begun ahead.
template <class N>
class ClusterMeeting {
 public:
  static constexpr int kMeetings = 4;

  struct Shared {
    Moments<float> segments[2][kMostSegments];
    Moments<float> slabs[kMeetings][kMostClusterBlocks * kChunkSlabs];
    std::uint64_t arrived[kMeetings];
    float reciprocal_counts[kPairs + 1];  // one over a number of a lane's elements: a table, as registers are scarce
    float reciprocal_segments[kMostSegments];
  };

  __device__ ClusterMeeting(Shared& shared, const Chunk& chunk, const NormForwardPlan& plan)
      : shared_(shared), plan_(plan) {
    const int i = threadIdx.x;
    if (i <= kPairs) {
      shared.reciprocal_counts[i] = reciprocal(static_cast<float>(i));
    }
    if (i < kMostSegments) {
      shared.reciprocal_segments[i] = reciprocal(static_cast<float>(Chunk::dealt(chunk.columns, kSegment, i)));
    }
    if (i == 0) {
      for (std::uint64_t& barrier : shared.arrived) {
        cuda::init_barrier(&barrier, 1);
      }
      cuda::publish_barriers();
    }
    __syncthreads();
    cuda::arrive_in_cluster();
    cuda::wait_for_cluster();
  }

  /// One over numbers of a lane's elements.
  __device__ const float* reciprocal_counts() const { return shared_.reciprocal_counts; }

  /// Leaves those of the block's row number i.
  __device__ void leave(int i, const Moments<float> (&mine)[2], const PairShare<kWarp>& share, const Chunk& chunk) {
    const int segment = threadIdx.x / (kWarp / 2);
    const Moments<float> own = combine_pairs<N>(mine, share, shared_.reciprocal_segments[segment]);
    Moments<float>* const segments = shared_.segments[i % 2];
    if (threadIdx.x % (kWarp / 2) == 0) {
      segments[segment] = own;
    }
    __syncthreads();
    if (static_cast<unsigned>(i) % (plan_.threads / kWarp) == threadIdx.x / kWarp) {  // they take turns at it
      send(i, combine_slab(segments, chunk), chunk.rank);
    }
  }

  /// The moments of row number i, of `columns`: the same bits in each thread.
  __device__ Moments<float> take(int i, int columns, float in_row) {
    const int slot = i % kMeetings;
    cuda::wait(&shared_.arrived[slot], i / kMeetings % 2);
    const int lane = threadIdx.x % kWarp;
    const Moments<float> mine = lane < plan_.blocks * kChunkSlabs ? shared_.slabs[slot][lane] : Moments<float>{0, 0};
    if constexpr (!N::kCentered) {
      return {0, sum_lanes<kWarp>(mine.b)};
    } else {
      const float n = static_cast<float>(Chunk::dealt(columns, plan_.slab, lane));
      const float mean = __fmul_rn(sum_lanes<kWarp>(__fmul_rn(n, mine.a)), in_row);
      const float difference = mine.a - mean;
      return {mean, sum_lanes<kWarp>(fma(n * difference, difference, mine.b))};
    }
  }

  /// To precede the end: nobody sends to a block that has ended.
  __device__ static void close() {
    cuda::arrive_in_cluster();
    cuda::wait_for_cluster();
  }

 private:
  // The moments of the slab that the lower, or the upper, half of the warp joins.
  __device__ static Moments<float> combine_slab(const Moments<float>* segments, const Chunk& chunk) {
    const int i = threadIdx.x % kMostSegments;
    const int j = threadIdx.x % kWarp / kMostSegments;
    const int n = chunk.in_segment(j, i);
    const Moments<float> segment = n > 0 ? segments[j * (chunk.slab / kSegment) + i] : Moments<float>{0, 0};
    if constexpr (!N::kCentered) {
      return {0, sum_lanes<kMostSegments>(segment.b)};
    } else {
      return combine_lanes<kMostSegments>(segment, static_cast<float>(n),
                                          reciprocal(static_cast<float>(chunk.in_slab(j))));
    }
  }

  __device__ void send(int i, const Moments<float>& slab, int rank) {
    const int slot = i % kMeetings;
    const int lane = threadIdx.x % kWarp;
    const int block = lane % kMostClusterBlocks;
    std::uint64_t* const barrier = &shared_.arrived[slot];
    if (lane == 0) {
      cuda::arrive_expecting(barrier, plan_.blocks * kChunkSlabs * static_cast<int>(sizeof(Moments<float>)));
    }
    if (block < plan_.blocks) {
      Moments<float>& place = shared_.slabs[slot][rank * kChunkSlabs + lane / kMostClusterBlocks];
      cuda::send(&place.a, block, slab.a, barrier);
      cuda::send(&place.b, block, slab.b, barrier);
    }
  }

  Shared& shared_;
  const NormForwardPlan& plan_;
};

template <class N, class T, bool kFull>
using ChunkPairs = RowPairs<N, T, kPairs, kFull ? kPairs : 0, kWarp>;

// The first look at a chunk: the moments of the thread's pairs.
template <bool kFull, class N, class T, class S>
__device__ void find_chunk_moments(const T* chunk, T first, const PairShare<kWarp>& share, const S* reciprocals,
                                   Moments<S> (&mine)[2]) {
  ChunkPairs<N, T, kFull> pairs;
  pairs.load_from(chunk, first, share, cuda::shared_address(chunk) % (2 * sizeof(T)) == 0);
  pairs.find_moments(share, reciprocals, mine);
}

// The second look: y over x.
template <bool kFull, class N, class T, class S, class Parameters>
__device__ void normalize_chunk(T* chunk, int row, T first, S mean, S rstd, const PairShare<kWarp>& share,
                                const Parameters& parameters) {
  const bool in_pairs = cuda::shared_address(chunk) % (2 * sizeof(T)) == 0;
  ChunkPairs<N, T, kFull> pairs;
  pairs.load_from(chunk, first, share, in_pairs);
  pairs.write(chunk, row, share, in_pairs, mean, rstd, parameters);
}

template <class N, class T, class W>
__global__ void __launch_bounds__(kStagedBlock, 2)
    norm_forward_staged_cluster_kernel(const Forward<T, W> a, const NormForwardPlan p) {
  using S = Accumulate<T>;
  __shared__ typename ClusterMeeting<N>::Shared shared;
  extern __shared__ __align__(16) unsigned char memory[];
  const Chunk chunk(p, a.columns);
  const ChunkStream<T, W> stream(a, p, chunk, memory);
  const int rows = static_cast<int>(a.rows);
  const int columns = static_cast<int>(a.columns);
  const int step = gridDim.x / p.blocks;
  int row = blockIdx.x / p.blocks;
#pragma unroll 1
  for (int i = 0; i < kStagedClusterDepth; ++i) {
    stream.fetch(i, row + i * step);
  }
  const PairParameters<N, W, kPairs, kWarp> parameters(a.weight == nullptr ? nullptr : a.weight + chunk.begin,
                                                       a.bias == nullptr ? nullptr : a.bias + chunk.begin,
                                                       share_of_block<kPairs>(chunk.columns));
  ClusterMeeting<N> meeting(shared, chunk, p);
  const bool full = static_cast<int>(threadIdx.x / kWarp + 1) * (2 * kSegment) <= chunk.columns;  // the warp's segments

  const auto begin_row = [&](int i, int place, int row) {
    const T* const x = stream.at(place, row);
    const T first = stream.first(place, row);
    const PairShare<kWarp> share = share_of_block<kPairs>(chunk.columns);
    Moments<S> mine[2];
    full ? find_chunk_moments<true, N>(x, first, share, meeting.reciprocal_counts(), mine)
         : find_chunk_moments<false, N>(x, first, share, meeting.reciprocal_counts(), mine);
    meeting.leave(i, mine, share, chunk);
  };
  const auto end_row = [&](int i, int place, int row) {
    const Moments<S> m = meeting.take(i, columns, a.in_row);
    T* const x = stream.at(place, row);
    if (N::kCentered && !isfinite(m.b)) {  // in all threads of the row alike
      normalize_shrunk_row<N, kWarp>(a, row, x, chunk.begin, chunk.columns);
      return;
    }
    const T first = stream.first(place, row);
    const S shift = ChunkPairs<N, T, true>::shift_of_row(first);
    const S rstd = rsqrt(m.b * a.in_row + a.eps);
    if (threadIdx.x == 0 && chunk.rank == 0) {
      write_statistics<N>(a, row, shift + m.a, mean_rounding(shift, m.a), rstd, S(1));
    }
    const PairShare<kWarp> share = share_of_block<kPairs>(chunk.columns);
    full ? normalize_chunk<true, N>(x, row, first, m.a, rstd, share, parameters)
         : normalize_chunk<false, N>(x, row, first, m.a, rstd, share, parameters);
  };

  cuda::wait_copies<kStagedClusterDepth - 1>();
  __syncthreads();
  if (row < rows) {
    begin_row(0, 0, row);
  }
  int place = 0;
  int i = 0;
#pragma unroll 1
  for (; row < rows; row += step, ++i) {
    cuda::wait_copies<kStagedClusterDepth - 3>();  // the next row's have arrived
    __syncthreads();                               // in all threads, which are done with the row before, too
    if (i > 0) {
      if (!stream.write(stream.before(place), row - step)) {
        __syncthreads();
      }
      stream.fetch(stream.before(place), row + (kStagedClusterDepth - 1) * step);
    }
    if (row + step < rows) {
      begin_row(i + 1, stream.next(place), row + step);
    }
    end_row(i, place, row);
    place = stream.next(place);
  }
  __syncthreads();
  if (i > 0) {
    stream.write(stream.before(place), row - step);
  }
  meeting.close();
}

// On the host.

template <class N, class T, class W>
void launch(const Forward<T, W>& a, const NormForwardPlan& p) {
  const auto kernel = norm_forward_staged_cluster_kernel<N, T, W>;
  cuda::Launch launch(p.blocks, p.threads, kStagedClusterDepth * p.tile_bytes);
  launch.cluster(p.blocks);
  const auto clusters = std::min<std::int64_t>(a.rows, launch.resident(kernel));
  launch.grid(static_cast<unsigned>(clusters * p.blocks)).run(kernel, "norm_forward_staged_cluster_kernel", a, p);
}

}  // namespace

template <class N, class T, class W>
void forward_staged_cluster(const Forward<T, W>& a, const NormForwardPlan& plan) {
  launch<N>(a, plan);
}

#define MICA_INSTANTIATE(T, W)                                                                    \
  template void forward_staged_cluster<Norm<true>>(const Forward<T, W>&, const NormForwardPlan&); \
  template void forward_staged_cluster<Norm<false>>(const Forward<T, W>&, const NormForwardPlan&)
MICA_INSTANTIATE(Half, Half);
MICA_INSTANTIATE(Half, float);
MICA_INSTANTIATE(BFloat16, BFloat16);
MICA_INSTANTIATE(BFloat16, float);

}  // namespace mica::kernels::norm_cuda
