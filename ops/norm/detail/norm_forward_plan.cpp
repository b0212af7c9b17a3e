#include <algorithm>
#include <span>

#include <mica/ops/norm/detail/norm_forward_plan.h>

namespace mica::kernels {

namespace {

using norm_forward_kernels::Registers;
using norm_forward_kernels::RegisterSums;
using norm_forward_kernels::RegisterUnaligned;
using norm_forward_kernels::Short;
using rows::Group;
using rows::has_warps;
using rows::RowKernel;
using rows::Schedule;

constexpr int kWarpLanes = 32;
constexpr int kWarpGroups = 8;  // rows per block, if each warp has one

bool shares(const NormShape& s) {
  return s.aligned && shares_parameters(s.centered, s.adds, size_of(s.x), size_of(s.weight));
}

/// Whether the threads of `blocks` blocks have room for a row.
bool has_room(const NormShape& s, const RowKernel& shape, int pack, int blocks) {
  const int groups = has_warps(shape.group) ? kForwardBlock / shape.lanes * blocks : 1;
  if (s.columns > std::int64_t{groups} * shape.lanes * shape.packs * pack) {
    return false;
  }
  // GPUs before compute capability 9.0 may have only 99 KiB of shared memory, and have no clusters.
  const bool in_block = shape.group == Group::block && shares(s);
  const bool fits = !in_block || 2 * s.columns * static_cast<std::int64_t>(size_of(s.weight)) <= 96 << 10;
  return s.clusters || (fits && shape.group != Group::cluster);
}

/// The plan for the first kernel that has room for a row, without its schedule; the looped plan if there is none.
NormForwardPlan plan_of(const NormShape& s, NormForwardPlan::Kernel kernel, std::span<const RowKernel> shapes) {
  const int pack = s.aligned ? static_cast<int>(16 / size_of(s.x)) : 1;
  for (const RowKernel& shape : shapes) {
    const bool cluster = shape.group == Group::cluster;
    const int most = cluster ? rows::kMostCluster : 1;
    for (int blocks = cluster ? 8 : 1; blocks <= most; blocks *= 2) {
      if (!has_room(s, shape, pack, blocks)) {
        continue;
      }
      const rows::RowSplit split = rows::split_row(s.columns, shape, pack, blocks);
      const int block = kernel == NormForwardPlan::Kernel::short_rows || shape.group == Group::lanes
                            ? kShortBlock
                            : kWarpGroups * kWarpLanes;
      return {.kernel = kernel,
              .pack = pack,
              .shape = shape,
              .threads = static_cast<int>(split.threads),
              .groups = has_warps(shape.group) ? 1 : block / shape.lanes,
              .blocks = blocks,
              .slab = static_cast<int>(split.slab)};
    }
  }
  return {};
}

NormForwardPlan plan_of(const NormShape& s) {
  if (s.adds) {
    return s.aligned ? plan_of(s, NormForwardPlan::Kernel::in_registers, RegisterSums::kAll) : NormForwardPlan{};
  }
  if (!s.aligned) {
    return plan_of(s, NormForwardPlan::Kernel::in_registers, RegisterUnaligned::kAll);
  }
  const NormForwardPlan p = plan_of(s, NormForwardPlan::Kernel::short_rows, Short::kAll);
  return p.kernel == NormForwardPlan::Kernel::looped
             ? plan_of(s, NormForwardPlan::Kernel::in_registers, Registers::kAll)
             : p;
}

/// The schedule of a plan for rows in registers. It does not affect the bits of results.
Schedule schedule_of(const NormShape& s, const NormForwardPlan& p) {
  const auto has = [&](Schedule schedule) { return has_schedule(shares(s), p.shape, schedule); };
  // Threads per multiprocessor up to which a single wave is faster, measured on an H200.
  const int most = s.adds || !has_warps(p.shape.group) ? 512 : 1024;
  const bool fits_in_wave = s.rows * p.blocks * p.threads <= std::int64_t{most} * s.multiprocessors;
  if (has(Schedule::single_wave) && s.parameters && fits_in_wave) {
    return Schedule::single_wave;
  }
  return has(Schedule::many_waves) ? Schedule::many_waves : Schedule::persistent;
}

/// The most rows that a block computes at once if they share the parameters in shared memory. For short rows, blocks of
/// half the size are faster.
int most_sharing(int threads) {
  const int block = threads <= 128 ? kSharingBlock / 2 : threads <= 256 ? 896 : kSharingBlock;
  return block / threads;
}

}  // namespace

NormForwardPlan norm_forward_plan(const NormShape& shape) {
  NormShape s = shape;
  s.aligned = s.aligned && size_of(s.x) <= 4;
  NormForwardPlan p = plan_of(s);
  switch (p.kernel) {
    case NormForwardPlan::Kernel::short_rows: p.schedule = Schedule::persistent; break;
    case NormForwardPlan::Kernel::in_registers: p.schedule = schedule_of(s, p); break;
    case NormForwardPlan::Kernel::looped: break;
  }
  if (p.schedule == Schedule::persistent && p.shape.group == Group::block) {
    p.groups = static_cast<int>(std::clamp<std::int64_t>(s.rows / s.multiprocessors, 1, most_sharing(p.threads)));
  }
  return p;
}

}  // namespace mica::kernels
