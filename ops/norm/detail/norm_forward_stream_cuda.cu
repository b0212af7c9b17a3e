#include <type_traits>

#include <mica/ops/detail/stream_cuda.cuh>
#include <mica/ops/norm/detail/norm_forward_cuda.cuh>

// Forward for rows that no block holds in registers. A cluster of blocks stays with row after row, each block with the
// same columns of all of them:
//
//   x ──copies, D chunks ahead──▶ shared memory ──first look──▶ moments ──▶ warps, blocks of the cluster meet
//                                       │                                              │
//                                       └──────────second look · rstd, weight, bias ◀──┘──▶ y
//
// Between a row's two looks lies the first look at the next one, so that nobody waits for the blocks to meet. weight
// and bias of a thread's columns stay in registers.

namespace mica::kernels::norm_cuda {

namespace {

// The shifts of a team's rows, which a warp finds 32 at a time: loads in each row would wait behind its copies. Zeros,
// of norms that are not centered.
template <bool kCentered, class T, int V>
class Shifts {
 public:
  __device__ Shifts(const T* x, int rows, std::int64_t columns, int first, int step)
      : x_(x), rows_(rows), columns_(columns), step_(step), ahead_(first + threadIdx.x % kWarp * step) {
    fetch();
  }

  /// That of the next row.
  __device__ float take() {
    if constexpr (!kCentered) {
      return 0;
    }
    const int i = taken_++ % kWarp;
    if (i == 0) {
      shift_ = shift_of(next_);
      fetch();
    }
    return __shfl_sync(kAllLanes, shift_, i);
  }

 private:
  __device__ void fetch() {
    if (kCentered && ahead_ < rows_) {
      next_ = load<kFirst<T, V>>(x_ + ahead_ * columns_);
    }
    ahead_ += kWarp * step_;
  }

  const T* x_;
  int rows_;
  std::int64_t columns_;
  int step_;
  int ahead_;  // the lane's next row
  unsigned taken_ = 0;
  float shift_ = 0;
  Pack<T, kFirst<T, V>> next_ = {};
};

// How many of `columns` member number i has, where they are dealt out in slabs of so many.
__device__ inline int dealt(int columns, int slab, int i) { return max(0, min(slab, columns - i * slab)); }

// The moments of up to 16 members together, which have a slab of so many columns each, to the same bits in each warp.
// `numbers` are all a, then all b.
__device__ inline Moments<float> combine_members(const float* numbers, int members, int columns, int slab,
                                                 float reciprocal_n) {
  const int i = threadIdx.x % (kWarp / 2);
  const Moments<float> mine = i < members ? Moments<float>{numbers[i], numbers[members + i]} : Moments<float>{0, 0};
  return combine_lanes<kWarp / 2>(mine, static_cast<float>(dealt(columns, slab, i)), reciprocal_n);
}

// Chunks a row, by packs a thread: one of a block of most threads has 16 KiB, or a little more.
template <class T, int V>
constexpr int chunks_of(int packs) {
  return packs * V * static_cast<int>(sizeof(T)) * kForwardBlock / (16 * 1024);
}

// Packs of single elements a thread that leave room for their differences in registers.
constexpr int kFewPacks = 20;

// A thread's part in the kernel: P packs of a row, in C chunks, of which the shared memory holds D.
template <class N, class T, class W, int V, int P, int D>
class StreamedForward {
 public:
  __device__ StreamedForward(const Forward<T, W>& a, const StreamPlan& p, unsigned char* memory)
      : a_(a),
        p_(p),
        at_(p, a.columns, V, P),
        meeting_(p, at_.rank, memory),
        stream_(p, memory),
        rows_(static_cast<int>(a.rows)),
        columns_(static_cast<int>(a.columns)),
        row_step_(static_cast<int>(at_.step)),
        first_column_(static_cast<int>(at_.begin) + at_.first_pack * V),
        warp_column_(first_column_ - static_cast<int>(threadIdx.x) % kWarp * V),
        warp_left_(static_cast<int>(at_.begin) + at_.columns - warp_column_),
        shifts_(a.x, rows_, a.columns, static_cast<int>(at_.first), row_step_) {}

  __device__ void run() {
#pragma unroll 1
    for (int i = 0; i < D; ++i) {
      fetch(i, static_cast<int>(at_.first) + i / C * row_step_, i % C, at_.packs);
    }
    load_parameters();
    meeting_.open();
    __all_sync(kAllLanes, at_.packs == P) ? normalize_rows<true>() : normalize_rows<false>();
    meeting_.close();
  }

