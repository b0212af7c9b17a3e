#include <algorithm>
#include <array>
#include <climits>

#include <mica/ops/norm/detail/norm_forward_plan.h>

namespace mica::kernels {

namespace {

constexpr int kWarpLanes = 32;
constexpr int kWarpTeams = 8;  // rows per block, if each warp has one

/// The most packs of a row that a thread holds.
int most_packs(int pack) { return pack == 1 ? 16 : pack == 8 ? 4 : 8; }

std::int64_t divided(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// Plans held rows with `packs` packs per thread, and with as many blocks per row as that requires. The kernel for held
/// rows supports only plans with one block per row.
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

/// Plans streamed rows with `packs` packs per thread, which are of the slab that its block has.
NormForwardPlan streamed(std::int64_t columns, int pack, int packs, int blocks) {
  constexpr std::int64_t kUnit = 64;  // columns; slabs are multiples of it, and otherwise as equal as possible
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

/// The plan for long rows, which are streamed. Returns the looped plan if a row is too short, or if there is no kernel.
NormForwardPlan stream_plan(const NormShape& s, int pack) {
  const bool has_kernel = s.clusters && !s.adds && size_of(s.x) <= 4 && (pack > 1 || size_of(s.x) == 4);
  if (!has_kernel || s.rows > INT_MAX / 2) {  // the kernel counts rows in int
    return {};
  }
  if (s.centered && pack == 4 && s.columns > 8192 && s.columns <= 16384) {
    return streamed(s.columns, pack, 4, 2);
  }
  if (pack == 4 && s.columns > 49152 && s.columns <= 65536) {
    return streamed(s.columns, pack, 4, 8);
  }
  if (s.columns <= std::int64_t{kForwardBlock} * most_packs(pack) * pack) {
    return {};  // a block can hold a row in registers
  }
  for (int blocks = 2; blocks <= 16; blocks *= 2) {
    const std::int64_t threads = std::int64_t{blocks} * kForwardBlock;
    for (const int elements : {20, 24, 32}) {  // per thread
      if ((pack == 1 || elements == 32) && s.columns <= threads * elements) {
        NormForwardPlan p = streamed(s.columns, pack, elements / pack, blocks);
        p.units = pack == 1;
        return p;
      }
    }
  }
  return {};
}

/// Whether 16-bit rows consist of aligned words of 4 bytes.
bool has_words(const NormShape& s) { return s.columns % 2 == 0 && s.alignment >= 4; }

/// The plan for short rows. Returns the looped plan if a row is too long, or if there is no kernel.
NormForwardPlan short_plan(const NormShape& s) {
  struct Share {
    int lanes;
    int packs;
  };
  // Each row of a table serves longer rows than the previous one, so that at most most_empty_packs() of a lane are
  // empty. Packs of 16 bytes:
  constexpr std::array kOf16Bits{Share{8, 1}, Share{8, 2}, Share{8, 3}, Share{16, 2}, Share{16, 3}, Share{32, 2}};
  constexpr std::array kOfFloat32{Share{8, 1},  Share{8, 2},  Share{16, 2}, Share{32, 2}, Share{32, 3},
                                  Share{32, 4}, Share{32, 5}, Share{32, 6}, Share{32, 7}, Share{32, 8}};
  // Words of 4 bytes:
  constexpr std::array kPairs{Share{8, 2},  Share{8, 4},  Share{16, 3}, Share{16, 4},  Share{32, 3},
                              Share{32, 4}, Share{32, 6}, Share{32, 8}, Share{32, 12}, Share{32, 16}};
  constexpr std::array kFloats{Share{8, 2},   Share{8, 4},   Share{8, 6},   Share{8, 8},   Share{16, 6},  Share{16, 8},
                               Share{32, 6},  Share{32, 8},  Share{32, 10}, Share{32, 12}, Share{32, 14}, Share{32, 16},
                               Share{32, 20}, Share{32, 24}, Share{32, 28}, Share{32, 32}};
  // Single elements of 16 bits:
  constexpr std::array kElements{Share{8, 2},   Share{8, 4},   Share{8, 6},   Share{16, 4},
                                 Share{16, 6},  Share{16, 8},  Share{32, 6},  Share{32, 8},
                                 Share{32, 10}, Share{32, 12}, Share{32, 14}, Share{32, 16},
                                 Share{32, 20}, Share{32, 24}, Share{32, 28}, Share{32, 32}};
  const auto first_of = [&](int pack, const auto& shares) -> NormForwardPlan {
    for (const Share& share : shares) {
      if (s.columns <= share.lanes * share.packs * pack) {
        return {.kernel = NormForwardPlan::Kernel::short_rows,
                .team = share.lanes == kWarpLanes ? RowTeam::warp : RowTeam::lanes,
                .pack = pack,
                .packs = share.packs,
                .threads = share.lanes,
                .teams = kShortBlock / share.lanes,
                .slab = share.lanes * share.packs * pack};
      }
    }
    return {};
  };
  if (s.adds || size_of(s.x) > 4) {
    return {};
  }
  if (size_of(s.x) == 4) {
    // Longer rows are faster if they are held, by a warp (aligned) or a block (unaligned).
    const std::int64_t most = s.packed != s.centered ? 1024 : s.packed ? 256 : 512;
    return s.columns > most ? NormForwardPlan() : s.packed ? first_of(4, kOfFloat32) : first_of(1, kFloats);
  }
  return s.packed ? first_of(8, kOf16Bits) : has_words(s) ? first_of(2, kPairs) : first_of(1, kElements);
}

/// The plan for rows that are held in registers. Returns the looped plan if there is no kernel.
NormForwardPlan held_plan(const NormShape& s, int pack) {
  if (pack < 4 && (s.adds || size_of(s.x) == 2)) {
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
  if (pack >= 4 && s.columns <= (pack == 8 ? 1024 : 512)) {
    const int packs = static_cast<int>(divided(s.columns, kWarpLanes * pack));
    return held(s.columns, pack, packs, kWarpLanes);
  }
  // Float32 rows of RMS norms need fewer registers per pack.
  const bool more_packs = pack == 4 && !s.centered && !s.adds;
  if (pack >= 4 && !more_packs && s.columns <= (pack == 8 ? 2560 : 2048)) {
    return held(s.columns, pack, 2, kForwardBlock);
  }
  // Chooses the number of packs per thread, among these candidates, that leaves the fewest packs of the threads unused;
  // the first one on a tie.
  const std::array<int, 4> numbers = pack == 8    ? std::array{4, 3, 3, 3}
                                     : more_packs ? std::array{8, 4, 4, 4}
                                     : pack == 4  ? std::array{4, 8, 8, 8}
                                     : pack == 2  ? std::array{8, 4, 2, 1}
                                                  : std::array{16, 8, 8, 8};
  NormForwardPlan best;
  for (const int packs : numbers) {
    if (s.adds && packs > 4) {
      continue;  // packs of x and of residual are in flight together, which doubles their number
    }
    const NormForwardPlan p = held(s.columns, pack, packs, kForwardBlock);
    if (p.blocks == 1 && (best.threads == 0 || p.threads * packs < best.threads * best.packs)) {
      best = p;
    }
  }
  return best;
}

constexpr std::int64_t kMostPairs = 262144;  // columns of unaligned 16-bit rows that are streamed

/// The plan for longer unaligned 16-bit rows, which are streamed in pairs. A thread has 12 pairs, unless a block
/// computes more rows at once with 16 pairs per thread.
NormForwardPlan pairs_plan(const NormShape& s) {
  const int blocks = s.columns <= 16384    ? 1
                     : s.columns <= 32768  ? 2
                     : s.columns <= 65536  ? 4
                     : s.columns <= 131072 ? 8
                                           : 16;
  const NormForwardPlan of_12 = streamed(s.columns, 2, 12, blocks);
  const NormForwardPlan of_16 = streamed(s.columns, 2, 16, blocks);
  NormForwardPlan p = kForwardBlock / of_12.threads >= kForwardBlock / of_16.threads ? of_12 : of_16;
  p.units = !has_words(s);
  p.teams = static_cast<int>(std::clamp<std::int64_t>(divided(s.rows, s.multiprocessors), 1, p.teams));
  return p;
}

/// Whether persistent blocks keep the parameters in shared memory, because weight and bias each have twice as many
/// bytes as a row.
bool shares(const NormShape& s) { return s.centered && size_of(s.weight) > size_of(s.x); }

/// The most rows that a block computes at once if they share the parameters in shared memory. For short rows, two
/// blocks per multiprocessor, with half as many threads each, are fastest.
int most_sharing(int threads) {
  const int block = threads <= 128 ? kSharingBlock / 2 : threads <= 256 ? 896 : kSharingBlock;
  return block / threads;
}

/// Whether 16-bit rows that begin and end inside packs are held, by persistent blocks. With fewer rows, loading the
/// parameters takes too long. Other rows are faster if they are streamed in pairs. Measured on an H200. The limits are
/// constants, so that results do not depend on the GPU's number of multiprocessors.
bool has_edges(const NormShape& s) {
  if (s.alignment < 16 || s.adds || !s.clusters) {  // older GPUs may have too little shared memory
    return false;
  }
  const std::int64_t most = has_words(s) ? 12288 : 16384;
  return s.centered ? s.columns > 1024 && s.columns <= most - 7 && s.rows >= 2112
                    : s.columns > 4096 && s.columns <= 12288 - 7 && s.rows >= 4224;
}

/// The plan for such rows.
NormForwardPlan edges_plan(const NormShape& s) {
  const std::int64_t columns = s.columns + 7;  // up to 7 elements of the first pack are not in the row
  NormForwardPlan p = held(columns, 8, columns <= 12288 ? 3 : 4, kForwardBlock);
  p.edges = true;
  p.stays = true;
  p.teams = p.packs == 3 ? most_sharing(p.threads) : 1;
  return p;
}

/// Whether all blocks can run at once with the parameters in registers. Does not affect the bits of the results.
bool has_few_blocks(const NormShape& s, const NormForwardPlan& p) {
  const bool has_kernel = p.kernel == NormForwardPlan::Kernel::held && p.pack >= 4 && !s.adds && s.parameters;
  if (!has_kernel || (shares(s) && p.team != RowTeam::block)) {  // such warps have them early, in shared memory
    return false;
  }
  // Each row loads the parameters again. With more rows, this costs more than it hides.
  return s.rows <= 2 * s.multiprocessors && s.rows * p.threads <= std::int64_t{kForwardBlock} * s.multiprocessors;
}

/// Whether blocks are persistent, so that their teams compute one row after another. Does not affect the bits of the
/// results.
bool teams_stay(const NormShape& s, const NormForwardPlan& p) {
  if (p.kernel != NormForwardPlan::Kernel::held || p.pack < 4 || s.adds) {
    return false;
  }
  if (shares(s)) {
    // Each block loads them for several rows. GPUs before compute capability 9.0 may have only 99 KiB of shared memory.
    const bool fit = s.clusters || 2 * s.columns * static_cast<std::int64_t>(size_of(s.weight)) <= 96 << 10;
    return p.team != RowTeam::block || (fit && s.rows >= 4 * s.multiprocessors);
  }
  return s.centered && p.team == RowTeam::block && p.packs == 2 && s.parameters;
}

}  // namespace

NormForwardPlan norm_forward_plan(const NormShape& s) {
  NormForwardPlan p = short_plan(s);
  if (p.kernel == NormForwardPlan::Kernel::looped && !s.packed && !s.adds && size_of(s.x) == 2) {
    if (has_edges(s)) {
      return edges_plan(s);
    }
    if (s.clusters && s.columns <= kMostPairs && s.rows <= INT_MAX / 2) {  // it uses int for rows
      return pairs_plan(s);
    }
  }
  const int pack = s.packed ? static_cast<int>(16 / size_of(s.x)) : 1;
  if (p.kernel == NormForwardPlan::Kernel::looped) {
    p = stream_plan(s, pack);
  }
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
