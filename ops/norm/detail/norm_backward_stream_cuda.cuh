#pragma once

#include <mica/core/cuda/launch.h>
#include <mica/ops/dropout/detail/drop_pack_cuda.cuh>
#include <mica/ops/norm/detail/norm_backward_stream_exchange_cuda.cuh>
#include <mica/ops/norm/detail/norm_backward_stream_parameters_cuda.cuh>
#include <mica/ops/norm/detail/norm_backward_stream_rows_cuda.cuh>

// Stage 1 of backward for rows that stream through shared memory. A thread has the same columns of all its rows, and
// passes over each row twice:
//
//     x, dy ──copies──▶ rows in shared memory ──pass 1──▶ Σ g, Σ g · x̂ ──exchange──▶ the row's sums
//                          │                        └──▶ dweight, dbias of the thread's columns, in registers
//                          └───────pass 2, with the row's sums──────▶ dx
//     after the last row:  dweight, dbias ──added up over the block──▶ a row of partials
//
// If there are enough registers, x̂ and g = dy · weight remain in them from pass 1 to pass 2. In a cluster, exchanging
// the sums takes long, so pass 1 of a row precedes pass 2 of the previous row.

namespace mica::kernels::norm_cuda {

/// Stores data that the kernel does not read, so that the compiler may move loads across this store. Unlike an ordinary
/// store after a branch, it is never split.
template <class T, int V>
__device__ void store_pack(T* to, const Pack<T, V>& pack) {
  if constexpr (sizeof(pack) == 16) {
    const uint4 bits = reinterpret_cast<const uint4&>(pack);
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(bits.x), "r"(bits.y), "r"(bits.z),
                 "r"(bits.w));
  } else {
    store(to, pack);
  }
}

/// A thread's part of the kernel.
template <class Policy, class T, class W, class Shape>
class StreamedBackward {
 public:
  __device__ StreamedBackward(const BackwardRows<T, W>& a, const StreamPlan& p, const typename Shape::Thread& at,
                              SumExchange<Shape::kGroup>& exchange, unsigned char* memory)
      : a_(a),
        p_(p),
        memory_(memory),
        at_(at),
        exchange_(exchange),
        ahead_(a, p, at_, memory),
        statistics_(a, at_),
        weights_(a.weight, p, at_, memory),
        reciprocal_(1.0f / static_cast<float>(a.columns)) {
    exchange_.open();
    cuda::allow_dependents();
  }

  __device__ void run() {
    Row row = first_row();
    // A warp continues as long as one of its rows exists.
    const std::int64_t warp_first = kLanes < kWarp ? at_.warp_first : at_.first;
    int stage = 0;
    if (kAhead && warp_first < a_.rows) {
      row.statistics = statistics_.take();
      exchange_.leave(begin_row(row, stage, D - 1));
    }
#pragma unroll 1
    for (std::int64_t index = warp_first; index < a_.rows; index += at_.step) {
      const std::int64_t own = kLanes == kWarp ? index : index - warp_first + at_.first;
      row.present = own < a_.rows;
      if constexpr (kAhead) {
        Row next{row.offset + at_.step * a_.columns, statistics_.take(), true};
        if (index + at_.step < a_.rows) {
          exchange_.leave(begin_row(next, Ahead::next(stage), D - 2));
        }
        end_row(row, stage, exchange_.take());
        row = next;
      } else {
        row.statistics = statistics_.take();
        float sums = begin_row(row, stage, D - 1);
        if constexpr (kGroup != Group::warp) {
          exchange_.leave(sums);
          sums = exchange_.take();
        }
        end_row(row, stage, sums);
        row.offset += at_.step * a_.columns;
      }
      stage = Ahead::next(stage);
    }
    write_partials();
  }

