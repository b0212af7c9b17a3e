#pragma once

// Streams the rows of kMatrices matrices of the same shape through shared memory, chunk after chunk, ahead of their use
// (see stream_cuda.cuh).
//
//     with packs:    global memory ── packs, each thread its own ──▶ shared memory ── packs ──▶ registers
//     kUnits:        global memory ── units of 16 bytes, by warp ──▶ shared memory ── words ──▶ registers
//                    global memory ◀─ units of 16 bytes, by warp ─── shared memory ◀─ words ─── registers

#include <type_traits>

#include <mica/ops/detail/stream_cuda.cuh>

namespace mica::kernels::rows {

/// Returns `packs`, but hides from the compiler that it is the same in all rows. Otherwise the compiler would compare
/// it with the index of each pack once, and keep the results in the bits of a register for all rows; extracting those
/// bits takes longer than comparing again.
template <class Shape>
__device__ int compare_again(int packs) {
  if constexpr (Shape::P > 8) {
    asm volatile("" : "+r"(packs));
  }
  return packs;
}

/// `Matrices` has the members `rows`, `columns` and matrix<k>(), a pointer to matrix number k. There are two or three;
/// with kUnits or kEdges, two. With kUnits, a row must have at least 16 bytes. `offset` arguments are the index, in a
/// matrix, of the first element of the thread's part of a row.
template <class T, class Matrices, int kMatrices, class Shape>
class RowsAhead {
 public:
  static constexpr int V = Shape::V;
  static constexpr bool kUnits = Shape::kUnits;
  static constexpr bool kPairs = kUnits && V == 2;

  __device__ RowsAhead(const Matrices& a, const StreamPlan& p, const typename Shape::Place& at, unsigned char* memory)
      : a_(a),
        at_(at),
        lane_offset_(kUnits ? lane() * V : 0),
        left_(at.columns - (at.first_pack - lane()) * V),
        row_(at.first),
        from_(at.first * a.columns + at.begin + std::int64_t{at.first_pack} * V - lane_offset_),
        stream_(streams(p, memory)) {
#pragma unroll 1
    for (int i = 0; i < Shape::D; ++i) {
      fetch(i, i % Shape::C);
    }
  }

  /// Bytes of shared memory for a block of `threads` threads.
  static constexpr int bytes(int threads) {
    const int units = threads / Shape::kLanes * UnitStream::kStreamBytes;
    const int packs = threads * (Shape::D * Shape::kChunk * V * static_cast<int>(sizeof(T)));
    return kMatrices * (kUnits ? units : packs);
  }

  /// Starts copying the next chunk, which is chunk c of its row.
  __device__ void fetch(int place, int c) {
    const bool present = row_ < at_.end(a_.rows);
    if (present || Shape::kLanes < kWarp) {  // a lane without a row copies zeros: its warp may have rows
      const std::int64_t from = Shape::kLanes == kWarp || present ? from_ + c * kChunkColumns : 0;
      if constexpr (kUnits) {
        const int left = Shape::kLanes == kWarp || present ? left_ - c * kChunkColumns : 0;
        const bool is_last = row_ + 1 == a_.rows;
        stream_.first.fetch_units(place, a_.template matrix<0>() + from, left, is_last);
        stream_.second.fetch_units(place, a_.template matrix<1>() + from, left, is_last);
      } else if constexpr (Shape::kEdges) {
        // Of the matrix's last row, whole packs only: memory checkers report copies that reach past the end.
        const int left = at_.left & (row_ + 1 == a_.rows ? -V : -1);
        stream_.fetch_elements(place, left - c * kChunkColumns, a_.template matrix<0>() + from,
                               a_.template matrix<1>() + from);
      } else {
        const int row_packs = compare_again<Shape>(at_.packs);
        const int packs = Shape::kLanes == kWarp || present ? row_packs - c * Shape::kChunk : 0;
        if constexpr (kMatrices == 2) {
          stream_.fetch(place, packs, a_.template matrix<0>() + from, a_.template matrix<1>() + from);
        } else {
          stream_.fetch(place, packs, a_.template matrix<0>() + from, a_.template matrix<1>() + from,
                        a_.template matrix<2>() + from);
        }
      }
    }
    cuda::commit_copies();  // also without copies, since wait() counts the commits
    if (c == Shape::C - 1) {
      row_ += at_.step;
      from_ += at_.step * a_.columns;
    }
  }

  /// Waits for chunk c of the row at `offset`; `pending` later chunks may still be in flight. Sets elements that are
  /// not in the row to zero: with kEdges, those before it; with kUnits, those after it in its last unit.
  __device__ void wait(int place, int c, std::int64_t offset, int pending) const {
    cuda::wait_copies(pending);
    if constexpr (Shape::kEdges) {
      if (c == 0 && at_.head > 0) {
#pragma unroll
        for (int source = 0; source < kMatrices; ++source) {
          T* const pack = stream_.at(place, source, 0).at;
#pragma unroll
          for (int j = 0; j < V; ++j) {
            if (j < at_.head) {
              pack[j] = static_cast<T>(0.0f);
            }
          }
        }
      }
      if (at_.cut >= c * Shape::kChunk && at_.cut < (c + 1) * Shape::kChunk) {
        load_if_last(place, offset);
      }
    }
    if constexpr (kUnits) {
      __syncwarp();  // other lanes have copied parts of it
      clear(place, offset, left_ - c * kChunkColumns);
    }
  }

