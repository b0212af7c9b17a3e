#pragma once

// Chooses the CUDA kernel of a norm's forward, and how many threads share a row. The choice is a pure function of
// NormShape.

#include <cstddef>
#include <cstdint>

#include <mica/core/dtype.h>
#include <mica/ops/rows/detail/row_plan.h>

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
  bool aligned;     // whether rows can be accessed in packs of 16 bytes; other rows, and float64, by single elements
  bool clusters;    // whether the GPU has thread block clusters (compute capability 9.0)
  int multiprocessors;
};

struct NormForwardPlan {
  enum class Kernel { short_rows, in_registers, looped };
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

/// Whether blocks of aligned rows are persistent and have weight and bias in shared memory, since each of these has
/// more bytes than a row. The sizes are those of elements.
constexpr bool shares_parameters(bool centered, bool adds, std::size_t size, std::size_t weight_size) {
  return centered && !adds && weight_size > size;
}

/// Whether the kernel for rows in registers is compiled with this schedule. `shares`: see shares_parameters().
constexpr bool has_schedule(bool shares, const rows::RowKernel& shape, rows::Schedule schedule) {
  const bool persists = shape.group == rows::Group::cluster || shares;
  switch (schedule) {
    case rows::Schedule::single_wave: return shape.packs == 4;
    case rows::Schedule::many_waves: return !persists;
    case rows::Schedule::persistent: return persists;
  }
  return false;
}

// The kernels. A row gets the first of a list that has room for it.
namespace norm_forward_kernels {

using rows::by_block;
using rows::by_cluster;
using rows::by_lanes;
using rows::by_warp;
using rows::Kernels;

using Short = Kernels<by_lanes(8, 1), by_lanes(8, 2), by_lanes(16, 2), by_warp(2)>;
using Registers = Kernels<by_warp(4), by_block(4), by_cluster(4)>;
using RegisterSums = Kernels<by_lanes(8, 2), by_lanes(16, 2), by_warp(2), by_warp(4), by_block(4)>;
using RegisterUnaligned = Kernels<by_warp(16), by_block(16)>;

}  // namespace norm_forward_kernels

}  // namespace mica::kernels
