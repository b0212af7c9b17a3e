#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include <mica/ops/norm/detail/norm_forward_plan.h>

// Tests what norm_forward_plan() chooses, and that every choice is valid.

namespace mica::kernels {

namespace {

using rows::Group;
using rows::Schedule;
using Kernel = NormForwardPlan::Kernel;

NormShape shape_of(std::int64_t rows, std::int64_t columns, DType x, DType weight) {
  return {.rows = rows,
          .columns = columns,
          .x = x,
          .weight = weight,
          .parameters = true,
          .centered = true,
          .adds = false,
          .aligned = columns * static_cast<std::int64_t>(size_of(x)) % 16 == 0,
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
            s.clusters = false;
            f(s);
            s.aligned = false;
            f(s);
          }
        }
      }
    }
  }
}

TEST(NormForwardPlan, ThreadsHaveRoomForEachColumn) {
  for_shapes([](const NormShape& s) {
    const NormForwardPlan p = norm_forward_plan(s);
    const std::string what = fmt::format("{} × {} of {}", s.rows, s.columns, s.x);
    if (p.kernel == Kernel::looped) {
      ASSERT_EQ(p.pack, 1) << what;
      return;
    }
    ASSERT_EQ(p.pack, s.aligned && s.x != float64 ? 16 / static_cast<int>(size_of(s.x)) : 1) << what;
    const int lane_columns = p.shape.packs * p.pack;
    if (p.kernel == Kernel::short_rows) {
      ASSERT_TRUE(s.aligned) << what;
      ASSERT_GE(p.threads * lane_columns, s.columns) << what;
      ASSERT_LT(p.threads * (lane_columns - p.pack), s.columns) << what;  // a lane has all packs but the last
      ASSERT_EQ(p.threads * p.groups, kShortBlock) << what;
      ASSERT_EQ(p.threads, p.shape.lanes) << what;
      ASSERT_EQ(p.blocks, 1) << what;
      return;
    }
    ASSERT_GE(p.threads * lane_columns, std::min<std::int64_t>(p.slab, s.columns)) << what;
    ASSERT_GE(std::int64_t{p.slab} * p.blocks, s.columns) << what;
    ASSERT_LT(std::int64_t{p.slab} * (p.blocks - 1), s.columns) << what;
    ASSERT_EQ(p.blocks > 1, p.shape.group == Group::cluster) << what;
    const bool warps = rows::has_warps(p.shape.group);
    const int most = !warps ? kForwardBlock / 2 : p.groups > 1 ? kSharingBlock : kForwardBlock;
    ASSERT_LE(p.threads * p.groups, most) << what;
    ASSERT_EQ(p.shape.group == Group::lanes, p.shape.lanes < 32) << what;
    if (warps) {
      ASSERT_EQ(p.threads % 32, 0) << what;
    } else {
      ASSERT_EQ(p.threads, p.shape.lanes) << what;
    }
    if (p.shape.group == Group::cluster) {
      ASSERT_TRUE(s.aligned && s.clusters && size_of(s.x) <= 4 && p.blocks <= 16 && p.groups == 1) << what;
      ASSERT_NE(p.schedule, Schedule::many_waves) << what;
    }
    if (p.schedule == Schedule::persistent) {
      ASSERT_TRUE(s.aligned) << what;
      if (p.shape.group == Group::cluster || size_of(s.weight) > size_of(s.x)) {  // the parameters are in shared memory
        ASSERT_LE(2 * (p.slab + 256) * static_cast<std::int64_t>(size_of(s.weight)), 200 * 1024) << what;
        ASSERT_LE(p.groups, warps ? 15 : 100) << what;  // each group of warps has a named barrier
      }
    }
  });
}

// The order in which a row is summed depends only on its length, its alignment and the dtype of x. The exception are
// rows that clusters share, if there are few of them.
TEST(NormForwardPlan, RowsAndWeightsDoNotChangeHowARowIsAddedUp) {
  for_shapes([](const NormShape& s) {
    NormShape other = s;
    other.multiprocessors = 60;
    const NormForwardPlan a = norm_forward_plan(s);
    if (a.shape.group != Group::cluster || s.rows * s.columns > 8 << 20) {
      other.weight = s.x;
      other.parameters = false;
      other.rows = a.shape.group == Group::cluster ? 5000 : 5;
    }
    const NormForwardPlan b = norm_forward_plan(other);
    ASSERT_EQ(a.kernel, b.kernel);
    ASSERT_EQ(a.pack, b.pack);
    ASSERT_EQ(a.shape, b.shape);
    ASSERT_EQ(a.threads, b.threads);
    ASSERT_EQ(a.blocks, b.blocks);
  });
}

