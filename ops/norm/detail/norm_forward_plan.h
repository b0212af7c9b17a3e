#pragma once

// Chooses the CUDA kernel of a norm's forward, and how many threads share a row. The choice is a pure function of
// NormShape.

#include <cstddef>
#include <cstdint>

#include <mica/core/dtype.h>
#include <mica/ops/rows/row_plan.h>

namespace mica::kernels {

/// Everything that a plan depends on.
struct NormShape {
  std::int64_t rows;
  std::int64_t columns;
  DType x;
  DType weight;     // of weight and bias
  bool parameters;  // whether weight and, if centered, bias are defined
  bool centered;    // layer norm; else RMS norm
  bool adds;        // whether a sum is computed, written and normalized
  bool aligned;     // whether rows can be accessed in packs of 16 bytes; else, or in float64, a pack is one element
  bool clusters;    // whether the GPU has thread block clusters (compute capability 9.0)
  int multiprocessors;
};

struct NormForwardPlan {
  enum class Kernel { short_rows, held, looped };
  Kernel kernel = Kernel::looped;
  int pack = 1;  // columns
  rows::RowKernel shape = {rows::Group::block, 32, 0};
  rows::Schedule schedule = rows::Schedule::many_waves;
  int threads = 0;  // per block, that share a row
  int groups = 1;   // groups of `threads` threads per block
  int blocks = 1;   // that share a row
  int slab = 0;     // columns of a row per block
};

NormForwardPlan norm_forward_plan(const NormShape& shape);

constexpr int kForwardBlock = 512;   // the most threads per block
constexpr int kSharingBlock = 1024;  // the same, if the rows of a block share parameters in shared memory
constexpr int kShortBlock = 128;     // threads per block in the kernel for short rows

/// How many rows a group of threads in the kernel for short rows computes at once, if there are many rows: several, if
/// a lane has few packs of each.
constexpr int rows_per_step(int packs) { return packs == 1 ? 4 : packs == 2 ? 2 : 1; }

/// What the kernels for rows in registers are compiled for. `size` is that of an element of x, in bytes.
struct NormForwardKind {
  std::size_t size;
  std::size_t weight_size;
  bool centered;
  bool adds;
  bool aligned;
};

/// Whether persistent blocks keep the parameters in shared memory, because weight and bias each have twice as many
/// bytes as a row.
constexpr bool shares_parameters(const NormForwardKind& k) {
  return k.aligned && k.centered && !k.adds && k.weight_size > k.size;
}

/// Whether the kernel for rows in registers is compiled with this schedule.
constexpr bool has_schedule(const NormForwardKind& k, const rows::RowKernel& shape, rows::Schedule schedule) {
  const bool warps = rows::has_warps(shape.group);
  const bool cluster = shape.group == rows::Group::cluster;
  const bool persistent =
      k.aligned && (cluster || shares_parameters(k) || (k.centered && !k.adds && warps && shape.packs == 2));
  const bool must_persist = persistent && (cluster || !warps);
  switch (schedule) {
    case rows::Schedule::single_wave: return k.aligned && shape.packs > 1 && (cluster || !must_persist);
    case rows::Schedule::many_waves: return !must_persist;
    case rows::Schedule::persistent: return persistent;
  }
  return false;
}

// The kernels, by the size of an element in bytes.
namespace norm_forward_kernels {

using rows::by_block;
using rows::by_cluster;
using rows::by_lanes;
using rows::by_warp;
using rows::Kernels;

using ShortOf16Bits =
    Kernels<by_lanes(8, 1), by_lanes(8, 2), by_lanes(8, 3), by_lanes(16, 2), by_lanes(16, 3), by_warp(2)>;
using ShortOfFloat32 = Kernels<by_lanes(8, 1), by_lanes(8, 2), by_lanes(16, 2), by_warp(2)>;
using ShortOfFloat32NotCentered = Kernels<by_lanes(8, 1), by_lanes(8, 2), by_lanes(16, 2), by_warp(2), by_warp(3),
                                          by_warp(4), by_warp(5), by_warp(6), by_warp(7), by_warp(8)>;

using HeldOf16Bits =
    Kernels<by_warp(3), by_warp(4), by_block(2), by_block(3), by_block(4), by_cluster(2), by_cluster(4)>;
using HeldSumsOf16Bits =
    Kernels<by_lanes(8, 1), by_lanes(16, 1), by_warp(1), by_warp(2), by_warp(3), by_warp(4), by_block(2), by_block(4)>;
using HeldOfFloat32 =
    Kernels<by_warp(3), by_warp(4), by_block(2), by_block(4), by_block(8), by_cluster(4), by_cluster(8)>;
using HeldOfFloat32NotCentered = Kernels<by_block(4), by_block(8), by_cluster(4), by_cluster(8)>;
using HeldSumsOfFloat32 =
    Kernels<by_lanes(8, 2), by_warp(1), by_warp(2), by_warp(3), by_warp(4), by_block(2), by_block(4)>;
using HeldUnaligned = Kernels<by_lanes(8, 8), by_warp(16), by_block(16)>;

}  // namespace norm_forward_kernels

}  // namespace mica::kernels
