#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>
#include <string>
#include <tuple>

#include <mica/ops/norm/detail/norm_backward_plan.h>

// Tests what plan_norm_backward() and plan_parameters() choose, and that every choice is valid.

namespace mica::kernels::norm_cuda {

namespace {

using enum NormBackwardKernel;

NormBackwardCase case_of(std::int64_t rows, std::int64_t columns, int size) {
  return {.rows = rows,
          .columns = columns,
          .size = size,
          .weight_size = size,
          .centered = true,
          .packs = columns % (16 / size) == 0,
          .clusters = true};
}

TEST(NormBackwardPlan, ChoosesTheKernelByDtypeChipAndLength) {
  for (const std::int64_t columns : {264, 1000, 8192, 40'000, 131'072}) {
    for (const int size : {2, 4}) {
      EXPECT_EQ(plan_norm_backward(case_of(100, columns, size)).kernel, streamed) << columns << ", " << size;
      NormBackwardCase old = case_of(100, columns, size);
      old.clusters = false;
      EXPECT_EQ(plan_norm_backward(old).kernel, columns <= 8192 ? in_registers : looped) << columns << ", " << size;
    }
    EXPECT_EQ(plan_norm_backward(case_of(100, columns, 8)).kernel, columns <= 4096 ? in_registers : looped) << columns;
  }
  for (const int size : {2, 4}) {
    for (const std::int64_t columns : {8, 64, 128, 256}) {
      EXPECT_EQ(plan_norm_backward(case_of(1'000'000, columns, size)).kernel, size == 2 ? streamed : in_registers)
          << columns << ", " << size;
      NormBackwardCase old = case_of(1'000'000, columns, size);
      old.clusters = false;
      EXPECT_EQ(plan_norm_backward(old).kernel, in_registers) << columns << ", " << size;
    }
    // Unaligned rows.
    for (const std::int64_t rows : {1, 1'000'000}) {
      EXPECT_EQ(plan_norm_backward(case_of(rows, 129, size)).kernel, in_registers);
      EXPECT_EQ(plan_norm_backward(case_of(rows, 8191, size)).kernel, in_registers);
      EXPECT_EQ(plan_norm_backward(case_of(rows, 8193, size)).kernel, looped);
    }
  }
}

// A row's dx is computed by the same threads from the same elements for any number of rows.
TEST(NormBackwardPlan, RowsDoNotChangeHowARowIsAddedUp) {
  const auto way_of = [](const NormBackwardCase& c) {
    const NormBackwardPlan p = plan_norm_backward(c);
    return std::tuple(p.kernel, p.pack, p.shape.lanes, p.shape.packs, p.stream.threads, p.stream.cluster);
  };
  for (const int size : {2, 4, 8}) {
    for (const bool centered : {true, false}) {
      for (std::int64_t columns = 1; columns <= 300'000; columns += 1 + columns / 61) {
        NormBackwardCase many = case_of(1'000'000, columns, size);
        many.centered = centered;
        NormBackwardCase few = many;
        few.rows = 3;
        if (columns <= 229'376) {  // beyond, shared memory has no room for float32 weights
          few.weight_size = std::max(size, 4);
        }
        ASSERT_EQ(way_of(few), way_of(many)) << columns;
      }
    }
  }
}

TEST(NormBackwardPlan, SharesRowsAmongLanesWarpsAndBlocks) {
  struct Expected {
    std::int64_t columns;
    int size;
    int lanes;
    int threads;
    int groups;
    int cluster;
  };
  for (const Expected& e :
       {Expected{1024, 2, 32, 128, 4, 1}, Expected{8192, 2, 32, 512, 1, 1}, Expected{16384, 2, 32, 256, 2, 4},
        Expected{131'072, 2, 32, 256, 2, 16}, Expected{262'144, 2, 32, 512, 1, 16}, Expected{768, 4, 32, 96, 5, 1},
        Expected{8192, 4, 32, 512, 1, 1}, Expected{65536, 4, 32, 512, 1, 8}, Expected{131'072, 4, 32, 512, 1, 16},
        Expected{64, 2, 8, 8, 64, 1}, Expected{72, 2, 16, 16, 32, 1}, Expected{136, 2, 32, 32, 16, 1},
        Expected{384, 2, 32, 32, 16, 1}, Expected{392, 2, 32, 64, 8, 1}, Expected{1032, 2, 32, 96, 5, 1},
        Expected{8200, 2, 32, 160, 3, 4}, Expected{16'392, 2, 32, 160, 3, 8}, Expected{260, 4, 32, 64, 8, 1}}) {
    const NormBackwardPlan plan = plan_norm_backward(case_of(1000, e.columns, e.size));
    const StreamPlan& p = plan.stream;
    EXPECT_EQ(std::tuple(plan.shape.lanes, p.threads, p.groups, p.cluster),
              std::tuple(e.lanes, e.threads, e.groups, e.cluster))
        << e.columns << ", " << e.size;
  }
}

// Of aligned rows: up to which length threads have this many packs, and shared memory this many rows.
TEST(NormBackwardPlan, PacksAndRowsInSharedMemory) {
  struct Range {
    std::int64_t last;
    int packs;
    int depth;
  };
  const auto expect_ranges = [](int size, std::initializer_list<Range> ranges) {
    const std::int64_t step = 16 / size;
    std::int64_t columns = step;
    for (const Range& range : ranges) {
      for (; columns <= range.last; columns += step) {
        const NormBackwardPlan plan = plan_norm_backward(case_of(1000, columns, size));
        ASSERT_EQ(std::pair(plan.shape.packs, plan.shape.depth), std::pair(range.packs, range.depth))
            << columns << ", " << size;
      }
    }
  };
  expect_ranges(2, {Range{256, 1, 4}, Range{384, 2, 2}, Range{1024, 1, 3}, Range{8192, 2, 2}, Range{65'536, 2, 4},
                    Range{262'144, 4, 3}});
  expect_ranges(4, {Range{256, 0, 0}, Range{4096, 2, 2}, Range{8192, 4, 2}, Range{32'768, 2, 4}, Range{131'072, 4, 3},
                    Range{131'200, 0, 0}});  // the shortest are in registers, the longest looped
}

// For many lengths: all rows stream that should, their threads have room for all columns, and shared memory suffices.
TEST(NormBackwardPlan, StreamedRowsFit) {
  for (const int size : {2, 4}) {
    for (const int weight_size : {size, 4}) {
      for (std::int64_t columns = 16 / size; columns <= 262'144;
           columns += 16 / size * (1 + columns / 61 * size / 16)) {
        for (const bool adds : {false, true}) {
          NormBackwardCase c = case_of(1 << 23, columns, size);
          c.weight_size = weight_size;
          c.adds = adds;
          const NormBackwardPlan plan = plan_norm_backward(c);
          const StreamPlan& p = plan.stream;
          const std::string what = fmt::format("{} columns of {} bytes, adds {}", columns, size, adds);
          const std::int64_t most = adds ? 262'144 / size : size == 4 ? 131'072 : weight_size == 4 ? 229'376 : 262'144;
          const bool is_in_registers = size == 4 && !adds && columns <= 256;
          ASSERT_EQ(plan.kernel == streamed, columns <= most && !is_in_registers) << what;
          if (plan.kernel != streamed) {
            continue;
          }
          ASSERT_EQ(plan.pack, 16 / size) << what;
          ASSERT_GE(std::int64_t{p.threads} * plan.shape.packs * plan.pack * p.cluster, columns) << what;
          ASSERT_GE(std::int64_t{p.slab} * p.cluster, columns) << what;
          ASSERT_LT(std::int64_t{p.slab} * (p.cluster - 1), columns) << what;
          ASSERT_LE(p.shared_bytes(), kStreamShared) << what;
          ASSERT_LE(p.block(), 512) << what;
          ASSERT_EQ(p.block() % 32, 0) << what;
          ASSERT_GE(plan.shape.depth, 2) << what;
          ASSERT_EQ(plan.shape.lanes == 32 ? p.threads % 32 : p.threads - plan.shape.lanes, 0) << what;
        }
      }
    }
  }
}

TEST(NormBackwardPlan, PartialRowsFollowTheShape) {
  for (const int size : {2, 4, 8}) {
    for (const std::int64_t columns : {5, 64, 1000, 3000, 20'000}) {
      std::int64_t before = 0;
      for (const std::int64_t rows : {1, 7, 100, 3000, 200'000}) {
        const NormBackwardPlan plan = plan_norm_backward(case_of(rows, columns, size));
        if (plan.kernel == looped) {
          EXPECT_EQ(plan.partial_rows, 0);
          continue;
        }
        EXPECT_GE(plan.partial_rows, std::max<std::int64_t>(before, 1));
        EXPECT_LE(plan.partial_rows, std::min<std::int64_t>(rows, 8 * 132));
        before = plan.partial_rows;
      }
    }
  }
}

TEST(NormBackwardPlan, SumsHaveAKernelForSomeLengths) {
  const auto kernel = [](std::int64_t columns, int size) {
    NormBackwardCase c = case_of(1000, columns, size);
    c.adds = true;
    return plan_norm_backward(c).kernel;
  };
  for (const int size : {2, 4}) {
    for (const std::int64_t columns : {128, 768, 8192, 65'536}) {
      EXPECT_EQ(kernel(columns, size), streamed) << columns << ", " << size;
    }
    EXPECT_EQ(kernel(1001, size), none);
    EXPECT_EQ(kernel(200'000, size), none);
  }
  EXPECT_EQ(kernel(768, 8), none);
}

TEST(ParametersPlan, DealsOutColumnsAndRows) {
  // With few columns and many rows, there are clusters and partial sums; with many columns, no partial sums.
  const ParametersPlan narrow = plan_parameters(1'000'000, 64, 4, 4, 4, true);
  EXPECT_EQ(narrow.cluster, 8);
  EXPECT_GT(narrow.partial_rows(), 1);
  const ParametersPlan wide = plan_parameters(1000, 100'000, 4, 4, 4, true);
  EXPECT_EQ(wide.partial_rows(), 1);
  EXPECT_GE(wide.tiles * wide.lanes * 4, 100'000);
  // Without clusters, every block that shares a tile has partial sums.
  const ParametersPlan old = plan_parameters(1'000'000, 64, 4, 4, 4, false);
  EXPECT_EQ(old.cluster, 1);
  EXPECT_EQ(old.partial_rows(), old.parts);
  EXPECT_EQ(old.parts, narrow.parts);
  // A single row, or none.
  for (const std::int64_t rows : {0, 1}) {
    const ParametersPlan p = plan_parameters(rows, 1000, 4, 4, 4, true);
    EXPECT_EQ(p.parts, 1);
    EXPECT_EQ(p.cluster, 1);
  }
}

}  // namespace

}  // namespace mica::kernels::norm_cuda
