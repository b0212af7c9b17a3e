#include <algorithm>
#include <climits>
#include <type_traits>

#include <mica/core/cuda/launch.h>
#include <mica/ops/norm/detail/norm_forward_cuda.cuh>

// Forward for short unaligned rows. They are still copied in packs of 16 bytes, through shared memory, in tiles of
// adjacent rows:
//
//   x ──packs, tiles ahead──▶ tile ──pairs──▶ differences from a shift, in registers ──▶ moments: half warps
//                                                          │                                      │
//   y ◀──packs── tile ◀──pairs── · rstd, weight, bias ◀────┴──────────────────────────────────────┘
//
// A warp computes one tile after another. weight and bias of a thread's columns stay in registers. Half a warp, or 4
// lanes, share a row. In norm_forward_held_kernel, kLanes lanes would share it. Here kLanes / 2 threads do, and each
// does the work of two neighboring lanes of that kernel, whose columns form pairs. Sums are added up in the order of
// that kernel.

namespace mica::kernels::norm_cuda {

namespace {

// The rows of a tile in shared memory. They have the same offset from a 128-byte line as in global memory. A thread
// always copies the same packs of a tile, so it may fetch its packs of a later tile as soon as it has written its packs
// of this one.
template <class T>
class Tile {
 public:
  static constexpr int kPack = 16 / sizeof(T);
  static constexpr int kLine = 128 / sizeof(T);

  /// `threads` threads share the tile.
  __device__ Tile(unsigned char* memory, int thread, int threads)
      : packs_(reinterpret_cast<T*>(memory)), first_(thread * kPack), step_(threads * kPack) {}

  /// The offset of an address from the beginning of its 128-byte line, in elements.
  __device__ static int phase(const T* from) {
    return static_cast<int>(reinterpret_cast<std::uintptr_t>(from) / sizeof(T) % kLine);
  }

  /// Starts copying `count` elements. Copies whole packs, including the elements before `from` in the first pack, and
  /// those after the last element in the last pack. If that pack would extend past `end`, where the matrix ends, its
  /// elements are copied one by one.
  __device__ void fetch(const T* from, int count, const T* end) const {
    const int skipped = phase(from);
    from -= skipped;
    count += skipped;
    const int rounded = (count + kPack - 1) / kPack * kPack;
    const int whole = from + rounded <= end ? rounded : rounded - kPack;
    int i = first_pack(skipped);
#pragma unroll 4
    for (; i < whole; i += step_) {
      cuda::copy_async<16, /*kLastInL2=*/true>(packs_ + i, from + i);
    }
    if (i == whole) {
      copy(packs_, from, max(i, skipped), count);
    }
  }

  /// Writes `count` elements that were copied from `from`. If `to` and `from` have the same offset from a multiple of
  /// 16 bytes, each thread writes the packs that it has copied itself, and write() returns true. Otherwise threads
  /// write single elements, also those that other threads have copied, and write() returns false. Then the warp must
  /// synchronize before the next fetch().
  __device__ bool write(T* to, const T* from, int count) const {
    const int skipped = phase(from);
    to -= skipped;
    count += skipped;
    if (reinterpret_cast<std::uintptr_t>(to) % 16 != 0) {
      const int step = step_ / kPack;
#pragma unroll 1
      for (int i = skipped + first_ / kPack; i < count; i += step) {
        to[i] = packs_[i];
      }
      return false;
    }
    const int whole = count / kPack * kPack;
    int i = first_pack(skipped);
    if (i < skipped) {
      copy(to, packs_, skipped, min(count, i + kPack));
      i += step_;
    }
#pragma unroll 2
    for (; i < whole; i += step_) {
      store_whole(to + i, *reinterpret_cast<const uint4*>(packs_ + i));
    }
    if (i == whole) {
      copy(to, packs_, i, count);
    }
    return true;
  }

  /// A pointer to the first element of a tile that was copied from `from`.
  __device__ T* begin(const T* from) const { return packs_ + phase(from); }

