#pragma once

// The reductions of cross entropy, written once for both devices; see ops/reduce/detail/reductions.h.

#include <cstdint>

#include <mica/ops/cross_entropy/detail/cross_entropy_kernels.h>
#include <mica/ops/reduce/detail/reductions.h>

namespace mica::kernels {

/// The sum of the labels' weights over the rows that are not ignored. Without weights it is a number of rows; as a
/// float, it is exact up to 2²⁴.
template <class Index, class S>
struct LabelWeightOp {
  using Value = std::int64_t;
  using Acc = S;
  using Out = S;
  static constexpr bool kShifted = false;

  std::int64_t ignore_index;
  const S* weight;  // null: all 1
  std::int64_t classes;

  MICA_HOST_DEVICE static Acc identity() { return 0; }
  MICA_HOST_DEVICE Acc map(Value label, Value, std::int64_t) const {
    if (label == ignore_index) {
      return 0;
    }
    // A label that is out of range counts as 0 here; the loss of its row is NaN.
    return weight == nullptr ? Acc{1} : label >= 0 && label < classes ? weight[label] : Acc{0};
  }
  MICA_HOST_DEVICE Acc combine(Acc a, Acc b) const { return a + b; }
  MICA_HOST_DEVICE Acc finish(Acc sum, Value) const { return sum; }
};

/// Σ losses / denominator. The denominator is passed as the reduction's shift.
template <class S>
struct MeanLossOp {
  using Value = S;
  using Acc = S;
  using Out = S;
  static constexpr bool kShifted = true;

  MICA_HOST_DEVICE static Acc identity() { return 0; }
  MICA_HOST_DEVICE Acc map(Value loss, Value, std::int64_t) const { return loss; }
  MICA_HOST_DEVICE Acc combine(Acc a, Acc b) const { return a + b; }
  MICA_HOST_DEVICE Acc finish(Acc sum, Value denominator) const { return sum / denominator; }
};

/// Σ losses
template <class S>
struct SumLossOp : MeanLossOp<S> {
  static constexpr bool kShifted = false;
  MICA_HOST_DEVICE S finish(S sum, S) const { return sum; }
};

// Calls of these reductions, for files that have included their device's reduce().

template <class Device>
void sum_label_weights(Device device, const CrossEntropyDenominator& args) {
  on_dtype(Types<float, double>{}, args.denominator.dtype(), "cross_entropy", [&]<class S>() {
    on_dtype(IndexTypes{}, args.targets.dtype(), "cross_entropy", [&]<class Index>() {
      const bool weighted = args.weight.defined();
      const LabelWeightOp<Index, S> op{.ignore_index = args.ignore_index,
                                       .weight = weighted ? args.weight.template data<S>() : nullptr,
                                       .classes = weighted ? args.weight.numel() : 0};
      reduce<Index>(device, op, args.targets, args.denominator);
    });
  });
}

template <class Device>
void reduce_losses(Device device, const CrossEntropyReduce& args) {
  on_dtype(Types<float, double>{}, args.loss.dtype(), "cross_entropy", [&]<class S>() {
    if (args.denominator.defined()) {
      reduce<S>(device, MeanLossOp<S>{}, args.losses, args.loss, args.denominator.template data<S>());
    } else {
      reduce<S>(device, SumLossOp<S>{}, args.losses, args.loss);
    }
  });
}

}  // namespace mica::kernels
