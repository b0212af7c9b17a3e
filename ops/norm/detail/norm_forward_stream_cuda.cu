#include <type_traits>

#include <mica/ops/detail/rows_ahead_cuda.cuh>
#include <mica/ops/norm/detail/norm_forward_cuda.cuh>

// Forward for long unaligned rows: of an odd number of 16-bit elements, or of float32. Blocks are persistent: a block,
// a part of its warps, or a cluster computes one row after another, and each thread has the same columns of all its
// rows:
//
//   x ──copied rows ahead──▶ shared memory ──first read──▶ moments of a warp ──Meeting──▶ the row's moments
//                                  │                                                          │
//                                  └──────second read · rstd, weight, bias ◀──────────────────┘──▶ y
//
// The blocks of a cluster take long to exchange their moments, so a cluster starts a row before it finishes the
// previous one. weight and bias of a thread's columns stay in registers. Rows are copied in units of 16 bytes, from and
// to global memory, through shared memory, and a thread has words of 4 bytes of them: pairs of 16-bit elements, or
// single float32 elements. Pairs stay in registers from the first read to the second, except in clusters, which read
// them again.

namespace mica::kernels::norm_cuda {

namespace {

// Properties of the kernel's template arguments.
template <class T, class Shape>
struct Streamed {
  static constexpr bool kAhead = Shape::kTeam == Team::cluster;
  static constexpr bool kPairs = Shape::V == 2;  // of 16-bit elements, whose moments are computed in one pass
  // The number of accumulators per thread, which elements use alternately.
  static constexpr int kTurns = kPairs ? 1 : 2;
  // Whether differences stay in registers from the sum for the mean to the sum of squares.
  static constexpr bool kKeep = kPairs || Shape::P <= 20;
  static_assert(Shape::kUnits && kPairs == (sizeof(T) == 2));
};

// The shifts of a team's rows: their first elements. A warp loads them for 32 rows at a time, since a load for each row
// would wait behind the copies of that row. For norms that are not centered, they are 0.
template <bool kCentered, class T>
class Shifts {
 public:
  __device__ Shifts(const T* x, int rows, int columns, int first, int step)
      : x_(x), rows_(rows), columns_(columns), step_(step), ahead_(first + threadIdx.x % kWarp * step) {
    fetch();
  }

  /// Returns the shift of the next row.
  __device__ float take() {
    if constexpr (!kCentered) {
      return 0;
    }
    const int i = taken_++ % kWarp;
    if (i == 0) {
      shift_ = static_cast<float>(next_);
      fetch();
    }
    return __shfl_sync(kAllLanes, shift_, i);
  }

 private:
  __device__ void fetch() {
    if (kCentered && ahead_ < rows_) {
      next_ = x_[std::int64_t{ahead_} * columns_];
    }
    ahead_ += kWarp * step_;
  }

  const T* x_;
  int rows_;
  int columns_;
  int step_;
  int ahead_;  // the next row whose first element the lane loads
  unsigned taken_ = 0;
  float shift_ = 0;
  T next_ = {};
};

// The number of columns that member i has, if `columns` columns are divided into slabs of `slab` columns.
__device__ inline int dealt(int columns, int slab, int i) { return max(0, min(slab, columns - i * slab)); }

// Combines the moments of up to 16 members, each of which has a slab of up to `slab` columns. Each warp gets the same
// bits. `numbers` has a of all members, followed by b of all members.
template <class N>
__device__ Moments<float> combine_members(const float* numbers, int members, int columns, int slab,
                                          float reciprocal_n) {
  constexpr int kMost = kWarp / 2;
  const int i = static_cast<int>(threadIdx.x) % kMost;
  const int member = min(i, members - 1);  // a valid index, so that no branch is needed
  const float squares = i < members ? numbers[members + member] : 0.0f;
  if constexpr (!N::kCentered) {
    return {0, sum_lanes<kMost>(squares)};
  }
  const float n = static_cast<float>(dealt(columns, slab, i));
  const float mean = sum_lanes<kMost>(n * numbers[member]) * reciprocal_n;
  const float rest = numbers[member] - mean;
  return {mean, sum_lanes<kMost>(fma(n * rest, rest, squares))};
}

// What one thread does in the kernel.
template <class N, class T, class W, class Shape>
class StreamedForward {
 public:
  __device__ StreamedForward(const Forward<T, W>& a, const StreamPlan& p, unsigned char* memory)
      : a_(a),
        p_(p),
        at_(p, a.columns, V, P),
        meeting_(p, at_.rank, memory),
        first_column_(static_cast<int>(at_.begin) + at_.first_pack * V),
        parameters_(a.weight, N::kCentered ? a.bias : nullptr, first_column_, at_.packs - cuts(), cuts()),
        ahead_(a, p, at_, memory),
        rows_(static_cast<int>(a.rows)),
        warp_columns_(dealt(at_.columns, kWarpColumns, static_cast<int>(threadIdx.x) / kWarp)),
        in_thread_(reciprocal(static_cast<float>(at_.packs * V))),
        in_warp_(reciprocal(static_cast<float>(warp_columns_))),
        row_elements_(static_cast<unsigned>(at_.step) * static_cast<unsigned>(a.columns)),
        shifts_(a.x, rows_, static_cast<int>(a.columns), static_cast<int>(at_.first), static_cast<int>(at_.step)) {
    parameters_.place_cut(at_.packs - cuts(), cuts());
    meeting_.open();
  }

