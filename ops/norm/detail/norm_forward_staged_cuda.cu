#include <mica/ops/detail/stream_cuda.cuh>
#include <mica/ops/norm/detail/norm_forward_cuda.cuh>

// Forward for rows that packs of 16 bytes do not fit. They come and go in units of 16 bytes all the same, through
// shared memory; in between, a thread has words, of a pair of 16-bit elements each, of the same columns of row after
// row:
//
//   x ──units, rows ahead──▶ shared memory ──words──▶ registers ──▶ moments of a warp ──meeting──▶ the row's moments
//                                                         │                                           │
//   y ◀──units── shared memory ◀──words── · rstd, weight, bias ◀───────────────────────────────────────┘
//
// A warp has a row, or a block, or the blocks of a cluster. A cluster, whose blocks take long to meet,
// begins a row before it ends the one before.

namespace mica::kernels::norm_cuda {

namespace {

constexpr int kMostMembers = 16;  // that meet: warps of a block, or blocks of a cluster

// How many of so many columns the lane's member has, where each has `width`, and the last ones fewer.
__device__ float columns_of_member(int columns, int width) {
  const int i = static_cast<int>(threadIdx.x) % kMostMembers;
  return static_cast<float>(max(0, min(width, columns - i * width)));
}

// The moments of members together, from theirs: all of them relative to the row's shift. n: columns of the lane's
// member.
template <class N>
__device__ Moments<float> combine_members(const float* numbers, int members, float n, float reciprocal_columns) {
  const int i = static_cast<int>(threadIdx.x) % kMostMembers;
  const int member = min(i, members - 1);
  const float squares = i < members ? numbers[members + member] : 0.0f;
  if constexpr (!N::kCentered) {
    return {0, sum_lanes<kMostMembers>(squares)};
  }
  const float mean = sum_lanes<kMostMembers>(n * numbers[member]) * reciprocal_columns;
  const float rest = numbers[member] - mean;
  return {mean, sum_lanes<kMostMembers>(fma(n * rest, rest, squares))};
}

// weight and bias of a thread's packs, as they were read.
template <class N, class W, class Shape>
class StagedParameters {
 public:
  static constexpr int V = Shape::V;

  __device__ StagedParameters(const W* weight, const W* bias, const typename Shape::Place& at) {
    load_from(weight, 1, at, weights_);
    if constexpr (N::kCentered) {
      load_from(bias, 0, at, biases_);
    }
  }

  /// Those of pack number i, for a row at such a place.
  __device__ void at(int i, int place, float (&w)[V], float (&b)[V]) const {
    unpack_anew(weights_[i], place, w);
    if constexpr (N::kCentered) {
      unpack_anew(biases_[i], place, b);
    }
  }

 private:
  // Seemingly in another way for each row: the compiler would unpack 16-bit elements once, into twice as many
  // registers.
  __device__ static void unpack_anew(Pack<W, V> pack, int place, float (&values)[V]) {
    if constexpr (sizeof(W) == 2) {
      asm("" : "+r"(reinterpret_cast<unsigned&>(pack)) : "r"(place));
    }
    unpack(pack, values);
  }

  __device__ static void load_from(const W* row, float absent, const typename Shape::Place& at,
                                   Pack<W, V> (&packs)[Shape::P]) {
#pragma unroll
    for (int i = 0; i < Shape::P; ++i) {
      const int column = (at.first_pack + i * kWarp) * V;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const bool inside = row != nullptr && column + j < at.columns;
        packs[i].at[j] = inside ? row[at.begin + column + j] : static_cast<W>(absent);
      }
    }
  }

