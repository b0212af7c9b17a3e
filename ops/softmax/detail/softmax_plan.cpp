#include <algorithm>
#include <iterator>
#include <limits>

#include <mica/ops/softmax/detail/softmax_plan.h>

namespace mica::kernels {

namespace {

using rows::kMostGroupThreads;

constexpr int kWarp = 32;
constexpr std::int64_t kUnusable = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kSlabUnit = 64;  // columns

// In forward, longer aligned rows are streamed. Shorter ones are faster with one row per cluster.
constexpr std::int64_t kMostColumnsInRegisters = 32768;
// Longer 16-bit rows remain packed, two elements in a register.
constexpr std::int64_t kMostUnpackedColumns = 8192;
// The longest rows of a block. In backward of 4-byte elements, clusters can also share shorter rows, since two of their
// smaller blocks fit on a multiprocessor.
constexpr std::int64_t kMostBlockColumns = 16384;
constexpr std::int64_t kMostBlockColumnsBackward = 10240;
// For rows that are processed element by element: the longest row of 8 lanes, the longest of a warp, and a block's
// elements per thread.
constexpr std::int64_t kMostLaneColumns = 128;
constexpr std::int64_t kMostWarpColumns = 512;
constexpr int kLoopedElements = 16;

std::int64_t round_up(std::int64_t n, std::int64_t unit) { return (n + unit - 1) / unit * unit; }

/// The number of threads that share `columns` columns, if each has up to `elements` of them.
int threads_for(std::int64_t columns, int elements) {
  return static_cast<int>(
      std::min<std::int64_t>(round_up(columns, std::int64_t{kWarp} * elements) / elements, kMostGroupThreads));
}

/// The cost of a plan for a row in registers; the cheapest one is used. Fewer blocks and threads are cheaper.
std::int64_t cost_of(const SoftmaxProblem& problem, const SoftmaxLayout& layout, const SoftmaxPlan& plan) {
  const bool narrow = problem.element_size == 2;
  if (layout.group == Group::warp) {
    return plan.layout;
  }
  if (layout.group == Group::block) {
    const bool packed = narrow && !problem.backward && problem.columns > kMostUnpackedColumns;
    const bool shorter = problem.element_size == 4 && problem.backward && problem.clusters && !problem.masked;
    return layout.packed == packed && problem.columns <= (shorter ? kMostBlockColumnsBackward : kMostBlockColumns)
               ? 1000 + plan.threads * layout.elements
               : kUnusable;
  }
  // 16-bit rows are streamed only by the largest blocks, since otherwise one row per cluster is faster.
  const bool streams =
      problem.columns > kMostColumnsInRegisters && (narrow ? plan.threads == kMostGroupThreads : plan.cluster >= 8);
  return layout.streamed && !streams ? kUnusable : 1'000'000 + plan.layout * 100 + plan.cluster;
}

}  // namespace

SoftmaxPlan plan_softmax(const SoftmaxProblem& problem) {
  SoftmaxPlan best{.threads = threads_for(problem.columns, kLoopedElements)};
  if (problem.columns <= kMostWarpColumns) {
    best = problem.columns <= kMostLaneColumns ? SoftmaxPlan{.threads = 8, .rows = 32}
                                               : SoftmaxPlan{.threads = kWarp, .rows = 8};
  }
  if (problem.alignment % 16 != 0 || problem.columns * problem.element_size % 16 != 0) {
    return best;
  }
  std::int64_t best_cost = kUnusable;
  for (int i = 0; i < static_cast<int>(std::size(kSoftmaxLayouts)); ++i) {
    const SoftmaxLayout& layout = kSoftmaxLayouts[i];
    const bool lanes = layout.group == Group::warp;
    const bool cluster = layout.group == Group::cluster;
    const int most_blocks = cluster ? problem.clusters ? rows::kMostCluster : 0 : 1;
    for (int blocks = cluster ? 2 : 1; blocks <= most_blocks; blocks *= 2) {
      const std::int64_t slab =
          blocks == 1 ? problem.columns : round_up((problem.columns + blocks - 1) / blocks, kSlabUnit);
      if (layout.serves(problem.element_size, problem.backward, problem.masked) &&
          slab <= std::int64_t{lanes ? layout.lanes : layout.threads} * layout.elements) {
        const SoftmaxPlan plan{.layout = i,
                               .threads = lanes ? layout.lanes : threads_for(slab, layout.elements),
                               .rows = lanes ? layout.threads / layout.lanes : 1,
                               .cluster = blocks,
                               .slab = static_cast<int>(slab)};
        if (const std::int64_t cost = cost_of(problem, layout, plan); cost < best_cost) {
          best = plan;
          best_cost = cost;
        }
      }
    }
  }
  return best;
}

}  // namespace mica::kernels