 private:
  static constexpr int V = Shape::V;
  static constexpr int P = Shape::P;
  static constexpr int D = Shape::D;
  static constexpr int kLanes = Shape::kLanes;
  static constexpr Group kGroup = Shape::kGroup;
  static constexpr int kElements = P * V;
  static constexpr bool kCentered = Policy::kCentered;
  // Whether pass 1 of a row precedes pass 2 of the previous row.
  static constexpr bool kAhead = kGroup == Group::cluster;
  // Whether x̂ and g of a row are in registers from pass 1 to pass 2.
  static constexpr bool kInRegisters = kGroup != Group::cluster && kElements <= 16;
  // Pass 2 reads nothing from shared memory, so pass 1 can already replace a row by a later one.
  static constexpr bool kFetchEarly = kInRegisters && !Policy::kAdds;
  static constexpr bool kWeightsInRegisters = weights_in_registers(kElements, kLanes);
  // Pass 1 skips absent packs by branches.
  static constexpr bool kBranches = !kWeightsInRegisters || Policy::kAdds;
  static constexpr bool kSumsDx = Policy::kAdds && sizeof(T) == 2 && P == 1;
  // Whether lanes first add up the sums of the warp's rows.
  static constexpr bool kWarpFolds = kLanes < kWarp;
  using RowStatistics = Statistics<T, kCentered>;
  using Ahead = RowsAhead<T, W, Policy::kMatrices, Shape>;

  struct Row {
    std::int64_t offset;  // of the thread's first element
    RowStatistics statistics;
    bool present;
  };

  __device__ Row first_row() const {
    return {at_.first * a_.columns + at_.begin + std::int64_t{at_.first_pack} * V, {}, true};
  }

