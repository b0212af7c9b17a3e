#pragma once

// Softmax of the rows of a matrix (rows, columns), by the kernel that plan_softmax() says.

#include <algorithm>
#include <type_traits>
#include <utility>

#include <mica/core/cuda/launch.h>
#include <mica/ops/softmax/detail/softmax_held_cuda.cuh>
#include <mica/ops/softmax/detail/softmax_looped_cuda.cuh>
#include <mica/ops/softmax/detail/softmax_plan.h>
#include <mica/ops/softmax/detail/softmax_staged_cuda.cuh>

namespace mica::kernels::softmax_rows {

using held::Held;

/// Results larger than this leave the L2 cache before anybody reads them. Then the inputs are told to stay in it
/// longest: what is written leaves in the order in which it came, which the memory takes faster.
constexpr std::int64_t kLargeResult = std::int64_t{40} << 20;  // bytes

/// Elements after rows in shared memory that are read, but do not count.
constexpr int kPast = 1024 + 8;

inline bool is_aligned(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }

/// Whether elements with the same number lie at the same distance from a unit of 16 bytes.
template <class... Pointers>
bool same_phase(const void* first, const Pointers*... others) {
  return ((reinterpret_cast<std::uintptr_t>(first) % 16 == reinterpret_cast<std::uintptr_t>(others) % 16) && ...);
}

template <int... kElements>
using Elements = std::integer_sequence<int, kElements...>;

/// Calls f.operator()<L>() with the HeldLayout of a plan for rows in registers.
template <class T, bool kBackward, class F>
void with_layout(const RowPlan& plan, const F& f) {
  constexpr bool kDouble = sizeof(T) == 8;
  constexpr bool kNarrow = sizeof(T) == 2;
  const auto with = [&]<Team kTeam, int V, bool kPacked, bool kStaged, int... kElements>(Elements<kElements...>) {
    ((plan.elements == kElements &&
      (f.template operator()<HeldLayout<kTeam, V, kElements, kPacked, kStaged>>(), true)) ||
     ...);
  };
  using OfLane = std::conditional_t<kDouble, Elements<8, 16>, Elements<8, 16, 32>>;
  using OfWarp = std::conditional_t<kDouble, Elements<16>, Elements<16, 24, 32>>;
  using OfBlock = std::conditional_t<sizeof(T) == 4 && kBackward, Elements<16, 32>, Elements<24, 32>>;
  constexpr int kWord = held::kInWord<T>;
  if (plan.held == Held::staged_registers) {
    if (plan.team == Team::lanes) {
      return with.template operator()<Team::lanes, kWord, kNarrow, true>(OfLane{});
    }
    return with.template operator()<Team::warp, kWord, kNarrow, true>(OfWarp{});
  }
  if constexpr (!kDouble) {
    constexpr int kUnit = 16 / sizeof(T);
    if (plan.team == Team::lanes) {
      with.template operator()<Team::lanes, kUnit, false, false>(OfLane{});
    } else if (plan.team == Team::warp) {
      with.template operator()<Team::warp, kUnit, false, false>(OfWarp{});
    } else if (plan.team == Team::cluster) {
      with.template operator()<Team::cluster, kUnit, kNarrow && !kBackward, false>(Elements<32>{});
    } else if (!plan.packed) {
      with.template operator()<Team::block, kUnit, false, false>(OfBlock{});
    } else if constexpr (kNarrow && !kBackward) {
      with.template operator()<Team::block, kUnit, true, false>(OfBlock{});
    }
  }
}

/// The names of launches, for records and profiles.
struct LaunchNames {
  const char* held;
  const char* held_cluster;
  const char* held_staged;
  const char* staged_block;
  const char* staged_cluster;

  const char* of(const RowPlan& plan) const {
    switch (plan.held) {
      case Held::registers: return plan.team == Team::cluster ? held_cluster : held;
      case Held::staged_registers: return held_staged;
      default: return plan.team == Team::cluster ? staged_cluster : staged_block;
    }
  }
};
constexpr LaunchNames kForwardNames{"softmax_held", "softmax_held<cluster>", "softmax_held<staged>",
                                    "softmax_staged<block>", "softmax_staged<cluster>"};
constexpr LaunchNames kBackwardNames{"softmax_backward_held", "softmax_backward_held<cluster>",
                                     "softmax_backward_held<staged>", "softmax_backward_staged<block>",
                                     "softmax_backward_staged<cluster>"};

template <class Kernel, class... Arguments>
void launch(Kernel kernel, const char* name, const RowPlan& plan, std::int64_t rows, std::int64_t shared_bytes,
            const Arguments&... arguments) {
  if (shared_bytes > (48 << 10)) {
    cuda::check(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
        "cudaFuncSetAttribute");
  }
  if (plan.cluster > 8) {
    cuda::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
                "cudaFuncSetAttribute");
  }
  const std::int64_t blocks = (rows + plan.rows - 1) / plan.rows * plan.cluster;
  cuda::Launch(rows::grid_of(blocks), dim3(plan.threads, plan.rows), shared_bytes)
      .cluster(plan.cluster)
      .run(kernel, name, arguments...);
}

