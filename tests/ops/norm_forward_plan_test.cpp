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
      ASSERT_EQ(p.team == Team::warp, p.threads == 32) << what;
      ASSERT_EQ(p.blocks, 1) << what;
      return;
    }
    const int full_pack = 16 / static_cast<int>(size_of(s.x));
    if (p.kernel == Kernel::looped) {
      ASSERT_EQ(p.pack, s.packed ? full_pack : 1) << what;
      return;
    }
    ASSERT_EQ(p.pack, s.packed || p.edges ? full_pack : has_words(s) ? 2 : 1) << what;
    if (p.edges) {
      ASSERT_TRUE(s.alignment == 16 && !s.packed && s.clusters && p.stays) << what;
      switch (p.team) {
        case Team::warp: ASSERT_EQ(p.packs, 6) << what; break;
        case Team::block: ASSERT_TRUE(p.packs == 3 || p.packs == 4) << what; break;
        default: ASSERT_EQ(p.team, Team::cluster) << what;
      }
      const std::int64_t entry = 2 * (p.team == Team::warp ? 4 : static_cast<std::int64_t>(size_of(s.weight)));
      ASSERT_LE(entry * (p.threads * p.packs + 16) * p.pack, 220 * 1024) << what;  // in shared memory
    }
    ASSERT_GE(p.threads * p.packs * p.pack, p.slab) << what;
    ASSERT_GE(std::int64_t{p.slab} * p.blocks, s.columns + (p.edges ? p.pack - 1 : 0)) << what;
    ASSERT_LT(std::int64_t{p.slab} * (p.blocks - 1), s.columns) << what;
    ASSERT_EQ(p.blocks > 1, p.team == Team::cluster) << what;
    const bool warps = p.team == Team::block || p.team == Team::cluster;
    const int most = !warps ? kForwardBlock / 2 : p.teams > 1 ? kSharingBlock : kForwardBlock;
    ASSERT_LE(p.threads * p.teams, most) << what;
    switch (p.team) {
      case Team::lanes: ASSERT_TRUE(p.threads == 8 || p.threads == 16) << what; break;
      case Team::warp: ASSERT_EQ(p.threads, 32) << what; break;
      case Team::block: ASSERT_EQ(p.threads % 32, 0) << what; break;
      case Team::cluster:
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
        ASSERT_LE(p.teams, 15 * (p.team == Team::block ? 1 : 100)) << what;  // each team has a named barrier
      }
    }
  });
}

