#include <algorithm>
#include <array>
#include <atomic>
#include <type_traits>
#include <vector>

#include <mica/core/detail/ceil_div.h>
#include <mica/core/detail/half_cpu.h>
#include <mica/core/parallel.h>
#include <mica/ops/gemm/detail/bfloat16_gemm.h>

namespace mica::gemm {

namespace {

constexpr int kBlock = 2 * kTileVectors;  // rows and columns of an output block

// The most elements of an operand that are packed at once, and the elements of a's rows that remain in the L2 cache
// while all of b is read.
constexpr std::int64_t kPackedElements = std::int64_t{1} << 22;
constexpr std::int64_t kCachedElements = std::int64_t{1} << 18;
// Minimum work per thread, in elements to pack and in multiplications.
constexpr std::int64_t kPackGrain = std::int64_t{1} << 16;
constexpr std::int64_t kMultiplyGrain = std::int64_t{1} << 21;

struct alignas(64) PackedTile {
  BFloat16 elements[kTileElements];
};
/// A thread's scratch memory, reused between products.
using Scratch = std::vector<PackedTile>;

/// One operand, in tiles.
struct Operand {
  const BFloat16* data;
  std::int64_t row;   // elements from one vector of a tile to the next
  std::int64_t next;  // … from one tile to the next along the depth
  std::int64_t tile;  // … from one tile to the next across it
};

template <class T>
using VectorsOf = std::conditional_t<std::is_same_v<T, float>, FloatVectors, Vectors>;

/// Packs `count` vectors: rows of a or, as pairs, columns of b.
template <class V>
Operand packed(const V& all, std::int64_t count, bool as_pairs, Scratch& scratch) {
  constexpr std::int64_t kNext = std::is_same_v<V, FloatVectors> ? 2 * kTileElements : kTileElements;
  const std::int64_t deep = ceil_div(all.depth, kTileDepth) * (kNext / kTileElements);
  const std::int64_t tile = deep * kTileElements;
  const std::int64_t tiles = ceil_div(count, kTileVectors);
  if (static_cast<std::int64_t>(scratch.size()) < tiles * deep) {
    scratch.resize(tiles * deep);
  }
  BFloat16* const out = scratch.front().elements;
  parallel_for(tiles, kPackGrain / tile + 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      V some = all;
      some.data += t * kTileVectors * all.stride;
      some.count = static_cast<int>(std::min<std::int64_t>(kTileVectors, count - t * kTileVectors));
      pack_tiles(some, as_pairs, out + t * tile);
    }
  });
  return {out, kTileDepth, kNext, tile};
}

/// Whether tiles of rows can be read in place, and the rows of a tile do not map to the same cache sets.
template <class T>
bool is_direct(Matrix<T> a, std::int64_t rows, std::int64_t depth) {
  return std::is_same_v<T, BFloat16> && a.column == 1 && rows % kTileVectors == 0 && depth % kTileDepth == 0 &&
         2 * a.row % 4096 != 0;
}

template <class Out>
struct Product {
  std::int64_t rows, columns, depth;
  Operand a, b;
  const float* start;  // nullptr: add to out
  Out* out;
  std::int64_t leading;
  bool split;

  void run() const {
    const std::int64_t row_blocks = ceil_div(rows, kBlock);
    const std::int64_t column_blocks = ceil_div(columns, kBlock);
    const std::int64_t cached = std::clamp<std::int64_t>(kCachedElements / (kBlock * depth), 1, row_blocks);
    const std::int64_t grain = kMultiplyGrain / (kBlock * kBlock * depth) + 1;
    parallel_for(row_blocks * column_blocks, grain, [&](std::int64_t begin, std::int64_t end) {
      const TileSession session;
      // Loop order: groups of row blocks, columns, rows.
      for (; begin < end; ++begin) {
        const std::int64_t first = begin / (cached * column_blocks) * cached;
        const std::int64_t count = std::min(cached, row_blocks - first);
        const std::int64_t within = begin - first * column_blocks;
        multiply(session, first + within % count, within / count);
      }
    });
  }

  void multiply(const TileSession& session, std::int64_t i, std::int64_t j) const {
    const std::int64_t valid_rows = std::min<std::int64_t>(kBlock, rows - i * kBlock);
    const std::int64_t valid_columns = std::min<std::int64_t>(kBlock, columns - j * kBlock);
    Out* const to = out + i * kBlock * leading + j * kBlock;
    alignas(64) std::array<float, kBlock> first{};
    const float* from = start != nullptr ? start + j * kBlock : nullptr;
    if (start != nullptr && valid_columns < kBlock) {  // loads of a whole one would wait for the copy
      std::copy_n(from, valid_columns, first.data());
      from = first.data();
    }
    TileBlock block{.row_tiles = static_cast<int>(ceil_div(valid_rows, kTileVectors)),
                    .column_tiles = static_cast<int>(ceil_div(valid_columns, kTileVectors)),
                    .depth_tiles = ceil_div(depth, kTileDepth),
                    .a = a.data + 2 * i * a.tile,
                    .a_row = a.row,
                    .a_next = a.next,
                    .a_row_tile = a.tile,
                    .b = b.data + 2 * j * b.tile,
                    .b_column_tile = b.tile,
                    .start = from,
                    .out = nullptr,
                    .leading = kBlock,
                    .split = split};
    if constexpr (std::is_same_v<Out, float>) {
      if (valid_rows % kTileVectors == 0 && valid_columns % kTileVectors == 0) {
        block.out = to;
        block.leading = leading;
        multiply_tiles(session, block);
        return;
      }
    }
    alignas(64) std::array<float, kBlock * kBlock> sums;
    block.out = sums.data();
    if constexpr (std::is_same_v<Out, float>) {
      for (std::int64_t r = 0; start == nullptr && r < valid_rows; ++r) {
        std::copy_n(to + r * leading, valid_columns, sums.data() + r * kBlock);
      }
    }
    multiply_tiles(session, block);
    for (std::int64_t r = 0; r < valid_rows; ++r) {
      narrow(sums.data() + r * kBlock, valid_columns, to + r * leading);
    }
  }
};