  Pack<W, V> weights_[Shape::P];
  Pack<W, V> biases_[N::kCentered ? Shape::P : 1];
};

// A warp's rows to come; where it meets others, each with the word that has the row's first element.
template <class T, class Shape>
using StagedUnits = WarpStream<T, Shape::P * Shape::V, Shape::D, kWarp, Shape::kTeam == Team::warp ? 0 : 8>;

// A thread's part in the kernel.
template <class N, class T, class W, class Shape>
class StagedForward {
 public:
  __device__ StagedForward(const Forward<T, W>& a, const StreamPlan& p, unsigned char* memory)
      : a_(a),
        at_(p, a.columns, V, P),
        meeting_(p, at_.rank, memory),
        units_(p, memory),
        left_(at_.columns - (at_.first_pack - lane()) * V),
        in_warp_(reciprocal(static_cast<float>(warp_columns()))),
        of_warps_(columns_of_member(at_.columns, kWarpColumns)),
        of_blocks_(columns_of_member(static_cast<int>(a.columns), p.slab)),
        parameters_(start_copies(a.weight), a.bias, at_) {
    meeting_.open();
  }

  __device__ void run() {
    int place = 0;
    Row row = first_row();
    if (kAhead && row.number < rows()) {
      begin_row(row, 0, D - 1);
    }
#pragma unroll 1
    while (row.number < rows()) {
      if constexpr (kAhead) {
        if (row.number + step() < rows()) {
          begin_row(after(row), next(place), D - 2);
        }
        load(row, place);
        end_row(row, place, take());
      } else {
        const Moments<float> mine = begin_row(row, place, D - 1);
        end_row(row, place, kMeets ? take() : mine);
      }
      fetch(row.number + D * step(), row.element + D * step() * a_.columns, place);
      place = next(place);
      row = after(row);
    }
    meeting_.close();
  }

 private:
  static constexpr int V = Shape::V;
  static constexpr int P = Shape::P;
  static constexpr int D = Shape::D;
  static constexpr Team kTeam = Shape::kTeam;
  static constexpr bool kMeets = kTeam != Team::warp;
  static constexpr bool kAhead = kTeam == Team::cluster;
  static constexpr int kWarpColumns = P * kWarp * V;
  using Units = StagedUnits<T, Shape>;
  static_assert(V == Units::kInWord && Shape::kLanes == kWarp);

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  __device__ static int next(int place) { return place + 1 == D ? 0 : place + 1; }
  __device__ int warp_columns() const { return max(0, min(kWarpColumns, left_)); }

  struct Row {
    int number;
    std::int64_t element;  // the first of the warp's
  };
  __device__ Row first_row() const {
    return {static_cast<int>(at_.first), at_.first * a_.columns + at_.begin + (at_.first_pack - lane()) * V};
  }
  __device__ Row after(const Row& row) const { return {row.number + step(), row.element + step() * a_.columns}; }
  __device__ int step() const { return static_cast<int>(at_.step); }
  __device__ int rows() const { return static_cast<int>(a_.rows); }

  // The first rows are on their way before the parameters are read. Returns its argument.
  __device__ const W* start_copies(const W* weight) {
    Row row = first_row();
#pragma unroll 1
    for (int i = 0; i < D; ++i) {
      fetch(row.number, row.element, i);
      row = after(row);
    }
    return weight;
  }

  // Starts copying a row, if there is one.
  __device__ void fetch(int number, std::int64_t element, int place) {
    if (number < rows()) {
      if (kMeets && N::kCentered && lane() == 0) {
        cuda::copy_async<4>(units_.spare(place), a_.x + number * a_.columns - first_in_word(number));
      }
      units_.fetch_units(place, a_.x + element, left_, a_.x + a_.rows * a_.columns);
    }
    cuda::commit_copies();  // also of nothing: they are counted
  }

  // Where in its word a row has its first element.
  __device__ int first_in_word(int number) const { return Units::phase(a_.x + number * a_.columns) % V; }

  // The shift of a row's moments: if warps meet, its first element, which each has copied for itself.
  __device__ float shift_of(const Row& row, int place) const {
    if constexpr (!N::kCentered) {
      return 0;
    } else if constexpr (kMeets) {
      return static_cast<float>(units_.spare(place)[first_in_word(row.number)]);
    } else {
      return warp_shift_;
    }
  }