 private:
  /// The index of the first of the thread's packs that does not lie entirely before element `skipped`.
  __device__ int first_pack(int skipped) const { return first_ + (first_ + kPack <= skipped ? step_ : 0); }

  // Copies the elements of an incomplete pack one by one.
  __device__ static void copy(T* to, const T* from, int begin, int end) {
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      to[i] = from[i];
    }
  }

  T* packs_;
  int first_;
  int step_;
};

// A thread's elements of a row: those of two neighboring lanes of the kLanes lanes that would share the row. The first
// lane has columns first, first + kLanes, …, and the second lane has the column after each of these.
template <int kLanes>
struct PairShare {
  int first;     // the first lane's first column
  int count[2];  // of columns, in each lane; at most K

  __device__ PairShare(int first, int end, int most)
      : first(first), count{counted(first, end, most), counted(first + 1, end, most)} {}

  __device__ bool has(int i, int j) const { return i < count[j]; }

 private:
  __device__ static int counted(int from, int end, int most) {
    return max(0, min(most, (end - from + kLanes - 1) / kLanes));
  }
};

// The sum over kLanes lanes, where each thread has the values of two neighboring lanes. The order of the additions is
// that of sum_lanes<kLanes> with one value per lane.
template <int kLanes, class S>
__device__ S sum_pairs(S even, S odd) {
  const bool upper = threadIdx.x % (kLanes / 2) >= kLanes / 4;
  S mine = (upper ? odd : even) + __shfl_xor_sync(kAllLanes, upper ? even : odd, kLanes / 4);
  mine = sum_lanes<kLanes / 4>(mine);
  return mine + __shfl_xor_sync(kAllLanes, mine, kLanes / 4);
}

// A thread's pairs of a row, as differences from a shift. A thread has up to K pairs, and each thread has the first
// kSure of them.
template <class N, class T, int K, int kSure, int kLanes>
class RowPairs {
 public:
  using S = Accumulate<T>;
  using Share = PairShare<kLanes>;

  /// Reads the row that begins at `row` in shared memory. `first` is its first element, which centered norms use as the
  /// shift. in_pairs: the row begins at an address aligned to pairs, as do all rows that the warp has at this time.
  __device__ void load_from(const T* row, T first, const Share& share, bool in_pairs) {
    const T absent = N::kCentered ? first : T{};  // so that its difference is 0
    const T* const from = row + share.first;
    Word words[K];
    if (in_pairs) {
#pragma unroll
      for (int i = 0; i < K; ++i) {
        words[i] = word_of(absent, absent);
        if (i < kSure || share.has(i, 0)) {
          words[i] = *reinterpret_cast<const Word*>(from + i * kLanes);
        }
        if (i >= kSure && !share.has(i, 1)) {
          words[i] = word_of(reinterpret_cast<const Pack<T, 2>&>(words[i]).at[0], absent);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < K; ++i) {
        T pair[2] = {absent, absent};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (i < kSure || i < share.count[j]) {
            pair[j] = from[i * kLanes + j];
          }
        }
        words[i] = word_of(pair[0], pair[1]);
      }
    }
    const S shift = shift_of_row(first);
#pragma unroll
    for (int i = 0; i < K; ++i) {
      unpack(reinterpret_cast<const Pack<T, 2>&>(words[i]), values_[i]);
#pragma unroll
      for (S& value : values_[i]) {
        value = N::kCentered ? value - shift : value;
      }
    }
  }

  __device__ static S shift_of_row(T first) { return N::kCentered ? shift_of(Pack<T, 1>{first}) : S(0); }

