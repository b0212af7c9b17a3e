#include <algorithm>

#include <mica/ops/softmax/detail/softmax_plan.h>

namespace mica::kernels {

namespace {

using held::Held;
using held::kMostTeamThreads;
using held::RowPlan;

constexpr int kWarp = 32;
constexpr std::int64_t kSlabUnit = 64;  // columns

// Bytes of shared memory per block with which three blocks, two blocks or one block fit on a multiprocessor.
constexpr int kSharedBytes[] = {73 << 10, 110 << 10, 220 << 10};
// Columns per thread of rows in shared memory, unless a block would then need more than kMostTeamThreads threads.
constexpr int kStagedElements = 32;

// In forward, aligned rows that are longer are streamed. Shorter ones are faster with one row per cluster.
constexpr std::int64_t kMostHeldColumns = 32768;
constexpr std::int64_t kMostAhead = 8;
// In backward of 4-byte elements, two blocks with one row each fit on a multiprocessor if rows are not longer.
constexpr std::int64_t kMostColumnsOfTwo = 10240;
// Bytes of shared memory that the blocks of a multiprocessor have, and those that a block needs for the exchange of
// sums.
constexpr std::int64_t kSharedBytesOfAll = 226 << 10;
constexpr std::int64_t kExchangeBytes = 9 << 10;  // with 1 KB that each block reserves

std::int64_t round_up(std::int64_t n, std::int64_t unit) { return (n + unit - 1) / unit * unit; }

/// The number of threads of a block that share `columns` columns, if each holds up to `elements` of them.
int threads_for(std::int64_t columns, int elements) {
  return static_cast<int>(round_up(columns, std::int64_t{kWarp} * elements) / elements);
}

/// Whether rows can be read and written in packs of 16 bytes. Doubles are read one by one.
bool has_packs(const SoftmaxProblem& problem) {
  return problem.element_size < 8 && problem.alignment % 16 == 0 && problem.columns * problem.element_size % 16 == 0;
}

/// The plan for rows in the registers of a warp, or of some of its lanes.
RowPlan plan_lanes(const SoftmaxProblem& problem) {
  const auto first_of = [&](const auto& splits, int pack) -> RowPlan {
    for (const LaneSplit& split : splits) {
      if (split.columns() >= problem.columns) {
        return {.held = Held::registers,
                .team = Team::warp,
                .pack = pack,
                .elements = split.elements,
                .threads = split.lanes,
                .rows = held::kWarpRows * kWarp / split.lanes,
                .slab = static_cast<int>(problem.columns)};
      }
    }
    return {};
  };
  return has_packs(problem) ? first_of(kSplitsOfPacks, 16 / problem.element_size) : first_of(kSplitsOfElements, 1);
}

/// The plan for rows in the registers of a block or a cluster.
RowPlan plan_registers(const SoftmaxProblem& problem) {
  const std::int64_t n = problem.columns;
  const bool narrow = problem.element_size == 2;
  if (!has_packs(problem)) {
    return {};
  }
  RowPlan plan{.held = Held::registers,
               .pack = 16 / problem.element_size,
               .slab = static_cast<int>(std::min<std::int64_t>(n, 1 << 30))};
  constexpr std::int64_t kSlab = std::int64_t{kMostTeamThreads} * 32;
  // Backward with 4-byte elements fills the registers with its two matrices. With smaller blocks, two of them fit on a
  // multiprocessor, so that one computes while the other loads.
  const bool wide = problem.element_size == 4 && problem.backward;
  const bool two = wide && problem.clusters && !problem.masked;  // not measured for masked rows
  const int most = wide && n <= kSlab / 2 ? 16 : 32;
  if (n <= (two ? kMostColumnsOfTwo : kSlab)) {
    // Of the two numbers of elements per thread, choose the one that leaves fewer threads without elements.
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
  if (!problem.clusters) {
    return {};
  }
  plan.team = Team::cluster;
  plan.elements = most;
  // Chooses the smallest cluster whose blocks need at most `most_threads` threads.
  const auto divide = [&](int most_threads) {
    for (plan.cluster = 2; plan.cluster <= held::kMostCluster; plan.cluster *= 2) {
      const std::int64_t slab = round_up((n + plan.cluster - 1) / plan.cluster, kSlabUnit);
      if (slab <= std::int64_t{most_threads} * most) {
        plan.threads = threads_for(slab, most);
        plan.slab = static_cast<int>(slab);
        return true;
      }
    }
    return false;
  };
  if (!(two && divide(kMostThreadsOfTwo)) && !divide(kMostTeamThreads)) {
    return {};
  }
  plan.packed = narrow && !problem.backward;
  return plan;
}

/// The plan for rows that stream through the shared memory of clusters of `cluster` blocks, with up to `elements`
/// columns per thread. A multiprocessor has registers for kMostTeamThreads threads, in one or more blocks.
RowPlan streamed(const SoftmaxProblem& problem, int cluster, int elements) {
  const std::int64_t slab = round_up((problem.columns + cluster - 1) / cluster, kSlabUnit);
  const int threads = threads_for(slab, elements);
  if (threads > kMostTeamThreads) {
    return {};
  }
  const std::int64_t row_bytes = std::int64_t{threads} * elements * problem.element_size;
  const std::int64_t bytes = kSharedBytesOfAll / (kMostTeamThreads / threads) - kExchangeBytes;
  return {.held = Held::streamed,
          .team = Team::cluster,
          .pack = 16 / problem.element_size,
          .elements = elements,
          .threads = threads,
          .cluster = cluster,
          .slab = static_cast<int>(slab),
          .ahead = static_cast<int>(std::clamp<std::int64_t>(bytes / row_bytes, 1, kMostAhead))};
}

/// Estimates the speed of streamed 16-bit rows, in columns per unit of time. To process its parts of one row per block,
/// a multiprocessor takes a constant time, for loads and the exchange of sums, and a time in proportion to the elements
/// of the warps on each of its four schedulers. Fitted to the times of 23 lengths on an H200.
double streamed_speed(const RowPlan& plan) {
  constexpr int kConstantTime = 100;  // in the time that a scheduler's warp takes for one element per thread
  constexpr int kSchedulers = 4;
  const int blocks = kMostTeamThreads / plan.threads;  // per multiprocessor
  const auto warps = static_cast<int>(round_up(blocks * plan.threads / kWarp, kSchedulers)) / kSchedulers;
  return static_cast<double>(persistent_blocks(plan.cluster)) * blocks * plan.slab /
         (kConstantTime + warps * plan.elements);
}

/// The plan for long rows that stream. If the fastest is slow, rows of 16 bits are faster in registers, with one row
/// per cluster.
RowPlan plan_streamed(const SoftmaxProblem& problem) {
  constexpr double kLeastSpeed = 6840;
  const bool narrow = problem.element_size == 2;
  const bool has_kernel = problem.clusters && has_packs(problem) && !problem.backward && !problem.masked &&
                          problem.columns > kMostHeldColumns;
  if (!has_kernel) {
    return {};
  }
  if (!narrow) {
    const RowPlan plan = streamed(problem, 8, 32);
    return plan.held == Held::streamed ? plan : streamed(problem, 16, 32);
  }
  RowPlan best;
  double best_speed = kLeastSpeed;
  for (int cluster = 2; cluster <= held::kMostCluster; cluster *= 2) {
    for (const int elements : {32, 40}) {
      const RowPlan plan = streamed(problem, cluster, elements);
      const double speed = plan.held == Held::streamed ? streamed_speed(plan) : 0;
      if (speed > best_speed) {
        best = plan;
        best_speed = speed;
      }
    }
  }
  return best;
}

/// The plan for rows in the shared memory of a block or a cluster.
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
        plan.threads = std::min(kMostTeamThreads, threads_for(slab, kStagedElements));
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
  for (const RowPlan& plan : {plan_lanes(problem), plan_streamed(problem), plan_registers(problem)}) {
    if (plan.held != Held::nowhere) {
      return plan;
    }
  }
  return plan_shared_memory(problem);
}

}  // namespace mica::kernels
