#pragma once

// Rows that stream through shared memory, ahead of their use:
//
//     global memory ──cp.async──▶ ring in shared memory ──▶ registers
//
// Each thread copies the elements that it uses itself, so that the threads of a row synchronize only to reduce.

#include <cstdint>

#include <mica/core/cuda/pack.cuh>
#include <mica/core/cuda/ptx.cuh>
#include <mica/core/cuda/reduce.cuh>

namespace mica::kernels::rows {

/// A thread's kDepth stages in shared memory. Each has P packs of each of kSources matrices, kLanes packs apart.
template <class T, int V, int kSources, int P, int kDepth, int kLanes = cuda::kWarp>
class RowRing {
 public:
  using Packs = cuda::Pack<T, V>;

  __device__ explicit RowRing(unsigned char* memory) {
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    packs_ = reinterpret_cast<Packs*>(memory) + thread / cuda::kWarp * (kDepth * kStage) + thread % cuda::kWarp;
  }

  /// Starts copying the first `count` packs of a stage from each matrix, with a policy for the L2 cache. The stage's
  /// other packs become zeros.
  template <class... From>
  __device__ void fetch(int stage, std::uint64_t policy, int count, const From*... from) {
#pragma unroll
    for (int i = 0; i < P; ++i) {
      int source = 0;
      (cuda::copy_async<sizeof(Packs)>(cuda::shared_address(&at(stage, source++, i)),
                                       i < count ? from + i * (kLanes * V) : from, policy, i < count),
       ...);
    }
  }

  /// For rings whose absent packs are not zeros: writes `pack` over the packs from number `count` on, in all stages.
  /// fetch_present() leaves them as they are.
  __device__ void fill(int count, const Packs& pack) {
#pragma unroll
    for (int i = 0; i < kDepth * kSources * P; ++i) {
      if (i % P >= count) {
        packs_[i * cuda::kWarp] = pack;
      }
    }
  }
  __device__ void fetch_present(int stage, std::uint64_t policy, int count, const T* from) {
    static_assert(kSources == 1);
#pragma unroll
    for (int i = 0; i < P; ++i) {
      if (i < count) {
        cuda::copy_async<sizeof(Packs)>(cuda::shared_address(&at(stage, 0, i)), from + i * (kLanes * V), policy);
      }
    }
  }

  /// The thread's pack number i of a matrix.
  __device__ Packs& at(int stage, int source, int i) const {
    return packs_[stage * kStage + (source * P + i) * cuda::kWarp];
  }

  __device__ static int next(int stage) { return stage + 1 == kDepth ? 0 : stage + 1; }

 private:
  static constexpr int kStage = kSources * P * cuda::kWarp;
  Packs* packs_;
};

}  // namespace mica::kernels::rows