 private:
  static constexpr int C = chunks_of<T, V>(P);
  static constexpr int kChunk = P / C;  // packs
  static constexpr int kWarpColumns = P * kWarp * V;
  static constexpr bool kWhole = V > 1;                   // each lane copies packs of its own
  static constexpr bool kKeep = V > 1 || P <= kFewPacks;  // differences in registers, from the mean to the squares
  static_assert(C * kChunk == P && D % C == 0 && D > 2 * C);
  using Chunks = std::conditional_t<kWhole, Stream<T, V, 1, kChunk, D>, WarpStream<T, kChunk, D>>;

  // What makes y of x.
  struct Normalizer {
    float scale;
    float shift;
    float offset;
    float rstd;
  };

  // All rows, each begun before the one before it is ended. kFull: all threads of the warp have P packs.
  template <bool kFull>
  __device__ void normalize_rows() {
    const int first = static_cast<int>(at_.first);
    int place = 0;
    float shift = shifts_.take();
    if (first < rows_) {
      leave(begin_row<kFull>(first, place, shift, D - 1));
    }
#pragma unroll 1
    for (int row = first; row < rows_; row += row_step_) {
      const float next_shift = shifts_.take();
      const int next_place = place + C == D ? 0 : place + C;
      if (row + row_step_ < rows_) {
        leave(begin_row<kFull>(row + row_step_, next_place, next_shift, D - 1 - C));
      }
      end_row<kFull>(row, place, shift);
      shift = next_shift;
      place = next_place;
    }
  }

  // Packs of the thread. In few registers: the compiler would compare them once with the number of each, and keep what
  // comes out over all rows.
  template <bool kFull>
  __device__ int packs() const {
    int packs = kFull ? P : at_.packs;
    if constexpr (!kFull && !kWhole) {
      asm volatile("" : "+r"(packs));
    }
    return packs;
  }

  // Of the thread's packs. Whether there are any is asked once, so that no load waits for a branch.
  __device__ void load_parameter(const W* row, float absent, Pack<W, V> (&parameter)[P]) const {
    Pack<W, V> filled;
#pragma unroll
    for (W& value : filled.at) {
      value = static_cast<W>(absent);
    }
#pragma unroll
    for (Pack<W, V>& pack : parameter) {
      pack = filled;
    }
    if (row != nullptr) {
#pragma unroll
      for (int i = 0; i < P; ++i) {
        if (i < at_.packs) {
          parameter[i] = load<V>(row + first_column_ + i * (kWarp * V));
        }
      }
    }
  }

  __device__ void load_parameters() {
    load_parameter(a_.weight, 1, weights_);
    load_parameter(N::kCentered ? a_.bias : nullptr, 0, biases_);
    in_thread_ = reciprocal(static_cast<float>(at_.packs * V));
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    in_warp_ = reciprocal(static_cast<float>(dealt(at_.columns, kWarpColumns, warp)));
  }

  // Starts copying a chunk of a row, if there is one; `packs` are the thread's.
  __device__ void fetch(int place, int row, int c, int packs) {
    if (row < rows_) {
      const int chunk = c * (kChunk * kWarp * V);
      if constexpr (kWhole) {
        stream_.fetch(place, packs - c * kChunk, a_.x + (row * a_.columns + first_column_) + chunk);
      } else {
        stream_.fetch(place, a_.x + (row * a_.columns + warp_column_) + chunk, warp_left_ - chunk);
      }
    }
    cuda::commit_copies();  // also of nothing: they are counted
  }

  // Where the warp's part of a row begins in its first unit. All of its chunks begin alike.
  __device__ int phase_of(const T* matrix, int row) const {
    return kWhole ? 0 : WarpStream<T, kChunk, D>::phase(matrix + (row * a_.columns + warp_column_));
  }

  // Pack number i of a chunk.
  __device__ Pack<T, V> pack_at(int place, int phase, int i) const {
    if constexpr (kWhole) {
      return stream_.at(place, 0, i);
    } else {
      return Pack<T, 1>{stream_.at(place, phase, i)};
    }
  }

  // Differences of pack number i of chunk c from `shift`; zeros if it is absent, as it is where it was copied to.
  __device__ void look(int packs, int place, int phase, int c, int i, float shift, float (&x)[V]) const {
    unpack(pack_at(place, phase, i), x);
    if constexpr (N::kCentered) {
      const float from = c * kChunk + i < packs ? shift : 0.0f;
#pragma unroll
      for (float& value : x) {
        value -= from;
      }
    }
  }

