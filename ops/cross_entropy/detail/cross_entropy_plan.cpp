#include <initializer_list>

#include <mica/ops/cross_entropy/detail/cross_entropy_plan.h>

namespace mica::kernels {

namespace {

constexpr std::int64_t kShortestRow = 1025;      // classes
constexpr std::int64_t kHalfShared = 110 << 10;  // the most bytes of a row per block with which two blocks fit
constexpr std::int64_t kMostShared = 218 << 10;  // the same for one block; a cluster's exchange takes 8 KB more
constexpr int kMostCluster = 8;

}  // namespace

CrossEntropyPlan plan_cross_entropy_in_place(std::int64_t classes, int element_size, bool clusters) {
  CrossEntropyPlan plan;
  if (classes < kShortestRow || element_size > 4 || !clusters) {
    return plan;
  }
  const std::int64_t packs = classes * element_size / 16;
  for (const std::int64_t most : {kHalfShared, kMostShared}) {
    for (int blocks = 1; blocks <= kMostCluster && plan.cluster == 0; blocks *= 2) {
      const std::int64_t slab = (packs + blocks - 1) / blocks;
      if (slab * 16 <= most) {
        plan.cluster = blocks;
        plan.slab = static_cast<int>(slab);
      }
    }
  }
  if (plan.cluster == 0) {
    return plan;
  }
  // A multiprocessor has room for three blocks with up to 72 KB of shared memory, or for two with more.
  plan.threads = plan.slab > 4608 ? CrossEntropyPlan::kMostThreads : plan.slab > 1024 ? 256 : 128;
  const int rounds_of_all = 2 * CrossEntropyPlan::kParts * plan.threads;
  plan.part = 2 * ((plan.slab + rounds_of_all - 1) / rounds_of_all);
  return plan;
}

}  // namespace mica::kernels