  __device__ void run() {
    if constexpr (kPairs) {
      normalize_rows<true>();  // absent pairs need no tests: they equal the shift, and are not written
    } else {
      __all_sync(kAllLanes, at_.packs == P) ? normalize_rows<true>() : normalize_rows<false>();
    }
    meeting_.close();
  }

 private:
  static constexpr int V = Shape::V;
  static constexpr int P = Shape::P;
  static constexpr int C = Shape::C;
  static constexpr int D = Shape::D;
  static constexpr int kChunk = Shape::kChunk;
  static constexpr Team kTeam = Shape::kTeam;
  static constexpr int kWarpColumns = P * kWarp * V;
  using Kind = Streamed<T, Shape>;
  static constexpr bool kPairs = Kind::kPairs;
  static constexpr bool kKeep = Kind::kKeep;
  using Ahead = RowsAhead<T, Forward<T, W>, 1, Shape, int>;
  using Chunk = typename Ahead::Chunk;
  static_assert(D % C == 0 && (!kPairs || C == 1));

  struct Row {
    int number;
    float shift;
    std::int64_t element;  // the index of the warp's first element
  };
  // The index of the thread's first element of a row or, for pairs, of the warp's first element.
  __device__ std::int64_t offset(const Row& row) const {
    if constexpr (kPairs) {
      return row.element;
    }
    return std::int64_t{row.number} * static_cast<int>(a_.columns) + first_column_;
  }

  // Whether the thread's last pair is cut: the row ends after its first element.
  __device__ bool cuts() const {
    return kPairs && at_.packs > 0 && at_.columns % 2 == 1 &&
           at_.first_pack + (at_.packs - 1) * kWarp == at_.columns / 2;
  }

  // Computes all rows. kFull: all threads of the warp have P packs.
  template <bool kFull>
  __device__ void normalize_rows() {
    Row row{static_cast<int>(at_.first), 0,
            at_.first * a_.columns + first_column_ - static_cast<int>(threadIdx.x) % kWarp * V};
    int place = 0;
    if constexpr (Kind::kAhead) {
      row.shift = shifts_.take();
      if (row.number < rows_) {
        begin_row<kFull>(row, place, D - 1);
      }
    }
#pragma unroll 1
    while (row.number < rows_) {
      Row next{row.number + static_cast<int>(at_.step), 0, row.element + row_elements_};
      const int next_place = place + C == D ? 0 : place + C;
      if constexpr (Kind::kAhead) {
        next.shift = shifts_.take();
        if (next.number < rows_) {
          begin_row<kFull>(next, next_place, D - 1 - C);
        }
        end_row<kFull>(row, place, take());
      } else {
        row.shift = shifts_.take();
        begin_row<kFull>(row, place, D - 1);
        end_row<kFull>(row, place, take());
      }
      row = next;
      place = next_place;
    }
  }

  // The number of packs that the thread has.
  template <bool kFull>
  __device__ int packs() const {
    return kFull ? P : compare_again<Shape>(at_.packs);
  }