template <class T, Kind kKind>
void forward(const T* x, T* y, std::int64_t rows, std::int64_t columns, const SoftmaxRule<T, kKind>& rule) {
  using Rule = SoftmaxRule<T, kKind>;
  const RowPlan plan = plan_softmax({.columns = columns,
                                     .element_size = sizeof(T),
                                     .aligned = is_aligned(x) && is_aligned(y),
                                     .clusters = cuda::device_has_clusters(),
                                     .backward = false});
  const bool large = rows * columns * static_cast<std::int64_t>(sizeof(T)) > kLargeResult;
  const auto bytes = [](std::int64_t count) { return StagedPiece<T>::bytes(static_cast<int>(count)); };
  if (plan.held == Held::nowhere || !same_phase(x, y)) {
    softmax_looped<<<rows::grid_of(rows), kLoopThreads, 0, cuda::current_stream()>>>(x, y, columns, rule);
    cuda::check_launch("softmax_looped");
  } else if (plan.held == Held::shared_memory) {
    const auto run = [&](auto kernel) {
      launch(kernel, kForwardNames.of(plan), plan, rows, bytes(plan.slab), x, y, rows, columns, rule, plan);
    };
    if constexpr (sizeof(T) < 8) {
      if (plan.team == Team::cluster) {
        return run(softmax_staged<T, Team::cluster, Rule>);
      }
    }
    run(softmax_staged<T, Team::block, Rule>);
  } else {
    const int staged = plan.held == Held::staged_registers ? bytes(plan.rows * columns + kPast) : 0;
    with_layout<T, false>(plan, [&]<class L>() {
      launch(softmax_held<T, L, Rule>, kForwardNames.of(plan), plan, rows, staged, x, y, rows, columns, rule, plan,
             large);
    });
  }
}

template <class T, Kind kKind>
void backward(const T* y, const T* dy, T* dx, std::int64_t rows, std::int64_t columns,
              const SoftmaxRule<T, kKind>& rule) {
  using Rule = SoftmaxRule<T, kKind>;
  const RowPlan plan = plan_softmax({.columns = columns,
                                     .element_size = sizeof(T),
                                     .aligned = is_aligned(y) && is_aligned(dy) && is_aligned(dx),
                                     .clusters = cuda::device_has_clusters(),
                                     .backward = true});
  const bool large = rows * columns * static_cast<std::int64_t>(sizeof(T)) > kLargeResult;
  const auto bytes = [](std::int64_t count) { return 2 * StagedPiece<T>::bytes(static_cast<int>(count)); };
  if (plan.held == Held::nowhere || !same_phase(y, dy, dx)) {
    softmax_backward_looped<<<rows::grid_of(rows), kLoopThreads, 0, cuda::current_stream()>>>(y, dy, dx, columns, rule);
    cuda::check_launch("softmax_backward_looped");
  } else if (plan.held == Held::shared_memory) {
    const auto run = [&](auto kernel) {
      launch(kernel, kBackwardNames.of(plan), plan, rows, bytes(plan.slab), y, dy, dx, rows, columns, rule, plan);
    };
    if constexpr (sizeof(T) < 8) {
      if (plan.team == Team::cluster) {
        return run(softmax_backward_staged<T, Team::cluster, Rule>);
      }
    }
    run(softmax_backward_staged<T, Team::block, Rule>);
  } else {
    const int staged = plan.held == Held::staged_registers ? bytes(plan.rows * columns + kPast) : 0;
    with_layout<T, true>(plan, [&]<class L>() {
      launch(softmax_backward_held<T, L, Rule>, kBackwardNames.of(plan), plan, rows, staged, y, dy, dx, rows, columns,
             rule, plan, large);
    });
  }
}

}  // namespace mica::kernels::softmax_rows
