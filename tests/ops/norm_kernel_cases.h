#pragma once

// Finds shapes for which a norm runs each of its CUDA kernels. It asks the plans, so that a change of a plan leaves no
// kernel without a test.

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "norm_grid.h"
#include "tests/launches.h"
#include <mica/core/cuda/device.h>
#include <mica/ops/norm/detail/norm_backward_plan.h>
#include <mica/ops/norm/detail/norm_forward_plan.h>

namespace mica::testing_support {

/// An instantiation of a kernel's template: two shapes with equal ones run the same code.
struct NormKernel {
  std::string name;            // as in cuda::LaunchRecord
  std::vector<int> arguments;  // whatever tells its instantiations apart

  auto operator<=>(const NormKernel&) const = default;
};

inline NormKernel kernel_of(const kernels::NormForwardPlan& p) {
  using kernels::Team;
  const bool warps = p.team == Team::block || p.team == Team::cluster;
  const char* const kind = p.edges                   ? "edges"
                           : p.team == Team::cluster ? "cluster"
                           : p.stays                 ? "stays"
                           : p.few                   ? "few"
                           : p.team == Team::block   ? "block"
                                                     : "warp";
  switch (p.kernel) {
    case kernels::NormForwardPlan::Kernel::short_rows:
      return {"norm_forward_short_kernel", {p.pack, p.packs, p.threads, p.few}};
    case kernels::NormForwardPlan::Kernel::held:
      return {fmt::format("norm_forward_held_kernel<{}>", kind),
              {p.pack, p.packs, static_cast<int>(p.team), warps ? 0 : p.threads, p.blocks, p.few}};
    case kernels::NormForwardPlan::Kernel::looped: break;
  }
  return {"norm_forward_looped_kernel", {p.pack}};
}

inline NormKernel kernel_of(const kernels::norm_cuda::NormBackwardPlan& p,
                            const kernels::norm_cuda::HeldLayout& layout) {
  using enum kernels::norm_cuda::NormBackwardKernel;
  const auto& s = p.stream;
  switch (p.kernel) {
    case streamed:
      return {"norm_backward_stream_kernel",
              {p.pack, p.lanes, p.chunks, p.depth, s.packs, static_cast<int>(s.team()), s.cluster, s.sector, s.sorted}};
    case held: return {"norm_backward_held_kernel", {p.pack, layout.threads, layout.elements}};
    case looped:
    case none: break;
  }
  return {"norm_backward_looped_kernel", {p.pack}};
}

struct NormKernelCase {
  NormCase shape;
  NormKernel kernel;
};

/// For each kernel that layer_norm (`centered`) or rms_norm can run on this GPU with x and weight of these dtypes, the
/// smallest shape with which it runs. Where possible, there are enough rows for its threads to reuse shared memory.
/// `adds`: the same for the forward of add_layer_norm or add_rms_norm.
inline std::vector<NormKernelCase> norm_kernel_cases(const std::pair<DType, DType>& types, bool centered,
                                                     bool adds = false) {
  const auto [x, weight] = types;
  const int size = static_cast<int>(size_of(x));
  const bool clusters = gpu_has_clusters();
  struct Best {
    bool reuses;
    NormCase shape;
  };
  std::map<NormKernel, Best> best;
  const auto offer = [&](const NormKernel& kernel, bool reuses, const NormCase& shape) {
    const auto [it, is_new] = best.try_emplace(kernel, Best{reuses, shape});
    const NormCase& other = it->second.shape;
    const bool smaller = shape.rows * shape.columns < other.rows * other.columns;
    if (!is_new && (reuses == it->second.reuses ? smaller : reuses)) {
      it->second = {reuses, shape};
    }
  };

  const auto try_shape = [&](std::int64_t rows, std::int64_t columns) {
    const NormCase shape{x, weight, rows, columns};
    const bool packed = columns * size % 16 == 0;
    const kernels::NormForwardPlan forward =
        kernels::norm_forward_plan({.rows = rows,
                                    .columns = columns,
                                    .x = x,
                                    .weight = weight,
                                    .parameters = true,
                                    .centered = centered,
                                    .adds = adds,
                                    .packed = packed,
                                    .alignment = 16,
                                    .clusters = clusters,
                                    .multiprocessors = cuda::multiprocessor_count()});
    // Persistent blocks have up to 1024 threads on a multiprocessor.
    const bool two_rows = rows * forward.threads * forward.blocks >= 2 * 1024 * cuda::multiprocessor_count();
    if (!adds || forward.kernel == kernels::NormForwardPlan::Kernel::held) {  // other sums take more than one kernel
      offer(kernel_of(forward), !forward.stays || two_rows, shape);
    }
    if (adds) {
      return;
    }

    using namespace kernels::norm_cuda;
    const NormBackwardPlan backward = plan_norm_backward({.rows = rows,
                                                          .columns = columns,
                                                          .size = size,
                                                          .weight_size = static_cast<int>(size_of(weight)),
                                                          .centered = centered,
                                                          .packs = packed,
                                                          .alike = true,
                                                          .clusters = clusters});
    const HeldLayout layout = held_layout(columns, size, packed, centered);
    const bool streams = backward.kernel == NormBackwardKernel::streamed;
    const std::int64_t at_once = streams ? backward.teams * backward.stream.groups
                                         : std::max<std::int64_t>(backward.partial_rows, 1) * layout.rows();
    offer(kernel_of(backward, layout), rows > (streams ? kMeetings : 1) * at_once, shape);
  };
  const auto next = [](std::int64_t n, double factor) {
    return std::max(n + 1, static_cast<std::int64_t>(n * factor));
  };
  constexpr std::int64_t kMostElements = 16 << 20;
  for (std::int64_t n = 1; n < 300'000; n = next(n, 1.04)) {
    for (const std::int64_t unit : {1, 2, 8, 64}) {
      const std::int64_t columns = (n + unit - 1) / unit * unit;
      for (std::int64_t rows = 1; rows * columns <= kMostElements; rows = next(rows, 1.25)) {
        try_shape(rows, columns);
      }
    }
  }
  std::vector<NormKernelCase> cases;
  for (const auto& [kernel, found] : best) {
    cases.push_back({found.shape, kernel});
  }
  return cases;
}

}  // namespace mica::testing_support
