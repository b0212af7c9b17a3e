#pragma once

// Finds shapes for which a norm runs each of its CUDA kernels. It asks the plans, so that a change of a plan leaves no
// kernel without a test.

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "norm_grid.h"
#include "tests/launches.h"
#include <mica/core/rng.h>
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
  using kernels::rows::Group;
  using kernels::rows::Schedule;
  const char* const kind = p.shape.group == Group::cluster       ? "cluster"
                           : p.schedule == Schedule::persistent  ? "persistent"
                           : p.schedule == Schedule::single_wave ? "single_wave"
                           : p.shape.group == Group::block       ? "block"
                                                                 : "warp";
  const std::vector<int> arguments = {p.pack, static_cast<int>(p.shape.group), p.shape.lanes, p.shape.packs,
                                      static_cast<int>(p.schedule)};
  switch (p.kernel) {
    case kernels::NormForwardPlan::Kernel::short_rows: return {"norm_forward_short_kernel", arguments};
    case kernels::NormForwardPlan::Kernel::in_registers:
      return {fmt::format("norm_forward_registers_kernel<{}>", kind), arguments};
    case kernels::NormForwardPlan::Kernel::looped: break;
  }
  return {"norm_forward_looped_kernel", {}};
}

inline NormKernel kernel_of(const kernels::norm_cuda::NormBackwardPlan& p,
                            const kernels::norm_cuda::RegisterLayout& layout) {
  using enum kernels::norm_cuda::NormBackwardKernel;
  const auto& s = p.stream;
  switch (p.kernel) {
    case streamed:
      return {"norm_backward_stream_kernel",
              {p.pack, p.shape.lanes, p.shape.depth, p.shape.packs, static_cast<int>(p.shape.group), s.cluster}};
    case in_registers: return {"norm_backward_registers_kernel", {p.pack, layout.threads, layout.elements}};
    case looped:
    case none: break;
  }
  return {"norm_backward_looped_kernel", {}};
}

struct NormKernelCase {
  NormCase shape;
  NormKernel kernel;
};

/// The smallest shape for each kernel, preferably one of at most `most` elements for which the kernel's threads reuse
/// shared memory.
class SmallestShapes {
 public:
  explicit SmallestShapes(std::int64_t most) : most_(most) {}

  void offer(const NormKernel& kernel, const NormCase& shape, bool reuses) {
    reuses = reuses && shape.rows * shape.columns <= most_;
    const auto [it, is_new] = best_.try_emplace(kernel, Best{shape, reuses});
    const NormCase& other = it->second.shape;
    const bool smaller = shape.rows * shape.columns < other.rows * other.columns;
    if (!is_new && (reuses == it->second.reuses ? smaller : reuses)) {
      it->second = {shape, reuses};
    }
  }

  std::vector<NormKernelCase> cases() const {
    std::vector<NormKernelCase> cases;
    for (const auto& [kernel, found] : best_) {
      cases.push_back({found.shape, kernel});
    }
    return cases;
  }

 private:
  struct Best {
    NormCase shape;
    bool reuses;
  };
  std::int64_t most_;
  std::map<NormKernel, Best> best_;
};

inline bool is_packed(const NormCase& c) { return c.columns * static_cast<std::int64_t>(size_of(c.dtype)) % 16 == 0; }

inline void offer_forward(SmallestShapes& smallest, const NormCase& c, bool centered, bool adds) {
  const int multiprocessors = gpu_multiprocessors();
  const kernels::NormForwardPlan p = kernels::norm_forward_plan({.rows = c.rows,
                                                                 .columns = c.columns,
                                                                 .x = c.dtype,
                                                                 .weight = c.weight_dtype,
                                                                 .parameters = true,
                                                                 .centered = centered,
                                                                 .adds = adds,
                                                                 .aligned = is_packed(c),
                                                                 .clusters = gpu_has_clusters(),
                                                                 .multiprocessors = multiprocessors});
  if (adds && p.kernel != kernels::NormForwardPlan::Kernel::in_registers) {
    return;  // such sums take more than one kernel
  }
  // Persistent blocks have up to 1024 threads on a multiprocessor.
  const bool two_rows = c.rows * p.threads * p.blocks >= 2 * 1024 * multiprocessors;
  smallest.offer(kernel_of(p), c, p.schedule != kernels::rows::Schedule::persistent || two_rows);
}

