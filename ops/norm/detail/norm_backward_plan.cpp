#include <algorithm>

#include <mica/ops/norm/detail/norm_backward_plan.h>

namespace mica::kernels::norm_cuda {

namespace {

constexpr std::int64_t kShortRow = 256;

using norm_backward_kernels::by_block;
using norm_backward_kernels::by_cluster;
using norm_backward_kernels::by_lanes;
using norm_backward_kernels::Of16Bits;
using norm_backward_kernels::OfFloat32;
using norm_backward_kernels::SumsOf16Bits;
using norm_backward_kernels::SumsOfFloat32;
using rows::ceil_div;
using rows::Group;
using rows::kPersistentBlocks;
using rows::persistent_blocks;

/// Which kernel streams rows, and how many blocks share each.
struct StreamShape {
  StreamKernel kernel;
  int cluster = 1;
};

constexpr StreamShape kNone{{Group::block, 32, 0, 0, 1}};  // rows do not stream

// The smallest number of blocks whose threads, with `elements` elements each, can hold a row; 0 if even 16 blocks
// cannot.
int cluster_of(std::int64_t columns, int elements) {
  int cluster = 1;
  while (cluster <= 16 && columns > std::int64_t{cluster} * kMostThreads * elements) {
    cluster *= 2;
  }
  return cluster <= 16 ? cluster : 0;
}

// Short rows: 8 elements for each lane, in `kPacks` packs.
template <class List, int kPacks>
StreamShape shape_of_short_rows(std::int64_t columns) {
  return {columns <= 64    ? List::get(by_lanes(8, kPacks, 4))
          : columns <= 128 ? List::get(by_lanes(16, kPacks, 4))
                           : List::get(by_lanes(32, kPacks, 4))};
}

// Longer rows of 16-bit elements, read in packs of 8. Measured on an H200.
StreamShape shape_of_16_bits(std::int64_t columns, int weight_size) {
  if (columns <= 384) {
    return {Of16Bits::get(by_lanes(32, 2, 2))};
  }
  if (columns <= 512 || (columns > 672 && columns <= 1280)) {
    return {Of16Bits::get(by_block(1, 3))};
  }
  if (columns <= 10240) {
    return {columns <= 8192 ? Of16Bits::get(by_block(2, 2)) : Of16Bits::get(by_block(3, 2))};
  }
  if (columns <= 16384) {
    return {Of16Bits::get(by_cluster(2, 4)), 2};
  }
  const int cluster = columns <= 131072 ? 8 : cluster_of(columns, 32);
  if (cluster == 0) {
    return kNone;
  }
  if (columns > std::int64_t{cluster} * kMostThreads * 16 && columns <= std::int64_t{cluster} * kMostThreads * 24) {
    return {Of16Bits::get(by_cluster(3, 3)), cluster};  // with 4 packs, a quarter of the threads or more would idle
  }
  // Whether shared memory has room for 6 chunks beside the weights.
  const bool has_room = weight_size == 2 || columns <= std::int64_t{cluster} * 448 * 32;
  return {has_room ? Of16Bits::get(by_cluster(4, 6, 2)) : Of16Bits::get(by_cluster(4, 5, 2)), cluster};
}

// The same for float32, read in packs of 4.
StreamShape shape_of_float32(std::int64_t columns) {
  if (columns <= 8192) {
    return {columns <= 1024 ? OfFloat32::get(by_block(2, 2)) : OfFloat32::get(by_block(4, 2))};
  }
  if (columns <= 131072) {
    return {OfFloat32::get(by_cluster(4, 3)), columns <= 65536 ? 8 : 16};
  }
  if (columns <= 196608) {
    return {OfFloat32::get(by_cluster(6, 5, 3)), 16};
  }
  const int cluster = cluster_of(columns, 32);
  return cluster == 0 ? kNone : StreamShape{OfFloat32::get(by_cluster(8, 5, 4)), cluster};
}

// The same for rows of three matrices: x, dy and dsum.
StreamShape shape_of_sums_of_16_bits(std::int64_t columns) {
  if (columns <= kShortRow) {
    return shape_of_short_rows<SumsOf16Bits, 1>(columns);
  }
  if (columns <= 12288) {
    return {columns <= 1536   ? SumsOf16Bits::get(by_block(1, 4))
            : columns <= 8192 ? SumsOf16Bits::get(by_block(2, 2))
                              : SumsOf16Bits::get(by_block(3, 2))};
  }
  const int cluster = cluster_of(columns, 16);
  return cluster == 0 ? kNone : StreamShape{SumsOf16Bits::get(by_cluster(2, 4)), cluster};
}
StreamShape shape_of_sums_of_float32(std::int64_t columns) {
  if (columns <= kShortRow) {
    return shape_of_short_rows<SumsOfFloat32, 2>(columns);
  }
  if (columns <= 8192) {
    return {columns <= 1024 ? SumsOfFloat32::get(by_block(2, 2)) : SumsOfFloat32::get(by_block(4, 2))};
  }
  const int cluster = cluster_of(columns, 8);
  return cluster == 0 ? kNone : StreamShape{SumsOfFloat32::get(by_cluster(2, 4)), cluster};
}

StreamShape shape_of(const NormBackwardCase& c) {
  if (!c.packs) {
    return kNone;
  }
  if (c.adds) {
    return c.size == 2 ? shape_of_sums_of_16_bits(c.columns) : shape_of_sums_of_float32(c.columns);
  }
  if (c.columns <= kShortRow) {
    return c.size == 2 ? shape_of_short_rows<Of16Bits, 1>(c.columns) : kNone;
  }
  return c.size == 2 ? shape_of_16_bits(c.columns, c.weight_size) : shape_of_float32(c.columns);
}

// The number of teams to launch: blocks, or clusters.
std::int64_t stream_teams(const StreamPlan& p, std::int64_t rows) {
  return std::min<std::int64_t>(persistent_blocks(p.cluster) / p.cluster, ceil_div(rows, p.groups));
}

// How `shape` divides rows among threads, and the layout of shared memory. No threads if there is not enough of it.
StreamPlan stream_plan(const NormBackwardCase& c, const StreamShape& shape) {
  const StreamKernel& kernel = shape.kernel;
  StreamPlan p{.cluster = shape.cluster};
  if (kernel.packs == 0) {
    return p;
  }
  const int pack = 16 / c.size;
  const int elements = kernel.packs * pack;  // of a row, per thread
  const rows::RowShare share = rows::share_row(c.columns, kernel, pack, p.cluster);
  p.slab = static_cast<int>(share.slab);
  p.threads = static_cast<int>(share.threads);
  p.groups = std::max(1, kMostThreads / p.threads);
  const int matrices = c.adds ? 3 : 2;
  const bool in_registers = weights_in_registers(elements, kernel.lanes, c.adds && c.size == 4);
  p.kept_bytes = in_registers ? 0 : p.threads * elements * c.weight_size;
  const int chunk_bytes = p.block() * elements / kernel.chunks * matrices * c.size;
  // Rows of partials that a block adds up.
  const int folds = std::max(1, p.block() / std::max(32, p.threads));
  const int fold_bytes = folds > 1 ? matrices * folds * p.slab * 4 : 0;
  p.stream_bytes = std::max(fold_bytes, kernel.depth * chunk_bytes);
  if (p.block() > kMostThreads || p.shared_bytes() > kStreamShared) {
    p.threads = 0;
  }
  return p;
}

// The number of blocks, or clusters, that stream rows. If each of their groups would have only one or two rows, of 513
// to 2048 columns, about half as many blocks are faster: writing and adding the partial sums takes as long as
// processing the rows.
std::int64_t teams_of(const NormBackwardCase& c, const StreamPlan& stream) {
  constexpr std::int64_t kFew = 64;
  const std::int64_t teams = stream_teams(stream, c.rows);
  const bool few_rows = c.rows <= 2 * kPersistentBlocks * stream.groups;
  return few_rows && c.columns > 512 && c.columns <= 2048 ? std::min(teams, kFew) : teams;
}

}  // namespace

NormBackwardPlan plan_norm_backward(const NormBackwardCase& given) {
  NormBackwardCase c = given;
  c.packs = c.packs && c.size <= 4;
  if (c.clusters) {
    const StreamShape shape = shape_of(c);
    const StreamPlan stream = stream_plan(c, shape);
    if (stream.threads > 0) {
      const std::int64_t teams = teams_of(c, stream);
      return {.kernel = NormBackwardKernel::streamed,
              .partial_rows = teams,
              .teams = teams,
              .pack = 16 / c.size,
              .shape = shape.kernel,
              .stream = stream};
    }
  }
  if (c.adds) {
    return {};
  }
  if (c.columns > 512 * 64 / std::max(c.size, 4)) {
    return {.kernel = NormBackwardKernel::looped};
  }
  const HeldLayout layout = held_layout(c.columns, c.size, c.packs, c.centered);
  // Enough blocks to keep a large GPU busy, but so few that the partial sums are small compared with x. With single
  // elements, more loads must be in flight.
  const int blocks = layout.rows() == 1     ? (c.packs ? 65536 : 131072) / layout.block
                     : layout.elements < 16 ? 512
                     : layout.threads == 32 ? 2 * kPersistentBlocks
                                            : 3 * kPersistentBlocks;
  return {.kernel = NormBackwardKernel::held,
          .partial_rows = std::min<std::int64_t>(ceil_div(c.rows, layout.rows()), blocks),
          .pack = c.packs ? 16 / c.size : 1};
}

namespace {

// The most blocks of the grid: about as many as an H200 can run at a time if they form clusters. A constant, so that
// results do not depend on the GPU.
constexpr int kBlocks = 320;
constexpr int kBlocksWithPartials = 192;
constexpr int kNarrowTile = 128;  // bytes
constexpr int kLeastRows = 2;     // per thread
constexpr int kLeastBatches = 4;  // per thread
constexpr int kManyBatches = 16;  // per thread, from which on partial sums in memory pay off

}  // namespace

ParametersPlan plan_parameters(std::int64_t rows, std::int64_t columns, int width, int size, int unroll,
                               bool clusters) {
  ParametersPlan p{};
  p.lanes = 1;
  while (p.lanes < 32 && p.lanes * width < columns) {
    p.lanes *= 2;
  }
  // Makes tiles narrower if there would be too few blocks even with the largest clusters, and if there are enough rows
  // for blocks that process twice as many rows at a time.
  while (ceil_div(columns, p.lanes * width) * kParametersCluster < kBlocks && p.lanes * width * size > kNarrowTile &&
         kParametersBlock / p.lanes * 2 <= rows) {
    p.lanes /= 2;
  }
  p.tiles = ceil_div(columns, p.lanes * width);
  const std::int64_t thread_rows = rows * p.lanes / kParametersBlock;  // rows per thread if each tile had one block
  const std::int64_t most = std::min(kBlocks / p.tiles, thread_rows / kLeastRows);
  p.parts = static_cast<int>(std::clamp<std::int64_t>(most, 1, kParametersCluster));
  if (p.parts == kParametersCluster && thread_rows >= kParametersCluster * kManyBatches * unroll) {
    p.parts *= static_cast<int>(
        std::max<std::int64_t>(1, std::min(kBlocksWithPartials / (kParametersCluster * p.tiles),
                                           thread_rows / (kParametersCluster * kLeastBatches * unroll))));
  }
  p.cluster = clusters ? std::min(p.parts, kParametersCluster) : 1;
  return p;
}

}  // namespace mica::kernels::norm_cuda
