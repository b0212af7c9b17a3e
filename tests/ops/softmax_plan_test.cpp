// Tests which kernel plan_softmax() chooses for a row. No GPU is needed.

#include <gtest/gtest.h>

#include <cstdint>
#include <iterator>
#include <set>
#include <utility>

#include <mica/ops/cross_entropy/detail/cross_entropy_plan.h>
#include <mica/ops/softmax/detail/softmax_plan.h>

using namespace mica::kernels;

namespace softmax_plan_test {

constexpr int kSharedMemory = 227 << 10;  // the most bytes per block
constexpr int kReserved = 1 << 10;        // bytes that a multiprocessor reserves for each block
// Bytes with which streamed rows exchange sums: four buffers for two numbers of each of 256 warps, and their barriers.
constexpr int kExchange = 4 * (2 * 256 * 4 + 8);

SoftmaxPlan plan(std::int64_t columns, int element_size, bool backward = false, int alignment = 16,
                 bool clusters = true, bool masked = false) {
  return plan_softmax({.columns = columns,
                       .element_size = element_size,
                       .alignment = alignment,
                       .clusters = clusters,
                       .backward = backward,
                       .masked = masked});
}

template <class F>
void for_problems(const F& f) {
  for (std::int64_t n = 1; n < 700'000; n += 1 + n / 50) {
    for (const int size : {2, 4, 8}) {
      for (const bool backward : {false, true}) {
        for (const int alignment : {size, 8, 16}) {
          for (const bool clusters : {false, true}) {
            for (const bool masked : {false, true}) {
              f(SoftmaxProblem{.columns = n,
                               .element_size = size,
                               .alignment = alignment,
                               .clusters = clusters,
                               .backward = backward,
                               .masked = masked});
            }
          }
        }
      }
    }
  }
}

TEST(SoftmaxPlan, CoversRows) {
  for_problems([](const SoftmaxProblem& problem) {
    const SoftmaxPlan p = plan_softmax(problem);
    const std::int64_t n = problem.columns;
    if (p.held == Held::nowhere) {
      EXPECT_GT(n * problem.element_size, 100 << 10) << n;
      return;
    }
    EXPECT_GE(std::int64_t{p.cluster} * p.slab, n) << n;
    EXPECT_LT(std::int64_t{p.cluster - 1} * p.slab, n) << n << ": a block without columns";
    EXPECT_LE(p.threads, rows::kMostGroupThreads) << n;
    EXPECT_EQ(p.threads % (p.rows > kWarpRows ? 8 : 32), 0) << n;
    EXPECT_EQ(p.threads * p.rows % 32, 0) << n;
    EXPECT_EQ(p.cluster > 1, p.group == Group::cluster) << n;
    const int matrices = problem.backward ? 2 : 1;
    const std::int64_t bytes = (std::int64_t{p.slab} * p.rows * problem.element_size + 32) * matrices;
    if (p.held == Held::shared_memory) {
      EXPECT_LE(bytes, kSharedMemory) << n;
    } else {
      ASSERT_GE(p.layout, 0) << n;
      const SoftmaxLayout& layout = kSoftmaxLayouts[p.layout];
      EXPECT_TRUE(layout.serves(problem.element_size, problem.backward, problem.masked)) << n;
      EXPECT_LE(p.threads * p.rows, layout.threads) << n;
      EXPECT_TRUE(p.held == layout.held && p.group == layout.group && p.elements == layout.elements) << n;
      EXPECT_TRUE(p.packed == layout.packed && (p.pack > 1) == layout.packs) << n;
      EXPECT_GE(std::int64_t{p.threads} * p.elements, p.slab) << n;
      EXPECT_EQ(p.elements % p.pack, 0) << n;
      EXPECT_EQ(n % p.pack, 0) << n;
      EXPECT_EQ(p.slab % p.pack, 0) << n;
      EXPECT_EQ(problem.alignment % (p.pack * problem.element_size), 0) << n;
    }
    EXPECT_EQ(p.ahead > 0, p.held == Held::streamed) << n;
    if (p.held == Held::streamed) {
      EXPECT_FALSE(problem.backward || problem.masked) << n;
      EXPECT_EQ(p.pack * problem.element_size, 16) << n;
      EXPECT_FALSE(p.packed) << n;
      EXPECT_LE(p.ahead, 16) << n << ": wait_copies() counts to 15";
      const int blocks = rows::kMostGroupThreads / p.threads;  // that share a multiprocessor
      EXPECT_TRUE(p.elements == 32 || (p.elements == 40 && problem.element_size == 2)) << n;
      const std::int64_t block_bytes =
          std::int64_t{p.ahead} * p.threads * p.elements * problem.element_size + kExchange + kReserved;
      EXPECT_LE(blocks * block_bytes, kSharedMemory + kReserved) << n;
    }
  });
}

// A layout that no row gets would be compiled in vain.
TEST(SoftmaxPlan, UsesEachLayout) {
  std::set<std::pair<int, int>> used;  // layout, element size
  for (std::int64_t n = 1; n < 400'000; n += n < 2000 ? 1 : 8) {
    for (const int size : {2, 4, 8}) {
      for (const bool backward : {false, true}) {
        for (const int alignment : {size, 16}) {
          used.emplace(plan(n, size, backward, alignment).layout, backward ? -size : size);
        }
      }
    }
  }
  for (int i = 0; i < static_cast<int>(std::size(kSoftmaxLayouts)); ++i) {
    for (const int size : {2, 4, 8}) {
      for (const bool backward : {false, true}) {
        EXPECT_EQ(used.count({i, backward ? -size : size}), kSoftmaxLayouts[i].serves(size, backward, false) ? 1 : 0)
            << i << ", " << size << (backward ? " backward" : "");
      }
    }
  }
}

TEST(SoftmaxPlan, UsesClustersOnlyWhereThereAreSome) {
  for_problems([](const SoftmaxProblem& problem) {
    if (!problem.clusters) {
      EXPECT_EQ(plan_softmax(problem).cluster, 1) << problem.columns;
    }
  });
}

TEST(SoftmaxPlan, ChoosesByLengthAndAlignment) {
  EXPECT_EQ(plan(320, 2).threads, 8);
  EXPECT_EQ(plan(328, 2).threads, 32);
  EXPECT_EQ(plan(328, 2).pack, 8);
  EXPECT_EQ(plan(328, 4).pack, 4);
  EXPECT_EQ(plan(1024, 2).group, Group::warp);
  EXPECT_EQ(plan(1032, 2).group, Group::block);
  for (const int size : {2, 4}) {
    for (const bool backward : {false, true}) {
      EXPECT_EQ(plan(8192, size, backward).held, Held::registers);
      EXPECT_EQ(plan(8200, size, backward).held, Held::registers);
      EXPECT_EQ(plan(16'384, size, backward).group, size == 4 && backward ? Group::cluster : Group::block);
      EXPECT_EQ(plan(16'392, size, backward).held, Held::registers);
      EXPECT_EQ(plan(16'392, size, backward).group, Group::cluster);
      EXPECT_EQ(plan(32'768, size, backward).held, Held::registers);
      EXPECT_EQ(plan(32'776, size, backward).held, backward ? Held::registers : Held::streamed);
      EXPECT_EQ(plan(32'776, size, backward, 16, true, /*masked=*/true).held, Held::registers);
      EXPECT_EQ(plan(262'144, size, backward).held, backward ? Held::registers : Held::streamed);
      EXPECT_EQ(plan(262'144, size, backward, 16, true, /*masked=*/true).held, Held::registers);
      EXPECT_EQ(plan(10'000'000, size, backward).held, Held::nowhere);
    }
  }
  EXPECT_EQ(plan(131'072, 2).cluster, 8);
  EXPECT_EQ(plan(131'072, 2).elements, 32);
  EXPECT_EQ(plan(80'000, 2).cluster, 8);
  EXPECT_EQ(plan(80'000, 2).elements, 40);  // two blocks of 256 threads; with 32 elements, one of 320
  EXPECT_EQ(plan(90'000, 2).cluster, 16);   // three blocks of 160 threads; in a cluster of 8, one of 288
  EXPECT_EQ(plan(145'000, 2).elements, 40);
  EXPECT_EQ(plan(171'840, 2).held, Held::registers);  // 16 blocks of 288 threads would leave too many unused
  EXPECT_EQ(plan(300'000, 2).held, Held::streamed);
  EXPECT_EQ(plan(36'000, 4).cluster, 8);
  EXPECT_EQ(plan(131'072, 4).cluster, 8);
  EXPECT_EQ(plan(140'000, 4).cluster, 16);
  EXPECT_EQ(plan(16'392, 2, false, 16, /*clusters=*/false).held, Held::shared_memory);
  EXPECT_EQ(plan(131'072, 2, false, 16, /*clusters=*/false).held, Held::nowhere);
}

// Rows that are not aligned to 16 bytes, and doubles, are read element by element: short ones into registers, others
// into shared memory.
TEST(SoftmaxPlan, UnalignedRows) {
  for (const int size : {2, 4, 8}) {
    for (const bool backward : {false, true}) {
      EXPECT_EQ(plan(127, size, backward).threads, 8);
      EXPECT_EQ(plan(129, size, backward).threads, 32);
      EXPECT_EQ(plan(326, size, backward, size).pack, 1);
      EXPECT_EQ(plan(1023, size, backward).held, Held::registers);
      EXPECT_EQ(plan(1023, size, backward).elements, 32);
      EXPECT_EQ(plan(1025, size, backward).held, Held::shared_memory);
      EXPECT_EQ(plan(1025, size, backward).threads, 96);
      EXPECT_EQ(plan(16'391, size, backward).held, size == 8 && backward ? Held::nowhere : Held::shared_memory);
      EXPECT_EQ(plan(10'000'001, size, backward).held, Held::nowhere);
    }
  }
  EXPECT_EQ(plan(328, 2, false, 8).pack, 1);
  EXPECT_EQ(plan(326, 2).pack, 1);
  EXPECT_EQ(plan(2048, 8).held, Held::shared_memory);
  EXPECT_EQ(plan(16'391, 2).group, Group::block);
  EXPECT_EQ(plan(131'071, 2).group, Group::cluster);
  EXPECT_EQ(plan(262'143, 4).group, Group::cluster);
}

// Backward of float32 in clusters: two blocks fit on a multiprocessor, unless rows are too long or masked.
TEST(SoftmaxPlan, BackwardUsesSmallBlocksIfItCan) {
  constexpr int kThreadsOfTwo = 384;
  EXPECT_EQ(plan(10'240, 4, true).group, Group::block);
  EXPECT_EQ(plan(16'384, 4, true, 16, true, /*masked=*/true).group, Group::block);
  for (const std::int64_t n : {10'244, 16'384, 16'388, 24'576, 24'580, 32'768, 65'536, 183'488, 196'608}) {
    EXPECT_LE(plan(n, 4, true).threads, kThreadsOfTwo) << n;
    EXPECT_EQ(plan(n, 4, true).elements, 32) << n;
  }
  EXPECT_EQ(plan(24'576, 4, true).cluster, 2);
  EXPECT_EQ(plan(24'580, 4, true).cluster, 4);
  EXPECT_EQ(plan(24'580, 4, true, 16, true, /*masked=*/true).cluster, 2);
  EXPECT_EQ(plan(196'612, 4, true).cluster, 16);
  EXPECT_GT(plan(196'612, 4, true).threads, kThreadsOfTwo);
  EXPECT_EQ(plan(32'768, 2, true).threads, rows::kMostGroupThreads);
}

TEST(CrossEntropyPlan, CoversRows) {
  for (std::int64_t classes = 1; classes < 1'000'000; classes += 1 + classes / 50) {
    for (const int size : {2, 4}) {
      const CrossEntropyPlan p = plan_cross_entropy_in_place(classes, size, true);
      if (classes <= 1024 || classes * size > 8 * (220 << 10)) {
        EXPECT_EQ(p.cluster, 0) << classes;
        continue;
      }
      const std::int64_t packs = classes * size / 16;
      ASSERT_GE(p.cluster, 1) << classes;
      EXPECT_LE(p.cluster, 8) << classes;
      EXPECT_GE(std::int64_t{p.cluster} * p.slab, packs) << classes;
      EXPECT_LE(p.bytes(), 220 << 10) << classes;
      EXPECT_EQ(p.threads % 32, 0) << classes;
      EXPECT_LE(p.threads, CrossEntropyPlan::kMostThreads) << classes;
      EXPECT_EQ(p.part % 2, 0) << classes;
      EXPECT_GE(p.part * p.threads * CrossEntropyPlan::kParts, p.slab) << classes;
    }
  }
}

TEST(CrossEntropyPlan, LeavesTheOthersToTwoPasses) {
  EXPECT_EQ(plan_cross_entropy_in_place(50'304, 8, true).cluster, 0);
  EXPECT_EQ(plan_cross_entropy_in_place(50'304, 2, false).cluster, 0);
  EXPECT_EQ(plan_cross_entropy_in_place(1024, 2, true).cluster, 0);
  EXPECT_EQ(plan_cross_entropy_in_place(50'304, 2, true).cluster, 1);
  EXPECT_EQ(plan_cross_entropy_in_place(128'256, 2, true).cluster, 4);
}

}  // namespace softmax_plan_test