  // Reads a row for the first time, and leaves the moments of the warp's elements for the other warps of the team. Up
  // to `pending` chunks that follow the row's first one may still be in flight.
  template <bool kFull>
  __device__ void begin_row(const Row& row, int place, int pending) {
    Moments<float> warp;
    if constexpr (kPairs) {
      ahead_.template wait<false>(place, 0, offset(row), pending);
      const float shift = read_pairs(row, place);
      warp = moments_of<kFull>(row, place, shift, pending);
      warp.a += shift - row.shift;
    } else {
      warp = moments_of<kFull>(row, place, row.shift, pending);
    }
    meeting_.leave(pair_of(warp), [&](const float* numbers, int warps) {
      return pair_of(
          combine_members<N>(numbers, warps, at_.columns, kWarpColumns, reciprocal(static_cast<float>(at_.columns))));
    });
  }

  // Reads a row's pairs into registers. Returns the shift of the warp's part of the row: the mean of the part's first
  // 32 elements, so that the shift is close to the part whatever the value of a single element. Absent elements are set
  // to the shift.
  __device__ float read_pairs(const Row& row, int place) {
    T shift = static_cast<T>(0.0f);
    if constexpr (N::kCentered) {
      const int lane = static_cast<int>(threadIdx.x) % kWarp;
      const int i = lane < warp_columns_ ? lane : 0;  // if the warp has fewer, its first one again
      const float first = static_cast<float>(ahead_.element(place, offset(row), i));
      shift = static_cast<T>(sum_lanes<kWarp>(first) * (1.0f / kWarp));
    }
    ahead_.fill(place, 0, offset(row), shift);
    chunk_ = ahead_.chunk(place, offset(row));
    if (N::kCentered && warp_columns_ < kWarpColumns) {
#pragma unroll
      for (int i = 0; i < P; ++i) {
#pragma unroll
        for (T& value : chunk_.of[0][i].at) {
          value = i < at_.packs ? value : shift;
        }
      }
    }
    return static_cast<float>(shift);
  }

  // The differences of pack i of a chunk from `shift`. For an absent pack they are 0: it consists of zeros, from which
  // nothing is subtracted, or, if packs are pairs, of the shift itself.
  __device__ void look(const Chunk& chunk, int i, bool present, float shift, float (&x)[V]) const {
    Ahead::values(chunk.of[0], i % kChunk, x);
    if constexpr (N::kCentered) {
      const float from = kPairs || present ? shift : 0.0f;
#pragma unroll
      for (float& value : x) {
        value -= from;
      }
    }
  }

