#pragma once

// What a thread has of rows that stream, in a norm's backward: the rows to come, their statistics and the weights.

#include <type_traits>

#include <mica/ops/detail/stream_cuda.cuh>
#include <mica/ops/norm/detail/norm_backward_cuda.cuh>

namespace mica::kernels::norm_cuda {

/// V columns in a pack; 1: rows that begin anywhere. A thread has P packs of a row, which `kLanes` lanes of a warp
/// share, or more threads; it comes in C chunks, of which the shared memory holds D. kUnits: the lanes of a warp copy
/// the units of 16 bytes in which their elements lie, for each other; else each copies its own packs.
template <int V_, int P_, Team kTeam_, int kLanes_, int C_, int D_, bool kUnits_ = false>
struct StreamShape {
  static constexpr int V = V_;
  static constexpr int P = P_;
  static constexpr Team kTeam = kTeam_;
  static constexpr int kLanes = kLanes_;
  static constexpr int C = C_;
  static constexpr int D = D_;
  static constexpr bool kUnits = kUnits_;
  static constexpr int kChunk = P / C;  // packs
  static_assert(C * kChunk == P && (!kUnits || (V == 1 && kLanes == kWarp)));
  using Place = StreamPlace<kTeam, kLanes>;
};

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
          unpack(load_or<V>(weight, at.begin + (at.first_pack + i * Shape::kLanes) * V, 1), w);
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
          pack = load_or<V>(weight, at.begin + column, 1);
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
      unpack(load<V>(slab_ + i * (Shape::kLanes * V)), w);
    }
  }

 private:
  const W* slab_;
  float values_[kInRegisters ? Shape::P * V : 1];
};

/// What a thread has of rows to come: chunk after chunk of x, dy and, if it is added, dsum.
template <class Policy, class T, class W, class Shape>
class RowsAhead {
 public:
  static constexpr int V = Shape::V;
  static constexpr bool kUnits = Shape::kUnits;
  static_assert(!kUnits || !Policy::kAdds);

  __device__ RowsAhead(const BackwardRows<T, W>& a, const StreamPlan& p, const typename Shape::Place& at,
                       unsigned char* memory)
      : a_(a),
        packs_(at.packs),
        lane_offset_(kUnits ? lane() : 0),
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
      const int row_packs = compare_again<Shape>(packs_);
      const int packs = Shape::kLanes == kWarp || present ? row_packs - c * Shape::kChunk : 0;
      if constexpr (kUnits) {
        const std::int64_t matrix_left = a_.rows * a_.columns - from;
        stream_.x.fetch_units(place, a_.x + from, left_ - c * kChunkColumns, matrix_left);
        stream_.dy.fetch_units(place, a_.dy + from, left_ - c * kChunkColumns, matrix_left);
      } else if constexpr (Policy::kAdds) {
        stream_.fetch(place, packs, a_.x + from, a_.dy + from, a_.dsum + from);
      } else {
        stream_.fetch(place, packs, a_.x + from, a_.dy + from);
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

  /// Where the thread's packs of a chunk are, of the row that is at `offset`.
  struct Chunk {
    const T* x;
    const T* dy;
  };
  __device__ Chunk chunk(int place, std::int64_t offset) const {
    if constexpr (kUnits) {
      return {&stream_.x.at(place, UnitStream::phase(a_.x + offset - lane_offset_), 0),
              &stream_.dy.at(place, UnitStream::phase(a_.dy + offset - lane_offset_), 0)};
    } else {
      return {stream_.at(place, 0, 0).at, stream_.at(place, 1, 0).at};
    }
  }

  /// Elements of pack i of x's or dy's part of a chunk.
  __device__ static void values(const T* packs, int i, float (&result)[V]) {
    unpack(load<V>(packs + i * (kWarp * V)), result);
  }

  /// And of dsum's.
  __device__ void dsum_values(int place, int i, float (&result)[V]) const {
    static_assert(Policy::kAdds);
    unpack(stream_.at(place, 2, i), result);
  }

  /// Writes chunk c of dx's row that is at `offset`, in units, through shared memory, where x's was.
  __device__ void write_units(int place, int c, std::int64_t offset, const T (&dx)[Shape::kChunk]) {
    T* const to = a_.dx + offset - lane_offset_ + c * kChunkColumns;
    const int phase = UnitStream::phase(to);
    __syncwarp();  // all have read
#pragma unroll
    for (int i = 0; i < Shape::kChunk; ++i) {
      stream_.x.at(place, phase, i) = dx[i];
    }
    __syncwarp();
    stream_.x.write(place, to, max(left_ - c * kChunkColumns, 0));
    __syncwarp();  // nobody reads what is copied over
  }

  __device__ static int next(int place) { return place + 1 == Shape::D ? 0 : place + 1; }

 private:
  static constexpr int kChunkColumns = Shape::kChunk * Shape::kLanes * V;
  using PackStream = Stream<T, V, Policy::kMatrices, Shape::kChunk, Shape::D, Shape::kLanes>;
  using UnitStream = WarpStream<T, Shape::kChunk, Shape::D>;
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
