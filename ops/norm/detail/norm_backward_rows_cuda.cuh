#pragma once

// What a thread has of rows that stream, in a norm's backward: the rows to come, their statistics and the weights.

#include <type_traits>

#include <mica/ops/detail/stream_cuda.cuh>
#include <mica/ops/norm/detail/norm_backward_cuda.cuh>

namespace mica::kernels::norm_cuda {

/// packs, as the compiler did not see it before. It would compare it once with the number of each pack, and keep what
/// comes out over all rows: bits that take longer to unpack than to compare again.
template <class Shape>
__device__ int compare_again(int packs) {
  if constexpr (Shape::P > 8) {
    asm volatile("" : "+r"(packs));
  }
  return packs;
}

/// A number or more of each of a team's rows, which its lanes fetch kLanes at a time: loads in each row would wait
/// behind its copies.
template <class T, class W, bool kCentered, int kLanes>
class StatisticsAhead {
 public:
  using Row = Statistics<T, kCentered>;

  __device__ StatisticsAhead(const BackwardRows<T, W>& a, std::int64_t first, std::int64_t step)
      : a_(a), step_(step), ahead_(first + threadIdx.x % kLanes * step) {
    fetch();
  }

  /// Those of the next row.
  __device__ Row take() {
    const int i = taken_++ % kLanes;
    if (i == 0) {
      current_ = next_;
      fetch();
    }
    Row row{.mean = 0, .rstd = __shfl_sync(kAllLanes, current_.rstd, i, kLanes), .mean_rest = 0};
    if constexpr (kCentered) {
      row.mean = __shfl_sync(kAllLanes, current_.mean, i, kLanes);
      if constexpr (has_mean_rest(sizeof(T))) {
        row.mean_rest = __shfl_sync(kAllLanes, current_.mean_rest, i, kLanes);
      }
    }
    return row;
  }

 private:
  __device__ void fetch() {
    if (ahead_ < a_.rows) {
      next_ = a_.template statistics<kCentered>(ahead_);
    } else if (kLanes < kWarp) {
      next_ = {};  // other rows of the warp are there
    }
    ahead_ += kLanes * step_;
  }

  const BackwardRows<T, W>& a_;
  std::int64_t step_;
  std::int64_t ahead_;  // the lane's next row
  unsigned taken_ = 0;
  Row current_{};
  Row next_{};
};

/// The weights of a thread's packs: in registers or in shared memory, where others put some.
template <class W, class Shape, bool kInRegisters>
class Weights {
 public:
  static constexpr int V = Shape::V;

  /// `weight` may be null: 1.
  __device__ Weights(const W* weight, const StreamPlan& p, const typename Shape::Place& at, unsigned char* memory)
      : slab_(reinterpret_cast<W*>(memory + p.kept_begin()) + at.first_pack * V) {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int i = 0; i < Shape::P; ++i) {
        float w[V] = {};
        if (i < at.packs) {
          unpack(load(weight, at, (at.first_pack + i * Shape::kLanes) * V), w);
        }
#pragma unroll
        for (int j = 0; j < V; ++j) {
          values_[i * V + j] = w[j];
        }
      }
    } else {
      W* const slab = reinterpret_cast<W*>(memory + p.kept_begin());
#pragma unroll 1
      for (int column = (threadIdx.y * blockDim.x + threadIdx.x) * V; column < p.threads * (Shape::P * V);
           column += p.block() * V) {
        Pack<W, V> pack = {};
        if (column < at.columns) {
          pack = load(weight, at, column);
        }
        store(slab + column, pack);
      }
    }
  }

  /// Those of pack number i; zeros if there is none.
  __device__ void at(int i, float (&w)[V]) const {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        w[j] = values_[i * V + j];
      }
    } else {
      unpack(rows::load<V>(slab_ + i * (Shape::kLanes * V)), w);
    }
  }

 private:
  /// From a column of the slab on; zeros past its end.
  __device__ static Pack<W, V> load(const W* weight, const typename Shape::Place& at, int column) {
    if constexpr (!Shape::kUnits) {
      return load_or<V>(weight, at.begin + column, 1);
    }
    Pack<W, V> pack = {};
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (column + j < at.columns) {
        pack.at[j] = load_or<1>(weight, at.begin + column + j, 1).at[0];
      }
    }
    return pack;
  }

  const W* slab_;
  float values_[kInRegisters ? Shape::P * V : 1];
};

/// What a thread has of rows to come: chunk after chunk of x, dy and, if it is added, dsum.
template <class Policy, class T, class W, class Shape>
class RowsAhead {
 public:
  static constexpr int V = Shape::V;
  static constexpr bool kUnits = Shape::kUnits;
  static constexpr bool kPairs = kUnits && V == 2;
  static_assert(!kUnits || !Policy::kAdds);

  __device__ RowsAhead(const BackwardRows<T, W>& a, const StreamPlan& p, const typename Shape::Place& at,
                       unsigned char* memory)
      : a_(a),
        packs_(at.packs),
        lane_offset_(kUnits ? lane() * V : 0),
        left_(at.columns - (at.first_pack - lane()) * V),
        step_(at.step),
        row_(at.first),
        from_(at.first * a.columns + at.begin + std::int64_t{at.first_pack} * V - lane_offset_),
        stream_(streams(p, memory)) {
#pragma unroll 1
    for (int i = 0; i < Shape::D; ++i) {
      fetch(i, i % Shape::C);
    }
  }

