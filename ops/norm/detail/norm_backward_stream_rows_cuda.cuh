#pragma once

// Streamed rows: copies the matrices that are read through shared memory, chunk after chunk, ahead of their use.
//
//     global memory ── packs, each thread its own ──▶ shared memory ── packs ──▶ registers
//
// Each thread copies (cp.async) the elements that it will use itself. So it never waits for other threads' copies, and
// the threads of a row synchronize only to add up their sums.

#include <mica/ops/norm/detail/norm_backward_cuda.cuh>
#include <mica/ops/norm/detail/norm_backward_stream_shape_cuda.cuh>

namespace mica::kernels::norm_cuda {

/// A thread's ring buffer in shared memory: D chunks with P packs of each of kSources matrices. A `place` is the index
/// of a chunk in the ring.
template <class T, int V, int kSources, int P, int D, int kLanes = kWarp>
class Stream {
 public:
  using Packs = Pack<T, V>;

  __device__ Stream(const StreamPlan& p, unsigned char* memory) {
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    places_ = reinterpret_cast<Packs*>(memory + p.stream_begin()) + thread / kWarp * (D * kChunk) + thread % kWarp;
  }

  /// Starts copying the first `count` packs of a chunk from each matrix, with a policy for the L2 cache. The chunk's
  /// other packs become zeros.
  template <class... From>
  __device__ void fetch(int place, std::uint64_t policy, int count, const From*... from) {
    Packs* to = places_ + place * kChunk;
#pragma unroll
    for (int i = 0; i < P; ++i) {
      int source = 0;
      (cuda::copy_async<sizeof(Packs)>(cuda::shared_address(to + (source++ * P + i) * kWarp),
                                       i < count ? from + i * (kLanes * V) : from, policy, i < count),
       ...);
    }
  }

  /// The thread's pack number i of a chunk.
  __device__ Packs& at(int place, int source, int i) const {
    return places_[place * kChunk + (source * P + i) * kWarp];
  }

  __device__ static int next(int place) { return place + 1 == D ? 0 : place + 1; }

 private:
  static constexpr int kChunk = kSources * P * kWarp;
  Packs* places_;
};

/// Returns `packs`, but hides from the compiler that it is the same in all rows. Otherwise the compiler compares it
/// with the index of each pack once and keeps the answers as bits of a register. Extracting the bits takes longer than
/// comparing again.
template <class Shape>
__device__ int compare_again(int packs) {
  if constexpr (Shape::P > 8) {
    asm volatile("" : "+r"(packs));
  }
  return packs;
}

/// Streams the rows of kMatrices matrices, two or three.
template <class T, class W, int kMatrices, class Shape>
class RowsAhead {
 public:
  static constexpr int V = Shape::V;

  __device__ RowsAhead(const BackwardRows<T, W>& a, const StreamPlan& p, const typename Shape::Place& at,
                       unsigned char* memory)
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
    const bool present = row_ < a_.rows;
    if (present || Shape::kLanes < kWarp) {  // a lane without a row copies zeros: its warp may have rows
      const std::int64_t from = Shape::kLanes == kWarp || present ? from_ + c * kChunkColumns : 0;
      const int row_packs = compare_again<Shape>(at_.packs);
      const int packs = Shape::kLanes == kWarp || present ? row_packs - c * Shape::kChunk : 0;
      if constexpr (kMatrices == 2) {
        stream_.fetch(place, a_.policy, packs, a_.template matrix<0>() + from, a_.template matrix<1>() + from);
      } else {
        stream_.fetch(place, a_.policy, packs, a_.template matrix<0>() + from, a_.template matrix<1>() + from,
                      a_.template matrix<2>() + from);
      }
    }
    cuda::commit_copies();  // also without copies, since wait() counts the commits
    if (c == Shape::C - 1) {
      row_ += at_.step;
      from_ += at_.step * a_.columns;
    }
  }

  /// The elements of pack i of a chunk, in matrix number `matrix`.
  __device__ void values(int place, int matrix, int i, float (&result)[V]) const {
    unpack(stream_.at(place, matrix, i), result);
  }

  __device__ static int next(int place) { return place + 1 == Shape::D ? 0 : place + 1; }

 private:
  static_assert(kMatrices == 2 || kMatrices == 3);
  static constexpr int kChunkColumns = Shape::kChunk * Shape::kLanes * V;

  const BackwardRows<T, W>& a_;
  const typename Shape::Place at_;
  std::int64_t row_;   // the next row to be copied
  std::int64_t from_;  // the index of the next element to be copied
  Stream<T, V, kMatrices, Shape::kChunk, Shape::D, Shape::kLanes> stream_;
};

}  // namespace mica::kernels::norm_cuda
