#include <algorithm>
#include <array>
#include <climits>

#include <mica/ops/norm/detail/norm_forward_plan.h>

namespace mica::kernels {

namespace {

constexpr int kWarpLanes = 32;
constexpr int kWarpTeams = 8;                   // rows of a block whose warps have one each
constexpr std::int64_t kMostWarpColumns = 512;  // of single elements

/// Packs of a row that a thread holds, at most.
int most_packs(int pack) { return pack == 1 ? 16 : pack == 8 ? 4 : 8; }

std::int64_t divided(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// P packs a thread, and as many blocks a row as it then takes: the kernel for held rows has one.
NormForwardPlan held(std::int64_t columns, int pack, int packs, int most_threads) {
  const std::int64_t warp_columns = std::int64_t{kWarpLanes} * pack * packs;
  const std::int64_t warps = divided(columns, warp_columns);
  const std::int64_t blocks = std::min<std::int64_t>(divided(warps, most_threads / kWarpLanes), INT_MAX);
  const std::int64_t threads = divided(warps, blocks) * kWarpLanes;
  return {.kernel = NormForwardPlan::Kernel::held,
          .team = threads == kWarpLanes ? RowTeam::warp : RowTeam::block,
          .pack = pack,
          .packs = packs,
          .threads = static_cast<int>(threads),
          .teams = threads == kWarpLanes ? kWarpTeams : 1,
          .blocks = static_cast<int>(blocks),
          .slab = static_cast<int>(threads / kWarpLanes * warp_columns)};
}

NormForwardPlan held_by_lanes(int pack, int packs, int lanes) {
  return {.kernel = NormForwardPlan::Kernel::held,
          .team = RowTeam::lanes,
          .pack = pack,
          .packs = packs,
          .threads = lanes,
          .teams = 256 / lanes / 2,
          .slab = lanes * pack * packs};
}

/// The plan for rows that stream; else, looped.
NormForwardPlan stream_plan(const NormShape& s, int pack) {
  const auto streamed = [&](int packs, int depth, int blocks) {
    return NormForwardPlan{.kernel = NormForwardPlan::Kernel::stream,
                           .team = RowTeam::cluster,
                           .pack = pack,
                           .packs = packs,
                           .blocks = blocks,
                           .depth = depth};
  };
  const bool has_kernel = s.clusters && !s.adds && size_of(s.x) <= 4 && (pack > 1 || size_of(s.x) == 4);
  if (!has_kernel || s.rows > INT_MAX / 2) {  // the kernel counts rows in int
    return {};
  }
  if (s.centered && pack == 4 && s.columns > 8192 && s.columns <= 16384) {
    return streamed(4, 8, 2);
  }
  if (s.columns <= std::int64_t{kForwardBlock} * most_packs(pack) * pack) {
    return {};  // a block holds them in registers
  }
  for (int blocks = 2; blocks <= 16; blocks *= 2) {
    const std::int64_t threads = std::int64_t{blocks} * kForwardBlock;
    if (pack == 1 && s.columns <= threads * 20) {
      return streamed(20, 10, blocks);
    }
    if (pack == 1 && s.columns <= threads * 24) {
      return streamed(24, 12, blocks);
    }
    if (s.columns <= threads * 32) {
      return streamed(32 / pack, pack == 8 ? 8 : 12, blocks);
    }
  }
  return {};
}

/// The plan for rows that are held; else, looped.
NormForwardPlan held_plan(const NormShape& s, int pack) {
  if (s.adds && pack < 4) {
    return {};
  }
  if (s.columns <= 64) {
    return held_by_lanes(pack, std::max(1, 8 / pack), 8);
  }
  if (pack == 8 && s.columns <= 128) {
    return held_by_lanes(pack, 1, 16);
  }
  if (pack == 1 && s.columns <= 128) {
    return held(s.columns, pack, 4, kWarpLanes);
  }
  // float32 rows that are not centered take fewer registers a pack.
  const bool more_packs = pack == 4 && !s.centered && !s.adds;
  const int warp_columns = pack == 8 || more_packs ? 1024 : 512;
  if (pack >= 4 && s.columns <= warp_columns) {
    const int packs = static_cast<int>(divided(s.columns, kWarpLanes * pack));
    return held(s.columns, pack, packs > 4 ? 8 : packs, kWarpLanes);
  }
  if (pack >= 4 && !more_packs && s.columns <= (pack == 8 ? 2560 : 2048)) {
    return held(s.columns, pack, 2, kForwardBlock);
  }
  // Of so many packs a thread, the first number that leaves the fewest threads without one.
  const std::array<int, 4> numbers = pack == 8    ? std::array{4, 3, 3, 3}
                                     : more_packs ? std::array{8, 4, 4, 4}
                                     : pack == 4  ? std::array{4, 8, 8, 8}
                                     : pack == 2  ? std::array{8, 4, 2, 1}
                                                  : std::array{16, 8, 8, 8};
  NormForwardPlan best;
  for (const int packs : numbers) {
    if (s.adds && packs > 4) {
      continue;  // twice as many are on their way
    }
    const NormForwardPlan p = held(s.columns, pack, packs, kForwardBlock);
    if (p.blocks == 1 && (best.threads == 0 || p.threads * packs < best.threads * best.packs)) {
      best = p;
    }
  }
  return best;
}

// Of staged rows.
constexpr int kSlabBlock = kForwardBlock / 2;         // threads that had a slab each of a cluster's rows
constexpr int kTileBytes = 4096;                      // of a tile, for each warp of its team
constexpr int kStagedTeamWarps = 16;                  // that a multiprocessor has room for
constexpr std::int64_t kMostFloatColumns = 256;       // of float32
constexpr std::int64_t kMostBlockColumns = 8192;      // that a block shares
constexpr std::int64_t kFewClusterColumns = 24576;    // of rows that are not centered: they are looped over
constexpr std::int64_t kMostClusterColumns = 131072;  // that a cluster shares: 16 blocks have 2 slabs of 8 warps each

/// Shared memory for so many elements that lie at any distance from a line of 128 bytes.
int staged_bytes(std::int64_t elements, DType x) {
  return static_cast<int>(divided(elements * static_cast<std::int64_t>(size_of(x)), 128) + 1) * 128;
}

/// The plan for rows that come and go in tiles. A thread has pairs of single elements.
NormForwardPlan staged_plan(const NormShape& s) {
  NormForwardPlan p{.kernel = NormForwardPlan::Kernel::staged, .pack = 2, .depth = kStagedDepth};
  int group = 1;  // rows that a team works on at a time
  if (s.columns <= kMostWarpColumns) {
    p.team = s.columns <= 64 ? RowTeam::lanes : RowTeam::warp;
    p.packs = s.columns <= 64 ? 8 : static_cast<int>(divided(s.columns, 2 * kWarpLanes) * 2);
    p.threads = kWarpLanes;
    p.teams = kStagedWarps;
    group = s.columns <= 64 ? 16 : 4;
  } else {
    p.team = RowTeam::block;
    p.packs = held_plan(s, 1).packs;
    p.threads = static_cast<int>(divided(s.columns, 2 * kWarpLanes * p.packs) * kWarpLanes);
  }
  const std::int64_t warps = p.threads / kWarpLanes;
  const std::int64_t group_bytes = group * s.columns * static_cast<std::int64_t>(size_of(s.x));
  const std::int64_t teams = kStagedTeamWarps / warps * s.multiprocessors;
  const std::int64_t most = divided(s.rows, teams * group);  // so that all have some
  p.tile_rows = group * static_cast<int>(std::clamp<std::int64_t>(kTileBytes * warps / group_bytes, 1, most));
  p.tile_bytes = staged_bytes(p.tile_rows * s.columns, s.x);
  return p;
}

/// The same for rows that a cluster shares. Their slabs are those of the blocks that would hold them.
NormForwardPlan staged_cluster_plan(const NormShape& s) {
  const NormForwardPlan slabs = held(s.columns, 1, 16, kSlabBlock);
  return {.kernel = NormForwardPlan::Kernel::staged,
          .team = RowTeam::cluster,
          .pack = 2,
          .packs = slabs.packs,
          .threads = slabs.threads,
          .blocks = (slabs.blocks + 1) / 2,
          .slab = slabs.slab,
          .depth = kStagedClusterDepth,
          .tile_rows = 1,
          .tile_bytes = staged_bytes(2 * slabs.slab, s.x) + 128};
}

/// Whether blocks that stay have the parameters in shared memory: they are twice as many bytes as a row.
bool shares(const NormShape& s) { return s.centered && size_of(s.weight) > size_of(s.x); }

/// Rows, at most, of a block that shares the parameters among them. Two blocks of half the threads do best where rows
/// are short.
int most_sharing(int threads) {
  const int block = threads <= 128 ? kSharingBlock / 2 : threads <= 256 ? 896 : kSharingBlock;
  return block / threads;
}

/// Whether blocks, or warps, stay for row after row. Of no effect on the bits of a row.
bool stays(const NormShape& s, const NormForwardPlan& p) {
  if (p.kernel != NormForwardPlan::Kernel::held || p.pack < 4 || s.adds) {
    return false;
  }
  if (shares(s)) {
    return p.team != RowTeam::block || s.rows >= 4 * s.multiprocessors;  // a block reads them for some rows
  }
  const bool result_is_small = s.rows * s.columns * static_cast<std::int64_t>(size_of(s.x)) <= 40 << 20;
  return p.team == RowTeam::block && p.packs == 2 && s.parameters && (size_of(s.x) == 4 || result_is_small);
}

}  // namespace

NormForwardPlan norm_forward_plan(const NormShape& s) {
  const int pack = s.packed ? static_cast<int>(16 / size_of(s.x)) : 1;
  if (!s.packed && !s.adds) {
    const std::int64_t most = size_of(s.x) == 2 ? kMostBlockColumns : size_of(s.x) == 4 ? kMostFloatColumns : 0;
    if (s.columns <= most) {
      return staged_plan(s);
    }
    const bool is_faster = s.centered || s.columns > kFewClusterColumns;
    if (size_of(s.x) == 2 && s.clusters && is_faster && s.columns <= kMostClusterColumns && s.rows <= INT_MAX / 2) {
      return staged_cluster_plan(s);
    }
  }
  NormForwardPlan p = stream_plan(s, pack);
  if (p.kernel == NormForwardPlan::Kernel::looped) {
    p = held_plan(s, pack);
    p.pack = pack;
    p.stays = stays(s, p);
    if (p.stays && p.team == RowTeam::block && shares(s)) {
      p.teams = static_cast<int>(std::clamp<std::int64_t>(s.rows / s.multiprocessors, 1, most_sharing(p.threads)));
    }
  }
  return p;
}

}  // namespace mica::kernels