  /// Starts copying the next chunk, number c of its row.
  __device__ void fetch(int place, int c) {
    const bool present = row_ < a_.rows;
    if (present || Shape::kLanes < kWarp) {  // zeros, if others of the warp are present
      const std::int64_t from = Shape::kLanes == kWarp || present ? from_ + c * kChunkColumns : 0;
      if constexpr (kUnits) {
        const std::int64_t elements = a_.rows * a_.columns;
        const int left = Shape::kLanes == kWarp || present ? left_ - c * kChunkColumns : 0;
        stream_.x.fetch_units(place, a_.x + from, left, a_.x + elements);
        stream_.dy.fetch_units(place, a_.dy + from, left, a_.dy + elements);
      } else {
        const int row_packs = compare_again<Shape>(packs_);
        const int packs = Shape::kLanes == kWarp || present ? row_packs - c * Shape::kChunk : 0;
        if constexpr (Policy::kAdds) {
          stream_.fetch(place, packs, a_.x + from, a_.dy + from, a_.dsum + from);
        } else {
          stream_.fetch(place, packs, a_.x + from, a_.dy + from);
        }
      }
    }
    cuda::commit_copies();  // also of nothing: they are counted
    if (c == Shape::C - 1) {
      row_ += step_;
      from_ += step_ * a_.columns;
    }
  }

  /// Waits for chunk c of the row that is at `offset`, of which `pending` younger ones may still be under way.
  __device__ void wait(int place, int c, std::int64_t offset, int pending) const {
    cuda::wait_copies(pending);
    if constexpr (kUnits) {
      const int left = left_ - c * kChunkColumns;
      __syncwarp();  // for what other lanes have copied
      if (left < kChunkColumns) {
        stream_.x.clear(place, UnitStream::phase(a_.x + offset - lane_offset_), left);
        stream_.dy.clear(place, UnitStream::phase(a_.dy + offset - lane_offset_), left);
        __syncwarp();
      }
    }
  }

  /// What the thread has of a chunk of the row that is at `offset`: where its packs are. Pairs are read at once, since
  /// all begin inside of words or none.
  struct Places {
    const T* x;
    const T* dy;
  };
  struct Pairs {
    Pack<T, V> x[Shape::kChunk];
    Pack<T, V> dy[Shape::kChunk];
  };
  using Chunk = std::conditional_t<kPairs, Pairs, Places>;
  __device__ Chunk chunk(int place, std::int64_t offset) const {
    if constexpr (kUnits) {
      const int x_phase = UnitStream::phase(a_.x + offset - lane_offset_);
      const int dy_phase = UnitStream::phase(a_.dy + offset - lane_offset_);
      if constexpr (kPairs) {
        Pairs pairs;
        stream_.x.load_words(place, x_phase, pairs.x);
        stream_.dy.load_words(place, dy_phase, pairs.dy);
        return pairs;
      } else {
        return {&stream_.x.at(place, x_phase, 0), &stream_.dy.at(place, dy_phase, 0)};
      }
    } else {
      return {stream_.at(place, 0, 0).at, stream_.at(place, 1, 0).at};
    }
  }

  /// Elements of pack i of x's or dy's part of a chunk.
  __device__ static void values(const T* packs, int i, float (&result)[V]) {
    unpack(load<V>(packs + i * (kWarp * V)), result);
  }
  __device__ static void values(const Pack<T, V> (&pairs)[Shape::kChunk], int i, float (&result)[V]) {
    unpack(pairs[i], result);
  }

  /// And of dsum's.
  __device__ void dsum_values(int place, int i, float (&result)[V]) const {
    static_assert(Policy::kAdds);
    unpack(stream_.at(place, 2, i), result);
  }

  /// Writes chunk c of dx's row that is at `offset`, in units, through shared memory, where x's was.
  __device__ void write_units(int place, int c, std::int64_t offset, bool present,
                              const Pack<T, V> (&dx)[Shape::kChunk]) {
    T* const to = a_.dx + offset - lane_offset_ + c * kChunkColumns;
    __syncwarp();  // all have read
    stream_.x.store_words(place, UnitStream::phase(to), dx);
    __syncwarp();
    stream_.x.write(place, to, present ? max(0, min(kChunkColumns, left_ - c * kChunkColumns)) : 0);
    __syncwarp();  // nobody reads what is copied over
  }

  __device__ static int next(int place) { return place + 1 == Shape::D ? 0 : place + 1; }

 private:
  static constexpr int kChunkColumns = Shape::kChunk * Shape::kLanes * V;
  using PackStream = Stream<T, V, Policy::kMatrices, Shape::kChunk, Shape::D, Shape::kLanes>;
  using UnitStream = WarpStream<T, Shape::kChunk * V, Shape::D, Shape::kLanes>;
  struct UnitStreams {
    UnitStream x;
    UnitStream dy;
  };

  __device__ static int lane() { return threadIdx.x % Shape::kLanes; }

  __device__ static auto streams(const StreamPlan& p, unsigned char* memory) {
    if constexpr (kUnits) {
      return UnitStreams{UnitStream(p, memory, 0, 2), UnitStream(p, memory, 1, 2)};
    } else {
      return PackStream(p, memory);
    }
  }

  const BackwardRows<T, W>& a_;
  int packs_;
  int lane_offset_;
  int left_;  // columns of the slab from those of the first lane on
  std::int64_t step_;
  std::int64_t row_;   // the next to be copied
  std::int64_t from_;  // what is copied next: the thread's first pack, or the first lane's
  std::conditional_t<kUnits, UnitStreams, PackStream> stream_;
};

}  // namespace mica::kernels::norm_cuda
