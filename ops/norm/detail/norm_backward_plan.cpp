#include <algorithm>

#include <mica/ops/norm/detail/norm_backward_plan.h>

namespace mica::kernels::norm_cuda {

namespace {

constexpr std::int64_t kShortRow = 256;

struct StreamShape {
  int packs = 0;  // per thread; 0: rows do not stream
  int depth = 0;
  int cluster = 1;
  int chunks = 1;
  int lanes = 0;  // that share a row; 0: a whole block or cluster
};

// The smallest number of blocks whose threads, with `elements` elements each, can hold a row; 0 if even 16 blocks
// cannot.
int cluster_of(std::int64_t columns, int elements) {
  int cluster = 1;
  while (cluster <= 16 && columns > std::int64_t{cluster} * kMostThreads * elements) {
    cluster *= 2;
  }
  return cluster <= 16 ? cluster : 0;
}

// Aligned rows of up to kShortRow columns, read in packs of `pack` elements: 8 elements for each lane.
StreamShape shape_of_short_rows(std::int64_t columns, int pack) {
  return {.packs = 8 / pack, .depth = 4, .lanes = columns <= 64 ? 8 : columns <= 128 ? 16 : 32};
}

// Longer rows of 16-bit elements, read in packs of 8. Measured on an H200.
StreamShape shape_of_16_bits(std::int64_t columns, int weight_size) {
  if (columns <= 384) {
    return {.packs = 2, .depth = 2};  // a warp has a row
  }
  if (columns <= 512 || (columns > 672 && columns <= 1280)) {
    return {.packs = 1, .depth = 3};
  }
  if (columns <= 10240) {
    return {.packs = columns <= 8192 ? 2 : 3, .depth = 2};
  }
  if (columns <= 16384) {
    return {.packs = 2, .depth = 4, .cluster = 2};
  }
  const int cluster = columns <= 131072 ? 8 : cluster_of(columns, 32);
  if (columns > std::int64_t{cluster} * kMostThreads * 16 && columns <= std::int64_t{cluster} * kMostThreads * 24) {
    return {.packs = 3, .depth = 3, .cluster = cluster};  // with 4 packs, a quarter of the threads or more would idle
  }
  // Whether shared memory has room for 6 chunks beside the weights.
  const bool has_room = weight_size == 2 || columns <= std::int64_t{cluster} * 448 * 32;
  return {.packs = cluster > 0 ? 4 : 0, .depth = has_room ? 6 : 5, .cluster = cluster, .chunks = 2};
}

// The same for float32, read in packs of 4.
StreamShape shape_of_float32(std::int64_t columns) {
  if (columns <= 8192) {
    return {.packs = columns <= 1024 ? 2 : 4, .depth = 2};
  }
  if (columns <= 131072) {
    return {.packs = 4, .depth = 3, .cluster = columns <= 65536 ? 8 : 16};
  }
  if (columns <= 196608) {
    return {.packs = 6, .depth = 5, .cluster = 16, .chunks = 3};
  }
  const int cluster = cluster_of(columns, 32);
  return {.packs = cluster > 0 ? 8 : 0, .depth = 5, .cluster = cluster, .chunks = 4};
}

// The same for rows of three matrices: x, dy and dsum.
StreamShape shape_of_sums(std::int64_t columns, int pack, bool drops) {
  if (columns <= (pack == 8 && !drops ? 12288 : 8192)) {
    const int packs = pack == 4 ? columns <= 1024 ? 2 : 4 : columns <= 1536 ? 1 : columns <= 8192 ? 2 : 3;
    return {.packs = packs, .depth = packs == 1 ? 4 : 2};
  }
  const int cluster = cluster_of(columns, 2 * pack);
  return {.packs = cluster > 0 ? 2 : 0, .depth = 4, .cluster = cluster};
}

StreamShape shape_of(const NormBackwardCase& c) {
  const int pack = 16 / c.size;
  if (!c.packs) {
    return {};
  }
  if (c.columns <= kShortRow) {
    const bool held = c.size == 4 && c.source == GradientSource::y;
    return held ? StreamShape{} : shape_of_short_rows(c.columns, pack);
  }
  if (c.source != GradientSource::y) {
    return shape_of_sums(c.columns, pack, c.source == GradientSource::y_and_dropped_sum);
  }
  return c.size == 4 ? shape_of_float32(c.columns) : shape_of_16_bits(c.columns, c.weight_size);
}

// Divides `columns` among the blocks of p's cluster, and a block's part among whole warps with p.packs packs of V
// columns per thread.
void divide(StreamPlan& p, std::int64_t columns, int V, int most_threads) {
  constexpr std::int64_t kUnit = 64;
  p.slab = static_cast<int>((columns + p.cluster * kUnit - 1) / (p.cluster * kUnit) * kUnit);
  const int warp_columns = p.packs * V * 32;
  p.threads = (p.slab + warp_columns - 1) / warp_columns * 32;
  p.groups = std::max(1, most_threads / p.threads);
}

// The number of teams to launch: blocks, or clusters.
std::int64_t stream_teams(const StreamPlan& p, std::int64_t rows) {
  return std::min<std::int64_t>(persistent_blocks(p.cluster) / p.cluster, (rows + p.groups - 1) / p.groups);
}

// How `shape` divides rows among threads, and the layout of shared memory. packs is 0 if there is not enough shared
// memory.
StreamPlan stream_plan(const NormBackwardCase& c, int pack, const StreamShape& shape) {
  StreamPlan p{.packs = shape.packs, .cluster = shape.cluster};
  if (shape.packs == 0) {
    return p;
  }
  divide(p, c.columns, pack, kMostThreads);
  if (shape.lanes > 0) {
    p.threads = shape.lanes;
    p.groups = kMostThreads / p.threads;
  }
  const bool drops = c.source == GradientSource::y_and_dropped_sum;
  const int matrices = c.source == GradientSource::y ? 2 : 3;
  const bool in_registers = weights_in_registers(p.packs * pack, std::min(p.threads, 32), drops);
  p.kept_bytes = in_registers ? 0 : p.threads * p.packs * pack * c.weight_size;
  const int chunk_elements = p.packs / shape.chunks * pack;
  const int chunk_bytes = p.block() * chunk_elements * matrices * c.size;
  // Rows of partials that a block adds up.
  const int folds = std::max(1, p.block() / std::max(32, p.threads));
  const int fold_bytes = folds > 1 ? matrices * folds * p.slab * 4 : 0;
  p.stream_bytes = std::max(fold_bytes, shape.depth * chunk_bytes);
  if (p.block() > kMostThreads || p.shared_bytes() > kStreamShared) {
    p.packs = 0;
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

NormBackwardPlan plan_norm_backward(const NormBackwardCase& c) {
  if (c.size <= 4 && c.clusters) {
    const StreamShape shape = shape_of(c);
    const int pack = 16 / c.size;
    StreamPlan stream = stream_plan(c, pack, shape);
    if (stream.packs > 0) {
      const std::int64_t teams = teams_of(c, stream);
      return {.kernel = NormBackwardKernel::streamed,
              .partial_rows = teams,
              .teams = teams,
              .pack = pack,
              .lanes = shape.lanes > 0 ? shape.lanes : 32,
              .chunks = shape.chunks,
              .depth = shape.depth,
              .stream = stream};
    }
  }
  if (c.source != GradientSource::y) {
    return {};
  }
  const int pack = c.packs ? 16 / c.size : 1;
  if (c.columns > 512 * 64 / std::max(c.size, 4)) {
    return {.kernel = NormBackwardKernel::looped, .pack = pack};
  }
  const HeldLayout layout = held_layout(c.columns, c.size, c.packs, c.centered);
  // Enough blocks to keep a large GPU busy, but so few that the partial sums are small compared with x.
  const int blocks = layout.rows() == 1 ? 65536 / layout.block : layout.elements == 16 ? 3 * kPersistentBlocks : 512;
  const std::int64_t wanted = (c.rows + layout.rows() - 1) / layout.rows();
  return {.kernel = NormBackwardKernel::held, .partial_rows = std::min<std::int64_t>(wanted, blocks), .pack = pack};
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

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

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