  /// The thread's packs of a chunk of the row at `offset`: pointers to them or, for pairs, the pairs themselves. Pairs
  /// are read all at once, since either all of them straddle words of shared memory or none.
  struct Places {
    const T* of[kMatrices];
  };
  struct Pairs {
    Pack<T, V> of[kMatrices][Shape::kChunk];
  };
  using Chunk = std::conditional_t<kPairs, Pairs, Places>;
  __device__ Chunk chunk(int place, std::int64_t offset) const {
    if constexpr (!kUnits) {
      return {stream_.at(place, 0, 0).at, stream_.at(place, 1, 0).at};
    } else if constexpr (kPairs) {
      Pairs pairs;
      stream_.first.load_words(place, phase<0>(offset), pairs.of[0]);
      stream_.second.load_words(place, phase<1>(offset), pairs.of[1]);
      return pairs;
    } else {
      return {&stream_.first.at(place, phase<0>(offset), 0), &stream_.second.at(place, phase<1>(offset), 0)};
    }
  }

  /// The elements of pack i in one matrix's part of a chunk.
  __device__ static void values(const T* packs, int i, float (&result)[V]) {
    unpack(load<V>(packs + i * (kWarp * V)), result);
  }
  __device__ static void values(const Pack<T, V> (&pairs)[Shape::kChunk], int i, float (&result)[V]) {
    unpack(pairs[i], result);
  }

  /// The same for the third matrix.
  __device__ void third_values(int place, int i, float (&result)[V]) const { unpack(stream_.at(place, 2, i), result); }

  /// Writes chunk c of the row at `offset` of another matrix, in units, through shared memory: it replaces matrix 0's
  /// chunk there.
  __device__ void write_units(T* matrix, int place, int c, std::int64_t offset, bool present,
                              const Pack<T, V> (&packs)[Shape::kChunk]) {
    T* const to = of_warp(matrix, offset) + c * kChunkColumns;
    __syncwarp();  // all lanes have read matrix 0's chunk
    stream_.first.store_words(place, UnitStream::phase(to), packs);
    __syncwarp();
    const int count = present ? max(0, min(kChunkColumns, left_ - c * kChunkColumns)) : 0;
    stream_.first.write(place, to, count);
    __syncwarp();  // all lanes have read it, before the next copy overwrites it
  }

  __device__ static int next(int place) { return place + 1 == Shape::D ? 0 : place + 1; }

 private:
  static_assert(kMatrices == 2 || (kMatrices == 3 && !kUnits && !Shape::kEdges));
  static constexpr int kChunkColumns = Shape::kChunk * Shape::kLanes * V;
  using PackStream = Stream<T, V, kMatrices, Shape::kChunk, Shape::D, Shape::kLanes>;
  using UnitStream = WarpStream<T, Shape::kChunk * V, Shape::D, Shape::kLanes>;
  struct UnitStreams {
    UnitStream first;
    UnitStream second;
  };

  // The address of the first element of the warp's part of the row at `offset`.
  template <class U>
  __device__ U* of_warp(U* matrix, std::int64_t offset) const {
    return matrix + offset - lane_offset_;  // another order would take two more registers
  }

  __device__ static int lane() { return threadIdx.x % Shape::kLanes; }

  // If the row at `offset` is the matrix's last one: loads the elements of the pack inside which it ends.
  __device__ void load_if_last(int place, std::int64_t offset) const {
    const int from = at_.cut * (kWarp * V);
    std::int64_t left_in_matrix = a_.rows;
    asm volatile("" : "+l"(left_in_matrix));  // otherwise the compiler would compute the end early, and keep it
    left_in_matrix = left_in_matrix * a_.columns - (offset + from);
    if (left_in_matrix < V) {
#pragma unroll 1
      for (int j = 0; j < static_cast<int>(left_in_matrix); ++j) {
        stream_.at(place, 0, at_.cut % Shape::kChunk).at[j] = a_.template matrix<0>()[offset + from + j];
        stream_.at(place, 1, at_.cut % Shape::kChunk).at[j] = a_.template matrix<1>()[offset + from + j];
      }
    }
  }

  // The row has `left` columns from the chunk's beginning on.
  __device__ void clear(int place, std::int64_t offset, int left) const {
    if (left < kChunkColumns) {
      stream_.first.clear(place, phase<0>(offset), left);
      stream_.second.clear(place, phase<1>(offset), left);
      __syncwarp();
    }
  }

  // The index of the first element of the warp's part of a row in its unit, in matrix k.
  template <int k>
  __device__ int phase(std::int64_t offset) const {
    return UnitStream::phase(of_warp(a_.template matrix<k>(), offset));
  }

  __device__ static auto streams(const StreamPlan& p, unsigned char* memory) {
    if constexpr (!kUnits) {
      return PackStream(p, memory);
    } else {
      return UnitStreams{UnitStream(p, memory, 0, kMatrices), UnitStream(p, memory, 1, kMatrices)};
    }
  }

  const Matrices& a_;
  const typename Shape::Place at_;
  int lane_offset_;
  int left_;           // columns of the slab from the first lane's first column on
  std::int64_t row_;   // the next row to be copied
  std::int64_t from_;  // the index of the next element to be copied, by the thread or (kUnits) by the first lane
  std::conditional_t<kUnits, UnitStreams, PackStream> stream_;
};

}  // namespace mica::kernels::rows