// A wide b, such as a layer's weight, is split into groups of columns. The same thread packs and multiplies a group, so
// that it is in that thread's cache.
constexpr std::int64_t kGroup = 2 * kBlock;              // columns
constexpr std::int64_t kGroupsPerThread = 4;             // at least, so that threads get about the same work
constexpr std::int64_t kReread = std::int64_t{1} << 20;  // elements of a, which every group reads

bool has_groups(std::int64_t rows, std::int64_t columns, std::int64_t depth) {
  return columns >= kGroup * kGroupsPerThread * num_threads() && rows * depth <= kReread;
}

/// all.run() restricted to the columns in `b`.
template <class Out, class V>
void multiply_groups(const Product<Out>& all, const V& b) {
  const std::int64_t groups = ceil_div(all.columns, kGroup);
  std::atomic<std::int64_t> next{0};
  parallel_for(std::min<std::int64_t>(groups, num_threads()), 1, [&](std::int64_t, std::int64_t) {
    static thread_local Scratch scratch;
    const TileSession session;
    for (std::int64_t group = next++; group < groups; group = next++) {
      const std::int64_t column = group * kGroup;
      V columns = b;
      columns.data += column * b.stride;
      Product<Out> part = all;
      part.columns = std::min(kGroup, all.columns - column);
      part.b = packed(columns, part.columns, true, scratch);
      part.start = all.start != nullptr ? all.start + column : nullptr;
      part.out = all.out + column;
      for (std::int64_t i = 0; i < ceil_div(part.rows, kBlock); ++i) {
        for (std::int64_t j = 0; j < ceil_div(part.columns, kBlock); ++j) {
          part.multiply(session, i, j);
        }
      }
    }
  });
}

template <class T, class Out>
void multiply(std::int64_t m, std::int64_t n, std::int64_t depth, Matrix<T> a, Matrix<T> b, const float* start,
              Out* out) {
  constexpr bool kSplit = std::is_same_v<T, float>;
  using V = VectorsOf<T>;
  static thread_local Scratch a_scratch, b_scratch;
  const std::int64_t padded_depth = ceil_div(depth, kTileDepth) * kTileDepth;
  const std::int64_t most = std::max<std::int64_t>(kPackedElements / padded_depth / kBlock, 1) * kBlock;
  const bool direct = is_direct(a, m, depth);
  const std::int64_t most_rows = direct ? m : most;
  for (std::int64_t i = 0; i < m; i += most_rows) {
    const std::int64_t rows = std::min(most_rows, m - i);
    Operand left;
    if constexpr (!kSplit) {
      left = {a.data, a.row, kTileDepth, kTileVectors * a.row};
    }
    if (!direct) {
      left = packed(V{a.data + i * a.row, a.row, a.column, kTileVectors, depth}, rows, false, a_scratch);
    }
    if (has_groups(rows, n, depth)) {
      multiply_groups(Product<Out>{.rows = rows,
                                   .columns = n,
                                   .depth = depth,
                                   .a = left,
                                   .b = {},
                                   .start = start,
                                   .out = out + i * n,
                                   .leading = n,
                                   .split = kSplit},
                      V{b.data, b.column, b.row, kTileVectors, depth});
      continue;
    }
    for (std::int64_t j = 0; j < n; j += most) {
      const std::int64_t columns = std::min(most, n - j);
      const Operand right =
          packed(V{b.data + j * b.column, b.column, b.row, kTileVectors, depth}, columns, true, b_scratch);
      Product<Out>{.rows = rows,
                   .columns = columns,
                   .depth = depth,
                   .a = left,
                   .b = right,
                   .start = start != nullptr ? start + j : nullptr,
                   .out = out + i * n + j,
                   .leading = n,
                   .split = kSplit}
          .run();
    }
  }
}

}  // namespace

void multiply_bfloat16(std::int64_t m, std::int64_t n, std::int64_t depth, Matrix<BFloat16> a, Matrix<BFloat16> b,
                       const float* start, float* out) {
  multiply(m, n, depth, a, b, start, out);
}

void multiply_bfloat16(std::int64_t m, std::int64_t n, std::int64_t depth, Matrix<BFloat16> a, Matrix<BFloat16> b,
                       const float* start, BFloat16* out) {
  multiply(m, n, depth, a, b, start, out);
}

void add_product_bfloat16(std::int64_t m, std::int64_t n, std::int64_t depth, Matrix<BFloat16> a, Matrix<BFloat16> b,
                          float* out) {
  multiply(m, n, depth, a, b, static_cast<const float*>(nullptr), out);
}

bool has_split_product(Matrix<float> a, Matrix<float> b) {
  return a.column == 1 && b.row == 1 && bfloat16_unit() == Bfloat16Unit::amx;
}

void multiply_split(std::int64_t m, std::int64_t n, std::int64_t depth, Matrix<float> a, Matrix<float> b,
                    const float* start, float* out) {
  multiply(m, n, depth, a, b, start, out);
}

}  // namespace mica::gemm
