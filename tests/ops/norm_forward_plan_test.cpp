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
    if (p.schedule == Schedule::persistent) {  // the parameters are in shared memory
      ASSERT_TRUE(s.aligned) << what;
      ASSERT_LE(2 * (p.slab + 256) * static_cast<std::int64_t>(size_of(s.weight)), (s.clusters ? 200 : 98) * 1024)
          << what;
      ASSERT_LE(p.groups, warps ? 15 : 100) << what;  // each group of warps has a named barrier
    }
  });
}

// The order in which a row is summed depends only on its length, its alignment and the dtype of x.
TEST(NormForwardPlan, RowsAndWeightsDoNotChangeHowARowIsAddedUp) {
  for_shapes([](const NormShape& s) {
    NormShape other = s;
    other.multiprocessors = 60;
    other.rows = 5;
    if (s.clusters) {  // otherwise shared memory may have no room for float32 weights
      other.weight = s.x;
    }
    other.parameters = false;
    const NormForwardPlan a = norm_forward_plan(s);
    const NormForwardPlan b = norm_forward_plan(other);
    ASSERT_EQ(a.kernel, b.kernel);
    ASSERT_EQ(a.pack, b.pack);
    ASSERT_EQ(a.shape, b.shape);
    ASSERT_EQ(a.threads, b.threads);
    ASSERT_EQ(a.blocks, b.blocks);
  });
}

