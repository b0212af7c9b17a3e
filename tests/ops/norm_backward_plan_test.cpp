#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <set>
#include <sstream>
#include <string>
#include <tuple>

#include <mica/ops/norm/detail/norm_backward_plan.h>

// Tests what plan_norm_backward() and plan_parameters() choose, that every choice is valid, and the tables in the
// README.

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
          .alike = true,
          .clusters = true};
}

TEST(NormBackwardPlan, ChoosesTheKernelByDtypeChipAndLength) {
  for (const std::int64_t columns : {264, 1000, 8192, 40'000, 131'072}) {
    for (const int size : {2, 4}) {
      EXPECT_EQ(plan_norm_backward(case_of(100, columns, size)).kernel, streamed) << columns << ", " << size;
      NormBackwardCase old = case_of(100, columns, size);
      old.clusters = false;
      EXPECT_EQ(plan_norm_backward(old).kernel, columns <= 8192 ? held : looped) << columns << ", " << size;
    }
    EXPECT_EQ(plan_norm_backward(case_of(100, columns, 8)).kernel, columns <= 4096 ? held : looped) << columns;
  }
  for (const int size : {2, 4}) {
    for (const std::int64_t columns : {8, 64, 128, 256}) {
      EXPECT_EQ(plan_norm_backward(case_of(1'000'000, columns, size)).kernel, size == 2 ? streamed : held)
          << columns << ", " << size;
      NormBackwardCase old = case_of(1'000'000, columns, size);
      old.clusters = false;
      EXPECT_EQ(plan_norm_backward(old).kernel, held) << columns << ", " << size;
    }
    EXPECT_EQ(plan_norm_backward(case_of(1'000'000, 129, size)).kernel, size == 2 ? streamed : held);
    EXPECT_EQ(plan_norm_backward(case_of(1'000'000, 4001, size)).kernel, streamed);
  }
  EXPECT_EQ(plan_norm_backward(case_of(100, 200'001, 4)).kernel, streamed);
  EXPECT_EQ(plan_norm_backward(case_of(100, 100'001, 2)).kernel, streamed);
  EXPECT_EQ(plan_norm_backward(case_of(100, 200'001, 2)).kernel, streamed);
  EXPECT_EQ(plan_norm_backward(case_of(100, 270'001, 2)).kernel, looped);
}

// In small matrices whose rows are not aligned, rows of up to 8192 columns are held in registers. Some short rows
// always are.
TEST(NormBackwardPlan, SmallMatricesOfUnalignedRows) {
  for (const int size : {2, 4}) {
    for (const std::int64_t columns : {7, 44, 49, 63, 65, 127, 129, 255, 257, 401, 513, 1001, 2001, 4095, 8191}) {
      const bool always = size == 2 ? columns <= 44 || columns == 63 : columns < 65 || (columns > 125 && columns < 257);
      EXPECT_EQ(plan_norm_backward(case_of(100, columns, size)).kernel, held) << columns;
      EXPECT_EQ(plan_norm_backward(case_of(1'000'000, columns, size)).kernel, always ? held : streamed) << columns;
    }
    EXPECT_EQ(plan_norm_backward(case_of((4 << 20) / (1001 * size), 1001, size)).kernel, held);
    EXPECT_EQ(plan_norm_backward(case_of((4 << 20) / (1001 * size) + 1, 1001, size)).kernel, streamed);
    EXPECT_EQ(plan_norm_backward(case_of((8 << 20) / (4001 * size), 4001, size)).kernel, held);
    EXPECT_EQ(plan_norm_backward(case_of((8 << 20) / (4001 * size) + 1, 4001, size)).kernel, streamed);
    EXPECT_EQ(plan_norm_backward(case_of(1, 9001, size)).kernel, streamed);
  }
  EXPECT_EQ(plan_norm_backward(case_of(10'000, 201, 2)).kernel, held);
  EXPECT_EQ(plan_norm_backward(case_of((2 << 20) / 802, 401, 2)).kernel, held);
  EXPECT_EQ(plan_norm_backward(case_of((2 << 20) / 802 + 1, 401, 2)).kernel, streamed);
  EXPECT_EQ(plan_norm_backward(case_of((8 << 20) / 109, 109, 4)).kernel, held);
  EXPECT_EQ(plan_norm_backward(case_of((8 << 20) / 109 + 1, 109, 4)).kernel, streamed);
}

// Short rows that begin and end inside packs.
TEST(NormBackwardPlan, SharesUnalignedRowsAmongLanes) {
  struct Expected {
    std::int64_t rows;
    std::int64_t columns;
    int size;
    int lanes;
    int packs;
  };
  for (const Expected& e : {Expected{1'000'000, 57, 2, 8, 1},
                            {1'000'000, 65, 2, 8, 2},
                            {1'000'000, 121, 2, 8, 2},
                            {1'000'000, 122, 2, 8, 3},
                            {200'000, 122, 2, 16, 2},
                            {1'000'000, 185, 2, 8, 3},
                            {1'000'000, 186, 2, 16, 2},
                            {1'000'000, 249, 2, 16, 2},
                            {1'000'000, 250, 2, 16, 3},
                            {1'000'000, 377, 2, 16, 3},
                            {20'000, 377, 2, 32, 2},
                            {1'000'000, 505, 2, 32, 2},
                            {1'000'000, 761, 2, 32, 3},
                            {1'000'000, 125, 4, 8, 4}}) {
    const NormBackwardPlan plan = plan_norm_backward(case_of(e.rows, e.columns, e.size));
    ASSERT_EQ(plan.kernel, streamed) << e.columns;
    EXPECT_EQ(std::tuple(plan.lanes, plan.stream.threads, plan.stream.packs, plan.stream.sector),
              std::tuple(e.lanes, e.lanes, e.packs, 32 / e.size))
        << e.columns;
    // The rows of a group are a multiple of this number of rows apart, so that they begin at the same place.
    EXPECT_EQ(plan.stream.groups % plan.stream.sector, 0) << e.columns;
  }
  EXPECT_GT(plan_norm_backward(case_of(1'000'000, 762, 2)).stream.threads, 32);
  // Aligned rows of an odd number of packs, in large matrices.
  EXPECT_EQ(plan_norm_backward(case_of(1'000'000, 376, 2)).stream.sector, 16);
  EXPECT_EQ(plan_norm_backward(case_of(1'000'000, 376, 2)).lanes, 16);
  EXPECT_EQ(plan_norm_backward(case_of(10'000, 376, 2)).stream.sector, 0);
  EXPECT_EQ(plan_norm_backward(case_of(1'000'000, 56, 2)).stream.sector, 0);
}

// Rows that begin and end inside packs: all rows of a team begin at the same place in a sector, or they are sorted.
TEST(NormBackwardPlan, DealsOutRowsThatBeginInsidePacks) {
  struct Expected {
    std::int64_t rows;
    std::int64_t columns;
    int size;
    int sector;  // elements
    int phases;
    std::int64_t teams;
    bool sorted;
  };
  for (const Expected& e : {
           Expected{100'000, 1001, 2, 16, 16, 128, false},
           Expected{100'000, 1002, 2, 16, 8, 128, false},
           Expected{100'000, 1004, 2, 16, 4, 132, false},
           Expected{100'000, 1001, 4, 8, 8, 128, false},
           Expected{100'000, 1002, 4, 8, 4, 132, false},
           Expected{132, 9001, 2, 16, 16, 132, false},  // a row for each block
           Expected{133, 9001, 2, 16, 16, 128, false},
           Expected{10'000, 12'001, 2, 16, 16, 64, false},  // clusters of 2 blocks
           Expected{15, 20'001, 2, 16, 16, 15, false},      // clusters of 8 blocks, a row for each
           Expected{400, 20'001, 2, 8, 8, 8, false},        // 16 MB or less: places in 16 bytes
           Expected{500, 20'001, 2, 16, 16, 64, false},     // clusters of 2 blocks
           Expected{500, 60'001, 2, 16, 16, 15, true},
           Expected{500, 60'004, 2, 16, 4, 12, false},
           Expected{20, 140'001, 2, 8, 8, 20, false},  // clusters of 16 blocks
           Expected{50, 140'001, 2, 8, 8, 7, true},
           Expected{113, 140'001, 2, 16, 16, 7, true},
           Expected{112, 200'001, 4, 4, 4, 7, true},
           Expected{113, 200'001, 4, 8, 8, 7, true},
       }) {
    const NormBackwardPlan plan = plan_norm_backward(case_of(e.rows, e.columns, e.size));
    const StreamPlan& p = plan.stream;
    ASSERT_EQ(plan.kernel, streamed) << e.rows << "x" << e.columns;
    EXPECT_EQ(std::tuple(p.sector, p.phases, plan.teams, p.sorted), std::tuple(e.sector, e.phases, e.teams, e.sorted))
        << e.rows << "x" << e.columns << ", " << e.size;
    EXPECT_EQ(plan.partial_rows, e.teams + (e.sorted ? e.phases - 1 : 0));
    EXPECT_EQ(p.phases * e.columns % p.sector, 0);
    EXPECT_TRUE(p.sorted || e.teams % p.phases == 0 || e.rows <= e.teams);
  }
  // So are large matrices of 16-bit rows of an odd number of packs.
  const std::int64_t large = (64 << 20) / (2 * 1032);
  EXPECT_EQ(plan_norm_backward(case_of(large, 1032, 2)).stream.phases, 2);
  EXPECT_EQ(plan_norm_backward(case_of(large - 1, 1032, 2)).stream.sector, 0);
  EXPECT_EQ(plan_norm_backward(case_of(large, 1040, 2)).stream.sector, 0);
  EXPECT_EQ(plan_norm_backward(case_of(1'000'000, 262'136, 2)).stream.sector, 0);
  // Without a common place in sectors there is no such kernel.
  NormBackwardCase c = case_of(100'000, 1001, 2);
  c.alike = false;
  EXPECT_EQ(plan_norm_backward(c).kernel, held);
  c.columns = 10'001;
  EXPECT_EQ(plan_norm_backward(c).kernel, looped);
  c.columns = 1032;
  c.packs = true;
  EXPECT_EQ(plan_norm_backward(c).stream.sector, 0);
}

// A row's dx is computed by the same threads from the same elements for any number of rows. The exception are rows that
// packs do not fit, and 16-bit rows of an odd number of packs: they are computed in one way up to some number of rows,
// and in another way beyond, or in up to three ways.
TEST(NormBackwardPlan, RowsDoNotChangeHowARowIsAddedUp) {
  const auto way_of = [](const NormBackwardCase& c) {
    const NormBackwardPlan p = plan_norm_backward(c);
    return std::tuple(p.kernel, p.pack, p.lanes, p.stream.packs, p.stream.threads, p.stream.cluster);
  };
  for (const int size : {2, 4, 8}) {
    for (const bool centered : {true, false}) {
      for (std::int64_t columns = 1; columns <= 300'000; columns += 1 + columns / 61) {
        NormBackwardCase many = case_of(1'000'000, columns, size);
        many.centered = centered;
        NormBackwardCase few = many;
        few.rows = 3;
        few.weight_size = 4;
        if ((many.packs && (size == 4 || columns % 16 == 0)) || size == 8) {
          ASSERT_EQ(way_of(few), way_of(many)) << columns;
        }
        std::set<decltype(way_of(few))> ways{way_of(few)};
        auto before = way_of(few);
        for (NormBackwardCase c = few; c.rows < many.rows; c.rows *= 2) {
          if (way_of(c) != before) {
            EXPECT_TRUE(ways.insert(way_of(c)).second) << "the same way again at " << c.rows << ", " << columns;
            before = way_of(c);
          }
        }
        EXPECT_LE(ways.size(), size == 2 && !many.packs && columns > 121 && columns <= 377 ? 3u : 2u) << columns;
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
       {Expected{1024, 2, 32, 128, 4, 1},    Expected{8192, 2, 32, 512, 1, 1},     Expected{16384, 2, 32, 512, 1, 2},
        Expected{131'072, 2, 32, 512, 1, 8}, Expected{262'144, 2, 32, 512, 1, 16}, Expected{768, 4, 32, 96, 5, 1},
        Expected{8192, 4, 32, 512, 1, 1},    Expected{65536, 4, 32, 512, 1, 8},    Expected{262'144, 4, 32, 512, 1, 16},
        Expected{511, 4, 32, 96, 5, 1},      Expected{16383, 2, 32, 352, 1, 2},    Expected{16383, 4, 32, 288, 1, 4},
        Expected{64, 2, 8, 8, 64, 1},        Expected{72, 2, 16, 16, 32, 1},       Expected{136, 2, 32, 32, 16, 1},
        Expected{384, 2, 32, 32, 16, 1},     Expected{512, 2, 32, 64, 8, 1},       Expected{576, 2, 32, 64, 8, 1},
        Expected{680, 2, 32, 96, 5, 1},      Expected{1280, 2, 32, 160, 3, 1},     Expected{1288, 2, 32, 96, 5, 1},
        Expected{10'240, 2, 32, 448, 1, 1},  Expected{10'248, 2, 32, 352, 1, 2},   Expected{260, 4, 32, 64, 8, 1}}) {
    const bool packs = e.columns * e.size % 16 == 0;
    const NormBackwardPlan plan = plan_norm_backward(case_of(packs ? 1000 : 1'000'000, e.columns, e.size));
    const StreamPlan& p = plan.stream;
    EXPECT_EQ(std::tuple(plan.lanes, p.threads, p.groups, p.cluster),
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
        ASSERT_EQ(std::pair(plan.stream.packs, plan.depth), std::pair(range.packs, range.depth))
            << columns << ", " << size;
      }
    }
  };
  expect_ranges(2, {Range{256, 1, 4}, Range{384, 2, 2}, Range{512, 1, 3}, Range{672, 2, 2}, Range{1280, 1, 3},
                    Range{8192, 2, 2}, Range{10'240, 3, 2}, Range{16'384, 2, 4}});
  expect_ranges(4, {Range{256, 0, 0}, Range{1024, 2, 2}, Range{8192, 4, 2}});  // the shortest are held
}

// For many lengths: the threads have room for all columns of a row, shared memory suffices, and a cluster that begins a
// row before it has finished the previous one has room for both.
TEST(NormBackwardPlan, StreamedRowsFit) {
  for (const int size : {2, 4}) {
    for (const int weight_size : {size, 4}) {
      for (std::int64_t columns = 1; columns <= 262'144; columns += 1 + columns / 61) {
        for (const auto& [packs, rows] : {std::pair{false, 1 << 23}, {false, 9}, {true, 1 << 23}}) {
          NormBackwardCase c = case_of(rows, columns, size);
          c.weight_size = weight_size;
          if (packs && !c.packs) {
            continue;
          }
          c.packs = packs;
          const NormBackwardPlan plan = plan_norm_backward(c);
          const StreamPlan& p = plan.stream;
          if (plan.kernel != streamed) {
            const bool small = !packs && rows == 9 && columns <= 8192;
            EXPECT_TRUE(small || (size == 4 ? columns <= 256 : !packs && columns <= 64) ||
                        (!packs && columns > 262'144 - 32 / size))
                << columns;
            continue;
          }
          EXPECT_EQ(plan.pack, (packs || p.sector > 0 ? 16 : 4) / size) << columns;
          const std::int64_t most = columns + (p.sector > 0 ? p.sector - 1 : 0);  // with those before the row
          // A group of up to a warp skips packs that are before the row.
          const std::int64_t skipped = p.sector > 0 && p.threads <= 32 ? p.sector - plan.pack : 0;
          EXPECT_GE(std::int64_t{p.threads} * p.packs * plan.pack * p.cluster, most - skipped);
          EXPECT_GE(std::int64_t{p.slab} * p.cluster, most);
          EXPECT_LE(p.shared_bytes(), kStreamShared) << columns;
          EXPECT_LE(p.block(), 512) << columns;
          EXPECT_EQ(p.block() % 32, 0) << columns;
          EXPECT_EQ(p.packs % plan.chunks, 0) << columns;
          EXPECT_GE(plan.depth, plan.chunks) << columns;
          EXPECT_EQ(plan.lanes == 32 ? p.threads % 32 : p.threads - plan.lanes, 0) << columns;
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
  using enum GradientSource;
  const auto kernel = [](std::int64_t columns, int size, GradientSource source) {
    NormBackwardCase c = case_of(1000, columns, size);
    c.source = source;
    return plan_norm_backward(c).kernel;
  };
  for (const int size : {2, 4}) {
    EXPECT_EQ(kernel(768, size, y_and_sum), streamed);
    EXPECT_EQ(kernel(8192, size, y_and_dropped_sum), streamed);
    EXPECT_EQ(kernel(128, size, y_and_dropped_sum), streamed);
    EXPECT_EQ(kernel(65'536, size, y_and_sum), streamed);
    EXPECT_EQ(kernel(1001, size, y_and_sum), none);
    EXPECT_EQ(kernel(200'000, size, y_and_sum), none);
  }
  EXPECT_EQ(kernel(768, 8, y_and_sum), none);
}

// How a row is shared among threads, by which kernel, and the number of packs per thread.
std::pair<std::string, int> row_of(const NormBackwardCase& c) {
  const NormBackwardPlan plan = plan_norm_backward(c);
  const auto threads_of = [](int threads) {
    return threads < 32 ? fmt::format("{} lanes", threads) : std::string(threads == 32 ? "a warp" : "a block");
  };
  switch (plan.kernel) {
    case streamed: {
      const StreamPlan& p = plan.stream;
      const std::string who = p.cluster > 1 ? fmt::format("a cluster of {} blocks", p.cluster) : threads_of(p.threads);
      const char* const how = p.sector > 0 ? ", with edges" : "";
      return {who + " | streamed" + how, p.packs};
    }
    case held: {
      const HeldLayout layout = held_layout(c.columns, c.size, c.packs, c.centered);
      return {threads_of(layout.threads) + " | held", layout.elements / plan.pack};
    }
    default: return {"a block, which rereads it | looped", 0};
  }
}

// A table with a line for each range of lengths whose rows are shared in the same way.
std::string table_of(const std::string& title, int size, bool packs, std::int64_t rows = 1'000'000) {
  const std::int64_t step = packs ? 16 / size : 1;
  std::string table = fmt::format(
      "| {}, columns up to | threads that share a row | kernel | packs per thread |\n|---|---|---|---|\n", title);
  std::string before;
  std::set<int> before_packs;
  constexpr std::int64_t kLast = 300'000;
  for (std::int64_t columns = step; columns <= kLast; columns += step) {
    NormBackwardCase c = case_of(rows, columns, size);
    c.packs = packs;
    const auto [row, row_packs] = row_of(c);
    const bool ends = columns + step > kLast;
    if (ends || (!before.empty() && row != before)) {
      table += fmt::format("| {} | {} | {} |\n", ends ? "any" : std::to_string(columns - step), before,
                           before_packs == std::set<int>{0} ? "" : fmt::format("{}", fmt::join(before_packs, ", ")));
      before_packs.clear();
    }
    before_packs.insert(row_packs);
    before = row;
  }
  return table;
}

TEST(NormBackwardPlan, ReadmeHasItsTables) {
  const std::filesystem::path readme = MICA_NORM_README;
  if (!std::filesystem::exists(readme)) {
    GTEST_SKIP() << "no source tree";
  }
  std::stringstream text;
  text << std::ifstream(readme).rdbuf();
  for (const std::string& table :
       {table_of("16 bits", 2, true, 9), table_of("float32", 4, true), table_of("16 bits, any alignment", 2, false),
        table_of("16 bits, any alignment, 600 rows", 2, false, 600), table_of("float32, any alignment", 4, false)}) {
    EXPECT_NE(text.str().find(table), std::string::npos) << "expected in " << readme << ":\n" << table;
  }
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