  /// Computes the moments of each of the thread's two lanes. reciprocals[n] is 1 / n, for each number n of elements
  /// that a lane may have.
  __device__ void find_moments(const Share& share, const S* reciprocals, Moments<S> (&m)[2]) const {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      S sum = 0;
      if constexpr (N::kCentered) {
#pragma unroll
        for (int i = 0; i < K; ++i) {
          sum += values_[i][j];
        }
        sum = __fmul_rn(sum, reciprocals[share.count[j]]);
      }
      S squares = 0;
#pragma unroll
      for (int i = 0; i < K; ++i) {
        if (!N::kCentered || i < kSure || i < share.count[j]) {
          const S difference = values_[i][j] - sum;
          squares = fma(difference, difference, squares);
        }
      }
      m[j] = {sum, squares};
    }
  }

  /// Writes y over the row in shared memory. `number` is the number of the row in the matrix.
  template <class Parameters>
  __device__ void write(T* row, int number, Share share, bool in_pairs, S mean, S rstd,
                        const Parameters& parameters) const {
    T* const to = row + share.first;
    // The counts are compared again for each row. Otherwise the compiler would keep the results of the comparisons.
    // There are more of them than predicate registers, so it would keep them as bits of a register, and would have to
    // extract these bits.
    asm volatile("" : "+r"(share.count[0]), "+r"(share.count[1]));
    if (in_pairs) {
#pragma unroll
      for (int i = 0; i < K; ++i) {
        const Pack<T, 2> pair = result(i, number, mean, rstd, parameters);
        if (i < kSure || share.has(i, 1)) {
          *reinterpret_cast<Word*>(to + i * kLanes) = reinterpret_cast<const Word&>(pair);
        }
        if (i >= kSure && share.count[0] > share.count[1] && i == share.count[1]) {
          to[i * kLanes] = pair.at[0];
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < K; ++i) {
        const Pack<T, 2> pair = result(i, number, mean, rstd, parameters);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (i < kSure || share.has(i, j)) {
            to[i * kLanes + j] = pair.at[j];
          }
        }
      }
    }
  }

 private:
  // A pair of 16-bit elements is kept as one word. The compiler would split a Pack of them, and put it together again.
  using Word = std::conditional_t<sizeof(T) == 2, unsigned, Pack<T, 2>>;

  __device__ static Word word_of(T even, T odd) {
    if constexpr (sizeof(T) == 2) {
      return reinterpret_cast<const std::uint16_t&>(even) | unsigned{reinterpret_cast<const std::uint16_t&>(odd)} << 16;
    } else {
      return {even, odd};
    }
  }

  template <class Parameters>
  __device__ Pack<T, 2> result(int i, int number, S mean, S rstd, const Parameters& parameters) const {
    const S offset = -mean * rstd;
    S w[2];
    S b[2];
    parameters.at(i, number, w, b);
    S y[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      y[j] = N::kCentered ? fma(fma(values_[i][j], rstd, offset), w[j], b[j]) : values_[i][j] * rstd * w[j];
    }
    return pack_of<T>(y);
  }

  S values_[K][2];
};

// The moments of a row, with the same bits in each of its threads. reciprocal_n: 1 / the number of its elements.
template <class N, int kLanes, class S>
__device__ Moments<S> combine_pairs(const Moments<S> (&mine)[2], const PairShare<kLanes>& share, S reciprocal_n) {
  if constexpr (!N::kCentered) {
    return {0, sum_pairs<kLanes>(mine[0].b, mine[1].b)};
  } else {
    const S counts[2] = {static_cast<S>(share.count[0]), static_cast<S>(share.count[1])};
    const S sum = sum_pairs<kLanes>(__fmul_rn(counts[0], mine[0].a), __fmul_rn(counts[1], mine[1].a));
    const S mean = __fmul_rn(sum, reciprocal_n);
    S squares[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const S difference = mine[j].a - mean;
      squares[j] = fma(difference, counts[j] * difference, mine[j].b);
    }
    return {mean, sum_pairs<kLanes>(squares[0], squares[1])};
  }
}

