#pragma once

// The softmax that the decoder's attention kernels update as they process the keys.

#include <mica/core/cuda/ptx.cuh>

namespace mica::kernels {

inline constexpr float kLowest = -1e30f;  // below all scores; finite, so that kLowest - kLowest is 0 and not NaN

/// One query head's softmax over the keys so far, with a lane's part of the weighted sum of values.
template <int kPart>
struct RunningSoftmax {
  float most = kLowest;
  float sum = 0;
  float values[kPart] = {};

  __device__ void rescale(float new_most) {
    const float factor = cuda::approximate_exp2(most - new_most);
    most = new_most;
    sum *= factor;
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      values[i] *= factor;
    }
  }
};

}  // namespace mica::kernels