  /// Reads pack i of a row from its stage, computes x̂ and g, and returns dy.
  __device__ void look(const Row& row, int stage, int i, float (&dy)[V]) {
    float x[V];
    float w[V];
    ahead_.values(stage, 0, i, x);
    ahead_.values(stage, 1, i, dy);
    weights_.at(i, w);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      x_hat_[index_of(i) + j] = row.statistics.x_hat(x[j]);
      g_[index_of(i) + j] = dy[j] * w[j];
    }
  }

  /// Pass 1 of a row: adds to dweight and dbias, and returns the sums over kLanes lanes: Σ g in the lower half of these
  /// lanes, Σ g · x̂ in the others, or in all if not centered. `pending` later rows may still be in flight.
  __device__ float begin_row(const Row& row, int stage, int pending) {
    float g_sum = 0;
    float gx_sum = 0;
    cuda::wait_copies(pending);
#pragma unroll
    for (int i = 0; i < P; ++i) {
      // Without kBranches, absent packs are added as zeros. With many packs, the branches keep the compiler from
      // loading all of them at once, which would spill registers.
      if (!kBranches || i < at_.packs) {
        float dy[V];
        look(row, stage, i, dy);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const int k = index_of(i) + j;
          if constexpr (kCentered) {
            g_sum = __fadd_rn(g_sum, g_[k]);  // keeps the compiler from fusing the product dy · w with the addition
          }
          gx_sum = fma(g_[k], x_hat_[k], gx_sum);
          dweight_[i * V + j] = fma(dy[j], x_hat_[k], dweight_[i * V + j]);
          if constexpr (kCentered) {
            dbias_[i * V + j] += dy[j];
          }
        }
      }
    }
    if constexpr (kFetchEarly) {
      ahead_.fetch(stage);
    }
    return kCentered ? sum_pair_of_lanes<kLanes>(g_sum, gx_sum) : sum_lanes<kLanes>(gx_sum);
  }

  /// Pass 2 of a row: computes dx from the sums over the row.
  __device__ void end_row(const Row& row, int stage, float sums) {
    const float rstd = row.statistics.rstd;
    // dx = g · rstd + x̂ · slope + offset
    const float offset = kCentered ? -__shfl_sync(kAllLanes, sums, 0, kLanes) * reciprocal_ * rstd : 0.0f;
    const float gx_sum = kCentered               ? __shfl_sync(kAllLanes, sums, kLanes / 2, kLanes)
                         : kGroup == Group::warp ? sums
                                                 : __shfl_sync(kAllLanes, sums, 0);
    const float slope = -gx_sum * reciprocal_ * rstd;
    const int packs = kLanes == kWarp || row.present ? at_.packs : 0;
#pragma unroll
    for (int i = 0; i < P; ++i) {
      if (i < packs) {
        float values[V];
        if constexpr (!kInRegisters) {
          look(row, stage, i, values);
        }
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const int k = index_of(i) + j;
          values[j] = fma(g_[k], rstd, kCentered ? fma(x_hat_[k], slope, offset) : x_hat_[k] * slope);
        }
        if constexpr (Policy::kAdds) {
          add_dsum(row, stage, i, values);
        }
        write_dx(row, i, values);
      }
    }
    if constexpr (!kFetchEarly) {
      ahead_.fetch(stage);
    }
  }

  __device__ void add_dsum(const Row& row, int stage, int i, float (&values)[V]) const {
    float dsum[V];
    ahead_.values(stage, 2, i, dsum);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      values[j] += dsum[j];
    }
  }

  /// Writes pack i of dx and, with dropout, of dx_dropped.
  __device__ void write_dx(const Row& row, int i, float (&values)[V]) {
    const std::int64_t element = row.offset + i * (kLanes * V);
    if (!Policy::kAdds || a_.dx != nullptr) {
      store_pack(a_.dx + element, pack_of<T>(values));
    }
    if constexpr (Policy::kAdds) {
      if (a_.dx_dropped != nullptr) {
        drop_pack(values, element, absolute_key(a_.key), a_.threshold, a_.scale);
        store_pack(a_.dx_dropped + element, pack_of<T>(values));
      }
    }
    if constexpr (kSumsDx) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        dx_bias_[i * V + j] += values[j];
      }
    }
  }

  /// Writes the block's row of partial sums, which its threads add up in a fixed order.
  __device__ void write_partials() {
    float* const fold = reinterpret_cast<float*>(memory_ + p_.stream_begin());
    const int folds = kWarpFolds ? p_.block() / kWarp : p_.groups;
    const int sums = folds * p_.slab;
    cuda::wait_copies<0>();
    if (folds_in_memory()) {
      __syncthreads();  // no thread still uses the memory
    }
    fold_or_write(dweight_, a_.dweights, fold);
    if constexpr (kCentered) {
      fold_or_write(dbias_, a_.dbiases, fold + sums);
    }
    if constexpr (kSumsDx) {
      fold_or_write(dx_bias_, a_.dx_biases, fold + 2 * sums);
    }
    if (folds_in_memory()) {
      __syncthreads();
      add_folds(a_.dweights, fold, folds);
      if constexpr (kCentered) {
        add_folds(a_.dbiases, fold + sums, folds);
      }
      if constexpr (kSumsDx) {
        add_folds(a_.dx_biases, fold + 2 * sums, folds);
      }
    }
  }

  /// Writes the thread's sums to the block's row of partial sums or, if folds_in_memory(), to a row of `fold`.
  __device__ void fold_or_write(float (&sums)[kElements], float* partials, float* fold) const {
    constexpr int kPart = 4;
    if (partials == nullptr) {
      return;
    }
    int fold_row = threadIdx.y;
    bool writes = true;
    if constexpr (kWarpFolds) {
#pragma unroll
      for (int k = 0; k < kElements; ++k) {
#pragma unroll
        for (int distance = kLanes; distance < kWarp; distance *= 2) {
          sums[k] += __shfl_xor_sync(kAllLanes, sums[k], distance);
        }
      }
      fold_row /= kWarp / kLanes;
      writes = threadIdx.y % (kWarp / kLanes) == 0;
    }
    float* const own = folds_in_memory() ? fold + fold_row * p_.slab : partials + first_partial();
#pragma unroll
    for (int i = 0; i < P; ++i) {
      if (writes && i < at_.packs) {
        const int column = (at_.first_pack + i * kLanes) * V;
#pragma unroll
        for (int part = 0; part < V; part += kPart) {
          Pack<float, kPart> values;
#pragma unroll
          for (int j = 0; j < kPart; ++j) {
            values.at[j] = sums[i * V + part + j];
          }
          store(own + column + part, values);
        }
      }
    }
  }

  __device__ void add_folds(float* partials, const float* fold, int folds) const {
    if (partials == nullptr) {
      return;
    }
#pragma unroll 1
    for (int column = threadIdx.y * blockDim.x + threadIdx.x; column < at_.columns; column += p_.block()) {
      float sum = 0;
#pragma unroll 4
      for (int i = 0; i < folds; ++i) {
        sum += fold[i * p_.slab + column];
      }
      partials[first_partial() + column] = sum;
    }
  }

  /// The index of the block's first partial sum: each cluster has a row of them.
  __device__ std::int64_t first_partial() const { return Shape::Thread::cluster_index(p_) * a_.columns + at_.begin; }

  /// Whether the thread's sums go through shared memory, since several threads have the same columns.
  __device__ bool folds_in_memory() const { return kLanes < kWarp || p_.groups > 1; }

  /// The index of pack i in x_hat_ and g_.
  __device__ static constexpr int index_of(int i) { return kInRegisters ? i * V : 0; }

  const BackwardRows<T, W>& a_;
  const StreamPlan& p_;
  unsigned char* const memory_;
  const typename Shape::Thread at_;
  SumExchange<kGroup>& exchange_;
  Ahead ahead_;
  StatisticsAhead<T, W, kCentered, Shape> statistics_;
  const Weights<W, Shape, kWeightsInRegisters> weights_;
  const float reciprocal_;
  float dweight_[kElements] = {};
  float dbias_[kCentered ? kElements : 1] = {};
  float dx_bias_[kSumsDx ? kElements : 1] = {};
  float x_hat_[kInRegisters ? kElements : V];
  float g_[kInRegisters ? kElements : V];
};

