#pragma once

// How CUDA threads share the rows of a matrix, as plain numbers that the host computes.

#include <array>
#include <cstdint>

#include <mica/core/detail/ceil_div.h>

namespace mica::kernels::rows {

/// The threads that share a row: some lanes of a warp, a warp, a thread block, or a cluster of blocks.
enum class Group { lanes, warp, block, cluster };

/// How the blocks of a grid run.
enum class Schedule {
  single_wave,  ///< each group has one row, and all blocks run at once
  many_waves,   ///< each group has one row
  persistent    ///< each group has one row after another
};

inline constexpr int kMostGroupThreads = 512;  // per block, that share a row
inline constexpr int kMostCluster = 16;        // blocks that share a row

/// A kernel for rows in registers: which threads share a row, how many lanes of each warp, and the most packs that a
/// thread has.
struct RowKernel {
  Group group;
  int lanes;
  int packs;

  bool operator==(const RowKernel&) const = default;
};

constexpr RowKernel by_lanes(int lanes, int packs) { return {Group::lanes, lanes, packs}; }
constexpr RowKernel by_warp(int packs) { return {Group::warp, 32, packs}; }
constexpr RowKernel by_block(int packs) { return {Group::block, 32, packs}; }
constexpr RowKernel by_cluster(int packs) { return {Group::cluster, 32, packs}; }

/// The kernels that are compiled for some kind of rows, as RowKernels or the like. Plans and launchers use the same
/// list, so that a plan that names another kernel does not compile.
template <auto... kKernels>
struct Kernels {
  static constexpr std::array kAll = {kKernels...};

  /// Returns `kernel`, which must be in the list.
  template <class Kernel>
  static consteval Kernel get(Kernel kernel) {
    if (!((kernel == kKernels) || ...)) {
      throw "this kernel is not compiled";
    }
    return kernel;
  }

  /// Calls f.operator()<kernel>() if `kernel` is in the list. Returns whether it is.
  template <class Kernel, class F>
  static bool call(const Kernel& kernel, const F& f) {
    return ((kernel == kKernels && (f.template operator()<kKernels>(), true)) || ...);
  }
};

/// Whether several warps share a row.
constexpr bool has_warps(Group group) { return group == Group::block || group == Group::cluster; }

/// How blocks and threads split a row: each block has a slab of `slab` columns, which `threads` of its threads share.
struct RowSplit {
  std::int64_t slab;
  std::int64_t threads;
};

/// The split for a kernel with packs of `pack` columns. Slabs are multiples of 64 columns, and otherwise as equal as
/// possible.
template <class Kernel>
constexpr RowSplit split_row(std::int64_t columns, const Kernel& kernel, int pack, int blocks) {
  constexpr std::int64_t kUnit = 64;
  const std::int64_t slab = ceil_div(columns, blocks * kUnit) * kUnit;
  const std::int64_t of_lanes = std::int64_t{kernel.lanes} * kernel.packs * pack;  // columns
  return {slab, has_warps(kernel.group) ? ceil_div(slab, of_lanes) * kernel.lanes : kernel.lanes};
}

// Blocks of a persistent grid: the number of multiprocessors of an H200 on any GPU, so that results do not depend on
// the GPU.
inline constexpr int kPersistentBlocks = 132;
// The same for clusters of 3 to 8 blocks, and of 16. A cluster must fit into one GPC, so that some multiprocessors
// remain unused.
inline constexpr int kPersistentClusterBlocks = 120;
inline constexpr int kPersistentLargestClusterBlocks = 112;

/// The number of blocks of a persistent grid of clusters of `cluster` blocks, if there are enough rows.
constexpr int persistent_blocks(int cluster) {
  return cluster <= 2 ? kPersistentBlocks : cluster <= 8 ? kPersistentClusterBlocks : kPersistentLargestClusterBlocks;
}

}  // namespace mica::kernels::rows
