#include <algorithm>
#include <iterator>
#include <limits>

#include <mica/ops/softmax/detail/softmax_plan.h>

namespace mica::kernels {

namespace {

using rows::kMostGroupThreads;
using rows::persistent_blocks;

constexpr int kWarp = 32;
constexpr double kTooExpensive = std::numeric_limits<double>::infinity();
constexpr std::int64_t kSlabUnit = 64;  // columns

// In forward, aligned rows that are longer are streamed. Shorter ones are faster with one row per cluster.
constexpr std::int64_t kMostHeldColumns = 32768;
// 16-bit rows that are longer stay packed, two elements in a register.
constexpr std::int64_t kMostUnpackedColumns = 8192;
// The longest rows of a block. In backward of 4-byte elements, clusters can share shorter rows, too: their blocks are
// smaller, so that two fit on a multiprocessor, and one computes while the other loads.
constexpr std::int64_t kMostBlockColumns = 16384;
constexpr std::int64_t kMostBlockColumnsBackward = 10240;
// If streamed: rows that are copied ahead; bytes of shared memory that the blocks of a multiprocessor have; and those
// that a block needs for the exchange of sums, with 1 KB that each block reserves.
constexpr std::int64_t kMostAhead = 8;
constexpr std::int64_t kSharedBytesOfAll = 226 << 10;
constexpr std::int64_t kExchangeBytes = 9 << 10;
// Bytes of shared memory per block with which three blocks, two blocks or one block fit on a multiprocessor.
constexpr int kSharedBytes[] = {73 << 10, 110 << 10, 220 << 10};
constexpr int kSharedElements = 16;  // columns per thread of rows in shared memory, unless a block is too small

std::int64_t round_up(std::int64_t n, std::int64_t unit) { return (n + unit - 1) / unit * unit; }

/// The number of threads that share `columns` columns, if each has up to `elements` of them.
int threads_for(std::int64_t columns, int elements) {
  return static_cast<int>(round_up(columns, std::int64_t{kWarp} * elements) / elements);
}

/// The columns of a block if `blocks` share a row.
std::int64_t slab_of(std::int64_t columns, int blocks) {
  return blocks == 1 ? columns : round_up((columns + blocks - 1) / blocks, kSlabUnit);
}

/// Whether rows can be read and written in packs of 16 bytes. Doubles are read one by one.
bool has_packs(const SoftmaxProblem& problem) {
  return problem.element_size < 8 && problem.alignment % 16 == 0 && problem.columns * problem.element_size % 16 == 0;
}

/// The plan with the lowest cost(plan), and of equal ones the first, among the layouts of a kind that the problem can
/// use, with a power of two of blocks from `least` to `most` that share a row.
template <class Cost>
SoftmaxPlan cheapest(const SoftmaxProblem& problem, Held held, Group group, int least, int most, const Cost& cost) {
  SoftmaxPlan best;
  double best_cost = kTooExpensive;
  for (int blocks = least; blocks <= most; blocks *= 2) {
    for (int i = 0; i < static_cast<int>(std::size(kSoftmaxLayouts)); ++i) {
      const SoftmaxLayout& layout = kSoftmaxLayouts[i];
      const std::int64_t slab = slab_of(problem.columns, blocks);
      const int threads = group == Group::warp ? layout.lanes : layout.threads;  // that share a row, at most
      if (layout.held != held || layout.group != group || layout.packs != has_packs(problem) ||
          !layout.serves(problem.element_size, problem.backward, problem.masked) ||
          slab > std::int64_t{threads} * layout.elements) {
        continue;
      }
      SoftmaxPlan plan;
      plan.held = held;
      plan.group = group;
      plan.pack = layout.packs ? 16 / problem.element_size : 1;
      plan.elements = layout.elements;
      plan.packed = layout.packed;
      plan.threads = group == Group::warp ? layout.lanes : threads_for(slab, layout.elements);
      plan.rows = group == Group::warp ? layout.threads / layout.lanes : 1;
      plan.cluster = blocks;
      plan.slab = static_cast<int>(slab);
      plan.layout = i;
      if (cost(plan) < best_cost) {
        best = plan;
        best_cost = cost(plan);
      }
    }
  }
  return best;
}

SoftmaxPlan plan_lanes(const SoftmaxProblem& problem) {
  return cheapest(problem, Held::registers, Group::warp, 1, 1, [](const SoftmaxPlan& plan) { return plan.layout; });
}

SoftmaxPlan plan_block(const SoftmaxProblem& problem) {
  const bool shorter = problem.element_size == 4 && problem.backward && problem.clusters && !problem.masked;
  if (problem.columns > (shorter ? kMostBlockColumnsBackward : kMostBlockColumns)) {
    return {};
  }
  const bool packed = problem.element_size == 2 && !problem.backward && problem.columns > kMostUnpackedColumns;
  return cheapest(problem, Held::registers, Group::block, 1, 1, [&](const SoftmaxPlan& plan) {
    return plan.packed == packed ? plan.threads * plan.elements : kTooExpensive;
  });
}

SoftmaxPlan plan_cluster(const SoftmaxProblem& problem) {
  const int most = problem.clusters ? rows::kMostCluster : 0;
  return cheapest(problem, Held::registers, Group::cluster, 2, most,
                  [](const SoftmaxPlan& plan) { return plan.layout * 100 + plan.cluster; });
}

/// Estimates the speed of streamed 16-bit rows, in columns per unit of time. To process its parts of one row per block,
/// a multiprocessor takes a constant time, for loads and the exchange of sums, and a time in proportion to the elements
/// of the warps on each of its four schedulers. Fitted to the times of 23 lengths on an H200.
double streamed_speed(const SoftmaxPlan& plan) {
  constexpr int kConstantTime = 100;  // in the time that a scheduler's warp takes for one element per thread
  constexpr int kSchedulers = 4;
  const int blocks = kMostGroupThreads / plan.threads;  // per multiprocessor
  const auto warps = static_cast<int>(round_up(blocks * plan.threads / kWarp, kSchedulers)) / kSchedulers;
  return static_cast<double>(persistent_blocks(plan.cluster)) * blocks * plan.slab /
         (kConstantTime + warps * plan.elements);
}

/// The plan for long rows that stream through the shared memory of clusters. If the fastest is slow, rows of 16 bits
/// are faster with one row per cluster. Rows of 32 bits get clusters of 8 blocks if these are enough.
SoftmaxPlan plan_streamed(const SoftmaxProblem& problem) {
  constexpr double kLeastSpeed = 6840;
  if (!problem.clusters || problem.columns <= kMostHeldColumns) {
    return {};
  }
  const bool narrow = problem.element_size == 2;
  SoftmaxPlan plan = cheapest(problem, Held::streamed, Group::cluster, narrow ? 2 : 8, rows::kMostCluster,
                              [&](const SoftmaxPlan& candidate) {
                                const double speed = streamed_speed(candidate);
                                return !narrow ? candidate.cluster : speed > kLeastSpeed ? -speed : kTooExpensive;
                              });
  if (plan.held == Held::streamed) {
    // A multiprocessor has registers for kMostGroupThreads threads, in one or more blocks.
    const std::int64_t bytes = kSharedBytesOfAll / (kMostGroupThreads / plan.threads) - kExchangeBytes;
    const std::int64_t row_bytes = std::int64_t{plan.threads} * plan.elements * problem.element_size;
    plan.ahead = static_cast<int>(std::clamp<std::int64_t>(bytes / row_bytes, 1, kMostAhead));
  }
  return plan;
}

/// The plan for rows in the shared memory of a block or a cluster, or, if they are too long, for reading them twice.
SoftmaxPlan plan_shared_memory(const SoftmaxProblem& problem) {
  SoftmaxPlan plan;
  plan.threads = kMostGroupThreads;
  const int matrices = problem.backward ? 2 : 1;
  const int most_blocks = problem.clusters && problem.element_size < 8 ? rows::kMostCluster : 1;
  for (const int bytes : kSharedBytes) {
    for (int blocks = 1; blocks <= most_blocks; blocks *= 2) {
      const std::int64_t slab = slab_of(problem.columns, blocks);
      if ((slab * problem.element_size + 32) * matrices <= bytes) {
        plan.held = Held::shared_memory;
        plan.group = blocks == 1 ? Group::block : Group::cluster;
        plan.threads = std::min(plan.threads, threads_for(slab, kSharedElements));
        plan.cluster = blocks;
        plan.slab = static_cast<int>(slab);
        return plan;
      }
    }
  }
  return plan;
}

}  // namespace

SoftmaxPlan plan_softmax(const SoftmaxProblem& problem) {
  for (const auto& choose : {plan_lanes, plan_streamed, plan_block, plan_cluster}) {
    const SoftmaxPlan plan = choose(problem);
    if (plan.held != Held::nowhere) {
      return plan;
    }
  }
  return plan_shared_memory(problem);
}

}  // namespace mica::kernels
