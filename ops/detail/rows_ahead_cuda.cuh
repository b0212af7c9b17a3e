#pragma once

// What a thread has of rows to come that stream through shared memory: of kMatrices matrices of the same shape, chunk
// after chunk.
//
//     memory ──packs, each thread its own──▶ shared memory ──packs──▶ registers
//     memory ──units of 16 bytes, of a warp──▶ shared memory ──words──▶ registers      rows begin anywhere: kUnits
//     memory ◀──units of 16 bytes, of a warp── shared memory ◀──words── registers

#include <type_traits>

#include <mica/ops/detail/stream_cuda.cuh>

namespace mica::kernels::rows {

/// packs, as the compiler did not see it before. It would compare it once with the number of each pack, and keep what
/// comes out over all rows: bits that take longer to unpack than to compare again.
template <class Shape>
__device__ int compare_again(int packs) {
  if constexpr (Shape::P > 8) {
    asm volatile("" : "+r"(packs));
  }
  return packs;
}

/// Matrices has `rows`, which are counted in Index, `columns` and matrix(k), where matrix number k begins.
template <class T, class Matrices, int kMatrices, class Shape, class Index = std::int64_t>
class RowsAhead {
 public:
  static constexpr int V = Shape::V;
  static constexpr bool kUnits = Shape::kUnits;
  static constexpr bool kPairs = kUnits && V == 2;

  __device__ RowsAhead(const Matrices& a, const StreamPlan& p, const typename Shape::Place& at, unsigned char* memory)
      : a_(a),
        packs_(at.packs),
        lane_offset_(kUnits ? lane() * V : 0),
        left_(at.columns - (at.first_pack - lane()) * V),
        step_(static_cast<Index>(at.step)),
        row_(static_cast<Index>(at.first)),
        first_(static_cast<int>(at.begin) + at.first_pack * V),
        from_(at.first * a.columns + at.begin + std::int64_t{at.first_pack} * V - lane_offset_),
        stream_(streams(p, memory)) {
#pragma unroll 1
    for (int i = 0; i < Shape::D; ++i) {
      fetch(i, i % Shape::C);
    }
  }

  /// Bytes of shared memory for a block of so many threads.
  static constexpr int bytes(int threads) {
    const int units = threads / Shape::kLanes * UnitStream::kStreamBytes;
    const int packs = threads * (Shape::D * Shape::kChunk * V * static_cast<int>(sizeof(T)));
    return kMatrices * (kUnits ? units : packs);
  }

  /// Starts copying the next chunk, number c of its row. kFull: the thread is known to have P packs of a row.
  template <bool kFull = false>
  __device__ void fetch(int place, int c) {
    const bool present = row_ < a_.rows;
    if (present || Shape::kLanes < kWarp) {  // zeros, if others of the warp are present
      const std::int64_t from = Shape::kLanes == kWarp || present ? next_element() + c * kChunkColumns : 0;
      if constexpr (kUnits) {
        Index rows = static_cast<Index>(a_.rows);
        if constexpr (kFewRows) {
          asm volatile("" : "+r"(rows));
        }
        const std::int64_t elements = std::int64_t{rows} * columns();
        const int left = Shape::kLanes == kWarp || present ? left_ - c * kChunkColumns : 0;
        stream_.first.fetch_units(place, a_.template matrix<0>() + from, left, a_.template matrix<0>() + elements);
        if constexpr (kMatrices == 2) {
          stream_.second.fetch_units(place, a_.template matrix<1>() + from, left, a_.template matrix<1>() + elements);
        }
      } else {
        const int row_packs = kFull ? Shape::P : compare_again<Shape>(packs_);
        const int packs = Shape::kLanes == kWarp || present ? row_packs - c * Shape::kChunk : 0;
        if constexpr (kMatrices == 1) {
          stream_.fetch(place, packs, a_.template matrix<0>() + from);
        } else if constexpr (kMatrices == 2) {
          stream_.fetch(place, packs, a_.template matrix<0>() + from, a_.template matrix<1>() + from);
        } else {
          stream_.fetch(place, packs, a_.template matrix<0>() + from, a_.template matrix<1>() + from,
                        a_.template matrix<2>() + from);
        }
      }
    }
    cuda::commit_copies();  // also of nothing: they are counted
    if (c == Shape::C - 1) {
      row_ += step_;
      from_ += step_ * a_.columns;
    }
  }

  /// Waits for chunk c of the row that is at `offset`, of which `pending` younger ones may still be under way. kClears:
  /// what follows the row in its last unit becomes zeros, if rows begin anywhere.
  template <bool kClears = true>
  __device__ void wait(int place, int c, std::int64_t offset, int pending) const {
    cuda::wait_copies(pending);
    if constexpr (kUnits) {
      const int left = left_ - c * kChunkColumns;
      __syncwarp();  // for what other lanes have copied
      if constexpr (kClears) {
        clear(place, offset, left, static_cast<T>(0.0f));
      }
    }
  }

  /// The same for all chunks of a row at once, of which `pending` chunks younger than its last may still be under way.
  template <bool kClears = true>
  __device__ void wait_for_row(int place, std::int64_t offset, int pending) const {
    cuda::wait_copies(pending);
    __syncwarp();  // for what other lanes have copied
    const int cut = left_ / kChunkColumns;
    if (kClears && cut < Shape::C) {
      clear(place + cut, offset, left_ - cut * kChunkColumns, static_cast<T>(0.0f));
    }
  }

