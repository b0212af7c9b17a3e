#include <mica/ops/softmax/detail/softmax_plan.h>

namespace mica::kernels {

namespace {

using held::Held;
using held::kMostTeamThreads;
using held::RowPlan;
using held::Team;

constexpr int kWarp = 32;
constexpr std::int64_t kSlabUnit = 64;  // columns

// Bytes of shared memory for which three, two or one blocks fit on a multiprocessor.
constexpr int kSharedBytes[] = {73 << 10, 110 << 10, 220 << 10};
// Of a matrix, of a thread, if a block has fewer than the most threads.
constexpr int kStagedBytes = 256;
constexpr int kStagedBytesBackward = 128;

std::int64_t round_up(std::int64_t n, std::int64_t unit) { return (n + unit - 1) / unit * unit; }

/// The fewest elements, of those that kernels are made for, that are enough for a thread; 0: none.
int elements_for(std::int64_t columns, int threads, int fewest, int most) {
  for (const int elements : {8, 16, 24, 32}) {
    if (elements >= fewest && elements <= most && std::int64_t{threads} * elements >= columns) {
      return elements;
    }
  }
  return 0;
}

/// The threads of a block that share so many columns: with `elements` each.
int threads_for(std::int64_t columns, int elements) {
  return static_cast<int>(round_up(columns, std::int64_t{kWarp} * elements) / elements);
}

/// In the registers of a warp or of some of its lanes; if aligned, also of a block or a cluster.
RowPlan plan_registers(const SoftmaxProblem& problem, bool aligned) {
  const std::int64_t n = problem.columns;
  const bool narrow = problem.element_size == 2;
  RowPlan plan;
  plan.held = aligned ? Held::registers : Held::staged_registers;
  plan.pack = aligned ? 16 / problem.element_size : narrow ? 2 : 1;
  plan.packed = narrow && !aligned;
  plan.slab = static_cast<int>(std::min<std::int64_t>(n, 1 << 30));
  const int most_in_warp = problem.element_size == 8 ? 16 : 32;
  if (const int in_lane = elements_for(n, held::kTeamLanes, 8, most_in_warp)) {
    plan.team = Team::lanes;
    plan.elements = in_lane == 24 ? 32 : in_lane;
    plan.threads = held::kTeamLanes;
    plan.rows = held::kWarpRows * kWarp / held::kTeamLanes;
    return plan;
  }
  if (const int in_warp = elements_for(n, kWarp, 16, most_in_warp)) {
    plan.team = Team::warp;
    plan.elements = in_warp;
    plan.threads = kWarp;
    plan.rows = held::kWarpRows;
    return plan;
  }
  if (!aligned) {
    return {};
  }
  constexpr std::int64_t kSlab = std::int64_t{kMostTeamThreads} * 32;
  // Two matrices of wide elements fill the registers. Where rows are short enough, two blocks fit on a multiprocessor,
  // so that one computes while the other loads.
  const bool wide = problem.element_size == 4 && problem.backward;
  const int most = wide && n <= kSlab / 2 ? 16 : 32;
  if (n <= kSlab) {
    // As few threads without elements as possible.
    const int fewer = wide ? most : 24;
    const int with_most = threads_for(n, most);
    const int with_fewer = threads_for(n, fewer);
    const bool better = with_fewer <= kMostTeamThreads && with_fewer * fewer < with_most * most;
    plan.team = Team::block;
    plan.elements = better ? fewer : most;
    plan.threads = better ? with_fewer : with_most;
    plan.packed = narrow && !problem.backward && n > kSlab / 2;
    return plan;
  }
  for (int blocks = 2; problem.clusters && blocks <= held::kMostCluster; blocks *= 2) {
    const std::int64_t slab = round_up((n + blocks - 1) / blocks, kSlabUnit);
    if (slab <= kSlab) {
      plan.team = Team::cluster;
      plan.elements = most;
      plan.threads = threads_for(slab, most);
      plan.packed = narrow && !problem.backward;
      plan.cluster = blocks;
      plan.slab = static_cast<int>(slab);
      return plan;
    }
  }
  return {};
}

/// In the shared memory of a block or a cluster.
RowPlan plan_shared_memory(const SoftmaxProblem& problem) {
  const std::int64_t n = problem.columns;
  const int matrices = problem.backward ? 2 : 1;
  const int most_blocks = problem.clusters && problem.element_size < 8 ? held::kMostCluster : 1;
  for (const int bytes : kSharedBytes) {
    for (int blocks = 1; blocks <= most_blocks; blocks *= 2) {
      const std::int64_t slab = blocks == 1 ? n : round_up((n + blocks - 1) / blocks, kSlabUnit);
      if ((slab * problem.element_size + 32) * matrices <= bytes) {
        RowPlan plan;
        plan.held = Held::shared_memory;
        plan.team = blocks == 1 ? Team::block : Team::cluster;
        plan.threads = std::min(
            kMostTeamThreads,
            threads_for(slab, (problem.backward ? kStagedBytesBackward : kStagedBytes) / problem.element_size));
        plan.cluster = blocks;
        plan.slab = static_cast<int>(slab);
        return plan;
      }
    }
  }
  return {};
}

}  // namespace

RowPlan plan_softmax(const SoftmaxProblem& problem) {
  const bool aligned =
      problem.aligned && problem.element_size < 8 && problem.columns % (16 / problem.element_size) == 0;
  const RowPlan plan = plan_registers(problem, aligned);
  return plan.held != Held::nowhere ? plan : plan_shared_memory(problem);
}

}  // namespace mica::kernels