  // Near the warp's part of a row, whatever one of its elements is: the mean of the first ones.
  __device__ T near(int place, int phase) const {
    const int i = lane() < left_ ? lane() : 0;  // where there are fewer, the first stands for them
    return static_cast<T>(sum_lanes<kWarp>(static_cast<float>(units_.element(place, phase, i))) * (1.0f / kWarp));
  }

  // Reads a row's words. What is absent is as the shift of the warp's squares, which it returns: zeros, if there is
  // none.
  __device__ float load(const Row& row, int place) {
    const int phase = Units::phase(a_.x + row.element);
    T shift = static_cast<T>(0.0f);
    if constexpr (N::kCentered) {
      shift = near(place, phase);
    }
    if (left_ < kWarpColumns) {
      __syncwarp();  // for those who read it before
      units_.clear(place, phase, left_, shift);
      __syncwarp();
    }
    units_.load_words(place, phase, words_);
    if (N::kCentered && left_ < kWarpColumns) {
#pragma unroll
      for (int i = 0; i < P; ++i) {
#pragma unroll
        for (T& value : words_[i].at) {
          value = i < at_.packs ? value : shift;
        }
      }
    }
    return static_cast<float>(shift);
  }

  // Waits for a row, of which `pending` younger ones may still be under way, and leaves the moments of the warp's part
  // for the team. Returns them.
  __device__ Moments<float> begin_row(const Row& row, int place, int pending) {
    cuda::wait_copies(pending);
    __syncwarp();  // for what other lanes have copied
    const float shift = load(row, place);
    if constexpr (N::kCentered && !kMeets) {
      warp_shift_ = shift;
    }
    float sum = 0;
    float squares = 0;
#pragma unroll
    for (int i = 0; i < P; ++i) {
      float x[V];
      unpack(words_[i], x);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const float difference = N::kCentered ? x[j] - shift : x[j];
        sum += N::kCentered ? difference : 0.0f;
        squares = fma(difference, difference, squares);
      }
    }
    const Moments<float> mine = of_warp(kMeets ? shift - shift_of(row, place) : 0.0f, sum, squares);
    if constexpr (kMeets) {
      meeting_.leave(pair_of(mine), [&](const float* numbers, int warps) {
        return pair_of(combine_members<N>(numbers, warps, of_warps_, reciprocal(static_cast<float>(at_.columns))));
      });
    }
    return mine;
  }

  // From the sums of a thread's differences from the warp's shift, which is so far from the row's, and of their
  // squares.
  __device__ Moments<float> of_warp(float from_row, float sum, float squares) const {
    if constexpr (!N::kCentered) {
      return {0, sum_lanes<kWarp>(squares)};
    }
    const float sums = sum_pair(sum, squares);
    const float total = __shfl_sync(kAllLanes, sums, 0);
    const float mean = total * in_warp_;
    const float rest = fma(-total, mean, __shfl_sync(kAllLanes, sums, kWarp / 2));
    return {from_row + mean, rest < 0 ? 0.0f : rest};
  }

  // The mean in the lower half of a warp, the squares in the upper.
  __device__ static float pair_of(const Moments<float>& m) {
    return N::kCentered && threadIdx.x % kWarp < kWarp / 2 ? m.a : m.b;
  }

  __device__ Moments<float> take() {
    return combine_members<N>(meeting_.take(), meeting_.members(), kTeam == Team::cluster ? of_blocks_ : of_warps_,
                              a_.in_row);
  }