  /// Puts `value` there instead.
  __device__ void fill(int place, int c, std::int64_t offset, T value) const {
    clear(place, offset, left_ - c * kChunkColumns, value);
  }

  /// What the thread has of a chunk of the row that is at `offset`: where its packs are. Pairs are read at once, since
  /// all begin inside of words or none.
  struct Places {
    const T* of[kMatrices];
  };
  struct Pairs {
    Pack<T, V> of[kMatrices][Shape::kChunk];
  };
  using Chunk = std::conditional_t<kPairs, Pairs, Places>;
  __device__ Chunk chunk(int place, std::int64_t offset) const {
    if constexpr (!kUnits) {
      if constexpr (kMatrices == 1) {
        return {stream_.at(place, 0, 0).at};
      } else {
        return {stream_.at(place, 0, 0).at, stream_.at(place, 1, 0).at};
      }
    } else if constexpr (kPairs) {
      Pairs pairs;
      stream_.first.load_words(place, phase<0>(offset), pairs.of[0]);
      if constexpr (kMatrices == 2) {
        stream_.second.load_words(place, phase<1>(offset), pairs.of[1]);
      }
      return pairs;
    } else if constexpr (kMatrices == 1) {
      return {&stream_.first.at(place, phase<0>(offset), 0)};
    } else {
      return {&stream_.first.at(place, phase<0>(offset), 0), &stream_.second.at(place, phase<1>(offset), 0)};
    }
  }

  /// Elements of pack i of a matrix's part of a chunk.
  __device__ static void values(const T* packs, int i, float (&result)[V]) {
    unpack(load<V>(packs + i * (kWarp * V)), result);
  }
  __device__ static void values(const Pack<T, V> (&pairs)[Shape::kChunk], int i, float (&result)[V]) {
    unpack(pairs[i], result);
  }

  /// And of the third matrix's.
  __device__ void third_values(int place, int i, float (&result)[V]) const { unpack(stream_.at(place, 2, i), result); }

  /// Element number i of the warp's part of a chunk of matrix 0.
  __device__ T element(int place, std::int64_t offset, int i) const {
    return stream_.first.element(place, phase<0>(offset), i);
  }

  /// Writes chunk c of the row that is at `offset` of another matrix, in units, through shared memory, where that of
  /// matrix 0 was. kWhole: the warp has all columns of it.
  template <bool kWhole = false>
  __device__ void write_units(T* matrix, int place, int c, std::int64_t offset, bool present,
                              const Pack<T, V> (&packs)[Shape::kChunk]) {
    T* const to = matrix + offset - lane_offset_ + c * kChunkColumns;
    __syncwarp();  // all have read
    stream_.first.store_words(place, UnitStream::phase(to), packs);
    __syncwarp();
    const int count = kWhole ? kChunkColumns : present ? max(0, min(kChunkColumns, left_ - c * kChunkColumns)) : 0;
    stream_.first.write(place, to, count);
    __syncwarp();  // nobody reads what is copied over
  }

  __device__ static int next(int place) { return place + 1 == Shape::D ? 0 : place + 1; }

 private:
  // Rows that are counted in int are long, and registers scarce: what can be computed from a row's number is, by one
  // multiplication.
  static constexpr bool kFewRows = sizeof(Index) == 4;
  __device__ Index columns() const { return static_cast<Index>(a_.columns); }
  static constexpr int kChunkColumns = Shape::kChunk * Shape::kLanes * V;
  using PackStream = Stream<T, V, kMatrices, Shape::kChunk, Shape::D, Shape::kLanes>;
  using UnitStream = WarpStream<T, Shape::kChunk * V, Shape::D, Shape::kLanes>;
  struct UnitStreams {
    UnitStream first;
    UnitStream second;
  };

  __device__ std::int64_t next_element() const {
    return kFewRows && !kPairs ? std::int64_t{row_} * columns() + (first_ - lane_offset_) : from_;
  }

  __device__ static int lane() { return threadIdx.x % Shape::kLanes; }

  // In a chunk of whose columns so many, or more, are left.
  __device__ void clear(int place, std::int64_t offset, int left, T value) const {
    if (left < kChunkColumns) {
      stream_.first.clear(place, phase<0>(offset), left, value);
      if constexpr (kMatrices == 2) {
        stream_.second.clear(place, phase<1>(offset), left, value);
      }
      __syncwarp();
    }
  }

  // Where in its first unit the warp's part of a row begins.
  template <int k>
  __device__ int phase(std::int64_t offset) const {
    return UnitStream::phase(a_.template matrix<k>() + offset - lane_offset_);
  }

  __device__ static auto streams(const StreamPlan& p, unsigned char* memory) {
    if constexpr (!kUnits) {
      return PackStream(p, memory);
    } else {
      return UnitStreams{UnitStream(p, memory, 0, kMatrices), UnitStream(p, memory, 1, kMatrices)};
    }
  }

  const Matrices& a_;
  int packs_;
  int lane_offset_;
  int left_;  // columns of the slab from those of the first lane on
  Index step_;
  Index row_;          // the next to be copied
  int first_;          // column of the thread
  std::int64_t from_;  // what is copied next: the thread's first pack, or the first lane's
  std::conditional_t<kUnits, UnitStreams, PackStream> stream_;
};

}  // namespace mica::kernels::rows
