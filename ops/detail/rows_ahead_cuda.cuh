#pragma once

// Streams the rows of kMatrices matrices of the same shape through shared memory, chunk after chunk, ahead of their use
// (see stream_cuda.cuh).
//
//     global memory ── packs, each thread its own ──▶ shared memory ── packs ──▶ registers

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
/// with kEdges, two. `offset` arguments are the index, in a matrix, of the first element of the thread's part of a row.
template <class T, class Matrices, int kMatrices, class Shape>
class RowsAhead {
 public:
  static constexpr int V = Shape::V;

  __device__ RowsAhead(const Matrices& a, const StreamPlan& p, const typename Shape::Place& at, unsigned char* memory)
      : a_(a),
        at_(at),
        row_(at.first),
        from_(at.first * a.columns + at.begin + std::int64_t{at.first_pack} * V),
        stream_(p, memory) {
#pragma unroll 1
    for (int i = 0; i < Shape::D; ++i) {
      fetch(i, i % Shape::C);
    }
  }

  /// Starts copying the next chunk, which is chunk c of its row.
  __device__ void fetch(int place, int c) {
    const bool present = row_ < at_.end(a_.rows);
    if (present || Shape::kLanes < kWarp) {  // a lane without a row copies zeros: its warp may have rows
      const std::int64_t from = Shape::kLanes == kWarp || present ? from_ + c * kChunkColumns : 0;
      if constexpr (Shape::kEdges) {
        // Of the matrix's last row, whole packs only: memory checkers report copies that reach past the end.
        const int row_left = Shape::kLanes == kWarp || present ? at_.left : 0;
        const int left = row_left & (row_ + 1 == a_.rows ? -V : -1);
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

  /// Waits for chunk c of the row at `offset`; `pending` later chunks may still be in flight. With kEdges, sets the
  /// elements before the row to zero.
  __device__ void wait(int place, int c, std::int64_t offset, int pending) const {
    cuda::wait_copies(pending);
    if constexpr (Shape::kEdges) {
      if (c == 0 && at_.head > 0) {
#pragma unroll
        for (int source = 0; source < kMatrices; ++source) {
          T* const pack = stream_.at(place, source, 0).at;
          if constexpr (Shape::kOwnPhases) {
            clear_first(pack, at_.head);
          } else {  // in larger teams, this is faster
#pragma unroll
            for (int j = 0; j < V; ++j) {
              if (j < at_.head) {
                pack[j] = static_cast<T>(0.0f);
              }
            }
          }
        }
      }
      if (at_.cut >= c * Shape::kChunk && at_.cut < (c + 1) * Shape::kChunk) {
        load_if_last(place, offset);
      }
    }
  }

  /// The elements of pack i of a chunk, in matrix number `matrix`.
  __device__ void values(int place, int matrix, int i, float (&result)[V]) const {
    unpack(stream_.at(place, matrix, i), result);
  }

  __device__ static int next(int place) { return place + 1 == Shape::D ? 0 : place + 1; }

 private:
  static_assert(kMatrices == 2 || (kMatrices == 3 && !Shape::kEdges));
  static constexpr int kChunkColumns = Shape::kChunk * Shape::kLanes * V;

  // Sets the first `count` elements of a pack to zero, by a store for each bit of `count`.
  template <int kBit = V>
  __device__ static void clear_first(T* pack, int count) {
    if ((count & kBit) != 0) {
      store(pack + (count & -2 * kBit), Pack<T, kBit>{});
    }
    if constexpr (kBit > 1) {
      clear_first<kBit / 2>(pack, count);
    }
  }

  // If the row at `offset` is the matrix's last one: loads the elements of the pack inside which it ends.
  __device__ void load_if_last(int place, std::int64_t offset) const {
    const int from = at_.cut * (Shape::kLanes * V);
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

  const Matrices& a_;
  const typename Shape::Place at_;
  std::int64_t row_;   // the next row to be copied
  std::int64_t from_;  // the index of the next element to be copied
  Stream<T, V, kMatrices, Shape::kChunk, Shape::D, Shape::kLanes> stream_;
};

}  // namespace mica::kernels::rows