// The tiles of a warp, of which shared memory holds kDepth: the current one, and later ones that are being fetched.
template <class T, class W, int kDepth>
class TileStream {
 public:
  /// step: rows from a tile to the next one of the warp.
  __device__ TileStream(const Forward<T, W>& a, const NormForwardPlan& p, const int& step, unsigned char* memory)
      : a_(a),
        p_(p),
        step_(step),
        memory_(memory + threadIdx.y * (kDepth * p.tile_bytes)),
        row_(static_cast<int>(blockIdx.x * blockDim.y + threadIdx.y) * p.tile_rows) {
#pragma unroll 1
    for (int i = 0; i < kDepth; ++i) {
      fetch(i, row_ + i * step_);
    }
  }

  __device__ bool has_tile() const { return row_ < rows_in_all(); }
  __device__ int first_row() const { return row_; }
  __device__ int rows() const { return rows_from(row_); }

  /// Waits for the thread's own copies of the current tile. Returns a pointer to the tile's first element.
  __device__ T* wait() const {
    cuda::wait_copies<kDepth - 1>();
    return at(place_).begin(a_.x + row_ * a_.columns);
  }

  /// Writes the current tile to y, starts fetching a later tile to its place, and makes the next tile the current one.
  __device__ void write() {
    const std::int64_t begin = row_ * a_.columns;
    if (!at(place_).write(a_.y + begin, a_.x + begin, rows() * static_cast<int>(a_.columns))) {
      __syncwarp();
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
    cuda::commit_copies();  // also without copies, since wait_copies() counts the commits
  }

  const Forward<T, W>& a_;
  const NormForwardPlan& p_;
  const int& step_;
  unsigned char* memory_;
  int row_;
  int place_ = 0;
};

// Computes a row of a tile: replaces x by y. Returns true if it could not, since the row is not finite or its squares
// overflow.
template <class N, int K, int kSure, int kLanes, class T, class W, class Parameters>
__device__ bool normalize_tile_row(const Forward<T, W>& a, T* staged, int row, bool present,
                                   const PairShare<kLanes>& share, const Parameters& parameters,
                                   const Accumulate<T>* reciprocal_counts) {
  using S = Accumulate<T>;
  const bool in_pairs = __all_sync(kAllLanes, cuda::shared_address(staged) % (2 * sizeof(T)) == 0);
  const T first = *staged;
  RowPairs<N, T, K, kSure, kLanes> pairs;
  const S shift = pairs.shift_of_row(first);
  pairs.load_from(staged, first, share, in_pairs);
  Moments<S> mine[2];
  pairs.find_moments(share, reciprocal_counts, mine);
  const Moments<S> m = combine_pairs<N>(mine, share, a.in_row);
  const bool overflow = N::kCentered && !isfinite(m.b);
  __syncwarp();  // all lanes have read the first element
  if (present && !overflow) {
    const S rstd = rsqrt(m.b * a.in_row + a.eps);
    if (threadIdx.x % (kLanes / 2) == 0) {
      write_statistics<N>(a, row, shift + m.a, mean_rounding(shift, m.a), rstd, S(1));
    }
    pairs.write(staged, row, share, in_pairs, m.a, rstd, parameters);
  }
  return overflow;
}

// K is the most pairs of a row that a thread has. Each thread has the first kSure of them.
template <class N, class T, class W, int K, int kSure, int kLanes>
__global__ void __launch_bounds__(kTileWarps* kWarp, 4)
    norm_forward_tiles_kernel(const Forward<T, W> a, const NormForwardPlan p, const int step) {
  constexpr int kThreads = kLanes / 2;  // that share a row
  // A warp computes a group of rows in two steps: every other row, then the rows between them. So in each step, the
  // distance between rows is an even number of elements, and either all of them begin at pairs or none does.
  constexpr int kGroup = 2 * kWarp / kThreads;
  __shared__ Accumulate<T> reciprocal_counts[K + 1];  // 1 / n for n elements of a lane: a table saves registers
  extern __shared__ __align__(16) unsigned char memory[];
  const int columns = static_cast<int>(a.columns);
  const auto share_of_thread = [&] {
    return PairShare<kLanes>(static_cast<int>(threadIdx.x) % kThreads * 2, columns, K);
  };
  const PairShare<kLanes> own = share_of_thread();
  KeptParameters<W, 2, K, kLanes> parameters(a.weight, N::kCentered ? a.bias : nullptr, own.first, own.count[1],
                                             own.count[0] > own.count[1]);
  TileStream<T, W, kTileDepth> tiles(a, p, step, memory);  // after the loads of the parameters were issued
  parameters.place_cut(own.count[1], own.count[0] > own.count[1]);
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  if (thread <= K) {
    reciprocal_counts[thread] = reciprocal(static_cast<Accumulate<T>>(thread));
  }
  __syncthreads();
  const int group_row = threadIdx.x / kThreads * 2;
#pragma unroll 1
  for (; tiles.has_tile(); tiles.write()) {
    const int first_row = tiles.first_row();
    const int rows = tiles.rows();
    T* const tile = tiles.wait();
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < rows; i += i % 2 == 0 ? 1 : kGroup - 1) {
      const int r = i + group_row;
      const bool present = r < rows;
      T* const row = tile + (present ? r : 0) * columns;
      const PairShare<kLanes> share = share_of_thread();  // computed again, since registers are scarce
      const bool undone =
          normalize_tile_row<N, K, kSure, kLanes>(a, row, first_row + r, present, share, parameters, reciprocal_counts);
      if constexpr (N::kCentered) {
        unsigned left = __ballot_sync(kAllLanes, undone && present && threadIdx.x % kThreads == 0);
#pragma unroll 1
        for (; left != 0; left &= left - 1) {
          const int other = __shfl_sync(kAllLanes, r, __ffs(left) - 1);
          write_shrunk_row<N, kLanes>(a, first_row + other, tile + other * columns);
        }
      }
    }
    __syncwarp();
  }
}