template <class Policy, class T, class W, class Shape>
__global__ void __launch_bounds__(kMostThreads, 1)
    norm_backward_stream_kernel(const BackwardRows<T, W> a, const StreamPlan p) {
  extern __shared__ __align__(128) unsigned char memory[];
  using Thread = typename Shape::Thread;
  SumExchange<Shape::kGroup> exchange(p, Thread::block_rank(), memory);
  StreamedBackward<Policy, T, W, Shape>(a, p, Thread(p, a.columns, Shape::V, Shape::P), exchange, memory).run();
  exchange.close();
}

// On the host.

/// The kernels for a policy.
template <class Policy, class T>
using StreamKernels = std::conditional_t<
    sizeof(T) == 4,
    std::conditional_t<Policy::kAdds, norm_backward_kernels::SumsOfFloat32, norm_backward_kernels::OfFloat32>,
    std::conditional_t<Policy::kAdds, norm_backward_kernels::SumsOf16Bits, norm_backward_kernels::Of16Bits>>;

/// Launches the kernel that the plan has chosen.
template <class Policy, class T, class W>
void launch_streamed(const BackwardRows<T, W>& a, const NormBackwardPlan& plan) {
  const StreamPlan& p = plan.stream;
  const bool found = StreamKernels<Policy, T>::call(plan.shape, [&]<StreamKernel kKernel>() {
    cuda::Launch(static_cast<unsigned>(plan.clusters * p.cluster), dim3(p.threads, p.groups), p.shared_bytes())
        .cluster(p.cluster)
        .run(norm_backward_stream_kernel<Policy, T, W, StreamShape<16 / sizeof(T), kKernel>>,
             "norm_backward_stream_kernel", a, p);
  });
  check(found, "norm_backward: no kernel streams {} packs a thread", plan.shape.packs);
}

}  // namespace mica::kernels::norm_cuda
