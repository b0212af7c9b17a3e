#pragma once

namespace mica::cuda {

/// A position in a ring of stages in shared memory; `parity` is the phase of the stage's barriers.
template <int kStages>
struct Ring {
  int stage = 0;
  unsigned parity = 0;

  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ void skip(int count) {
    const int to = stage + count;
    parity ^= to / kStages & 1;
    stage = to % kStages;
  }
};

/// Like Ring, for a number of stages that is known only at run time.
struct VariableRing {
  int stages;
  int stage = 0;
  unsigned parity = 0;

  __device__ void advance() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  /// Advances by several stages, at most `stages`.
  __device__ void skip(int count) {
    stage += count;
    if (stage >= stages) {
      stage -= stages;
      parity ^= 1;
    }
  }
};

}  // namespace mica::cuda
