#pragma once

// Softmax of the rows of a matrix (rows, columns), by the kernel that plan_softmax() chooses.

#include <algorithm>
#include <iterator>
#include <type_traits>
#include <utility>

#include <mica/core/cuda/launch.h>
#include <mica/ops/softmax/detail/softmax_held_cuda.cuh>
#include <mica/ops/softmax/detail/softmax_looped_cuda.cuh>
#include <mica/ops/softmax/detail/softmax_plan.h>
#include <mica/ops/softmax/detail/softmax_staged_cuda.cuh>
#include <mica/ops/softmax/detail/softmax_streamed_cuda.cuh>

namespace mica::kernels::softmax_rows {

using held::Held;

/// Whether all pointers have the same offset from a multiple of 16 bytes.
template <class... Pointers>
bool same_phase(const void* first, const Pointers*... others) {
  return ((reinterpret_cast<std::uintptr_t>(first) % 16 == reinterpret_cast<std::uintptr_t>(others) % 16) && ...);
}

// The tables of LaneSplit as types, with index sequences over them. With nvcc and recent GCC, an index sequence whose
// length depends on a template parameter does not compile.
struct SplitsOfPacks {
  static constexpr auto& of = kSplitsOfPacks;
  using Numbers = std::make_index_sequence<std::size(of)>;
};
struct SplitsOfElements {
  static constexpr auto& of = kSplitsOfElements;
  using Numbers = std::make_index_sequence<std::size(of)>;
};

/// Calls f.operator()<L>() with the HeldLayout of a plan for rows in registers.
template <class T, class Rule, bool kBackward, class F>
void with_layout(const RowPlan& plan, const F& f) {
  constexpr int kUnit = 16 / sizeof(T);
  constexpr bool kNarrow = sizeof(T) == 2;
  const auto by_lanes = [&]<int V, class Splits, std::size_t... I>(Splits, std::index_sequence<I...>) {
    ((plan.threads == Splits::of[I].lanes && plan.elements == Splits::of[I].elements &&
      (f.template operator()<HeldLayout<Team::warp, V, Splits::of[I].elements, false, Splits::of[I].lanes>>(), true)) ||
     ...);
  };
  const auto by_warps = [&]<Team kTeam, int V, bool kPacked, int... kElements>() {
    ((plan.elements == kElements && (f.template operator()<HeldLayout<kTeam, V, kElements, kPacked>>(), true)) || ...);
  };
  constexpr int kFewer = kNarrow || !kBackward ? 24 : 16;  // the alternative to 32 elements per thread of a block
  if (plan.team == Team::warp && plan.pack == 1) {
    by_lanes.template operator()<1>(SplitsOfElements{}, SplitsOfElements::Numbers{});
  } else if constexpr (sizeof(T) == 8) {
    return;  // longer rows are in shared memory
  } else if (plan.team == Team::warp) {
    by_lanes.template operator()<kUnit>(SplitsOfPacks{}, SplitsOfPacks::Numbers{});
  } else if (plan.team == Team::cluster) {
    using L = HeldLayout<Team::cluster, kUnit, 32, kNarrow && !kBackward>;
    if constexpr (!kNarrow && kBackward && !Rule::kMasked) {
      if (plan.threads <= kMostThreadsOfTwo) {
        return f.template operator()<BoundedLayout<L, kMostThreadsOfTwo, 2>>();
      }
    }
    f.template operator()<L>();
  } else if (!plan.packed) {
    by_warps.template operator()<Team::block, kUnit, false, kFewer, 32>();
  } else if constexpr (kNarrow && !kBackward) {
    by_warps.template operator()<Team::block, kUnit, true, kFewer, 32>();
  }
}

template <class Kernel, class... Arguments>
void launch(Kernel kernel, const char* name, const RowPlan& plan, std::int64_t rows, std::int64_t shared_bytes,
            const Arguments&... arguments) {
  const std::int64_t blocks = (rows + plan.rows - 1) / plan.rows * plan.cluster;
  cuda::Launch(rows::grid_of(blocks), dim3(plan.threads, plan.rows), shared_bytes)
      .cluster(plan.cluster)
      .run(kernel, name, arguments...);
}

/// Launches as many clusters as the GPU runs at a time. Each of them processes row after row.
template <class Kernel, class... Arguments>
void launch_streamed(Kernel kernel, const char* name, const RowPlan& plan, std::int64_t rows, std::int64_t shared_bytes,
                     const Arguments&... arguments) {
  cuda::Launch launch(plan.cluster, plan.threads, shared_bytes);
  launch.cluster(plan.cluster);
  const auto clusters = std::min<std::int64_t>(rows, launch.resident(kernel));
  launch.grid(static_cast<unsigned>(clusters * plan.cluster)).run(kernel, name, arguments...);
}

template <class T, Kind kKind>
void forward(const T* x, T* y, std::int64_t rows, std::int64_t columns, const SoftmaxRule<T, kKind>& rule) {
  using Rule = SoftmaxRule<T, kKind>;
  const RowPlan plan = plan_softmax({.columns = columns,
                                     .element_size = sizeof(T),
                                     .alignment = rows::alignment_of(x, y),
                                     .clusters = cuda::device_has_clusters(),
                                     .backward = false,
                                     .masked = Rule::kMasked});
  const auto bytes = [](std::int64_t count) { return StagedPiece<T>::bytes(static_cast<int>(count)); };
  if (plan.held == Held::nowhere || (plan.held == Held::shared_memory && !same_phase(x, y))) {
    softmax_looped<<<rows::grid_of(rows), kLoopThreads, 0, cuda::current_stream()>>>(x, y, columns, rule);
    cuda::check_launch("softmax_looped");
  } else if (plan.held == Held::shared_memory) {
    const auto run = [&](auto kernel, const char* name) {
      launch(kernel, name, plan, rows, bytes(plan.slab), x, y, rows, columns, rule, plan);
    };
    if constexpr (sizeof(T) < 8) {
      if (plan.team == Team::cluster) {
        return run(softmax_staged<T, Team::cluster, Rule>, "softmax_staged<cluster>");
      }
    }
    run(softmax_staged<T, Team::block, Rule>, "softmax_staged<block>");
  } else if (plan.held == Held::streamed) {
    if constexpr (sizeof(T) < 8 && !Rule::kMasked) {
      const auto run = [&]<int kElements>() {
        using L = HeldLayout<Team::cluster, 16 / sizeof(T), kElements, false>;
        const std::int64_t row_bytes = std::int64_t{plan.threads} * kElements * sizeof(T);
        launch_streamed(softmax_streamed<T, L, Rule>, "softmax_streamed", plan, rows, plan.ahead * row_bytes, x, y,
                        rows, columns, rule, plan);
      };
      if constexpr (sizeof(T) == 2) {
        if (plan.elements == 40) {
          return run.template operator()<40>();
        }
      }
      run.template operator()<32>();
    }
  } else {
    with_layout<T, Rule, false>(plan, [&]<class L>() {
      const char* const name = L::kTeam == Team::cluster ? "softmax_held<cluster>" : "softmax_held";
      launch(softmax_held<T, L, Rule>, name, plan, rows, 0, x, y, rows, columns, rule, plan);
    });
  }
}

template <class T, Kind kKind>
void backward(const T* y, const T* dy, T* dx, std::int64_t rows, std::int64_t columns,
              const SoftmaxRule<T, kKind>& rule) {
  using Rule = SoftmaxRule<T, kKind>;
  const RowPlan plan = plan_softmax({.columns = columns,
                                     .element_size = sizeof(T),
                                     .alignment = rows::alignment_of(y, dy, dx),
                                     .clusters = cuda::device_has_clusters(),
                                     .backward = true,
                                     .masked = Rule::kMasked});
  const auto bytes = [](std::int64_t count) { return 2 * StagedPiece<T>::bytes(static_cast<int>(count)); };
  if (plan.held == Held::nowhere || (plan.held == Held::shared_memory && !same_phase(y, dy, dx))) {
    softmax_backward_looped<<<rows::grid_of(rows), kLoopThreads, 0, cuda::current_stream()>>>(y, dy, dx, columns, rule);
    cuda::check_launch("softmax_backward_looped");
  } else if (plan.held == Held::shared_memory) {
    const auto run = [&](auto kernel, const char* name) {
      launch(kernel, name, plan, rows, bytes(plan.slab), y, dy, dx, rows, columns, rule, plan);
    };
    if constexpr (sizeof(T) < 8) {
      if (plan.team == Team::cluster) {
        return run(softmax_backward_staged<T, Team::cluster, Rule>, "softmax_backward_staged<cluster>");
      }
    }
    run(softmax_backward_staged<T, Team::block, Rule>, "softmax_backward_staged<block>");
  } else {
    with_layout<T, Rule, true>(plan, [&]<class L>() {
      const char* const name = L::kTeam == Team::cluster ? "softmax_backward_held<cluster>" : "softmax_backward_held";
      launch(softmax_backward_held<T, L, Rule>, name, plan, rows, 0, y, dy, dx, rows, columns, rule, plan);
    });
  }
}

}  // namespace mica::kernels::softmax_rows
