#include <algorithm>
#include <array>
#include <climits>

#include <mica/ops/norm/detail/norm_forward_plan.h>

namespace mica::kernels {

namespace {

constexpr int kWarpLanes = 32;
constexpr int kWarpTeams = 8;  // rows of a block whose warps have one each

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

/// Rows that stream: a thread has P packs of the part of a row that a block has.
NormForwardPlan streamed(std::int64_t columns, int pack, int packs, int blocks) {
  constexpr std::int64_t kUnit = 64;  // columns: parts are as long as possible alike
  const std::int64_t slab = divided(columns, blocks * kUnit) * kUnit;
  const auto threads = static_cast<int>(divided(slab, std::int64_t{kWarpLanes} * pack * packs) * kWarpLanes);
  return {.kernel = NormForwardPlan::Kernel::stream,
          .team = blocks > 1              ? RowTeam::cluster
                  : threads == kWarpLanes ? RowTeam::warp
                                          : RowTeam::block,
          .pack = pack,
          .packs = packs,
          .threads = threads,
          .teams = blocks > 1 ? 1 : kForwardBlock / threads,
          .blocks = blocks,
          .slab = static_cast<int>(slab)};
}

/// The plan for long rows, which stream; else, looped.
NormForwardPlan stream_plan(const NormShape& s, int pack) {
  const bool has_kernel = s.clusters && !s.adds && size_of(s.x) <= 4 && (pack > 1 || size_of(s.x) == 4);
  if (!has_kernel || s.rows > INT_MAX / 2) {  // the kernel counts rows in int
    return {};
  }
  if (s.centered && pack == 4 && s.columns > 8192 && s.columns <= 16384) {
    return streamed(s.columns, pack, 4, 2);
  }
  if (s.columns <= std::int64_t{kForwardBlock} * most_packs(pack) * pack) {
    return {};  // a block holds them in registers
  }
  for (int blocks = 2; blocks <= 16; blocks *= 2) {
    const std::int64_t threads = std::int64_t{blocks} * kForwardBlock;
    for (const int elements : {20, 24, 32}) {  // of a thread
      if ((pack == 1 || elements == 32) && s.columns <= threads * elements) {
        return streamed(s.columns, pack, elements / pack, blocks);
      }
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

// Of rows that packs do not fit.
constexpr std::int64_t kTileBytes = 4096;     // of a tile
constexpr int kTileWarpsAtATime = 16;         // that a multiprocessor has room for
constexpr std::int64_t kMostFloatTile = 256;  // columns of float32
constexpr std::int64_t kMostTile = 512;       // of 16 bits
constexpr std::int64_t kMostPairs = 262144;   // of 16 bits that stream

/// The plan for short rows, which come and go in tiles. A thread has pairs.
NormForwardPlan tiles_plan(const NormShape& s) {
  const bool shorter = s.columns <= 64;
  const std::int64_t group = shorter ? 16 : 4;  // rows that a warp works on at a time
  const auto size = static_cast<std::int64_t>(size_of(s.x));
  const std::int64_t warps = std::int64_t{kTileWarpsAtATime} * s.multiprocessors;
  const std::int64_t most = divided(s.rows, warps * group);  // so that all have some
  const std::int64_t groups = std::clamp<std::int64_t>(kTileBytes / (group * s.columns * size), 1, most);
  return {.kernel = NormForwardPlan::Kernel::tiles,
          .team = shorter ? RowTeam::lanes : RowTeam::warp,
          .pack = 2,
          .packs = shorter ? 8 : static_cast<int>(divided(s.columns, 2 * kWarpLanes) * 2),
          .threads = kWarpLanes,
          .teams = kTileWarps,
          .tile_rows = static_cast<int>(group * groups),
          // They may begin anywhere in a line of 128 bytes.
          .tile_bytes = static_cast<int>(divided(group * groups * s.columns * size, 128) + 1) * 128};
}

/// The plan for longer ones, of 16 bits, that stream in units of 16 bytes. A thread has 12 or 16 pairs: fewer if a
/// block then has no fewer rows at a time.
NormForwardPlan pairs_plan(const NormShape& s) {
  const int blocks = s.columns <= 16384    ? 1
                     : s.columns <= 32768  ? 2
                     : s.columns <= 65536  ? 4
                     : s.columns <= 131072 ? 8
                                           : 16;
  const NormForwardPlan of_12 = streamed(s.columns, 2, 12, blocks);
  const NormForwardPlan of_16 = streamed(s.columns, 2, 16, blocks);
  NormForwardPlan p = kForwardBlock / of_12.threads >= kForwardBlock / of_16.threads ? of_12 : of_16;
  p.teams = static_cast<int>(std::clamp<std::int64_t>(divided(s.rows, s.multiprocessors), 1, p.teams));
  return p;
}

/// Whether blocks that stay have the parameters in shared memory: they are twice as many bytes as a row.
bool shares(const NormShape& s) { return s.centered && size_of(s.weight) > size_of(s.x); }

/// Rows, at most, of a block that shares the parameters among them. Two blocks of half the threads do best where rows
/// are short.
int most_sharing(int threads) {
  const int block = threads <= 128 ? kSharingBlock / 2 : threads <= 256 ? 896 : kSharingBlock;
  return block / threads;
}

/// Whether all blocks have room at a time, and for the parameters in registers. Of no effect on the bits of a row.
bool has_few_blocks(const NormShape& s, const NormForwardPlan& p) {
  const bool has_kernel = p.kernel == NormForwardPlan::Kernel::held && p.pack >= 4 && !s.adds && s.parameters;
  if (!has_kernel || (shares(s) && p.team != RowTeam::block)) {  // warps that share them have them early enough
    return false;
  }
  // Each row reads them again: of more rows, that costs more than it hides.
  return s.rows <= 2 * s.multiprocessors && s.rows * p.threads <= std::int64_t{kForwardBlock} * s.multiprocessors;
}

/// Whether blocks, or warps, stay for row after row. Of no effect on the bits of a row.
bool teams_stay(const NormShape& s, const NormForwardPlan& p) {
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
  if (!s.packed && !s.adds && size_of(s.x) <= 4) {
    if (s.columns <= (size_of(s.x) == 2 ? kMostTile : kMostFloatTile)) {
      return tiles_plan(s);
    }
    if (s.clusters && size_of(s.x) == 2 && s.columns <= kMostPairs && s.rows <= INT_MAX / 2) {  // rows are int there
      return pairs_plan(s);
    }
  }
  NormForwardPlan p = stream_plan(s, pack);
  if (p.kernel == NormForwardPlan::Kernel::looped) {
    p = held_plan(s, pack);
    p.pack = pack;
    p.few = has_few_blocks(s, p);
    p.stays = !p.few && teams_stay(s, p);
    if (p.stays && p.team == RowTeam::block && shares(s)) {
      p.teams = static_cast<int>(std::clamp<std::int64_t>(s.rows / s.multiprocessors, 1, most_sharing(p.threads)));
    }
  }
  return p;
}

}  // namespace mica::kernels
