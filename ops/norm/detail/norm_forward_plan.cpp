#include <algorithm>
#include <climits>
#include <initializer_list>
#include <optional>
#include <span>

#include <mica/ops/norm/detail/norm_forward_plan.h>

namespace mica::kernels {

namespace {

using norm_forward_kernels::HeldOf16Bits;
using norm_forward_kernels::HeldOfFloat32;
using norm_forward_kernels::HeldOfFloat32NotCentered;
using norm_forward_kernels::HeldSumsOf16Bits;
using norm_forward_kernels::HeldSumsOfFloat32;
using norm_forward_kernels::HeldUnaligned;
using norm_forward_kernels::ShortOf16Bits;
using norm_forward_kernels::ShortOfFloat32;
using norm_forward_kernels::ShortOfFloat32NotCentered;
using rows::by_block;
using rows::by_cluster;
using rows::by_lanes;
using rows::by_warp;
using rows::ceil_div;
using rows::Group;
using rows::kPersistentBlocks;
using rows::RowKernel;
using rows::Schedule;
using Plan = NormForwardPlan;

constexpr int kWarpLanes = 32;
constexpr int kWarpGroups = 8;  // rows per block, if each warp has one

/// A line of a table: rows of up to `columns` columns are shared by the threads of `blocks` blocks.
struct Line {
  std::int64_t columns;
  RowKernel shape;
  int blocks = 1;
};

using Table = std::span<const Line>;

constexpr std::int64_t kAny = std::int64_t{1} << 62;

// Short rows. A lane always has at least all of its packs but one.
constexpr Line kShort16Bits[] = {{64, ShortOf16Bits::get(by_lanes(8, 1))},   {128, ShortOf16Bits::get(by_lanes(8, 2))},
                                 {192, ShortOf16Bits::get(by_lanes(8, 3))},  {256, ShortOf16Bits::get(by_lanes(16, 2))},
                                 {384, ShortOf16Bits::get(by_lanes(16, 3))}, {512, ShortOf16Bits::get(by_warp(2))}};
constexpr Line kShortFloat32[] = {{32, ShortOfFloat32::get(by_lanes(8, 1))},
                                  {64, ShortOfFloat32::get(by_lanes(8, 2))},
                                  {128, ShortOfFloat32::get(by_lanes(16, 2))},
                                  {256, ShortOfFloat32::get(by_warp(2))}};
constexpr Line kShortFloat32NotCentered[] = {
    {32, ShortOfFloat32NotCentered::get(by_lanes(8, 1))},   {64, ShortOfFloat32NotCentered::get(by_lanes(8, 2))},
    {128, ShortOfFloat32NotCentered::get(by_lanes(16, 2))}, {256, ShortOfFloat32NotCentered::get(by_warp(2))},
    {384, ShortOfFloat32NotCentered::get(by_warp(3))},      {512, ShortOfFloat32NotCentered::get(by_warp(4))},
    {640, ShortOfFloat32NotCentered::get(by_warp(5))},      {768, ShortOfFloat32NotCentered::get(by_warp(6))},
    {896, ShortOfFloat32NotCentered::get(by_warp(7))},      {1024, ShortOfFloat32NotCentered::get(by_warp(8))}};

// Rows in the registers of a block or less. A last line without a limit is for all rows that fit, and the one before it
// as well: they get the line that leaves fewer threads without elements.
constexpr Line kHeld16Bits[] = {{768, HeldOf16Bits::get(by_warp(3))},
                                {1024, HeldOf16Bits::get(by_warp(4))},
                                {2560, HeldOf16Bits::get(by_block(2))},
                                {kAny, HeldOf16Bits::get(by_block(4))},
                                {kAny, HeldOf16Bits::get(by_block(3))}};
constexpr Line kHeldSums16Bits[] = {
    {64, HeldSumsOf16Bits::get(by_lanes(8, 1))}, {128, HeldSumsOf16Bits::get(by_lanes(16, 1))},
    {256, HeldSumsOf16Bits::get(by_warp(1))},    {512, HeldSumsOf16Bits::get(by_warp(2))},
    {768, HeldSumsOf16Bits::get(by_warp(3))},    {1024, HeldSumsOf16Bits::get(by_warp(4))},
    {2560, HeldSumsOf16Bits::get(by_block(2))},  {kAny, HeldSumsOf16Bits::get(by_block(4))}};
constexpr Line kHeldFloat32[] = {{384, HeldOfFloat32::get(by_warp(3))},
                                 {512, HeldOfFloat32::get(by_warp(4))},
                                 {2048, HeldOfFloat32::get(by_block(2))},
                                 {kAny, HeldOfFloat32::get(by_block(4))},
                                 {kAny, HeldOfFloat32::get(by_block(8))}};
// Float32 rows of RMS norms need fewer registers per pack.
constexpr Line kHeldFloat32NotCentered[] = {{kAny, HeldOfFloat32NotCentered::get(by_block(8))},
                                            {kAny, HeldOfFloat32NotCentered::get(by_block(4))}};
constexpr Line kHeldSumsFloat32[] = {
    {64, HeldSumsOfFloat32::get(by_lanes(8, 2))}, {128, HeldSumsOfFloat32::get(by_warp(1))},
    {256, HeldSumsOfFloat32::get(by_warp(2))},    {384, HeldSumsOfFloat32::get(by_warp(3))},
    {512, HeldSumsOfFloat32::get(by_warp(4))},    {2048, HeldSumsOfFloat32::get(by_block(2))},
    {kAny, HeldSumsOfFloat32::get(by_block(4))}};
constexpr Line kHeldUnaligned[] = {{64, HeldUnaligned::get(by_lanes(8, 8))},
                                   {512, HeldUnaligned::get(by_warp(16))},
                                   {kAny, HeldUnaligned::get(by_block(16))}};

// Rows in the registers of a cluster. Those of large matrices were measured on an H200, others on an H100.
constexpr RowKernel kCluster2Of16Bits = HeldOf16Bits::get(by_cluster(2));
constexpr RowKernel kCluster4Of16Bits = HeldOf16Bits::get(by_cluster(4));
constexpr RowKernel kCluster4OfFloat32 = HeldOfFloat32::get(by_cluster(4));
constexpr RowKernel kCluster8OfFloat32 = HeldOfFloat32::get(by_cluster(8));
static_assert(HeldOfFloat32NotCentered::get(by_cluster(4)) == kCluster4OfFloat32 &&
              HeldOfFloat32NotCentered::get(by_cluster(8)) == kCluster8OfFloat32);

constexpr Line kLarge16Bits[] = {
    {40960, kCluster4Of16Bits, 4}, {131072, kCluster4Of16Bits, 8}, {262144, kCluster4Of16Bits, 16}};
constexpr Line kLarge16BitsNotCentered[] = {{131072, kCluster4Of16Bits, 8}, {262144, kCluster4Of16Bits, 16}};
constexpr Line kLargeFloat32[] = {
    {57344, kCluster4OfFloat32, 8}, {65536, kCluster8OfFloat32, 8}, {262144, kCluster8OfFloat32, 16}};
constexpr Line kLargeFloat32NotCentered[] = {
    {65536, kCluster4OfFloat32, 8}, {131072, kCluster8OfFloat32, 8}, {262144, kCluster8OfFloat32, 16}};

// With 2 packs, layer norms have room for two blocks on a multiprocessor.
constexpr Line kSmall16Bits[] = {
    {65536, kCluster2Of16Bits, 8}, {131072, kCluster4Of16Bits, 8}, {262144, kCluster4Of16Bits, 16}};
constexpr Table kSmall16BitsNotCentered = kLarge16BitsNotCentered;
constexpr Table kSmallFloat32 = kLargeFloat32NotCentered;

// The same, if not all clusters can run at once.
constexpr Line kSmallLongFloat32InWaves[] = {{114688, kCluster4OfFloat32, 16}, {262144, kCluster8OfFloat32, 16}};
constexpr Line kSmall16BitsNotCenteredInWaves[] = {{65536, kCluster2Of16Bits, 8}};

NormForwardKind kind_of(const NormShape& s) {
  return {.size = size_of(s.x),
          .weight_size = size_of(s.weight),
          .centered = s.centered,
          .adds = s.adds,
          .aligned = s.aligned};
}

int pack_of(const NormShape& s) { return s.aligned ? static_cast<int>(16 / size_of(s.x)) : 1; }

/// The plan for a line of a table.
Plan plan_of(Plan::Kernel kernel, const NormShape& s, const Line& line) {
  const RowKernel& shape = line.shape;
  const rows::RowShare share = rows::share_row(s.columns, shape, pack_of(s), line.blocks);
  const int block = kernel == Plan::Kernel::short_rows ? kShortBlock
                    : shape.group == Group::lanes      ? kForwardBlock / 4
                                                       : kWarpGroups * kWarpLanes;
  return {.kernel = kernel,
          .shape = shape,
          .threads = static_cast<int>(std::min<std::int64_t>(share.threads, INT_MAX)),
          .groups = rows::has_warps(shape.group) ? 1 : block / shape.lanes,
          .blocks = line.blocks,
          .slab = static_cast<int>(std::min<std::int64_t>(share.slab, INT_MAX))};
}

/// The plan for the first line of a table that has room for the row. Of several lines without a limit, the plan is that
/// which leaves the fewest packs of the threads unused. Returns the looped plan if the row is too long.
Plan plan_of(Plan::Kernel kernel, const NormShape& s, Table table) {
  Plan best;
  const auto capacity = [](const Plan& p) { return std::int64_t{p.blocks} * p.threads * p.shape.packs; };
  for (const Line& line : table) {
    if (s.columns <= line.columns) {
      const Plan p = plan_of(kernel, s, line);
      if (line.columns < kAny) {
        return p;
      }
      if (p.threads <= kForwardBlock && (best.threads == 0 || capacity(p) < capacity(best))) {
        best = p;
      }
    }
  }
  return best;
}

Plan short_plan(const NormShape& s) {
  if (s.adds || !s.aligned) {
    return {};
  }
  return plan_of(Plan::Kernel::short_rows, s,
                 size_of(s.x) == 2 ? Table(kShort16Bits)
                 : s.centered      ? Table(kShortFloat32)
                                   : Table(kShortFloat32NotCentered));
}

/// The plan for rows that a block or less holds in registers.
Plan held_plan(const NormShape& s) {
  const auto table = [&]() -> Table {
    if (!s.aligned) {
      return s.adds ? Table() : Table(kHeldUnaligned);
    }
    if (size_of(s.x) == 2) {
      return s.adds ? Table(kHeldSums16Bits) : Table(kHeld16Bits);
    }
    return s.adds ? Table(kHeldSumsFloat32) : s.centered ? Table(kHeldFloat32) : Table(kHeldFloat32NotCentered);
  };
  return plan_of(Plan::Kernel::held, s, table());
}

/// How many threads with the parameters in registers a multiprocessor can run.
int threads_at_once(const NormShape& s, const Plan& p) {
  const bool cluster = p.shape.group == Group::cluster;
  const bool is_16_bits = size_of(s.x) == 2;
  // What a thread needs besides its elements, as the kernels were compiled for compute capability 9.0.
  const int other = cluster ? (s.centered ? (is_16_bits ? 40 : 28) : (is_16_bits ? 24 : 26))
                            : (s.centered ? (is_16_bits ? 28 : 24) : (is_16_bits ? 18 : 16));
  const auto words = [&](DType dtype) { return ceil_div(pack_of(s) * static_cast<int>(size_of(dtype)), 4); };
  const int of_residual = s.adds ? static_cast<int>(p.shape.packs * words(s.x)) + (is_16_bits ? 16 : 4) : 0;
  const auto needed =
      static_cast<int>(p.shape.packs * (words(s.x) + (s.centered ? 2 : 1) * words(s.weight))) + other + of_residual;
  const int registers = (needed + 7) / 8 * 8;
  // Each quarter of a multiprocessor has registers of its own, which it gives to whole warps. Clusters keep the simpler
  // estimate with which their tables were measured.
  return cluster ? 65536 / registers : std::min(4 * kWarpLanes * (16384 / kWarpLanes / registers), 2048);
}

/// Whether all blocks can run at once on a GPU with this many multiprocessors, with the parameters in registers.
bool run_at_once(const NormShape& s, const Plan& p, int multiprocessors) {
  // The blocks of a cluster must lie in one GPC, so that some multiprocessors remain unused.
  multiprocessors -= kPersistentBlocks - rows::persistent_blocks(p.blocks);
  const int most = p.shape.group == Group::cluster ? 8 : 32;  // more than 8 blocks of clusters start too slowly
  const int blocks = std::min(threads_at_once(s, p) / (p.threads * p.groups), most);  // per multiprocessor
  return ceil_div(s.rows, p.groups) * p.blocks <= std::int64_t{blocks} * multiprocessors;
}

/// If not all blocks of plan p can run at once, returns one for clusters of another size whose blocks can, with the
/// most packs per thread; p if there is none. It assumes 132 multiprocessors, so that results do not depend on the GPU.
Plan at_once_plan(const NormShape& s, const Plan& p) {
  constexpr int kBusy = 100;  // blocks that keep nearly all multiprocessors busy
  if (p.kernel == Plan::Kernel::looped || !s.parameters || run_at_once(s, p, kPersistentBlocks)) {
    return p;
  }
  Plan best = p;
  for (const int blocks : {2, 4, 8, 16}) {  // small clusters are faster, if there are enough of them
    const RowKernel shape = size_of(s.x) == 2 ? kCluster4Of16Bits : kCluster8OfFloat32;
    const Plan other = plan_of(p.kernel, s, Line{s.columns, shape, blocks});
    if (other.threads <= kForwardBlock && run_at_once(s, other, kPersistentBlocks)) {
      best = other;
      if (s.rows * blocks >= kBusy) {
        break;
      }
    }
  }
  return best;
}

/// The plan for rows that a cluster holds in registers.
Plan cluster_plan(const NormShape& s) {
  if (!s.aligned || !s.clusters || s.adds || s.rows > INT_MAX / 2) {  // rows are counted in int
    return {};
  }
  const bool is_16_bits = size_of(s.x) == 2;
  const auto held = [&](Table table) { return plan_of(Plan::Kernel::held, s, table); };
  // In large matrices, memory traffic counts more than how early a kernel starts.
  if (s.rows * s.columns > 8 << 20) {
    return held(is_16_bits ? (s.centered ? Table(kLarge16Bits) : Table(kLarge16BitsNotCentered))
                           : (s.centered ? Table(kLargeFloat32) : Table(kLargeFloat32NotCentered)));
  }
  const Plan p = at_once_plan(s, held(!is_16_bits  ? kSmallFloat32
                                      : s.centered ? Table(kSmall16Bits)
                                                   : kSmall16BitsNotCentered));
  if (p.kernel == Plan::Kernel::looped || run_at_once(s, p, kPersistentBlocks)) {
    return p;
  }
  if (!is_16_bits && s.columns > 65536) {
    return held(kSmallLongFloat32InWaves);
  }
  if (is_16_bits && !s.centered && size_of(s.weight) > size_of(s.x) && s.columns <= 65536) {
    return held(kSmall16BitsNotCenteredInWaves);
  }
  return p;
}

/// The most rows that a block computes at once if they share the parameters in shared memory. For short rows, two
/// blocks per multiprocessor, with half as many threads each, are fastest.
int most_sharing(int threads) {
  const int block = threads <= 128 ? kSharingBlock / 2 : threads <= 256 ? 896 : kSharingBlock;
  return block / threads;
}

/// Whether there are so few short rows that a single one per group is faster.
bool is_single_short_wave(const NormShape& s, const Plan& p) {
  constexpr int kBlocks = 2;  // per multiprocessor, measured on an H100
  return rows_per_step(p.shape.packs) > 1 && ceil_div(s.rows, p.groups) <= kBlocks * s.multiprocessors;
}

/// Whether all blocks can run at once, or nearly, with the parameters in registers.
bool is_single_wave(const NormShape& s, const Plan& p) {
  if (!s.parameters) {
    return false;
  }
  // If a few large blocks have to wait, it is faster, too.
  const bool nearly =
      p.shape.group != Group::cluster && s.rows * p.threads <= std::int64_t{kForwardBlock} * s.multiprocessors;
  return nearly || run_at_once(s, p, s.multiprocessors);
}

/// Whether persistent blocks are faster than many waves, if both are possible.
bool is_persistent(const NormShape& s) {
  if (!shares_parameters(kind_of(s))) {
    return s.parameters;
  }
  // Each block loads them for several rows. GPUs before compute capability 9.0 may have only 99 KiB of shared memory.
  const bool fit = s.clusters || 2 * s.columns * static_cast<std::int64_t>(size_of(s.weight)) <= 96 << 10;
  return fit && s.rows >= 4 * s.multiprocessors;
}

/// The schedule of a plan for rows in registers. It does not affect the bits of results.
Schedule schedule_of(const NormShape& s, const Plan& p) {
  const auto has = [&](Schedule schedule) { return has_schedule(kind_of(s), p.shape, schedule); };
  if (has(Schedule::single_wave) && is_single_wave(s, p)) {
    return Schedule::single_wave;
  }
  if (!has(Schedule::many_waves) || (has(Schedule::persistent) && is_persistent(s))) {
    return Schedule::persistent;
  }
  return Schedule::many_waves;
}

/// The plan without its pack and schedule.
Plan group_plan(const NormShape& s) {
  Plan p = short_plan(s);
  if (p.kernel != Plan::Kernel::looped) {
    return p;
  }
  // In layer norms, a block can hold longer float32 rows, too, but a cluster is faster.
  const bool cluster_first = size_of(s.x) == 4 && s.centered && s.columns > 8192;
  p = cluster_first ? cluster_plan(s) : held_plan(s);
  if (p.kernel != Plan::Kernel::looped) {
    return p;
  }
  return cluster_first ? held_plan(s) : cluster_plan(s);
}

}  // namespace

NormForwardPlan norm_forward_plan(const NormShape& shape) {
  NormShape s = shape;
  s.aligned = s.aligned && size_of(s.x) <= 4;
  Plan p = group_plan(s);
  p.pack = p.kernel == Plan::Kernel::looped ? 1 : pack_of(s);
  switch (p.kernel) {
    case Plan::Kernel::short_rows:
      p.schedule = is_single_short_wave(s, p) ? Schedule::single_wave : Schedule::persistent;
      break;
    case Plan::Kernel::held:
      p.schedule = schedule_of(s, p);
      if (p.schedule == Schedule::persistent && p.shape.group == Group::block && shares_parameters(kind_of(s))) {
        p.groups = static_cast<int>(std::clamp<std::int64_t>(s.rows / s.multiprocessors, 1, most_sharing(p.threads)));
      }
      break;
    case Plan::Kernel::looped: break;
  }
  return p;
}

}  // namespace mica::kernels
