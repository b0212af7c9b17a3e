#pragma once

// What a thread has of a norm's statistics and parameters while rows stream.

#include <cstdint>

#include <mica/ops/detail/stream_cuda.cuh>

namespace mica::kernels::rows {

/// A number of each of a group's rows, which a warp fetches 32 at a time: loads in each row would wait behind its
/// copies.
class RowNumbers {
 public:
  __device__ RowNumbers(const float* numbers, std::int64_t rows, std::int64_t first, std::int64_t step)
      : numbers_(numbers), rows_(rows), step_(step), ahead_(first + threadIdx.x % kWarp * step) {
    fetch();
  }

  /// That of the next row.
  __device__ float take() {
    const int i = taken_++ % kWarp;
    if (i == 0) {
      current_ = next_;
      fetch();
    }
    return __shfl_sync(kAllLanes, current_, i);
  }

 private:
  __device__ void fetch() {
    if (ahead_ < rows_) {
      next_ = numbers_[ahead_];
    }
    ahead_ += kWarp * step_;
  }

  const float* numbers_;
  std::int64_t rows_;
  std::int64_t step_;
  std::int64_t ahead_;  // the lane's next row
  unsigned taken_ = 0;
  float current_ = 0;
  float next_ = 0;
};

/// Sums over rows: a block's row of partials is the sum of its groups', added in order.
template <int V, int P>
__device__ void write_partials(const float (&sums)[P * V], float* partial, const StreamPlan& p,
                               const StreamPlace<Team::block>& at, float* fold) {
  constexpr int kPart = V < 4 ? V : 4;
  const bool folds = p.groups > 1;
  float* const own = folds ? fold + threadIdx.y * p.slab : partial;
#pragma unroll
  for (int i = 0; i < P; ++i) {
    if (i < at.packs) {
#pragma unroll
      for (int part = 0; part < V; part += kPart) {
        Pack<float, kPart> values;
#pragma unroll
        for (int j = 0; j < kPart; ++j) {
          values.at[j] = sums[i * V + part + j];
        }
        store(own + (at.first_pack + i * kWarp) * V + part, values);
      }
    }
  }
  if (folds) {
    __syncthreads();
#pragma unroll 1
    for (int column = threadIdx.y * blockDim.x + threadIdx.x; column < at.columns; column += p.block()) {
      float sum = 0;
#pragma unroll 4
      for (int i = 0; i < p.groups; ++i) {
        sum += fold[i * p.slab + column];
      }
      partial[column] = sum;
    }
  }
}

/// The weights of a thread's packs: in registers or in shared memory, where others put some.
template <class W, int V, int P, bool kInRegisters>
class Weights {
 public:
  /// `weight` may be null: 1.
  __device__ Weights(const W* weight, const StreamPlan& p, const StreamPlace<Team::block>& at, unsigned char* memory)
      : slab_(reinterpret_cast<W*>(memory + p.kept_begin()) + at.first_pack * V) {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int i = 0; i < P; ++i) {
        float w[V] = {};
        if (i < at.packs) {
          unpack(load_or<V>(weight, (at.first_pack + i * kWarp) * V, 1), w);
        }
#pragma unroll
        for (int j = 0; j < V; ++j) {
          values_[i * V + j] = w[j];
        }
      }
    } else {
      W* const slab = reinterpret_cast<W*>(memory + p.kept_begin());
#pragma unroll 1
      for (int column = (threadIdx.y * blockDim.x + threadIdx.x) * V; column < at.columns; column += p.block() * V) {
        store(slab + column, load_or<V>(weight, column, 1));
      }
    }
  }

  /// Those of pack number i, which is there.
  __device__ void at(int i, float (&w)[V]) const {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        w[j] = values_[i * V + j];
      }
    } else {
      unpack(load<V>(slab_ + i * (kWarp * V)), w);
    }
  }

 private:
  const W* slab_;
  float values_[kInRegisters ? P * V : 1];
};

}  // namespace mica::kernels::rows
