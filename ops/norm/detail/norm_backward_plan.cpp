#include <algorithm>
#include <numeric>
#include <span>

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
  bool edges = false;
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

// Longer rows of 16-bit elements, read in packs of 8. few_blocks: clusters have as few blocks as possible. Measured on
// an H200.
StreamShape shape_of_16_bits(std::int64_t columns, int weight_size, bool few_blocks) {
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
  const int cluster = columns <= 131072 && !few_blocks ? 8 : cluster_of(columns, 32);
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

// The same for rows that begin and end inside packs. Measured on an H100.
StreamShape shape_of_float32_with_edges(std::int64_t columns) {
  if (columns <= 8192 || columns > 32768) {
    return shape_of_float32(columns);
  }
  if (columns <= 16384) {
    return {.packs = 4, .depth = 3, .cluster = 2};
  }
  if (columns <= 20480) {
    return {.packs = 4, .depth = 3, .cluster = 4};
  }
  return {.packs = 8, .depth = 5, .cluster = 2, .chunks = 4};
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

constexpr std::int64_t kMega = 1 << 20;

// Whether unaligned rows are held: matrices are so small, or rows so short, that it is faster. Measured on an H200, for
// more than 256 columns on an H100.
bool are_held(const NormBackwardCase& c) {
  struct Limit {
    std::int64_t columns;   // the longest row
    std::int64_t elements;  // the largest matrix that is held
  };
  constexpr std::int64_t kAny = std::int64_t{1} << 62;
  constexpr Limit k16Bits[] = {{44, kAny},       {57, 4 * kMega}, {64, kAny},        {121, 2 * kMega},
                               {256, 8 * kMega}, {512, kMega},    {2048, 2 * kMega}, {8192, 4 * kMega}};
  constexpr Limit kFloat32[] = {{64, kAny}, {125, 8 * kMega}, {256, kAny}, {2048, kMega}, {8192, 2 * kMega}};
  for (const Limit& limit : c.size == 2 ? std::span<const Limit>(k16Bits) : std::span<const Limit>(kFloat32)) {
    if (c.columns <= limit.columns) {
      return c.rows <= limit.elements / c.columns;
    }
  }
  return false;
}

constexpr int kSector = 32;  // bytes

// The columns of a row that begins inside a sector, with as many as can be before it in that sector.
std::int64_t columns_with_edges(const NormBackwardCase& c) { return c.columns + kSector / c.size - 1; }

// Rows that begin and end inside packs and that a warp or some of its lanes share. The fewer lanes share a row, the
// more rows a warp computes with the same instructions. Measured on an H200.
StreamShape shape_of_lanes(const NormBackwardCase& c) {
  struct Share {
    int lanes;
    int packs;
    std::int64_t elements;  // the smallest matrix
  };
  constexpr Share k16Bits[] = {{8, 1, 0},          {8, 2, 0},  {8, 3, 32 * kMega}, {16, 2, 0},
                               {16, 3, 8 * kMega}, {32, 2, 0}, {32, 3, 0}};
  constexpr Share kFloat32[] = {{8, 4, 0}};
  const int pack = 16 / c.size;
  for (const Share& share : c.size == 2 ? std::span<const Share>(k16Bits) : std::span<const Share>(kFloat32)) {
    const std::int64_t most = share.lanes * share.packs * pack - (pack - 1);  // columns
    if (c.columns <= most && c.rows >= share.elements / c.columns) {
      return {.packs = share.packs, .depth = share.packs == 1 ? 4 : 2, .lanes = share.lanes, .edges = true};
    }
  }
  return {};
}

// Rows that begin and end inside packs, or inside sectors.
StreamShape shape_with_edges(const NormBackwardCase& c) {
  if (!c.alike) {
    return {};
  }
  StreamShape shape = shape_of_lanes(c);
  if (shape.packs == 0) {
    const std::int64_t columns = columns_with_edges(c);
    // If clusters are small, there are enough of them for all places in a sector at which rows begin. But small
    // matrices need the blocks of larger ones.
    const bool few_blocks = columns <= 49152 && c.rows >= 8 * kMega / c.columns;
    shape = c.size == 4 ? shape_of_float32_with_edges(columns) : shape_of_16_bits(columns, c.weight_size, few_blocks);
    if (shape.packs == 1) {  // slower if rows have edges
      shape = {.packs = 2, .depth = 2};
    }
    shape.edges = true;
  }
  return shape;
}

// Other unaligned rows.
StreamShape shape_of_unaligned(const NormBackwardCase& c) {
  if (are_held(c)) {
    return {};
  }
  if (c.size == 4 && columns_with_edges(c) > 8192 && c.columns <= 131072 && c.rows < 48 * kMega / c.columns) {
    // In single elements.
    return {.packs = 16, .depth = 3, .cluster = c.columns <= 65536 ? 8 : 16};
  }
  return shape_with_edges(c);
}

StreamShape shape_of(const NormBackwardCase& c) {
  const int pack = 16 / c.size;
  if (!c.packs) {
    return c.source == GradientSource::y ? shape_of_unaligned(c) : StreamShape{};
  }
  // If 16-bit rows have an odd number of packs, every other one begins inside a sector. Small matrices, and shorter
  // rows, gain nothing.
  if (c.size == 2 && c.source == GradientSource::y && c.columns % 16 != 0 && c.columns > 64 &&
      c.rows >= 32 * kMega / c.columns) {
    const StreamShape shape = shape_with_edges(c);
    if (shape.packs > 0) {
      return shape;
    }
  }
  if (c.columns <= kShortRow) {
    const bool held = c.size == 4 && c.source == GradientSource::y;
    return held ? StreamShape{} : shape_of_short_rows(c.columns, pack);
  }
  if (c.source != GradientSource::y) {
    return shape_of_sums(c.columns, pack, c.source == GradientSource::y_and_dropped_sum);
  }
  return c.size == 4 ? shape_of_float32(c.columns) : shape_of_16_bits(c.columns, c.weight_size, /*few_blocks=*/false);
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
  divide(p, shape.edges ? columns_with_edges(c) : c.columns, pack, kMostThreads);
  if (shape.lanes > 0) {
    p.threads = shape.lanes;
    p.groups = kMostThreads / p.threads;
  }
  const bool drops = c.source == GradientSource::y_and_dropped_sum;
  const int matrices = c.source == GradientSource::y ? 2 : 3;
  const bool in_registers = weights_in_registers(p.packs * pack, pack, std::min(p.threads, 32), shape.edges, drops);
  const bool own_phases = shape.edges && p.team() == Team::warp;  // each group has weights of its own
  p.kept_bytes = in_registers ? 0 : (own_phases ? p.block() : p.threads) * p.packs * pack * c.weight_size;
  const int chunk_elements = p.packs / shape.chunks * pack;
  const int chunk_bytes = p.block() * chunk_elements * matrices * c.size;
  // Rows of partials that a block adds up.
  const int folds = own_phases ? p.groups : std::max(1, p.block() / std::max(32, p.threads));
  const int fold_bytes = folds > 1 || shape.edges ? matrices * folds * p.slab * 4 : 0;
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

// At how many different places in a sector of `sector` elements the rows begin.
int phases_of(std::int64_t columns, int sector) {
  return sector / std::gcd(static_cast<int>(columns % sector), sector);
}

// The number of teams for rows that begin and end inside packs. Also sets p's sector and, for blocks and clusters,
// phases and sorted.
std::int64_t deal_edges(const NormBackwardCase& c, StreamPlan& p) {
  if (p.team() == Team::warp) {  // the rows of a group begin alike, since there are 16, 32 or 64 groups
    p.sector = kSector / c.size;
    return stream_teams(p, c.rows);
  }
  constexpr std::int64_t kLarge = 16 << 20;  // bytes
  const bool large = c.rows > kLarge / (c.columns * c.size);
  const std::int64_t most = persistent_blocks(p.cluster) / p.cluster;
  const auto use_sectors_of = [&](int bytes) {
    p.sector = bytes / c.size;
    p.phases = phases_of(c.columns, p.sector);
  };
  if (c.rows <= most) {  // each team has one row
    use_sectors_of(kSector);
    return c.rows;
  }
  for (const int bytes : {kSector, 16}) {
    use_sectors_of(bytes);
    const std::int64_t teams = most / p.phases * p.phases;  // a multiple of phases, so that a team's rows begin alike
    if (4 * teams >= 3 * most || (bytes == 16 && teams > 0 && !large)) {
      return teams;
    }
  }
  use_sectors_of(c.rows > 16 * most ? kSector : 16);
  p.sorted = c.rows > 3 * most;  // if there are fewer rows, each team has one row, although not all can run at once
  return p.sorted ? most : c.rows;
}

}  // namespace

NormBackwardPlan plan_norm_backward(const NormBackwardCase& c) {
  if (c.size <= 4 && c.clusters) {
    const StreamShape shape = shape_of(c);
    const int pack = (c.packs || shape.edges ? 16 : 4) / c.size;
    StreamPlan stream = stream_plan(c, pack, shape);
    if (stream.packs > 0) {
      const std::int64_t teams = shape.edges ? deal_edges(c, stream) : teams_of(c, stream);
      return {.kernel = NormBackwardKernel::streamed,
              .partial_rows = teams + (stream.sorted ? stream.phases - 1 : 0),
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
