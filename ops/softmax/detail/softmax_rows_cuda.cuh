#pragma once

// Softmax of the rows of a matrix (rows, columns), by the kernel that plan_softmax() chooses.

#include <algorithm>
#include <iterator>
#include <utility>

#include <mica/core/cuda/launch.h>
#include <mica/ops/softmax/detail/softmax_elements_cuda.cuh>
#include <mica/ops/softmax/detail/softmax_held_cuda.cuh>
#include <mica/ops/softmax/detail/softmax_streamed_cuda.cuh>

namespace mica::kernels::softmax_rows {

/// Launches a kernel with one row per block, several rows per block, or one row per cluster. Streamed: as many clusters
/// as the GPU runs at a time, each of which processes row after row.
template <class Kernel, class... Arguments>
void launch(Kernel kernel, const char* name, const SoftmaxPlan& plan, std::int64_t rows, std::int64_t shared_bytes,
            const Arguments&... arguments) {
  cuda::Launch launch(plan.cluster, dim3(plan.threads, plan.rows), shared_bytes);
  launch.cluster(plan.cluster);
  std::int64_t groups = (rows + plan.rows - 1) / plan.rows;
  if (plan.held == Held::streamed) {
    groups = std::min<std::int64_t>(groups, launch.resident(kernel));
  }
  launch.grid(rows::grid_of(groups * plan.cluster)).run(kernel, name, arguments...);
}

/// Runs the kernel for entry kIndex of kSoftmaxLayouts.
template <int kIndex, class Direction>
void run_layout(const typename Direction::Inputs& m, std::int64_t rows, std::int64_t columns,
                const Direction& direction, const SoftmaxPlan& plan) {
  using L = Layout<typename Direction::T, kIndex>;
  if constexpr (L::kEntry.held == Held::streamed) {
    const std::int64_t row_bytes = std::int64_t{plan.threads} * plan.elements * sizeof(typename Direction::T);
    launch(softmax_streamed<Direction, L>, "softmax_streamed", plan, rows, plan.ahead * row_bytes, m, rows, columns,
           direction, plan);
  } else {
    launch(softmax_held<Direction, L>, Direction::kBackward ? "softmax_backward_held" : "softmax_held", plan, rows, 0,
           m, rows, columns, direction, plan);
  }
}

template <class Direction>
void run_elements(const typename Direction::Inputs& m, std::int64_t rows, std::int64_t columns,
                  const Direction& direction, const SoftmaxPlan& plan) {
  constexpr bool kBackward = Direction::kBackward;
  const auto run = [&]<Group kGroup, bool kStaged>(const char* name) {
    const std::int64_t bytes = kStaged ? m.kInputs * staged_bytes<typename Direction::T>(plan.slab) : 0;
    launch(softmax_elements<Direction, kGroup, kStaged>, name, plan, rows, bytes, m, rows, columns, direction, plan);
  };
  const char* const staged = kBackward ? "softmax_backward_staged" : "softmax_staged";
  if (plan.held == Held::nowhere) {
    run.template operator()<Group::block, false>(kBackward ? "softmax_backward_looped" : "softmax_looped");
  } else if (plan.group == Group::block) {
    run.template operator()<Group::block, true>(staged);
  } else if constexpr (sizeof(typename Direction::T) < 8) {
    run.template operator()<Group::cluster, true>(staged);
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
    return run_elements(m, rows, columns, direction, plan);
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

template <class T, Kind kKind>
void forward(const T* x, T* y, std::int64_t rows, std::int64_t columns, const SoftmaxRule<T, kKind>& rule) {
  run({{x}, y}, rows, columns, Forward<T, kKind>{rule});
}

template <class T, Kind kKind>
void backward(const T* y, const T* dy, T* dx, std::int64_t rows, std::int64_t columns,
              const SoftmaxRule<T, kKind>& rule) {
  run({{y, dy}, dx}, rows, columns, Backward<T, kKind>{rule});
}

}  // namespace mica::kernels::softmax_rows