  // Computes the moments of the warp's elements of a row, relative to `shift`.
  template <bool kFull>
  __device__ Moments<float> moments_of(const Row& row, int place, float shift, int pending) {
    constexpr int kTurns = Kind::kTurns;
    const int packs = this->packs<kFull>();
    float x[kKeep ? P : 1][V];
    float sums[kTurns] = {};
    float squares[kTurns] = {};
    if constexpr (!kPairs) {
      ahead_.template wait_for_row<!kFull>(place, offset(row), pending - (C - 1));
    }
#pragma unroll(kKeep ? C : 1)
    for (int c = 0; c < C; ++c) {
      if constexpr (!kPairs) {
        chunk_ = ahead_.chunk(place + c, offset(row));
      }
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        const int k = kKeep ? c * kChunk + i : 0;
        look(chunk_, i, c * kChunk + i < packs, shift, x[k]);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const int turn = (i * V + j) % kTurns;
          if constexpr (N::kCentered) {
            sums[turn] += x[k][j];
          }
          if constexpr (!N::kCentered || kPairs) {
            squares[turn] = fma(x[k][j], x[k][j], squares[turn]);
          }
        }
      }
    }
    [[maybe_unused]] const float sum = kTurns == 2 ? sums[0] + sums[kTurns - 1] : sums[0];
    if constexpr (!N::kCentered) {
      return {0, sum_lanes<kWarp>(total(squares))};
    } else if constexpr (kPairs) {
      const float both = sum_pair(sum, total(squares));
      const float warp = __shfl_sync(kAllLanes, both, 0);
      const float mean = warp * in_warp_;  // from here on, moments have the form of two passes
      const float rest = fma(-warp, mean, __shfl_sync(kAllLanes, both, kWarp / 2));
      return {mean, rest < 0 ? 0.0f : rest};
    } else {
      const float count = static_cast<float>(packs * V);
      const float mean = sum * (kFull ? 1.0f / static_cast<float>(P * V) : in_thread_);
#pragma unroll(kKeep ? C : 1)
      for (int c = 0; c < C; ++c) {
        if constexpr (!kKeep) {
          chunk_ = ahead_.chunk(place + c, offset(row));
        }
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
          const int k = kKeep ? c * kChunk + i : 0;
          const bool present = c * kChunk + i < packs;
          if constexpr (!kKeep) {
            look(chunk_, i, present, shift, x[k]);
          }
          const float from = present ? mean : 0.0f;
#pragma unroll
          for (int j = 0; j < V; ++j) {
            const int turn = (i * V + j) % kTurns;
            const float difference = x[k][j] - from;
            squares[turn] = fma(difference, difference, squares[turn]);
          }
        }
      }
      return combine_lanes<kWarp>(Moments<float>{mean, total(squares)}, count, in_warp_);
    }
  }

  template <int kTurns>
  __device__ static float total(const float (&sums)[kTurns]) {
    return kTurns == 2 ? sums[0] + sums[kTurns - 1] : sums[0];
  }

  // Returns a in the lower half of the warp, and b in the upper half. Norms that are not centered have only b.
  __device__ static float pair_of(const Moments<float>& m) {
    return N::kCentered && threadIdx.x % kWarp < kWarp / 2 ? m.a : m.b;
  }

  // Waits for the moments of all members of the team, and combines them into those of the row.
  __device__ Moments<float> take() {
    const int columns = kTeam == Team::cluster ? static_cast<int>(a_.columns) : at_.columns;
    const int slab = kTeam == Team::cluster ? p_.slab : kWarpColumns;
    return combine_members<N>(meeting_.take(), meeting_.members(), columns, slab, a_.in_row);
  }

  // The numbers by which normalized() computes y from x.
  struct Normalizer {
    float scale;
    float shift;
    float offset;
    float rstd;
  };

  // Computes the Normalizer from the row's moments. Also writes the row's statistics.
  __device__ Normalizer normalizer_of(const Row& row, Moments<float> m) {
    float scale = 1;
    float shift = row.shift;
    if (N::kCentered && __any_sync(kAllLanes, !isfinite(m.b))) {  // rare, and the same in all threads of the row
      scale = kShrink<float>;
      shift *= scale;
      m = shrunk_moments<kWarp>(a_.x + row.number * a_.columns, a_.columns, shift, a_.in_row);
    }
    // fma and __fmul_rn determine which products are rounded, so that the compiler does not choose.
    const float eps = a_.eps * scale;
    const float variance =
        N::kCentered && !kPairs ? fma(eps, scale, __fmul_rn(m.b, a_.in_row)) : fma(m.b, a_.in_row, eps * scale);
    const float rstd = rsqrt(variance);
    if (threadIdx.x == 0 && at_.rank == 0) {
      write_statistics<N>(a_, row.number, shift + m.a, mean_rounding(shift, m.a), rstd, scale);
    }
    return {scale, shift, -m.a * rstd, rstd};
  }

  // Reads a row for the second time: computes y from the row's moments, and writes it. Then starts copying later chunks
  // to the places of the row's chunks.
  template <bool kFull>
  __device__ void end_row(const Row& row, int place, const Moments<float>& moments) {
    const Normalizer normalizer = normalizer_of(row, moments);
    const int packs = this->packs<kFull>();
#pragma unroll
    for (int c = 0; c < C; ++c) {
      if constexpr (!kPairs || Kind::kAhead) {
        chunk_ = ahead_.chunk(place + c, offset(row));
      }
      [[maybe_unused]] Pack<T, V> units[kChunk];
#pragma unroll
      for (int i = c * kChunk; i < (c + 1) * kChunk; ++i) {
        const Pack<T, V> y = normalized(i, place, normalizer);
        if constexpr (kFull) {
          units[i - c * kChunk] = y;
        } else if (i < packs) {  // warps with fewer packs, which are rare, write single elements
          store(a_.y + offset(row) + i * (kWarp * V), y);
        }
      }
      if constexpr (kFull) {
        ahead_.template write_units<!kPairs>(a_.y, place + c, c, offset(row), true, units);
      } else {
        __syncwarp();  // all lanes have read the chunk that the next copy overwrites
      }
      ahead_.fetch(place + c, c);
    }
  }

  // Returns y of the thread's pack i.
  __device__ Pack<T, V> normalized(int i, int place, const Normalizer& n) const {
    float values[V];
    float w[V];
    float b[V];
    Ahead::values(chunk_.of[0], i % kChunk, values);
    parameters_.at(i, place, w, b);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      values[j] = N::kCentered ? fma(fma(fma(values[j], n.scale, -n.shift), n.rstd, n.offset), w[j], b[j])
                               : values[j] * n.rstd * w[j];
    }
    return pack_of<T>(values);
  }

  const Forward<T, W>& a_;
  const StreamPlan& p_;
  const typename Shape::Place at_;
  Meeting<kTeam> meeting_;
  const int first_column_;                         // of the thread
  KeptParameters<W, V, P, kWarp * V> parameters_;  // their loads are issued before the copies of rows
  Ahead ahead_;
  const int rows_;
  const int warp_columns_;
  const float in_thread_;        // 1 / the thread's number of columns
  const float in_warp_;          // 1 / the warp's number of columns
  const unsigned row_elements_;  // elements from a row to the team's next one
  Shifts<N::kCentered, T> shifts_;
  Chunk chunk_;  // the chunk that was read last
};

