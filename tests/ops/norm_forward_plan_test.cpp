#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <mica/ops/norm/detail/norm_forward_plan.h>

// Tests what norm_forward_plan() chooses, that every choice is valid, and the table in the README.

namespace mica::kernels {

namespace {

using Kernel = NormForwardPlan::Kernel;

NormShape shape_of(std::int64_t rows, std::int64_t columns, DType x, DType weight) {
  return {.rows = rows,
          .columns = columns,
          .x = x,
          .weight = weight,
          .parameters = true,
          .centered = true,
          .adds = false,
          .packed = columns * static_cast<std::int64_t>(size_of(x)) % 16 == 0,
          .alignment = 16,
          .clusters = true,
          .multiprocessors = 132};
}

std::vector<std::int64_t> many_columns() {
  std::vector<std::int64_t> columns;
  for (std::int64_t n = 1; n <= 600'000; n += 1 + n / 50) {
    columns.push_back(n);
    columns.push_back((n + 7) / 8 * 8);
  }
  return columns;
}

/// Whether 16-bit rows consist of words of 4 bytes.
bool has_words(const NormShape& s) { return size_of(s.x) == 2 && s.columns % 2 == 0 && s.alignment >= 4; }

template <class F>
void for_shapes(const F& f) {
  for (const DType x : {bfloat16, float32, float64}) {
    for (const DType weight : {x, x == bfloat16 ? float32 : x}) {
      for (const std::int64_t rows : {1, 300, 100'000}) {
        for (const std::int64_t columns : many_columns()) {
          for (const bool centered : {true, false}) {
            NormShape s = shape_of(rows, columns, x, weight);
            s.centered = centered;
            f(s);
            s.packed = false;
            f(s);
            s.alignment = 4;
            f(s);
            s.alignment = static_cast<int>(std::min<std::size_t>(size_of(x), 4));
            f(s);
            s.clusters = false;
            f(s);
          }
        }
      }
    }
  }
}

TEST(NormForwardPlan, RowsHaveAPlaceForEachColumn) {
  for_shapes([](const NormShape& s) {
    const NormForwardPlan p = norm_forward_plan(s);
    const std::string what = fmt::format("{} × {} of {}", s.rows, s.columns, s.x);
    if (p.kernel == Kernel::short_rows) {
      const int bytes = p.pack * static_cast<int>(size_of(s.x));
      ASSERT_EQ(bytes == 16, s.packed) << what;
      ASSERT_TRUE(s.packed || bytes == 4 || (size_of(s.x) == 2 && bytes == 2)) << what;
      ASSERT_GE(s.alignment, std::min(bytes, s.alignment == 16 ? 16 : 4)) << what;
      ASSERT_EQ(s.columns % p.pack, 0) << what;
      ASSERT_GE(p.threads * p.packs * p.pack, s.columns) << what;
      ASSERT_LT(p.threads * (p.packs - most_empty_packs(bytes, p.packs)) * p.pack, s.columns) << what;
      ASSERT_EQ(p.threads * p.teams, kShortBlock) << what;
      ASSERT_EQ(p.team == RowTeam::warp, p.threads == 32) << what;
      ASSERT_EQ(p.blocks, 1) << what;
      return;
    }
    if (p.kernel == Kernel::stream) {
      ASSERT_TRUE(s.clusters) << what;
      ASSERT_LE(size_of(s.x), 4u) << what;
      ASSERT_FALSE(s.packed || has_words(s)) << what;
      ASSERT_EQ(p.pack * size_of(s.x), 4u) << what;
      ASSERT_GE(p.threads * p.packs * p.pack, p.slab) << what;
      ASSERT_GE(std::int64_t{p.slab} * p.blocks, s.columns) << what;
      ASSERT_LT(std::int64_t{p.slab} * (p.blocks - 1), s.columns) << what;
      ASSERT_LE(p.threads * p.teams, kForwardBlock) << what;
      ASSERT_EQ(p.threads * p.teams % 32, 0) << what;
      ASSERT_LE(p.blocks, 16) << what;
      ASSERT_EQ(p.team == RowTeam::cluster, p.blocks > 1) << what;
      ASSERT_TRUE(p.blocks == 1 || p.teams == 1) << what;
      return;
    }
    const int full_pack = 16 / static_cast<int>(size_of(s.x));
    if (p.kernel == Kernel::looped) {
      ASSERT_EQ(p.pack, s.packed ? full_pack : 1) << what;
      return;
    }
    ASSERT_EQ(p.pack, s.packed || p.edges ? full_pack : has_words(s) ? 2 : 1) << what;
    if (p.edges) {
      ASSERT_TRUE(s.alignment == 16 && !s.packed && !has_words(s) && p.stays) << what;
      if (p.team == RowTeam::block) {
        ASSERT_TRUE(p.packs == 3 || (p.packs == 4 && p.teams == 1)) << what;
      } else {
        ASSERT_EQ(p.team, RowTeam::cluster) << what;
        ASSERT_LE(p.threads, kEdgesBlock) << what;
        ASSERT_TRUE(p.packs == 4 || (p.packs == 2 && !s.centered)) << what;
      }
      ASSERT_LE(2 * std::int64_t{p.slab} * 4, 200 * 1024) << what;  // the parameters in shared memory
    }
    ASSERT_GE(p.threads * p.packs * p.pack, p.slab) << what;
    ASSERT_GE(std::int64_t{p.slab} * p.blocks, s.columns + (p.edges ? p.pack - 1 : 0)) << what;
    ASSERT_LT(std::int64_t{p.slab} * (p.blocks - 1), s.columns) << what;
    ASSERT_EQ(p.blocks > 1, p.team == RowTeam::cluster) << what;
    const bool warps = p.team == RowTeam::block || p.team == RowTeam::cluster;
    const int most = !warps ? kForwardBlock / 2 : p.teams > 1 ? kSharingBlock : kForwardBlock;
    ASSERT_LE(p.threads * p.teams, most) << what;
    switch (p.team) {
      case RowTeam::lanes: ASSERT_TRUE(p.threads == 8 || p.threads == 16) << what; break;
      case RowTeam::warp: ASSERT_EQ(p.threads, 32) << what; break;
      case RowTeam::block: ASSERT_EQ(p.threads % 32, 0) << what; break;
      case RowTeam::cluster:
        ASSERT_TRUE(s.clusters && size_of(s.x) <= 4 && p.blocks <= 16 && p.teams == 1) << what;
        ASSERT_NE(p.stays, p.few) << what;
        if (p.stays && p.pack >= 4) {  // the parameters are in shared memory
          ASSERT_LE(2 * (p.slab + 256) * static_cast<std::int64_t>(size_of(s.weight)), 200 * 1024) << what;
        }
        return;
    }
    if (p.stays) {
      ASSERT_GE(p.pack, 4) << what;
      if (size_of(s.weight) > size_of(s.x)) {  // the parameters are in shared memory
        ASSERT_LE(2 * (s.columns + 256) * static_cast<std::int64_t>(size_of(s.weight)), 200 * 1024) << what;
        ASSERT_LE(p.teams, 15 * (p.team == RowTeam::block ? 1 : 100)) << what;  // each team has a named barrier
      }
    }
  });
}

// The order in which a row is summed depends only on its length, its alignment and the dtype of x. The exception are
// long rows that are accessed by single elements in small matrices.
TEST(NormForwardPlan, RowsAndWeightsDoNotChangeHowARowIsAddedUp) {
  for_shapes([](const NormShape& s) {
    NormShape other = s;
    other.weight = s.x;
    other.parameters = false;
    other.multiprocessors = 60;
    const bool single = !s.packed && !has_words(s) && size_of(s.x) <= 4;
    if (!single || s.columns <= (size_of(s.x) == 2 ? 1024 : 8192)) {
      other.rows = 5;
    }
    const NormForwardPlan a = norm_forward_plan(s);
    const NormForwardPlan b = norm_forward_plan(other);
    ASSERT_EQ(a.kernel, b.kernel);
    ASSERT_EQ(a.team, b.team);
    ASSERT_EQ(a.pack, b.pack);
    ASSERT_EQ(a.packs, b.packs);
    ASSERT_EQ(a.threads, b.threads);
    ASSERT_EQ(a.blocks, b.blocks);
  });
}

TEST(NormForwardPlan, Stays) {
  const auto stays = [](std::int64_t rows, std::int64_t columns, DType x, DType weight) {
    return norm_forward_plan(shape_of(rows, columns, x, weight)).stays;
  };
  EXPECT_TRUE(stays(65'536, 768, bfloat16, float32));
  EXPECT_TRUE(stays(8192, 16'384, float16, float32));
  EXPECT_FALSE(stays(65'536, 768, bfloat16, bfloat16));
  EXPECT_FALSE(stays(65'536, 769, bfloat16, float32));
  EXPECT_TRUE(stays(4096, 2048, float16, float16));
  EXPECT_TRUE(stays(65'536, 2048, float32, float32));
  EXPECT_FALSE(stays(4096, 4096, float16, float16));
  NormShape no_bias = shape_of(4096, 2048, float16, float16);
  no_bias.parameters = false;
  EXPECT_FALSE(norm_forward_plan(no_bias).stays);
  NormShape rms = shape_of(4096, 2048, float16, float16);
  rms.centered = false;
  EXPECT_FALSE(norm_forward_plan(rms).stays);
}

TEST(NormForwardPlan, Edges) {
  const auto edges = [](std::int64_t rows, std::int64_t columns, bool centered, DType x = bfloat16) {
    NormShape s = shape_of(rows, columns, x, x);
    s.centered = centered;
    const bool edges = norm_forward_plan(s).edges;
    s.multiprocessors = 60;  // the order of sums is the same on smaller GPUs
    EXPECT_EQ(norm_forward_plan(s).edges, edges);
    s.alignment = 8;
    EXPECT_FALSE(norm_forward_plan(s).edges);
    return edges;
  };
  EXPECT_TRUE(edges(2112, 8191, true));
  EXPECT_FALSE(edges(2111, 8191, true));
  EXPECT_FALSE(edges(2112, 8192, true));
  EXPECT_FALSE(edges(2112, 8191, true, float32));
  EXPECT_TRUE(edges(4224, 8191, false));
  EXPECT_FALSE(edges(4223, 8191, false));
  EXPECT_TRUE(edges(10'000, 1025, true));
  EXPECT_FALSE(edges(10'000, 1023, true));
  EXPECT_TRUE(edges(10'000, 16'377, true));
  EXPECT_TRUE(edges(10'000, 16'379, true));  // from here on, by clusters
  EXPECT_TRUE(edges(110, 57'343, true));
  EXPECT_FALSE(edges(109, 57'343, true));
  EXPECT_TRUE(edges(820, 81'919, true));
  EXPECT_FALSE(edges(819, 81'919, true));
  EXPECT_FALSE(edges(10'000, 81'921, true));
  EXPECT_FALSE(edges(10'000, 8190, true));  // by words
  EXPECT_FALSE(edges(10'000, 8190, false));
  EXPECT_TRUE(edges(10'000, 12'283, false));
  EXPECT_TRUE(edges(293, 57'343, false));
  EXPECT_FALSE(edges(292, 57'343, false));
  EXPECT_FALSE(edges(10'000, 57'345, false));
}

TEST(NormForwardPlan, FewBlocks) {
  const auto few = [](std::int64_t rows, std::int64_t columns, DType x, DType weight) {
    const NormForwardPlan p = norm_forward_plan(shape_of(rows, columns, x, weight));
    EXPECT_FALSE(p.few && p.stays);
    return p.few;
  };
  EXPECT_TRUE(few(1, 768, bfloat16, bfloat16));
  EXPECT_TRUE(few(264, 1024, bfloat16, bfloat16));
  EXPECT_FALSE(few(265, 1024, bfloat16, bfloat16));
  EXPECT_TRUE(few(132, 16'384, float16, float32));
  EXPECT_FALSE(few(133, 16'384, float16, float32));
  EXPECT_FALSE(few(1, 768, bfloat16, float32));  // here, warps share the parameters
  EXPECT_TRUE(few(15, 65'536, bfloat16, float32));
  EXPECT_FALSE(few(16, 65'536, bfloat16, float32));
  EXPECT_TRUE(few(7, 262'144, bfloat16, bfloat16));
  EXPECT_FALSE(few(8, 262'144, bfloat16, bfloat16));  // an H200 has room for 7 clusters of 16 blocks
  EXPECT_TRUE(few(5, 1229, bfloat16, bfloat16));
  EXPECT_TRUE(few(264, 2048, float32, float32));
  EXPECT_TRUE(few(1, 2049, float32, float32));
  EXPECT_FALSE(few(1, 2048, float64, float64));
  NormShape no_bias = shape_of(1, 2048, float16, float16);
  no_bias.parameters = false;
  EXPECT_FALSE(norm_forward_plan(no_bias).few);
}

TEST(NormForwardPlan, SumsAreHeldInPacks) {
  for (const DType x : {bfloat16, float32, float64}) {
    for (const std::int64_t columns : many_columns()) {
      NormShape s = shape_of(100, columns, x, x);
      s.adds = true;
      const NormForwardPlan p = norm_forward_plan(s);
      const bool expected = s.packed && x != float64 && columns <= (x == bfloat16 ? 16'384 : 8192);
      ASSERT_EQ(p.kernel, expected ? Kernel::held : Kernel::looped) << columns;
      ASSERT_FALSE(p.stays || p.few);
    }
  }
}

std::string name_of(const NormForwardPlan& p) {
  if (p.kernel == Kernel::looped) {
    return "a block, which rereads it | looped";
  }
  if (p.kernel == Kernel::short_rows) {
    return p.team == RowTeam::warp ? "a warp | short" : fmt::format("{} lanes | short", p.threads);
  }
  const char* const kernel = p.edges ? "held, with edges" : p.kernel == Kernel::held ? "held" : "streamed";
  switch (p.team) {
    case RowTeam::lanes: return fmt::format("{} lanes | {}", p.threads, kernel);
    case RowTeam::warp: return fmt::format("a warp | {}", kernel);
    case RowTeam::block: return fmt::format("a block | {}", kernel);
    case RowTeam::cluster: return fmt::format("a cluster of {} blocks | {}", p.blocks, kernel);
  }
  return "";
}

// A table with a row for each range of lengths whose rows are shared in the same way: lengths first, first + step, ….
std::string table_of(const std::string& title, DType x, bool packed, std::int64_t first, std::int64_t step) {
  std::string table = fmt::format(
      "| {}, columns up to | threads that share a row | kernel | packs per thread |\n"
      "|---|---|---|---|\n",
      title);
  std::string before;
  std::set<int> packs;
  constexpr std::int64_t kLast = 300'000;
  for (std::int64_t columns = first; columns <= kLast; columns += step) {
    NormShape s = shape_of(1000, columns, x, x);
    s.packed = packed;
    const NormForwardPlan p = norm_forward_plan(s);
    const std::string name = name_of(p);
    const bool ends = columns + step > kLast;
    if (ends || (!before.empty() && name != before)) {
      table += fmt::format("| {} | {} | {} |\n", ends ? "any" : std::to_string(columns - step), before,
                           packs == std::set<int>{0} ? "" : fmt::format("{}", fmt::join(packs, ", ")));
      packs.clear();
    }
    packs.insert(p.packs);
    before = name;
  }
  return table;
}

TEST(NormForwardPlan, ReadmeHasItsTable) {
  const std::filesystem::path readme = MICA_NORM_README;
  if (!std::filesystem::exists(readme)) {
    GTEST_SKIP() << "no source tree";
  }
  std::stringstream text;
  text << std::ifstream(readme).rdbuf();
  for (const std::string& table :
       {table_of("16 bits", bfloat16, true, 8, 8), table_of("float32", float32, true, 4, 4),
        table_of("float32, any alignment", float32, false, 1, 1), table_of("16 bits, even", bfloat16, false, 2, 2),
        table_of("16 bits, odd", bfloat16, false, 1, 2)}) {
    EXPECT_NE(text.str().find(table), std::string::npos) << "expected in " << readme << ":\n" << table;
  }
}

}  // namespace

}  // namespace mica::kernels
