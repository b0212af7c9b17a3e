#pragma once

// Streamed rows: their statistics and weights.

#include <mica/ops/norm/detail/norm_backward_cuda.cuh>
#include <mica/ops/norm/detail/norm_backward_stream_shape_cuda.cuh>

namespace mica::kernels::norm_cuda {

/// The statistics of a row group's rows. kLanes lanes load those of the next kLanes rows together, since a load for
/// each row would wait behind the copies of x and dy.
template <class T, class W, bool kCentered, class Shape>
class StatisticsAhead {
  static constexpr int kLanes = Shape::kLanes;
  using Thread = typename Shape::Thread;

 public:
  using Row = Statistics<T, kCentered>;

  __device__ StatisticsAhead(const BackwardRows<T, W>& a, const Thread& at)
      : a_(a), at_(at), ahead_(at.first + threadIdx.x % kLanes * at.step) {
    fetch();
  }

  /// Returns the statistics of the next row.
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
      next_ = {};  // zeros, as the warp's other rows may exist
    }
    ahead_ += kLanes * at_.step;
  }

  const BackwardRows<T, W>& a_;
  const Thread at_;
  std::int64_t ahead_;  // the row whose statistics the lane loads next
  unsigned taken_ = 0;
  Row current_{};
  Row next_{};
};

/// The weights of a thread's packs, in registers or in shared memory.
template <class W, class Shape, bool kInRegisters>
class Weights {
 public:
  static constexpr int V = Shape::V;

  /// If `weight` is null, all weights are 1.
  __device__ Weights(const W* weight, const StreamPlan& p, const typename Shape::Thread& at, unsigned char* memory)
      : first_(reinterpret_cast<W*>(memory + p.kept_begin()) + at.first_pack * V) {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int i = 0; i < Shape::P; ++i) {
        float w[V] = {};
        const int column = (at.first_pack + i * Shape::kLanes) * V;
        if (i < at.packs) {
          unpack(load_or<V>(weight, at.begin + column, 1), w);
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

  /// The weights of pack number i; zeros if the thread does not have that pack.
  __device__ void at(int i, float (&w)[V]) const {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        w[j] = values_[i * V + j];
      }
    } else {
      unpack(rows::load<V>(first_ + i * (Shape::kLanes * V)), w);
    }
  }

 private:
  W* first_;
  float values_[kInRegisters ? Shape::P * V : 1];
};

}  // namespace mica::kernels::norm_cuda