template <class N, class T, class W, class Shape>
__global__ void __launch_bounds__(kForwardBlock, 1)
    norm_forward_stream_kernel(const Forward<T, W> a, const StreamPlan p) {
  extern __shared__ __align__(128) unsigned char memory[];
  StreamedForward<N, T, W, Shape>(a, p, memory).run();
}

// On the host.

// Launches the kernel for Shape if the plan has chosen it. Returns whether it was launched.
template <class N, class T, class W, class Shape>
bool launch_chosen(const Forward<T, W>& a, const NormForwardPlan& plan) {
  StreamPlan p{
      .packs = plan.packs, .threads = plan.threads, .groups = plan.teams, .cluster = plan.blocks, .slab = plan.slab};
  if (plan.pack != Shape::V || plan.packs != Shape::P || p.team() != Shape::kTeam) {
    return false;
  }
  p.stream_bytes = RowsAhead<T, Forward<T, W>, 1, Shape, int>::bytes(p.block());
  const std::int64_t most = p.cluster > 1 ? stream_teams(p, a.rows) : cuda::multiprocessor_count();
  launch_teams(norm_forward_stream_kernel<N, T, W, Shape>, "norm_forward_stream_kernel", p,
               static_cast<unsigned>(std::min(most, a.rows)), a);  // with few rows, no more teams than rows
  return true;
}

template <int V, int P, Team kTeam, int C, int D>
using UnitShape = StreamShape<V, P, kTeam, kWarp, C, D, Copies::units>;

}  // namespace

void forward_stream(const NormForward& args, const NormForwardPlan& plan) {
  on_norm_with_pairs<4>(args, [&]<class N, class T, class W>(const Forward<T, W>& a) {
    const auto one_of = [&]<class... Shape>() { return (launch_chosen<N, T, W, Shape>(a, plan) || ...); };
    bool done;
    if constexpr (sizeof(T) == 2) {
      done = one_of.template operator()<UnitShape<2, 12, Team::block, 1, 4>, UnitShape<2, 16, Team::block, 1, 4>,
                                        UnitShape<2, 12, Team::cluster, 1, 4>, UnitShape<2, 16, Team::cluster, 1, 4>>();
    } else {
      done = one_of.template operator()<UnitShape<1, 20, Team::cluster, 2, 10>, UnitShape<1, 24, Team::cluster, 3, 12>,
                                        UnitShape<1, 32, Team::cluster, 4, 12>>();
    }
    check(done, "norm: there is no streamed forward with {} packs of {} a thread", plan.packs, plan.pack);
  });
}

}  // namespace mica::kernels::norm_cuda
