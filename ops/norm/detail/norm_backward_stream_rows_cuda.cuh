#pragma once

// Streamed rows: copies the matrices to shared memory, row after row, ahead of their use.

#include <mica/ops/norm/detail/norm_backward_cuda.cuh>
#include <mica/ops/norm/detail/norm_backward_stream_shape_cuda.cuh>
#include <mica/ops/rows/detail/row_ring.cuh>

namespace mica::kernels::norm_cuda {

/// Streams the rows of kMatrices matrices, two or three.
template <class T, class W, int kMatrices, class Shape>
class RowsAhead {
 public:
  static constexpr int V = Shape::V;

  __device__ RowsAhead(const BackwardRows<T, W>& a, const StreamPlan& p, const typename Shape::Thread& at,
                       unsigned char* memory)
      : a_(a),
        at_(at),
        row_(at.first),
        from_(at.first * a.columns + at.begin + std::int64_t{at.first_pack} * V),
        ring_(memory + p.stream_begin()) {
#pragma unroll 1
    for (int i = 0; i < Shape::D; ++i) {
      fetch(i);
    }
  }

  /// Starts copying the next row.
  __device__ void fetch(int stage) {
    const bool present = row_ < a_.rows;
    if (present || Shape::kLanes < kWarp) {  // a lane without a row copies zeros: its warp may have rows
      const std::int64_t from = Shape::kLanes == kWarp || present ? from_ : 0;
      const int packs = Shape::kLanes == kWarp || present ? at_.packs : 0;
      if constexpr (kMatrices == 2) {
        ring_.fetch(stage, a_.policy, packs, a_.template matrix<0>() + from, a_.template matrix<1>() + from);
      } else {
        ring_.fetch(stage, a_.policy, packs, a_.template matrix<0>() + from, a_.template matrix<1>() + from,
                    a_.template matrix<2>() + from);
      }
    }
    cuda::commit_copies();  // also without copies, since wait_copies() counts the commits
    row_ += at_.step;
    from_ += at_.step * a_.columns;
  }

  /// The elements of pack i of a row, in matrix number `matrix`.
  __device__ void values(int stage, int matrix, int i, float (&result)[V]) const {
    unpack(ring_.at(stage, matrix, i), result);
  }

  __device__ static int next(int stage) { return Ring::next(stage); }

 private:
  static_assert(kMatrices == 2 || kMatrices == 3);
  using Ring = RowRing<T, V, kMatrices, Shape::P, Shape::D, Shape::kLanes>;

  const BackwardRows<T, W>& a_;
  const typename Shape::Thread at_;
  std::int64_t row_;   // the next row to be copied
  std::int64_t from_;  // the index of the next element to be copied
  Ring ring_;
};

}  // namespace mica::kernels::norm_cuda