inline void offer_backward(SmallestShapes& smallest, const NormCase& c, bool centered) {
  using namespace kernels::norm_cuda;
  const int size = static_cast<int>(size_of(c.dtype));
  const NormBackwardPlan p = plan_norm_backward({.rows = c.rows,
                                                 .columns = c.columns,
                                                 .size = size,
                                                 .weight_size = static_cast<int>(size_of(c.weight_dtype)),
                                                 .centered = centered,
                                                 .packs = is_packed(c),
                                                 .clusters = gpu_has_clusters()});
  const RegisterLayout layout = register_layout(c.columns, size, p.pack > 1, centered);
  const bool reuses = p.kernel == NormBackwardKernel::streamed ? c.rows > kExchanges * p.clusters * p.stream.groups
                                                               : c.rows > p.partial_rows * layout.rows();
  smallest.offer(kernel_of(p, layout), c, reuses);
}

/// For each kernel that layer_norm (`centered`) or rms_norm can run on a GPU with x and weight of these dtypes, the
/// smallest shape with which it runs. Where possible, there are enough rows for its threads to reuse shared memory. A
/// third of the kernels need more than 2 million elements for that. Such cases take seconds on the CPU, which computes
/// what is expected, so only the pairs of dtypes with float32 weights and x of float32 or bfloat16 have them.
/// `adds`: the same for the forward of add_layer_norm or add_rms_norm. On the CPU, a few lengths, without kernels.
inline std::vector<NormKernelCase> norm_kernel_cases(Device device, const std::pair<DType, DType>& types, bool centered,
                                                     bool adds = false) {
  if (device.is_cpu()) {
    std::vector<NormKernelCase> cases;
    for (const std::int64_t columns : {7, 64, 100, 500, 768, 1000, 4005, 4096}) {
      cases.push_back({{types.first, types.second, 9, columns}, {}});
    }
    return cases;
  }
  constexpr std::int64_t kMostElements = 16 << 20;
  const auto next = [](std::int64_t n, double factor) {
    return std::max(n + 1, static_cast<std::int64_t>(n * factor));
  };
  const bool large = types.second == float32 && types.first != float16;
  SmallestShapes smallest(large ? kMostElements : 2 << 20);
  for (std::int64_t n = 1; n < 300'000; n = next(n, 1.04)) {
    for (const std::int64_t unit : {1, 2, 8, 64}) {
      const std::int64_t columns = (n + unit - 1) / unit * unit;
      for (std::int64_t rows = 1; rows * columns <= kMostElements; rows = next(rows, 1.25)) {
        const NormCase c{types.first, types.second, rows, columns};
        offer_forward(smallest, c, centered, adds);
        if (!adds) {
          offer_backward(smallest, c, centered);
        }
      }
    }
  }
  return smallest.cases();
}

/// Calls expect_matches(inputs, p, what) for each kernel of the forward of add_layer_norm (`centered`) or add_rms_norm,
/// without and with dropout, and expects that the kernel was launched. `make_inputs` takes a NormCase and a Device.
template <class MakeInputs, class ExpectMatches>
void expect_each_sum_kernel(const std::pair<DType, DType>& types, bool centered, const MakeInputs& make_inputs,
                            const ExpectMatches& expect_matches) {
  if (!cuda_available() || types.first == float64) {
    GTEST_SKIP() << "there are only CUDA kernels, and none for float64";
  }
  manual_seed(6);
  const Device device = Device::cuda();
  for (const auto& [c, kernel] : norm_kernel_cases(device, types, centered, /*adds=*/true)) {
    const auto in = make_inputs(c, device);
    for (const double p : {0.0, 0.3}) {
      const cuda::LaunchRecord record;
      expect_matches(in, p, fmt::format("{}, p {}", c.name(), p));
      expect_launched(record, device, {kernel.name.c_str()}, c.name());
    }
    if (testing::Test::HasFailure()) {
      return;
    }
  }
}

}  // namespace mica::testing_support