// On the host.

template <class N, class T, class W, int K, int kSure, int kLanes>
void launch(const Forward<T, W>& a, const NormForwardPlan& p) {
  const auto kernel = norm_forward_tiles_kernel<N, T, W, K, kSure, kLanes>;
  cuda::Launch launch(1, dim3(p.threads, p.teams), p.teams * kTileDepth * p.tile_bytes);
  // More blocks than can run at once balance the load if some multiprocessors are slower than others, but each block
  // waits for its first rows and for the parameters.
  const std::int64_t most_blocks = std::int64_t{N::kCentered ? 1 : 8} * launch.resident(kernel);
  const std::int64_t tile_rows = std::int64_t{p.tile_rows} * p.teams;  // rows per block, in one tile of each warp
  constexpr std::int64_t kMostRows = INT_MAX / 2;                      // the kernel counts rows in int
  for (std::int64_t begin = 0; begin < a.rows; begin += kMostRows) {
    const Forward<T, W> part = rows_of(a, begin, std::min(kMostRows, a.rows - begin));
    const std::int64_t blocks = std::min((part.rows + tile_rows - 1) / tile_rows, most_blocks);
    launch.grid(static_cast<unsigned>(blocks))
        .run(kernel, "norm_forward_tiles_kernel", part, p, static_cast<int>(blocks * tile_rows));
  }
}

}  // namespace

void forward_tiles(const NormForward& args, const NormForwardPlan& plan) {
  on_norm_with_pairs<4>(args, [&]<class N, class T, class W>(const Forward<T, W>& a) {
    if (plan.team == RowTeam::lanes) {
      return launch<N, T, W, 8, 0, 8>(a, plan);
    }
    const auto run = [&]<int... K>() {
      return ((plan.packs == K && (launch<N, T, W, K, K - 2, kWarp>(a, plan), true)) || ...);
    };
    bool done = run.template operator()<4, 6, 8>();
    if constexpr (sizeof(T) == 2) {
      done = done || run.template operator()<10, 12, 14, 16>();
    }
    check(done, "norm: there are no tiles with {} pairs a thread", plan.packs);
  });
}

}  // namespace mica::kernels::norm_cuda
