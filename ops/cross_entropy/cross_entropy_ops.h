#pragma once

// The reductions of cross entropy, written once for both devices; see ops/reduce/reduce_ops.h.

#include <cstdint>

#include <mica/ops/reduce/reduce_ops.h>

namespace mica::kernels {

/// How many targets are not ignored.
template <class Index, class Count>
struct CountValidOp {
  using Value = std::int64_t;
  using Acc = std::int64_t;
  using Out = Count;
  static constexpr bool kShifted = false;

  std::int64_t ignore_index;

  MICA_HOST_DEVICE static Acc identity() { return 0; }
  MICA_HOST_DEVICE Acc map(Value target, Value, std::int64_t) const { return target != ignore_index ? 1 : 0; }
  MICA_HOST_DEVICE Acc combine(Acc a, Acc b) const { return a + b; }
  MICA_HOST_DEVICE Acc finish(Acc count, Value) const { return count; }
};

/// Σ losses / count; the shift is the count.
template <class V, class Loss>
struct MeanLossOp {
  using Value = V;
  using Acc = V;
  using Out = Loss;
  static constexpr bool kShifted = true;

  MICA_HOST_DEVICE static Acc identity() { return 0; }
  MICA_HOST_DEVICE Acc map(Value loss, Value, std::int64_t) const { return loss; }
  MICA_HOST_DEVICE Acc combine(Acc a, Acc b) const { return a + b; }
  MICA_HOST_DEVICE Acc finish(Acc sum, Value count) const { return sum / count; }
};

/// Σ losses
template <class V, class Loss>
struct SumLossOp : MeanLossOp<V, Loss> {
  static constexpr bool kShifted = false;
  MICA_HOST_DEVICE V finish(V sum, V) const { return sum; }
};

}  // namespace mica::kernels