// The order in which a row is summed depends only on its length, its alignment and the dtype of x. The exceptions are
// long unaligned rows and, if there are few of them, aligned rows that clusters share.
TEST(NormForwardPlan, RowsAndWeightsDoNotChangeHowARowIsAddedUp) {
  for_shapes([](const NormShape& s) {
    NormShape other = s;
    other.multiprocessors = 60;
    const NormForwardPlan a = norm_forward_plan(s);
    const bool longer = s.columns > (size_of(s.x) == 2 ? 1024 : 16384);
    const bool small_clusters = a.team == Team::cluster && s.packed && s.rows * s.columns <= 8 << 20;
    if (!small_clusters) {
      other.weight = s.x;
      other.parameters = false;
      if (s.packed || size_of(s.x) > 4 || !longer) {
        other.rows = a.team == Team::cluster ? 5000 : 5;
      }
    }
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
  for (const bool centered : {true, false}) {
    EXPECT_TRUE(edges(513, 8191, centered));
    EXPECT_FALSE(edges(512, 8191, centered));  // by single elements
    EXPECT_TRUE(edges(513, 8190, centered));
    EXPECT_FALSE(edges(512, 8190, centered));  // by words
    EXPECT_FALSE(edges(10'000, 8192, centered));
    EXPECT_FALSE(edges(10'000, 8191, centered, float32));
    EXPECT_TRUE(edges(10'000, 1025, centered));
    EXPECT_FALSE(edges(10'000, 1023, centered));
    EXPECT_TRUE(edges(53, 30'001, centered));
    EXPECT_FALSE(edges(52, 30'001, centered));
    EXPECT_TRUE(edges(1119, 30'002, centered));
    EXPECT_FALSE(edges(1118, 30'002, centered));
    EXPECT_TRUE(edges(1, 262'001, centered));
    EXPECT_FALSE(edges(1, 262'145, centered));
    EXPECT_TRUE(edges(100, 50'001, centered, float32));
    EXPECT_FALSE(edges(50, 50'001, centered, float32));
    EXPECT_EQ(edges(10'000, 32'767, centered, float32), centered);
    EXPECT_FALSE(edges(500, 32'767, centered, float32));
    EXPECT_TRUE(edges(1, 262'141, centered, float32));
    EXPECT_FALSE(edges(10'000, 40'001, centered, float64));
  }
}

TEST(NormForwardPlan, FewBlocks) {
  const auto few = [](std::int64_t rows, std::int64_t columns, DType x, DType weight) {
    const NormForwardPlan p = norm_forward_plan(shape_of(rows, columns, x, weight));
    EXPECT_FALSE(p.few && p.stays);
    return p.few;
  };
  EXPECT_TRUE(few(1, 768, bfloat16, bfloat16));
  EXPECT_TRUE(few(3168, 1024, bfloat16, bfloat16));  // 3 blocks of 8 rows on a multiprocessor
  EXPECT_FALSE(few(3169, 1024, bfloat16, bfloat16));
  EXPECT_TRUE(few(792, 4096, float16, float16));
  EXPECT_FALSE(few(793, 4096, float16, float16));
  EXPECT_TRUE(few(132, 16'384, float16, float32));
  EXPECT_FALSE(few(133, 16'384, float16, float32));
  EXPECT_FALSE(few(1, 768, bfloat16, float32));  // here, warps share the parameters
  EXPECT_TRUE(few(30, 65'536, bfloat16, float32));
  EXPECT_FALSE(few(31, 65'536, bfloat16, float32));
  EXPECT_TRUE(few(7, 262'144, bfloat16, bfloat16));
  EXPECT_FALSE(few(8, 262'144, bfloat16, bfloat16));  // an H200 has room for 7 clusters of 16 blocks
  EXPECT_TRUE(few(792, 1229, bfloat16, bfloat16));
  EXPECT_FALSE(few(793, 1229, bfloat16, bfloat16));
  EXPECT_TRUE(few(660, 2048, float32, float32));
  EXPECT_FALSE(few(661, 2048, float32, float32));
  EXPECT_TRUE(few(1, 2049, float32, float32));
  EXPECT_FALSE(few(1, 2048, float64, float64));
  NormShape no_bias = shape_of(1, 2048, float16, float16);
  no_bias.parameters = false;
  EXPECT_FALSE(norm_forward_plan(no_bias).few);

  EXPECT_TRUE(few(4224, 64, bfloat16, bfloat16));  // 2 blocks of 16 rows on a multiprocessor
  EXPECT_FALSE(few(4225, 64, bfloat16, bfloat16));
  EXPECT_TRUE(few(2112, 256, float16, float32));
  EXPECT_FALSE(few(2113, 256, float16, float32));
  EXPECT_TRUE(few(1056, 510, bfloat16, bfloat16));
  EXPECT_FALSE(few(1, 192, bfloat16, bfloat16));  // a team has a single row per step anyway
  EXPECT_FALSE(few(1, 511, bfloat16, bfloat16));

  const auto few_sums = [](std::int64_t rows, std::int64_t columns, DType x, DType weight) {
    NormShape s = shape_of(rows, columns, x, weight);
    s.adds = true;
    return norm_forward_plan(s).few;
  };
  EXPECT_FALSE(few_sums(1, 256, bfloat16, bfloat16));  // one pack per thread
  EXPECT_TRUE(few_sums(1, 264, bfloat16, bfloat16));
  EXPECT_TRUE(few_sums(1, 768, bfloat16, float32));
  EXPECT_TRUE(few_sums(2112, 1024, bfloat16, bfloat16));  // 2 blocks of 8 rows on a multiprocessor
  EXPECT_FALSE(few_sums(2113, 1024, bfloat16, bfloat16));
  EXPECT_TRUE(few_sums(132, 16'384, float16, float32));
  EXPECT_FALSE(few_sums(133, 16'384, float16, float32));
}

// If there are few rows, clusters have such sizes that all blocks run at once. The choice does not depend on the GPU.
TEST(NormForwardPlan, FewClusters) {
  struct Expected {
    std::int64_t rows;
    std::int64_t columns;
    DType x;
    DType weight;
    bool centered;
    bool few;
    int blocks;
    int packs;
  };
  const DType b16 = bfloat16;
  const DType f32 = float32;
  for (const Expected& e :
       {Expected{32, 24'896, b16, b16, true, true, 8, 2}, Expected{64, 24'896, b16, b16, true, true, 2, 4},
        Expected{67, 24'896, b16, b16, true, true, 4, 4}, Expected{67, 24'896, b16, f32, true, false, 8, 2},
        Expected{100, 24'896, b16, b16, true, false, 8, 2}, Expected{5000, 24'896, b16, b16, true, false, 4, 4},
        Expected{200, 20'480, b16, b16, false, true, 4, 4}, Expected{300, 20'480, b16, b16, false, false, 8, 4},
        Expected{300, 20'480, b16, f32, false, false, 8, 2}, Expected{600, 20'480, b16, f32, false, false, 8, 4},
        Expected{64, 17'472, f32, f32, true, true, 8, 4}, Expected{32, 49'152, f32, f32, true, true, 16, 8},
        Expected{250, 49'152, f32, f32, true, false, 8, 4}, Expected{8, 98'304, f32, f32, true, true, 8, 8},
        Expected{30, 98'304, f32, f32, true, false, 16, 4}, Expected{300, 98'304, f32, f32, true, false, 16, 8},
        Expected{30, 131'072, f32, f32, true, false, 16, 8}}) {
    NormShape s = shape_of(e.rows, e.columns, e.x, e.weight);
    s.centered = e.centered;
    const NormForwardPlan p = norm_forward_plan(s);
    const std::string what = fmt::format("{} × {}", e.rows, e.columns);
    EXPECT_EQ(p.few, e.few) << what;
    EXPECT_EQ(p.blocks, e.blocks) << what;
    EXPECT_EQ(p.packs, e.packs) << what;
    s.multiprocessors = 60;
    EXPECT_EQ(norm_forward_plan(s).blocks, e.blocks) << what;
  }
}

TEST(NormForwardPlan, SumsAreHeldInPacks) {
  for (const DType x : {bfloat16, float32, float64}) {
    for (const std::int64_t columns : many_columns()) {
      NormShape s = shape_of(100, columns, x, x);
      s.adds = true;
      const NormForwardPlan p = norm_forward_plan(s);
      const bool expected = s.packed && x != float64 && columns <= (x == bfloat16 ? 16'384 : 8192);
      ASSERT_EQ(p.kernel, expected ? Kernel::held : Kernel::looped) << columns;
      ASSERT_FALSE(p.stays);
    }
  }
}

std::string name_of(const NormForwardPlan& p) {
  if (p.kernel == Kernel::looped) {
    return "a block, which rereads it | looped";
  }
  if (p.kernel == Kernel::short_rows) {
    return p.team == Team::warp ? "a warp | short" : fmt::format("{} lanes | short", p.threads);
  }
  const char* const kernel = p.edges ? "held, with edges" : "held";
  switch (p.team) {
    case Team::lanes: return fmt::format("{} lanes | {}", p.threads, kernel);
    case Team::warp: return fmt::format("a warp | {}", kernel);
    case Team::block: return fmt::format("a block | {}", kernel);
    case Team::cluster: return fmt::format("a cluster of {} blocks | {}", p.blocks, kernel);
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
