#include <algorithm>
#include <span>

#include <mica/core/detail/ceil_div.h>
#include <mica/ops/norm/detail/norm_backward.h>
#include <mica/ops/norm/detail/norm_backward_plan.h>

namespace mica::kernels::norm_cuda {

namespace {

using norm_backward_kernels::by_block;
using norm_backward_kernels::by_cluster;
using norm_backward_kernels::by_lanes;
using norm_backward_kernels::Of16Bits;
using norm_backward_kernels::OfFloat32;
using norm_backward_kernels::SumsOf16Bits;
using norm_backward_kernels::SumsOfFloat32;
using rows::kPersistentBlocks;
using rows::persistent_blocks;

/// A line of a table: the kernel for rows of up to `columns` columns, and the number of blocks that share a row.
struct Line {
  std::int64_t columns;
  StreamKernel kernel;
  int cluster = 1;
};

// Measured on an H200. Rows of up to 16,384 columns do not have enough packs for the threads of 8 blocks.
constexpr Line kOf16Bits[] = {{64, Of16Bits::get(by_lanes(8, 1, 4))},       {128, Of16Bits::get(by_lanes(16, 1, 4))},
                              {256, Of16Bits::get(by_lanes(32, 1, 4))},     {384, Of16Bits::get(by_lanes(32, 2, 2))},
                              {1024, Of16Bits::get(by_block(1, 3))},        {8192, Of16Bits::get(by_block(2, 2))},
                              {16384, Of16Bits::get(by_cluster(2, 4)), 4},  {65536, Of16Bits::get(by_cluster(2, 4)), 8},
                              {262144, Of16Bits::get(by_cluster(4, 3)), 16}};
constexpr Line kOfFloat32[] = {{4096, OfFloat32::get(by_block(2, 2))},
                               {8192, OfFloat32::get(by_block(4, 2))},
                               {32768, OfFloat32::get(by_cluster(2, 4)), 8},
                               {65536, OfFloat32::get(by_cluster(4, 3)), 8},
                               {131072, OfFloat32::get(by_cluster(4, 3)), 16}};

// The same with a third matrix, dsum. Kernels with one pack per thread also compute dx_bias: add_norm_sums_dx().
constexpr Line kSumsOf16Bits[] = {
    {128, SumsOf16Bits::get(by_lanes(16, 1, 4))},     {256, SumsOf16Bits::get(by_lanes(32, 1, 4))},
    {2048, SumsOf16Bits::get(by_block(1, 3))},        {8192, SumsOf16Bits::get(by_block(2, 2))},
    {16384, SumsOf16Bits::get(by_cluster(2, 4)), 4},  {65536, SumsOf16Bits::get(by_cluster(2, 4)), 8},
    {131072, SumsOf16Bits::get(by_cluster(2, 4)), 16}};
static_assert(std::all_of(std::begin(kSumsOf16Bits), std::end(kSumsOf16Bits), [](const Line& line) {
  return (line.kernel.packs == 1) == add_norm_sums_dx(float16, line.columns);
}));
constexpr Line kSumsOfFloat32[] = {
    {128, SumsOfFloat32::get(by_lanes(16, 2, 4))},    {256, SumsOfFloat32::get(by_lanes(32, 2, 4))},
    {4096, SumsOfFloat32::get(by_block(2, 2))},       {8192, SumsOfFloat32::get(by_cluster(2, 4)), 2},
    {32768, SumsOfFloat32::get(by_cluster(2, 4)), 8}, {65536, SumsOfFloat32::get(by_cluster(2, 4)), 16}};

/// The table for these rows; empty if they do not stream. Short float32 rows are faster in registers.
std::span<const Line> table_of(const NormBackwardCase& c) {
  if (!c.packs || !c.clusters || (c.size == 4 && !c.adds && c.columns <= kShortRow)) {
    return {};
  }
  if (c.adds) {
    return c.size == 2 ? std::span<const Line>(kSumsOf16Bits) : kSumsOfFloat32;
  }
  return c.size == 2 ? std::span<const Line>(kOf16Bits) : kOfFloat32;
}

// The clusters that run at once, or fewer if there are not enough rows for all of their groups.
std::int64_t clusters_that_stream(const StreamPlan& p, std::int64_t rows) {
  return std::min<std::int64_t>(persistent_blocks(p.cluster) / p.cluster, ceil_div(rows, p.groups));
}

// How a kernel splits rows, and its layout of shared memory; 0 threads if there is not enough of it.
StreamPlan stream_plan(const NormBackwardCase& c, const Line& line) {
  const StreamKernel& kernel = line.kernel;
  StreamPlan p{.cluster = line.cluster};
  const int pack = 16 / c.size;
  const int elements = kernel.packs * pack;  // of a row, per thread
  const rows::RowSplit split = rows::split_row(c.columns, kernel, pack, p.cluster);
  p.slab = static_cast<int>(split.slab);
  p.threads = static_cast<int>(split.threads);
  p.groups = std::max(1, kMostThreads / p.threads);
  const int matrices = c.adds ? 3 : 2;
  p.kept_bytes = weights_in_registers(elements, kernel.lanes) ? 0 : p.threads * elements * c.weight_size;
  const int row_bytes = p.block() * elements * matrices * c.size;  // of all groups
  // Rows of partial sums that a block adds up.
  const int folds = std::max(1, p.block() / std::max(32, p.threads));
  const int fold_bytes = folds > 1 ? matrices * folds * p.slab * 4 : 0;
  p.stream_bytes = std::max(fold_bytes, kernel.depth * row_bytes);
  if (p.block() > kMostThreads || p.shared_bytes() > kStreamShared) {
    p.threads = 0;
  }
  return p;
}

// The number of clusters to launch. If each group would have only one or two rows of 513 to 2048 columns, half as many
// blocks are faster, since the partial sums then take as long as the rows.
std::int64_t clusters_of(const NormBackwardCase& c, const StreamPlan& stream) {
  constexpr std::int64_t kFewClusters = 64;
  const std::int64_t clusters = clusters_that_stream(stream, c.rows);
  const bool few_rows = c.rows <= 2 * kPersistentBlocks * stream.groups;
  return few_rows && c.columns > 512 && c.columns <= 2048 ? std::min(clusters, kFewClusters) : clusters;
}

}  // namespace

NormBackwardPlan plan_norm_backward(const NormBackwardCase& given) {
  NormBackwardCase c = given;
  c.packs = c.packs && c.size <= 4;
  for (const Line& line : table_of(c)) {
    if (c.columns > line.columns) {
      continue;
    }
    const StreamPlan stream = stream_plan(c, line);
    if (stream.threads == 0) {
      break;
    }
    const std::int64_t clusters = clusters_of(c, stream);
    return {.kernel = NormBackwardKernel::streamed,
            .partial_rows = clusters,
            .clusters = clusters,
            .pack = 16 / c.size,
            .shape = line.kernel,
            .stream = stream};
  }
  if (c.adds) {
    return {};
  }
  if (c.columns > 512 * 64 / std::max(c.size, 4)) {
    return {.kernel = NormBackwardKernel::looped};
  }
  const bool packs = c.packs && c.size == 4 && c.columns <= kShortRow;
  const RegisterLayout layout = register_layout(c.columns, c.size, packs, c.centered);
  // Enough blocks to keep a large GPU busy, but so few that the partial sums are small compared with x.
  const int blocks = layout.rows() == 1     ? 131072 / layout.block
                     : layout.elements < 16 ? 512
                     : layout.threads == 32 ? 2 * kPersistentBlocks
                                            : 3 * kPersistentBlocks;
  return {.kernel = NormBackwardKernel::in_registers,
          .partial_rows = std::min<std::int64_t>(ceil_div(c.rows, layout.rows()), blocks),
          .pack = packs ? 4 : 1};
}

namespace {

// The most blocks of the grid: about as many as an H200 runs at a time in clusters. It is a constant, so that results
// do not depend on the GPU.
constexpr int kBlocks = 320;
constexpr int kBlocksWithPartials = 192;
constexpr int kNarrowTile = 128;  // bytes
constexpr int kLeastRows = 2;     // per thread
constexpr int kLeastBatches = 4;  // per thread
constexpr int kManyBatches = 16;  // per thread; from here on, partial sums in memory pay off

}  // namespace

ParametersPlan plan_parameters(std::int64_t rows, std::int64_t columns, int width, int size, int unroll,
                               bool clusters) {
  ParametersPlan p{};
  p.lanes = 1;
  while (p.lanes < 32 && p.lanes * width < columns) {
    p.lanes *= 2;
  }
  // Tiles become narrower as long as even the largest clusters make too few blocks, and there are enough rows for
  // blocks that process twice as many at a time.
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
