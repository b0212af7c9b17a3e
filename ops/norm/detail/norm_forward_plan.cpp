#include <algorithm>
#include <array>
#include <climits>
#include <initializer_list>

#include <mica/ops/norm/detail/norm_forward_plan.h>

namespace mica::kernels {

namespace {

constexpr int kWarpLanes = 32;
constexpr int kWarpTeams = 8;  // rows per block, if each warp has one

std::int64_t divided(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// How many threads share a row, if `blocks` blocks share it and each thread has up to `packs` packs.
struct Division {
  int blocks;
  int packs;
};

/// The plan for a division. Each block has a slab of the columns.
NormForwardPlan divide(NormForwardPlan::Kernel kernel, std::int64_t columns, int pack, Division d) {
  constexpr std::int64_t kUnit = 64;  // columns; slabs are multiples of it, and otherwise as equal as possible
  const std::int64_t slab = divided(columns, d.blocks * kUnit) * kUnit;
  const std::int64_t threads = divided(slab, std::int64_t{kWarpLanes} * pack * d.packs) * kWarpLanes;
  const bool warp = threads == kWarpLanes && d.blocks == 1;
  return {.kernel = kernel,
          .team = d.blocks > 1 ? Team::cluster
                  : warp       ? Team::warp
                               : Team::block,
          .pack = pack,
          .packs = d.packs,
          .threads = static_cast<int>(std::min<std::int64_t>(threads, INT_MAX)),
          .teams = warp ? kWarpTeams : 1,
          .blocks = d.blocks,
          .slab = static_cast<int>(std::min<std::int64_t>(slab, INT_MAX))};
}

/// The plan that holds rows with the division, out of some, that leaves the fewest packs of the threads unused; the
/// first one on a tie. Returns the looped plan if rows are too long for all of them.
NormForwardPlan hold(std::int64_t columns, int pack, std::initializer_list<Division> divisions) {
  NormForwardPlan best;
  for (const Division& d : divisions) {
    const NormForwardPlan p = divide(NormForwardPlan::Kernel::held, columns, pack, d);
    const auto capacity = [](const NormForwardPlan& of) { return std::int64_t{of.blocks} * of.threads * of.packs; };
    if (p.threads <= kForwardBlock && (best.threads == 0 || capacity(p) < capacity(best))) {
      best = p;
    }
  }
  return best;
}

/// The division of rows of up to `columns` columns.
struct Limit {
  std::int64_t columns;
  Division division;
};

/// The plan that holds rows with the division of the first limit that they do not exceed. Returns the looped plan if
/// they exceed all limits.
NormForwardPlan hold_up_to(std::int64_t columns, int pack, std::initializer_list<Limit> limits) {
  for (const Limit& limit : limits) {
    if (columns <= limit.columns) {
      return divide(NormForwardPlan::Kernel::held, columns, pack, limit.division);
    }
  }
  return {};
}

NormForwardPlan held_by_lanes(int pack, int packs, int lanes) {
  return {.kernel = NormForwardPlan::Kernel::held,
          .team = Team::lanes,
          .pack = pack,
          .packs = packs,
          .threads = lanes,
          .teams = 256 / lanes / 2,
          .slab = lanes * pack * packs};
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
                .team = share.lanes == kWarpLanes ? Team::warp : Team::lanes,
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

/// The plan for rows that a block or less holds in registers. Returns the looped plan if there is no kernel.
NormForwardPlan held_plan(const NormShape& s, int pack) {
  using enum NormForwardPlan::Kernel;
  if (s.adds && pack < 4) {
    return {};
  }
  if (size_of(s.x) == 2 && pack == 2) {
    return hold(s.columns, pack, {{1, 6}, {1, 8}, {1, 12}});
  }
  if (size_of(s.x) == 2 && pack == 1) {
    return hold(s.columns, pack, {{1, 16}, {1, 12}, {1, 8}});
  }
  if (s.columns <= 64) {
    return held_by_lanes(pack, std::max(1, 8 / pack), 8);
  }
  if (pack == 8 && s.columns <= 128) {
    return held_by_lanes(pack, 1, 16);
  }
  if (pack == 1 && s.columns <= 128) {
    return divide(held, s.columns, pack, {1, 4});
  }
  if (pack >= 4 && s.columns <= (pack == 8 ? 1024 : 512)) {
    return divide(held, s.columns, pack, {1, static_cast<int>(divided(s.columns, kWarpLanes * pack))});
  }
  // Float32 rows of RMS norms need fewer registers per pack. Packs of x and of residual are in flight together, which
  // doubles their number.
  const bool more_packs = pack == 4 && !s.centered && !s.adds;
  if (pack >= 4 && !more_packs && s.columns <= (pack == 8 ? 2560 : 2048)) {
    return divide(held, s.columns, pack, {1, 2});
  }
  if (pack == 8) {
    return hold(s.columns, pack, {{1, 4}, {1, 3}});
  }
  if (pack == 4 && s.adds) {
    return hold(s.columns, pack, {{1, 4}});
  }
  if (pack == 4) {
    return more_packs ? hold(s.columns, pack, {{1, 8}, {1, 4}}) : hold(s.columns, pack, {{1, 4}, {1, 8}});
  }
  return pack == 2 ? hold(s.columns, pack, {{1, 8}, {1, 4}, {1, 2}, {1, 1}}) : hold(s.columns, pack, {{1, 16}, {1, 8}});
}

/// How many threads with the parameters in registers a multiprocessor can run.
int threads_at_once(const NormShape& s, const NormForwardPlan& p) {
  const bool cluster = p.team == Team::cluster;
  if (cluster && p.pack < 4) {
    return kForwardBlock;
  }
  const bool is_16_bits = size_of(s.x) == 2;
  // What a thread needs besides its elements, as the kernels were compiled for compute capability 9.0.
  const int other = cluster      ? (s.centered ? (is_16_bits ? 40 : 28) : (is_16_bits ? 24 : 26))
                    : p.pack < 4 ? (s.centered ? 36 : 20)
                                 : (s.centered ? (is_16_bits ? 28 : 24) : (is_16_bits ? 18 : 16));
  const auto words = [&](DType dtype) { return divided(p.pack * static_cast<int>(size_of(dtype)), 4); };
  const int of_residual = s.adds ? static_cast<int>(p.packs * words(s.x)) + (is_16_bits ? 16 : 4) : 0;
  const auto needed =
      static_cast<int>(p.packs * (words(s.x) + (s.centered ? 2 : 1) * words(s.weight))) + other + of_residual;
  const int registers = (needed + 7) / 8 * 8;
  // Each quarter of a multiprocessor has registers of its own, which it gives to whole warps. Clusters keep the simpler
  // estimate with which their divisions were measured.
  return cluster ? 65536 / registers : std::min(4 * kWarpLanes * (16384 / kWarpLanes / registers), 2048);
}

/// Whether all blocks can run at once on a GPU with this many multiprocessors, with the parameters in registers.
bool run_at_once(const NormShape& s, const NormForwardPlan& p, int multiprocessors) {
  // The blocks of a cluster must lie in one GPC, so that some multiprocessors remain unused.
  multiprocessors -= kPersistentBlocks - persistent_blocks(p.blocks);
  const int most = p.team == Team::cluster ? 8 : 32;  // more than 8 blocks of clusters start too slowly
  const int blocks = std::min(threads_at_once(s, p) / (p.threads * p.teams), most);  // per multiprocessor
  return divided(s.rows, p.teams) * p.blocks <= std::int64_t{blocks} * multiprocessors;
}

/// If not all blocks of plan p can run at once, returns one for clusters of another size whose blocks can, with the
/// most packs per thread; p if there is none. It counts on 132 multiprocessors on any GPU, so that results do not
/// depend on the GPU.
NormForwardPlan at_once_plan(const NormShape& s, const NormForwardPlan& p) {
  constexpr int kBusy = 100;  // blocks that keep nearly all multiprocessors busy
  if (p.kernel == NormForwardPlan::Kernel::looped || !s.parameters || run_at_once(s, p, kPersistentBlocks)) {
    return p;
  }
  NormForwardPlan best = p;
  for (const int blocks : {2, 4, 8, 16}) {  // small clusters are faster, if there are enough of them
    const NormForwardPlan other = divide(p.kernel, s.columns, p.pack, {blocks, p.pack == 8 ? 4 : 8});
    if (other.threads <= kForwardBlock && run_at_once(s, other, kPersistentBlocks)) {
      best = other;
      if (s.rows * blocks >= kBusy) {
        break;
      }
    }
  }
  return best;
}

/// Whether a matrix is so large that its memory traffic counts more than how early a kernel starts.
bool is_large(const NormShape& s) { return s.rows * s.columns > 8 << 20; }

/// The plan for packed rows that a cluster holds in registers. Returns the looped plan if rows are too long.
NormForwardPlan packed_cluster_plan(const NormShape& s, int pack) {
  const auto held = [&](std::initializer_list<Limit> limits) { return hold_up_to(s.columns, pack, limits); };
  if (is_large(s)) {  // measured on an H200
    if (pack == 8) {
      return s.centered ? held({{40960, {4, 4}}, {131072, {8, 4}}, {262144, {16, 4}}})
                        : held({{131072, {8, 4}}, {262144, {16, 4}}});
    }
    return s.centered ? held({{57344, {8, 4}}, {65536, {8, 8}}, {262144, {16, 8}}})
                      : held({{65536, {8, 4}}, {131072, {8, 8}}, {262144, {16, 8}}});
  }
  // Measured on an H100. With 2 packs, layer norms have room for two blocks on a multiprocessor.
  const NormForwardPlan usual = pack == 4    ? held({{65536, {8, 4}}, {131072, {8, 8}}, {262144, {16, 8}}})
                                : s.centered ? held({{65536, {8, 2}}, {131072, {8, 4}}, {262144, {16, 4}}})
                                             : held({{131072, {8, 4}}, {262144, {16, 4}}});
  const NormForwardPlan p = at_once_plan(s, usual);
  if (p.kernel == NormForwardPlan::Kernel::looped || run_at_once(s, p, kPersistentBlocks)) {
    return p;
  }
  if (pack == 4 && s.columns > 65536) {
    return held({{114688, {16, 4}}, {262144, {16, 8}}});
  }
  if (pack == 8 && !s.centered && size_of(s.weight) > size_of(s.x) && s.columns <= 65536) {
    return held({{65536, {8, 2}}});
  }
  return p;
}

/// The plan for rows that a cluster holds in registers. Returns the looped plan if there is no kernel.
NormForwardPlan cluster_plan(const NormShape& s, int pack) {
  if (!s.clusters || s.adds || size_of(s.x) > 4 || s.rows > INT_MAX / 2) {  // the kernel counts rows in int
    return {};
  }
  if (pack >= 4) {
    return packed_cluster_plan(s, pack);
  }
  const int most = s.columns <= 24576 && pack == 2 ? 4 : 8;
  return hold(s.columns, pack, {{most, 16}, {16, 16}});
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

/// Whether unaligned rows are held with edges, in whole packs, rather than by words or single elements, as in plan p.
/// The limits were measured on an H100 (float32 up to 32768: an H200). They are constants, so that results do not
/// depend on the GPU's number of multiprocessors.
bool has_edges(const NormShape& s, const NormForwardPlan& p) {
  if (s.packed || s.adds || size_of(s.x) > 4 || s.alignment < 16 || s.rows > INT_MAX / 2 || !s.clusters) {
    return false;  // there is no such kernel; older GPUs may have too little shared memory
  }
  if (p.kernel == NormForwardPlan::Kernel::looped) {
    return true;
  }
  const std::int64_t elements = s.rows * s.columns;
  if (size_of(s.x) == 4) {
    const bool long_rows = s.columns > (s.centered ? 32768 : 40960) && elements > 4 << 20;
    return long_rows || (s.centered && s.columns > 16384 && elements > 16 << 20);
  }
  if (p.team == Team::cluster) {
    return elements > (p.pack == 1 ? 3 << 19 : 32 << 20);
  }
  return elements > 4 << 20;
}

/// How rows with edges are divided; `columns` are those from the beginning of their first pack. Returns the looped plan
/// if rows are too long. Measured on an H200 for large matrices, and on an H100 for others.
NormForwardPlan divide_with_edges(const NormShape& s, std::int64_t columns, int pack) {
  const auto held = [&](std::initializer_list<Limit> limits) { return hold_up_to(columns, pack, limits); };
  const bool large = is_large(s);
  if (pack == 4 && s.centered) {
    return large ? held({{28672, {4, 8}}, {65536, {8, 8}}, {262144, {16, 8}}})
                 : held({{40960, {8, 4}}, {65536, {8, 8}}, {262144, {16, 8}}});
  }
  if (pack == 4) {
    return large ? held({{40960, {8, 4}}, {65536, {8, 8}}, {98304, {16, 4}}, {131072, {8, 8}}, {262144, {16, 8}}})
                 : held({{40960, {8, 4}}, {131072, {8, 8}}, {262144, {16, 8}}});
  }
  if (columns <= 1536) {
    return held({{1536, {1, 6}}});
  }
  if (columns <= 16384) {
    const bool four = large && s.centered && columns > 4608 && columns <= 10752;
    return four ? held({{10752, {1, 4}}}) : hold(columns, pack, {{1, 3}, {1, 4}});
  }
  if (s.centered) {
    return large ? held({{20480, {4, 4}}, {32768, {2, 4}}, {131072, {8, 4}}, {262144, {16, 4}}})
                 : held({{32768, {4, 4}}, {131072, {8, 4}}, {262144, {16, 4}}});
  }
  return large ? held({{32768, {2, 4}}, {65536, {4, 4}}, {131072, {8, 4}}, {262144, {16, 4}}})
               : held({{65536, {8, 2}}, {131072, {8, 4}}, {262144, {16, 4}}});
}

/// The plan that holds rows with edges. Returns the looped plan if rows are too long.
NormForwardPlan edges_plan(const NormShape& s) {
  const int pack = static_cast<int>(16 / size_of(s.x));
  // Up to pack − 1 elements of the first pack are not in the row.
  NormForwardPlan p = divide_with_edges(s, s.columns + pack - 1, pack);
  if (p.kernel == NormForwardPlan::Kernel::held && p.team == Team::block) {
    p.teams = most_sharing(p.threads);
  }
  p.edges = true;
  p.stays = true;
  return p;
}

/// Whether there are so few short rows that a single one per team is faster. Does not affect the bits of the results.
bool has_few_short_rows(const NormShape& s, const NormForwardPlan& p) {
  constexpr int kBlocks = 2;  // per multiprocessor, measured on an H100
  const bool has_kernel = most_rows_per_step(p.pack * static_cast<int>(size_of(s.x)), p.pack, p.packs) > 1;
  return has_kernel && divided(s.rows, p.teams) <= kBlocks * s.multiprocessors;
}

/// Whether all blocks can run at once, or nearly, with the parameters in registers. Does not affect the bits of the
/// results.
bool has_few_blocks(const NormShape& s, const NormForwardPlan& p) {
  if (p.kernel != NormForwardPlan::Kernel::held || size_of(s.x) > 4 || !s.parameters) {
    return false;
  }
  if (p.packs == 1) {  // no faster
    return false;
  }
  if (!s.adds && shares(s) && p.team == Team::warp) {  // such warps have them early, in shared memory
    return false;
  }
  // If a few large blocks have to wait, it is faster, too.
  const bool nearly = p.team != Team::cluster && s.rows * p.threads <= std::int64_t{kForwardBlock} * s.multiprocessors;
  return nearly || run_at_once(s, p, s.multiprocessors);
}

/// Whether blocks are persistent, so that their teams compute one row after another. Does not affect the bits of the
/// results.
bool teams_stay(const NormShape& s, const NormForwardPlan& p) {
  if (p.team == Team::cluster) {
    return true;
  }
  if (p.kernel != NormForwardPlan::Kernel::held || p.pack < 4 || s.adds) {
    return false;
  }
  if (shares(s)) {
    // Each block loads them for several rows. GPUs before compute capability 9.0 may have only 99 KiB of shared memory.
    const bool fit = s.clusters || 2 * s.columns * static_cast<std::int64_t>(size_of(s.weight)) <= 96 << 10;
    return p.team != Team::block || (fit && s.rows >= 4 * s.multiprocessors);
  }
  return s.centered && p.team == Team::block && p.packs == 2 && s.parameters;
}

}  // namespace

NormForwardPlan norm_forward_plan(const NormShape& s) {
  using enum NormForwardPlan::Kernel;
  NormForwardPlan p = short_plan(s);
  if (p.kernel == short_rows) {
    p.few = has_few_short_rows(s, p);
    return p;
  }
  const int full_pack = static_cast<int>(16 / size_of(s.x));
  const int pack = s.packed ? full_pack : size_of(s.x) == 2 && has_words(s) ? 2 : 1;
  // In layer norms, a block can hold longer float32 rows, too, but a cluster is faster.
  const bool cluster_first = pack == 4 && s.centered && s.columns > 8192;
  p = cluster_first ? cluster_plan(s, pack) : held_plan(s, pack);
  if (p.kernel == looped) {
    p = cluster_first ? held_plan(s, pack) : cluster_plan(s, pack);
  }
  if (p.kernel == looped) {
    p.pack = s.packed ? full_pack : 1;
  }
  if (has_edges(s, p)) {
    const NormForwardPlan with_edges = edges_plan(s);
    return with_edges.kernel == looped ? p : with_edges;
  }
  p.few = has_few_blocks(s, p);
  p.stays = !p.few && teams_stay(s, p);
  if (p.stays && p.team == Team::block && shares(s)) {
    p.teams = static_cast<int>(std::clamp<std::int64_t>(s.rows / s.multiprocessors, 1, most_sharing(p.threads)));
  }
  return p;
}

}  // namespace mica::kernels