  // The first look at a row, of which `pending` chunks younger than its first may still be under way: the moments of
  // the warp's elements.
  template <bool kFull>
  __device__ Moments<float> begin_row(int row, int place, float shift, int pending) {
    const int phase = phase_of(a_.x, row);
    const int packs = this->packs<kFull>();
    float x[kKeep ? P : 1][V];
    float sums[2] = {};  // of elements in turn: one would be added to too often
    float squares[2] = {};
    if constexpr (!kWhole) {
      cuda::wait_copies(pending - C + 1);
      __syncwarp();  // for what other lanes have copied
    }
#pragma unroll(kKeep ? C : 1)
    for (int c = 0; c < C; ++c) {
      if constexpr (kWhole) {
        cuda::wait_copies(pending - c);
      }
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        const int k = kKeep ? c * kChunk + i : 0;
        look(packs, place + c, phase, c, i, shift, x[k]);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const int turn = (i * V + j) % 2;
          if constexpr (N::kCentered) {
            sums[turn] += x[k][j];
          }
          if constexpr (!N::kCentered || kOnePass<T, V>) {
            squares[turn] = fma(x[k][j], x[k][j], squares[turn]);
          }
        }
      }
    }
    [[maybe_unused]] const float sum = sums[0] + sums[1];
    if constexpr (!N::kCentered) {
      return {0, sum_lanes<kWarp>(squares[0] + squares[1])};
    } else if constexpr (kOnePass<T, V>) {
      const Moments<float> warp{sum_lanes<kWarp>(sum), sum_lanes<kWarp>(squares[0] + squares[1])};
      const float mean = warp.a * in_warp_;  // as those of two passes are from here on
      const float rest = fma(-warp.a, mean, warp.b);
      return {mean, rest < 0 ? 0.0f : rest};
    } else {
      const float count = static_cast<float>(packs * V);
      const float mean = sum * (kFull ? 1.0f / static_cast<float>(P * V) : in_thread_);
#pragma unroll(kKeep ? C : 1)
      for (int c = 0; c < C; ++c) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
          const int k = kKeep ? c * kChunk + i : 0;
          if constexpr (!kKeep) {
            look(packs, place + c, phase, c, i, shift, x[k]);
          }
          const float from = c * kChunk + i < packs ? mean : 0.0f;
#pragma unroll
          for (int j = 0; j < V; ++j) {
            const int turn = (i * V + j) % 2;
            const float difference = x[k][j] - from;
            squares[turn] = fma(difference, difference, squares[turn]);
          }
        }
      }
      return combine_lanes<kWarp>(Moments<float>{mean, squares[0] + squares[1]}, count, in_warp_);
    }
  }

  // The lower half of the warp has a, the upper one b.
  __device__ static float pair_of(const Moments<float>& m) { return threadIdx.x % kWarp < kWarp / 2 ? m.a : m.b; }

  __device__ void leave(const Moments<float>& warp) {
    meeting_.leave(pair_of(warp), [&](const float* numbers, int warps) {
      return pair_of(
          combine_members(numbers, warps, at_.columns, kWarpColumns, reciprocal(static_cast<float>(at_.columns))));
    });
  }

  // Waits for the moments of the row. Writes its statistics.
  __device__ Normalizer take(int row, float shift) {
    Moments<float> m = combine_members(meeting_.take(), meeting_.members(), columns_, p_.slab, a_.in_row);
    float scale = 1;
    if (N::kCentered && __any_sync(kAllLanes, !isfinite(m.b))) {  // in all threads of the row alike
      scale = kShrink<float>;
      shift *= scale;
      m = shrunk_moments<kWarp>(a_.x + row * a_.columns, columns_, shift, a_.in_row);
    }
    // Which of the two products is rounded is said here, not left to the compiler.
    const float variance =
        N::kCentered ? fma(a_.eps * scale, scale, __fmul_rn(m.b, a_.in_row)) : fma(m.b, a_.in_row, a_.eps);
    const float rstd = rsqrt(variance);
    if (threadIdx.x == 0 && at_.rank == 0) {
      write_statistics<N>(a_, row, shift + m.a, mean_rounding(shift, m.a), rstd, scale);
    }
    return {scale, shift, -m.a * rstd, rstd};
  }

  // The second look: y, from the moments of the row. Starts copying what comes next to its place.
  template <bool kFull>
  __device__ void end_row(int row, int place, float shift) {
    const Normalizer normalizer = take(row, shift);
    const int x_phase = phase_of(a_.x, row);
    const int y_phase = phase_of(a_.y, row);
    const int packs = this->packs<kFull>();
#pragma unroll
    for (int c = 0; c < C; ++c) {
      if constexpr (kWhole || !kFull) {
        write_packs(packs, row, place + c, x_phase, c, normalizer);
      }
      if constexpr (!kWhole) {
        if constexpr (kFull) {
          write_units(row, place + c, x_phase, y_phase, c, normalizer);
        }
        __syncwarp();  // nobody reads what is copied over
      }
      fetch(place + c, row + D / C * row_step_, c, packs);
    }
  }

  // y of the thread's pack number i.
  __device__ Pack<T, V> normalized(int place, int phase, int i, const Normalizer& n) const {
    float values[V];
    float w[V];
    float b[V];
    unpack(pack_at(place, phase, i % kChunk), values);
    unpack(weights_[i], w);
    unpack(biases_[i], b);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      values[j] = N::kCentered ? fma(fma(fma(values[j], n.scale, -n.shift), n.rstd, n.offset), w[j], b[j])
                               : values[j] * n.rstd * w[j];
    }
    return pack_of<T>(values);
  }

  // Writes y of chunk c from registers.
  __device__ void write_packs(int packs, int row, int place, int x_phase, int c, const Normalizer& normalizer) const {
    T* const y = a_.y + (row * a_.columns + first_column_);
#pragma unroll
    for (int i = c * kChunk; i < (c + 1) * kChunk; ++i) {
      const Pack<T, V> pack = normalized(place, x_phase, i, normalizer);
      if (i < packs) {
        store(y + i * (kWarp * V), pack);
      }
    }
  }

  // Writes y of chunk c through shared memory, in units as x was read.
  __device__ void write_units(int row, int place, int x_phase, int y_phase, int c, const Normalizer& normalizer) {
    T y[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      y[i] = normalized(place, x_phase, c * kChunk + i, normalizer).at[0];
    }
    __syncwarp();  // all have read
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      stream_.at(place, y_phase, i) = y[i];
    }
    __syncwarp();
    stream_.write(place, a_.y + (row * a_.columns + warp_column_) + c * (kChunk * kWarp));
  }

  const Forward<T, W>& a_;
  const StreamPlan& p_;
  StreamPlace<Team::cluster> at_;
  Meeting<Team::cluster> meeting_;
  Chunks stream_;
  int rows_;
  int columns_;
  int row_step_;
  int first_column_;  // the thread's
  int warp_column_;   // its warp's
  int warp_left_;     // columns from there on
  float in_thread_;   // one over the thread's columns
  float in_warp_;     // one over its warp's
  Shifts<N::kCentered, T, V> shifts_;
  Pack<W, V> weights_[P];
  Pack<W, V> biases_[P];
};

