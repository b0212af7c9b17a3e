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
// Bytes with which streamed rows exchange sums: four buffers for two numbers of each of 256 warps, and their barriers.
constexpr int kExchange = 4 * (2 * 256 * 4 + 8);
constexpr int kBytesAhead = 12 * 32 * 512;  // of the rows that a streamed block of 512 threads copies ahead

SoftmaxPlan plan(std::int64_t columns, int element_size, bool backward = false, int alignment = 16,
                 bool clusters = true, bool masked = false) {
  return plan_softmax({.columns = columns,
                       .element_size = element_size,
                       .alignment = alignment,
                       .clusters = clusters,
                       .backward = backward,
                       .masked = masked});
}

/// A layout's kind of kernel, for comparisons.
enum class Kernel { looped, in_registers, streamed };
Kernel kernel_of(const SoftmaxPlan& p) {
  return p.layout < 0 ? Kernel::looped : kSoftmaxLayouts[p.layout].streamed ? Kernel::streamed : Kernel::in_registers;
}
Group group_of(const SoftmaxPlan& p) { return kSoftmaxLayouts[p.layout].group; }

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
    const bool aligned = problem.alignment == 16 && n * problem.element_size % 16 == 0;
    EXPECT_LE(p.threads, rows::kMostGroupThreads) << n;
    EXPECT_TRUE(p.threads == 8 || p.threads % 32 == 0) << n;
    EXPECT_EQ(p.threads * p.rows % 32, 0) << n;
    if (p.layout < 0) {
      EXPECT_TRUE(!aligned || problem.element_size == 8 || n > (problem.clusters ? 196'608 : 10'240)) << n;
      EXPECT_EQ(p.cluster, 1) << n;
      return;
    }
    ASSERT_TRUE(aligned) << n;
    const SoftmaxLayout& layout = kSoftmaxLayouts[p.layout];
    EXPECT_TRUE(layout.serves(problem.element_size, problem.backward, problem.masked)) << n;
    EXPECT_EQ(p.cluster > 1, layout.group == Group::cluster) << n;
    EXPECT_EQ(p.rows > 1, layout.group == Group::warp) << n;
    EXPECT_GE(std::int64_t{p.cluster} * p.slab, n) << n;
    EXPECT_LT(std::int64_t{p.cluster - 1} * p.slab, n) << n << ": a block without columns";
    EXPECT_LE(p.threads * p.rows, layout.threads) << n;
    EXPECT_GE(std::int64_t{p.threads} * layout.elements, p.slab) << n;
    EXPECT_EQ(p.slab * problem.element_size % 16, 0) << n;
    if (layout.streamed) {
      EXPECT_FALSE(problem.backward || problem.masked) << n;
      EXPECT_LE(p.threads * layout.elements * 12 + kExchange, kSharedMemory) << n;
      EXPECT_EQ(layout.threads * layout.elements * 12, kBytesAhead);
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
  EXPECT_EQ(group_of(plan(1024, 2)), Group::warp);
  EXPECT_EQ(group_of(plan(1032, 2)), Group::block);
  for (const int size : {2, 4}) {
    for (const bool backward : {false, true}) {
      EXPECT_EQ(kernel_of(plan(8192, size, backward)), Kernel::in_registers);
      EXPECT_EQ(kernel_of(plan(8200, size, backward)), Kernel::in_registers);
      EXPECT_EQ(group_of(plan(16'384, size, backward)), size == 4 && backward ? Group::cluster : Group::block);
      EXPECT_EQ(group_of(plan(16'392, size, backward)), Group::cluster);
      EXPECT_EQ(kernel_of(plan(16'392, size, backward)), Kernel::in_registers);
      EXPECT_EQ(kernel_of(plan(32'768, size, backward)), Kernel::in_registers);
      for (const std::int64_t n : {65'536, 131'072, 262'144}) {
        EXPECT_EQ(kernel_of(plan(n, size, backward)), backward ? Kernel::in_registers : Kernel::streamed) << n;
        EXPECT_EQ(kernel_of(plan(n, size, backward, 16, true, /*masked=*/true)), Kernel::in_registers) << n;
      }
      EXPECT_EQ(kernel_of(plan(262'208, size, backward)), Kernel::looped);
    }
  }
  EXPECT_EQ(plan(131'072, 2).cluster, 8);
  EXPECT_EQ(kernel_of(plan(64'512, 2)), Kernel::streamed);      // 4 blocks of 504 threads, rounded up to 512
  EXPECT_EQ(kernel_of(plan(80'000, 2)), Kernel::in_registers);  // 8 blocks of 320 threads would leave too many unused
  EXPECT_EQ(plan(32'776, 4).cluster, 8);
  EXPECT_EQ(plan(131'072, 4).cluster, 8);
  EXPECT_EQ(plan(140'000, 4).cluster, 16);
  EXPECT_EQ(kernel_of(plan(16'392, 2, false, 16, /*clusters=*/false)), Kernel::looped);
}

// Rows that are not aligned to 16 bytes, and doubles, are read element by element.
TEST(SoftmaxPlan, UnalignedRows) {
  for (const int size : {2, 4, 8}) {
    for (const bool backward : {false, true}) {
      for (const auto& [columns, threads] : {std::pair(127, 8), std::pair(129, 32), std::pair(511, 32),
                                             std::pair(1025, 96), std::pair(10'000'001, 512)}) {
        const SoftmaxPlan p = plan(columns, size, backward, size);
        EXPECT_EQ(kernel_of(p), Kernel::looped) << columns;
        EXPECT_EQ(p.threads, threads) << columns;
        EXPECT_EQ(p.rows, columns > 512 ? 1 : 256 / threads) << columns;
      }
    }
  }
  EXPECT_EQ(kernel_of(plan(328, 2, false, 8)), Kernel::looped);
  EXPECT_EQ(kernel_of(plan(326, 2)), Kernel::looped);
  EXPECT_EQ(kernel_of(plan(2048, 8)), Kernel::looped);
}

// Backward of float32 in clusters: two blocks fit on a multiprocessor, unless rows are too long or masked.
TEST(SoftmaxPlan, BackwardUsesSmallBlocksIfItCan) {
  constexpr int kThreadsOfTwo = 384;
  EXPECT_EQ(group_of(plan(10'240, 4, true)), Group::block);
  EXPECT_EQ(group_of(plan(16'384, 4, true, 16, true, /*masked=*/true)), Group::block);
  for (const std::int64_t n : {10'244, 16'384, 16'388, 24'576, 24'580, 32'768, 65'536, 183'488, 196'608}) {
    EXPECT_LE(plan(n, 4, true).threads, kThreadsOfTwo) << n;
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
      if (classes <= 1024 || classes * size / 16 * 16 > 8 * (218 << 10)) {
        EXPECT_EQ(p.cluster, 0) << classes;
        continue;
      }
      const std::int64_t packs = classes * size / 16;
      ASSERT_GE(p.cluster, 1) << classes;
      EXPECT_LE(p.cluster, 8) << classes;
      EXPECT_GE(std::int64_t{p.cluster} * p.slab, packs) << classes;
      constexpr int exchange = 2 * (4 * 256 * 4 + 8);  // of a cluster: numbers of its warps, and barriers
      EXPECT_LE(p.bytes() + exchange, kSharedMemory) << classes;
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