  // y over x, from the row's moments.
  __device__ void end_row(const Row& row, int place, Moments<float> m) {
    float scale = 1;
    float shift = shift_of(row, place);
    float eps = a_.eps;
    if (N::kCentered && !isfinite(m.b)) {  // in all threads of the row alike, and hardly ever
      const T* const x_row = a_.x + row.number * a_.columns;
      scale = kShrink<float>;
      shift *= scale;
      m = shrunk_moments<kWarp>(x_row, a_.columns, shift, a_.in_row);
      eps *= scale * scale;
    }
    const float rstd = rsqrt(m.b * a_.in_row + eps);
    if (threadIdx.x == 0 && at_.rank == 0) {
      write_statistics<N>(a_, row.number, shift + m.a, mean_rounding(shift, m.a), rstd, scale);
    }
    normalize(place, shift, -m.a * rstd, rstd, scale);
    T* const to = a_.y + row.element;
    __syncwarp();  // all have read
    units_.store_words(place, Units::phase(to), words_);
    __syncwarp();
    units_.write(place, to, warp_columns());
    __syncwarp();  // nobody reads what is copied over
  }

  __device__ void normalize(int place, float shift, float offset, float rstd, float scale) {
#pragma unroll
    for (int i = 0; i < P; ++i) {
      float x[V];
      float w[V];
      float b[V];
      unpack(words_[i], x);
      parameters_.at(i, place, w, b);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        x[j] = N::kCentered ? fma(fma(fma(x[j], scale, -shift), rstd, offset), w[j], b[j]) : x[j] * rstd * w[j];
      }
      words_[i] = pack_of<T>(x);
    }
  }

  const Forward<T, W>& a_;
  const typename Shape::Place at_;
  Meeting<kTeam> meeting_;
  const Units units_;
  const int left_;        // columns of the slab from the warp's first on
  const float in_warp_;   // one over the warp's columns
  const float of_warps_;  // columns of the warp, or block, that has the lane's number
  const float of_blocks_;
  const StagedParameters<N, W, Shape> parameters_;
  Pack<T, V> words_[P];
  float warp_shift_ = 0;  // of the row begun last
};

template <class N, class T, class W, class Shape>
__global__ void __launch_bounds__(kForwardBlock, 1)
    norm_forward_staged_kernel(const Forward<T, W> a, const StreamPlan p) {
  extern __shared__ __align__(128) unsigned char memory[];
  StagedForward<N, T, W, Shape>(a, p, memory).run();
}

// On the host.

template <class N, class Shape, class T, class W>
void launch(const Forward<T, W>& a, const NormForwardPlan& plan) {
  const int warps = plan.threads * plan.teams / kWarp;
  const StreamPlan p{.packs = plan.packs,
                     .threads = plan.threads,
                     .groups = plan.teams,
                     .cluster = plan.blocks,
                     .slab = plan.slab,
                     .stream_bytes = Shape::D * warps * StagedUnits<T, Shape>::kPlace * static_cast<int>(sizeof(T))};
  const std::int64_t most = plan.blocks > 1 ? stream_teams(p, a.rows) : cuda::multiprocessor_count();
  launch_teams(norm_forward_staged_kernel<N, T, W, Shape>, "norm_forward_staged_kernel", p,
               static_cast<unsigned>(std::min(most, a.rows)), a);  // few rows: one a block
}

}  // namespace

void forward_staged(const NormForward& args, const NormForwardPlan& plan) {
  const Team team = plan.team == RowTeam::cluster ? Team::cluster
                    : plan.team == RowTeam::warp  ? Team::warp
                                                  : Team::block;
  on_norm<2>(args, [&]<class N>(const auto& a) {
    const auto run = [&]<int P, Team kTeam>() {
      const bool wanted = plan.packs == P && team == kTeam;
      return wanted && (launch<N, StreamShape<2, P, kTeam, kWarp, 1, 4, true>>(a, plan), true);
    };
    const bool done = run.template operator()<12, Team::warp>() || run.template operator()<16, Team::warp>() ||
                      run.template operator()<12, Team::block>() || run.template operator()<16, Team::block>() ||
                      run.template operator()<12, Team::cluster>() || run.template operator()<16, Team::cluster>();
    check(done, "norm: there is no staged forward with {} words a thread", plan.packs);
  });
}

}  // namespace mica::kernels::norm_cuda