// Up to which length aligned rows, whose packs have 16 bytes, get which kernel.
TEST(NormForwardPlan, KernelsByLength) {
  struct Expected {
    std::int64_t packs;
    Kernel kernel;
    rows::RowKernel shape;
    int blocks = 1;
  };
  for (const DType x : {bfloat16, float32}) {
    for (const bool adds : {false, true}) {
      const Kernel short_rows = adds ? Kernel::in_registers : Kernel::short_rows;
      std::int64_t packs = 1;
      for (const Expected& e :
           {Expected{8, short_rows, rows::by_lanes(8, adds ? 2 : 1)}, Expected{16, short_rows, rows::by_lanes(8, 2)},
            Expected{32, short_rows, rows::by_lanes(16, 2)}, Expected{64, short_rows, rows::by_warp(2)},
            Expected{128, Kernel::in_registers, rows::by_warp(4)},
            Expected{2048, Kernel::in_registers, rows::by_block(4)},
            Expected{16'384, Kernel::in_registers, rows::by_cluster(4), 8},
            Expected{32'768, Kernel::in_registers, rows::by_cluster(4), 16}, Expected{33'000, Kernel::looped, {}}}) {
        for (; packs <= e.packs; packs += 1 + packs / 100) {
          NormShape s = shape_of(100, packs * 16 / static_cast<std::int64_t>(size_of(x)), x, x);
          s.adds = adds;
          const NormForwardPlan p = norm_forward_plan(s);
          if (e.kernel == Kernel::looped || (adds && e.shape.group == Group::cluster)) {
            ASSERT_EQ(p.kernel, Kernel::looped) << packs;
            continue;
          }
          ASSERT_EQ(p.kernel, e.kernel) << packs;
          ASSERT_EQ(p.shape, e.shape) << packs;
          ASSERT_EQ(p.blocks, e.blocks) << packs;
        }
      }
    }
  }
}

TEST(NormForwardPlan, SchedulesOfManyRows) {
  const auto schedule = [](std::int64_t columns, DType x, DType weight, bool centered) {
    NormShape s = shape_of(100'000, columns, x, weight);
    s.centered = centered;
    const Schedule many = norm_forward_plan(s).schedule;
    s.parameters = false;
    EXPECT_EQ(norm_forward_plan(s).schedule, many);
    return many;
  };
  EXPECT_EQ(schedule(512, bfloat16, bfloat16, true), Schedule::persistent);  // short rows
  for (const std::int64_t columns : {768, 4096, 16'384}) {
    EXPECT_EQ(schedule(columns, bfloat16, float32, true), Schedule::persistent) << columns;
    EXPECT_EQ(schedule(columns, bfloat16, float32, false), Schedule::many_waves) << columns;
    EXPECT_EQ(schedule(columns, float16, float16, true), Schedule::many_waves) << columns;
    EXPECT_EQ(schedule(columns / 2, float32, float32, true), Schedule::many_waves) << columns;
  }
  EXPECT_EQ(schedule(769, bfloat16, float32, true), Schedule::many_waves);       // unaligned
  EXPECT_EQ(schedule(20'000, bfloat16, bfloat16, false), Schedule::persistent);  // by clusters
}

TEST(NormForwardPlan, UnalignedRowsHaveOneElementPerPack) {
  for (const DType x : {bfloat16, float32, float64}) {
    for (const std::int64_t columns : {1, 63, 64, 65, 200, 511, 513, 4001, 8192, 8193, 300'001}) {
      NormShape s = shape_of(1000, columns, x, x);
      s.aligned = false;
      const NormForwardPlan p = norm_forward_plan(s);
      EXPECT_EQ(p.pack, 1) << columns;
      EXPECT_EQ(p.kernel, columns <= 8192 ? Kernel::in_registers : Kernel::looped) << columns;
      EXPECT_EQ(p.schedule, Schedule::many_waves) << columns;
      s.adds = true;
      EXPECT_EQ(norm_forward_plan(s).kernel, Kernel::looped) << columns;
    }
  }
}

// With few rows, and if there are weight and bias, rows of more than 64 packs run in a single wave.
TEST(NormForwardPlan, SingleWave) {
  struct Expected {
    std::int64_t columns;
    DType x;
    DType weight;
    bool adds;
    std::int64_t most_rows;
  };
  for (const Expected& e :
       {Expected{768, bfloat16, bfloat16, false, 2112}, Expected{1024, bfloat16, float32, false, 2112},
        Expected{4096, float16, float16, false, 1056}, Expected{16'384, float16, float32, false, 264},
        Expected{2048, float32, float32, false, 1056}, Expected{65'536, bfloat16, float32, false, 66},
        Expected{768, bfloat16, float32, true, 2112}, Expected{16'384, float16, float32, true, 132}}) {
    const auto is_single = [&](std::int64_t rows, bool parameters) {
      NormShape s = shape_of(rows, e.columns, e.x, e.weight);
      s.adds = e.adds;
      s.parameters = parameters;
      return norm_forward_plan(s).schedule == Schedule::single_wave;
    };
    EXPECT_TRUE(is_single(1, true)) << e.columns;
    EXPECT_TRUE(is_single(e.most_rows, true)) << e.columns;
    EXPECT_FALSE(is_single(e.most_rows + 1, true)) << e.columns;
    EXPECT_FALSE(is_single(1, false)) << e.columns;
  }
  for (const NormShape& s : {shape_of(1, 512, bfloat16, bfloat16), shape_of(1, 2048, float64, float64),
                             shape_of(1, 1001, bfloat16, bfloat16)}) {
    EXPECT_NE(norm_forward_plan(s).schedule, Schedule::single_wave) << s.columns;
  }
}

TEST(NormForwardPlan, SumsAreInPacksInRegisters) {
  for (const DType x : {bfloat16, float32, float64}) {
    for (const std::int64_t columns : many_columns()) {
      NormShape s = shape_of(100, columns, x, x);
      s.adds = true;
      const NormForwardPlan p = norm_forward_plan(s);
      const bool expected = s.aligned && x != float64 && columns <= (x == bfloat16 ? 16'384 : 8192);
      ASSERT_EQ(p.kernel, expected ? Kernel::in_registers : Kernel::looped) << columns;
      ASSERT_NE(p.schedule, Schedule::persistent);
    }
  }
}

}  // namespace

}  // namespace mica::kernels