TEST(NormForwardPlan, PersistentBlocks) {
  const auto persists = [](const NormShape& s) { return norm_forward_plan(s).schedule == Schedule::persistent; };
  const auto are_persistent = [&](std::int64_t rows, std::int64_t columns, DType x, DType weight) {
    return persists(shape_of(rows, columns, x, weight));
  };
  EXPECT_TRUE(are_persistent(65'536, 768, bfloat16, float32));
  EXPECT_TRUE(are_persistent(8192, 16'384, float16, float32));
  EXPECT_FALSE(are_persistent(65'536, 768, bfloat16, bfloat16));
  EXPECT_FALSE(are_persistent(65'536, 769, bfloat16, float32));
  EXPECT_TRUE(are_persistent(4096, 2048, float16, float16));
  EXPECT_TRUE(are_persistent(65'536, 2048, float32, float32));
  EXPECT_FALSE(are_persistent(4096, 4096, float16, float16));
  NormShape no_bias = shape_of(4096, 2048, float16, float16);
  no_bias.parameters = false;
  EXPECT_FALSE(persists(no_bias));
  NormShape rms = shape_of(4096, 2048, float16, float16);
  rms.centered = false;
  EXPECT_FALSE(persists(rms));
}

TEST(NormForwardPlan, UnalignedRowsHaveOneElementPerPack) {
  for (const DType x : {bfloat16, float32, float64}) {
    for (const std::int64_t columns : {1, 63, 64, 65, 200, 511, 513, 4001, 8192, 8193, 300'001}) {
      NormShape s = shape_of(1000, columns, x, x);
      s.aligned = false;
      const NormForwardPlan p = norm_forward_plan(s);
      EXPECT_EQ(p.pack, 1) << columns;
      EXPECT_EQ(p.kernel, columns <= 8192 ? Kernel::held : Kernel::looped) << columns;
      EXPECT_EQ(p.schedule, Schedule::many_waves) << columns;
      s.adds = true;
      EXPECT_EQ(norm_forward_plan(s).kernel, Kernel::looped) << columns;
    }
  }
}

TEST(NormForwardPlan, SingleWave) {
  const auto few = [](std::int64_t rows, std::int64_t columns, DType x, DType weight) {
    return norm_forward_plan(shape_of(rows, columns, x, weight)).schedule == Schedule::single_wave;
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
  EXPECT_TRUE(few(660, 2048, float32, float32));
  EXPECT_FALSE(few(661, 2048, float32, float32));
  EXPECT_FALSE(few(1, 2048, float64, float64));
  NormShape no_bias = shape_of(1, 2048, float16, float16);
  no_bias.parameters = false;
  EXPECT_NE(norm_forward_plan(no_bias).schedule, Schedule::single_wave);

  EXPECT_TRUE(few(4224, 64, bfloat16, bfloat16));  // 2 blocks of 16 rows on a multiprocessor
  EXPECT_FALSE(few(4225, 64, bfloat16, bfloat16));
  EXPECT_TRUE(few(2112, 256, float16, float32));
  EXPECT_FALSE(few(2113, 256, float16, float32));
  EXPECT_FALSE(few(1, 192, bfloat16, bfloat16));  // a team has a single row per step anyway
  EXPECT_FALSE(few(1, 511, bfloat16, bfloat16));  // unaligned

  const auto few_sums = [](std::int64_t rows, std::int64_t columns, DType x, DType weight) {
    NormShape s = shape_of(rows, columns, x, weight);
    s.adds = true;
    return norm_forward_plan(s).schedule == Schedule::single_wave;
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
    EXPECT_EQ(p.schedule == Schedule::single_wave, e.few) << what;
    EXPECT_EQ(p.blocks, e.blocks) << what;
    EXPECT_EQ(p.shape.packs, e.packs) << what;
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
      const bool expected = s.aligned && x != float64 && columns <= (x == bfloat16 ? 16'384 : 8192);
      ASSERT_EQ(p.kernel, expected ? Kernel::held : Kernel::looped) << columns;
      ASSERT_NE(p.schedule, Schedule::persistent);
    }
  }
}

}  // namespace

}  // namespace mica::kernels
