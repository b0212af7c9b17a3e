#pragma once

// Softmax of the rows of a matrix (rows, columns), by the kernel that plan_softmax() chooses.

#include <algorithm>
#include <iterator>
#include <utility>

#include <mica/core/cuda/launch.h>
#include <mica/ops/softmax/detail/softmax_elements_cuda.cuh>
#include <mica/ops/softmax/detail/softmax_registers_cuda.cuh>
#include <mica/ops/softmax/detail/softmax_streamed_cuda.cuh>

namespace mica::kernels::softmax_rows {

/// Runs the kernel for entry kIndex of kSoftmaxLayouts: one or several rows per block, or one row per cluster. If
/// streamed, as many clusters as the GPU runs at a time process row after row.
template <int kIndex, class Direction>
void run_layout(const typename Direction::Inputs& m, std::int64_t rows, std::int64_t columns,
                const Direction& direction, const SoftmaxPlan& plan) {
  using T = typename Direction::T;
  using L = LayoutEntry<T, kIndex>;
  constexpr bool kStreamed = L::kEntry.streamed;
  const std::int64_t row_bytes = std::int64_t{plan.threads} * L::kEntry.elements * sizeof(T);
  cuda::Launch launch(plan.cluster, dim3(plan.threads, plan.rows), kStreamed ? kAhead<T> * row_bytes : 0);
  launch.cluster(plan.cluster);
  std::int64_t groups = (rows + plan.rows - 1) / plan.rows;
  const auto run = [&](auto kernel, const char* name) {
    if (kStreamed) {
      groups = std::min<std::int64_t>(groups, launch.resident(kernel));
    }
    launch.grid(rows::grid_of(groups * plan.cluster)).run(kernel, name, m, rows, columns, direction, plan);
  };
  if constexpr (kStreamed) {
    run(softmax_streamed<Direction, L>, "softmax_streamed");
  } else {
    run(softmax_registers<Direction, L>, Direction::kBackward ? "softmax_backward_registers" : "softmax_registers");
  }
}

template <class Direction>
void run(const typename Direction::Inputs& m, std::int64_t rows, std::int64_t columns, const Direction& direction) {
  constexpr int kSize = sizeof(typename Direction::T);
  const SoftmaxPlan plan = plan_softmax({.columns = columns,
                                         .element_size = kSize,
                                         .alignment = rows::alignment_of(m.out, m.in[0], m.in[m.kInputs - 1]),
                                         .clusters = cuda::device_has_clusters(),
                                         .backward = Direction::kBackward,
                                         .masked = Direction::kMasked});
  if (plan.layout < 0) {
    cuda::Launch launch(rows::grid_of((rows + plan.rows - 1) / plan.rows), dim3(plan.threads, plan.rows));
    const auto looped = [&]<Group kGroup, int kLanes>() {
      launch.run(softmax_looped<Direction, kGroup, kLanes>,
                 Direction::kBackward ? "softmax_backward_looped" : "softmax_looped", m, rows, columns, direction);
    };
    return plan.rows == 1       ? looped.template operator()<Group::block, rows::kWarp>()
           : plan.threads == 32 ? looped.template operator()<Group::warp, rows::kWarp>()
                                : looped.template operator()<Group::lanes, 8>();
  }
  const auto run_if = [&]<int kIndex>() {
    if constexpr (kSoftmaxLayouts[kIndex].serves(kSize, Direction::kBackward, Direction::kMasked)) {
      if (plan.layout == kIndex) {
        run_layout<kIndex>(m, rows, columns, direction, plan);
      }
    }
  };
  [&]<std::size_t... I>(std::index_sequence<I...>) { (run_if.template operator()<static_cast<int>(I)>(), ...); }
  (std::make_index_sequence<std::size(kSoftmaxLayouts)>{});
}

}  // namespace mica::kernels::softmax_rows
