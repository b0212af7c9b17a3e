#pragma once

// Chooses the CUDA kernels of a norm's backward. A plan depends only on the shape, the dtypes, the alignment of rows,
// and whether the GPU has clusters, so that results do not depend on anything else.

#include <cstdint>

#include <mica/ops/rows/detail/row_plan.h>

namespace mica::kernels::norm_cuda {

enum class NormBackwardKernel {
  streamed,      // rows stream through shared memory
  in_registers,  // rows are read once, into registers
  looped,        // rows are read twice for dx, and a third time by the kernel for dweight and dbias
  none
};

struct NormBackwardCase {
  std::int64_t rows;
  std::int64_t columns;
  int size;           // of an element of x, in bytes
  int weight_size;    // of an element of weight and bias, in bytes
  bool centered;      // a layer norm, which may have a bias
  bool packs;         // rows can be read in packs of 16 bytes; float64 is not
  bool clusters;      // the GPU has compute capability 9.0
  bool adds = false;  // of a sum, which has a gradient of its own (dsum) besides that through y
};

constexpr int kMostThreads = 512;          // of a block that streams rows
constexpr int kStreamShared = 227 * 1024;  // bytes of shared memory that a block may have
// Rows that a SumExchange has room for, which is used cyclically: warps may be up to two rows apart, and may have begun
// the next row already.
constexpr int kExchanges = 4;

/// The shared memory of a SumExchange between the members of a row group: its warps, or the blocks of a cluster.
/// Groups of up to a warp have it, too, but do not use it.
struct alignas(16) ExchangeNumbers {
  static constexpr int kMostMembers = 16;

  std::uint64_t barriers[kExchanges];
  float numbers[kExchanges][2][kMostMembers];
};

/// A kernel that streams rows: which threads share a row, how many lanes of each warp, how many packs each thread has,
/// and how many rows the ring in shared memory has room for.
struct StreamKernel {
  rows::Group group;
  int lanes;
  int packs;
  int depth;

  bool operator==(const StreamKernel&) const = default;
};

// The kernels, by the size of an element. Those for sums also read dsum.
namespace norm_backward_kernels {

using rows::Group;
using rows::Kernels;

constexpr StreamKernel by_lanes(int lanes, int packs, int depth) { return {Group::warp, lanes, packs, depth}; }
constexpr StreamKernel by_block(int packs, int depth) { return {Group::block, 32, packs, depth}; }
constexpr StreamKernel by_cluster(int packs, int depth) { return {Group::cluster, 32, packs, depth}; }

using Of16Bits = Kernels<by_lanes(8, 1, 4), by_lanes(16, 1, 4), by_lanes(32, 1, 4), by_lanes(32, 2, 2), by_block(1, 3),
                         by_block(2, 2), by_cluster(2, 4), by_cluster(4, 3)>;
using SumsOf16Bits = Kernels<by_lanes(16, 1, 4), by_lanes(32, 1, 4), by_block(1, 3), by_block(2, 2), by_cluster(2, 4)>;
using OfFloat32 = Kernels<by_block(2, 2), by_block(4, 2), by_cluster(2, 4), by_cluster(4, 3)>;
using SumsOfFloat32 = Kernels<by_lanes(16, 2, 4), by_lanes(32, 2, 4), by_block(2, 2), by_cluster(2, 4)>;

}  // namespace norm_backward_kernels

/// How rows stream through shared memory: which threads share a row, and the layout of a block's shared memory.
struct StreamPlan {
  int threads = 0;       // per block, that share a row
  int groups = 1;        // groups of `threads` threads in a block
  int cluster = 1;       // blocks that share a row
  int slab = 0;          // columns of a row per block
  int kept_bytes = 0;    // of shared memory, for parameters
  int stream_bytes = 0;  // of shared memory, for the rows in flight

  constexpr int block() const { return threads * groups; }
  constexpr int warps() const { return threads / 32; }  // per block, that share a row
  constexpr int kept_begin() const {
    return (groups * (cluster > 1 ? 2 : 1) * static_cast<int>(sizeof(ExchangeNumbers)) + 127) / 128 * 128;
  }
  constexpr int stream_begin() const { return (kept_begin() + kept_bytes + 127) / 128 * 128; }
  constexpr int shared_bytes() const { return stream_begin() + stream_bytes; }
};

/// Whether the weights of a thread's `elements` columns are in registers, and not in shared memory, if `lanes` lanes of
/// a warp share a streamed row.
constexpr bool weights_in_registers(int elements, int lanes) { return elements <= (lanes < 32 ? 8 : 16); }

struct NormBackwardPlan {
  NormBackwardKernel kernel = NormBackwardKernel::none;
  std::int64_t partial_rows = 0;  // G: rows of partial sums of dweight and dbias
  std::int64_t clusters = 0;      // of the grid, if rows are streamed; a block without a cluster counts as one
  int pack = 1;                   // columns per load
  // For streamed rows:
  StreamKernel shape = {rows::Group::block, 32, 0, 0};
  StreamPlan stream = {};
};

NormBackwardPlan plan_norm_backward(const NormBackwardCase& c);

/// The most elements of a row, and as many sums over rows, that a thread can have without spilling registers.
template <class S>
constexpr int kMostInRegisters = 64 / static_cast<int>(sizeof(S));

/// Rows in the registers of a block of `block` threads: `threads` threads share a row, and each has `elements` of its
/// elements.
struct RegisterLayout {
  int threads;
  int block;
  int elements;

  constexpr int rows() const { return block / threads; }  // at once
  bool operator==(const RegisterLayout&) const = default;
};

constexpr int kShortRow = 256;  // the longest aligned float32 row that is kept in registers

/// The layout for rows of `columns` elements of `size` bytes. Rows in packs of 16 bytes have at most kShortRow columns;
/// in a layer norm (`centered`), each thread has fewer of their packs, since its sums for the bias take registers.
constexpr RegisterLayout register_layout(std::int64_t columns, int size, bool packs, bool centered) {
  const int most = 64 / (size < 4 ? 4 : size);
  if (packs) {
    return columns <= 64    ? RegisterLayout{8, 256, 8}
           : columns <= 128 ? (centered ? RegisterLayout{32, 256, 4} : RegisterLayout{8, 256, 16})
                            : (centered ? RegisterLayout{32, 256, 8} : RegisterLayout{16, 256, 16});
  }
  return columns <= 32 * most    ? RegisterLayout{32, 256, most}
         : columns <= 128 * most ? RegisterLayout{128, 128, most}
                                 : RegisterLayout{512, 512, most};
}

/// How dweight and dbias are computed without dx.
struct ParametersPlan {
  int lanes;           // lanes that share a row
  std::int64_t tiles;  // tiles that the columns are divided into
  int parts;           // blocks that share a tile
  int cluster;         // blocks of these that form a cluster, which adds up their sums

  int partial_rows() const { return parts / cluster; }
};

constexpr int kParametersBlock = 256;  // threads per block
constexpr int kParametersCluster = 8;  // the most blocks of a cluster

/// A lane has `width` columns of `size` bytes, and loads `unroll` rows at once.
ParametersPlan plan_parameters(std::int64_t rows, std::int64_t columns, int width, int size, int unroll, bool clusters);

}  // namespace mica::kernels::norm_cuda