template <class N, class T, class W, int V, int P, int D>
__global__ void __launch_bounds__(kForwardBlock, 1)
    norm_forward_stream_kernel(const Forward<T, W> a, const StreamPlan p) {
  extern __shared__ __align__(128) unsigned char memory[];
  StreamedForward<N, T, W, V, P, D>(a, p, memory).run();
}

// On the host.

template <class N, class T, class W, int V, int P, int D>
void launch(const Forward<T, W>& a, const NormForwardPlan& plan) {
  StreamPlan p{.packs = P, .cluster = plan.blocks};
  divide(p, a.columns, V, kForwardBlock);
  p.groups = 1;
  const int chunk = P / chunks_of<T, V>(P) * V * kWarp + (V == 1 ? 16 / static_cast<int>(sizeof(T)) : 0);
  p.stream_bytes = D * p.warps() * chunk * static_cast<int>(sizeof(T));
  launch_stream(norm_forward_stream_kernel<N, T, W, V, P, D>, "norm_forward_stream_kernel", p, a.rows, a);
}

}  // namespace

void forward_stream(const NormForward& args, const NormForwardPlan& plan) {
  on_norm<4>(args, [&]<class N, class T, class W>(const Forward<T, W>& a) {
    const auto run = [&]<int V, int P, int D>() {
      const bool wanted = plan.pack == V && plan.packs == P && plan.depth == D;
      return wanted && (launch<N, T, W, V, P, D>(a, plan), true);
    };
    bool done;
    if constexpr (sizeof(T) == 2) {
      done = run.template operator()<8, 4, 8>();
    } else {
      done = run.template operator()<4, 4, 8>() || run.template operator()<4, 8, 12>() ||
             run.template operator()<1, 20, 10>() || run.template operator()<1, 24, 12>() ||
             run.template operator()<1, 32, 12>();
    }
    check(done, "norm: there is no streamed forward with {} packs of {} a thread", plan.packs, plan.pack);
  });
}

}  // namespace mica::kernels::norm_cuda
