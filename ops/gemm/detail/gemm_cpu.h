#pragma once

// One matrix product on the CPU. Included by *_cpu.cpp only.
//
// The arithmetic uses Eigen's packets, so that the same source runs on AVX-512, AVX2, SSE and NEON. Eigen's own product
// reaches two thirds of a core's peak, this one nearly all of it, since it keeps a tile of the output in registers over
// all of K. It also sums each element in an order that depends on K alone.

#include <Eigen/Core>

#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>
#include <vector>

#include <mica/core/detail/ceil_div.h>
#include <mica/core/dtype.h>
#include <mica/core/parallel.h>
#include <mica/ops/gemm/detail/bfloat16_gemm.h>
#include <mica/ops/gemm/detail/matrix.h>

namespace mica::gemm {

namespace packets = Eigen::internal;

// The size of a tile of the output, kRows x kColumns, whose sums fill the registers.
template <class S>
struct Tile {
  using Packet = typename packets::packet_traits<S>::type;
  static constexpr int kWidth = packets::unpacket_traits<Packet>::size;
  static constexpr int kRows = EIGEN_ARCH_DEFAULT_NUMBER_OF_REGISTERS >= 32 ? 8 : 6;
  static constexpr int kColumns = 2 * kWidth;
};

// The number of terms that are summed in registers before they are added to the output. Shorter sums round less.
inline constexpr std::int64_t kSum = 512;
// The number of terms between two reads of the output: the depth of a packed operand, sized for the caches.
inline constexpr std::int64_t kDepth = 4 * kSum;
inline constexpr std::int64_t kPackedElements = std::int64_t{1} << 20;
// Bytes of a's rows that remain in the L2 cache while all of b is read.
inline constexpr std::int64_t kBlockBytes = std::int64_t{1} << 18;
// Minimum work per thread, in elements to pack and in multiplications.
inline constexpr std::int64_t kPackGrain = 16384;
inline constexpr std::int64_t kMultiplyGrain = std::int64_t{1} << 18;

template <class S>
using Buffer = std::vector<S, Eigen::aligned_allocator<S>>;

/// c = a · b + start or, with kAdd, c += a · b, for a tile c of R rows and V packets, a (R, K), and b (K, V packets),
/// packed.
///
/// a's strides are separate arguments, since a Matrix would be passed in memory, and loading it would wait for the
/// stores of the previous tile: a sixth of the time of a transformer's step.
template <class S, int R, int V, bool kAdd>
EIGEN_DONT_INLINE void multiply_tile(std::int64_t depth, const S* a, std::int64_t a_row, std::int64_t a_column,
                                     const S* b, const S* start, S* c, std::int64_t leading) {
  using Packet = typename Tile<S>::Packet;
  constexpr int kWidth = Tile<S>::kWidth;
  Packet sums[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      sums[r][v] = packets::ploadu<Packet>(start + v * kWidth);
    }
  }
  for (std::int64_t k = 0; k < depth; ++k) {
    Packet line[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      line[v] = packets::ploadu<Packet>(b + v * kWidth);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Packet x = packets::pset1<Packet>(a[r * a_row]);
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) {
        sums[r][v] = packets::pmadd(x, line[v], sums[r][v]);
      }
    }
    a += a_column;
    b += V * kWidth;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      S* const at = c + r * leading + v * kWidth;
      packets::pstoreu(at, kAdd ? packets::padd(packets::ploadu<Packet>(at), sums[r][v]) : sums[r][v]);
    }
  }
}

template <class S>
using TileFunction = void (*)(std::int64_t, const S*, std::int64_t, std::int64_t, const S*, const S*, S*, std::int64_t);

/// The function above for a tile of `rows` rows, one or two packets wide, that sets its output or adds to it.
template <class S>
TileFunction<S> tile_function(int rows, int width, bool add) {
  static constexpr auto table = []<int... R>(std::integer_sequence<int, R...>) {
    return std::array<std::array<TileFunction<S>, 4>, sizeof...(R)>{
        {{multiply_tile<S, R + 1, 1, false>, multiply_tile<S, R + 1, 1, true>, multiply_tile<S, R + 1, 2, false>,
          multiply_tile<S, R + 1, 2, true>}...}};
  }
  (std::make_integer_sequence<int, Tile<S>::kRows>());
  return table[rows - 1][2 * (width - 1) + (add ? 1 : 0)];
}

/// out (K, width) row-major = b (K, columns), padded with zeros.
template <class S, class T>
void pack_columns(Matrix<T> b, std::int64_t depth, int columns, int width, S* out) {
  using Packet = typename Tile<S>::Packet;
  constexpr int kWidth = Tile<S>::kWidth;
  if (b.column == 1) {
    if constexpr (std::is_same_v<S, T>) {
      if (columns == width) {
        for (std::int64_t k = 0; k < depth; ++k) {
          for (int first = 0; first < width; first += kWidth) {
            packets::pstoreu(out + k * width + first, packets::ploadu<Packet>(b.data + k * b.row + first));
          }
        }
        return;
      }
    }
    for (std::int64_t k = 0; k < depth; ++k) {
      const T* const from = b.data + k * b.row;
      S* const to = out + k * width;
      for (int j = 0; j < columns; ++j) {
        to[j] = static_cast<S>(from[j]);
      }
      std::fill(to + columns, to + width, S{0});
    }
    return;
  }
  const std::int64_t square = depth / kWidth * kWidth;
  for (int first = 0; first < width; first += kWidth) {
    const T* const from = b.data + first * b.column;
    const int valid = std::clamp(columns - first, 0, kWidth);
    for (std::int64_t k = 0; k < square; k += kWidth) {
      packets::PacketBlock<Packet, kWidth> block;
      for (int j = 0; j < kWidth; ++j) {
        if (j >= valid) {
          block.packet[j] = packets::pset1<Packet>(S{0});
        } else if constexpr (std::is_same_v<S, T>) {
          block.packet[j] = packets::ploadu<Packet>(from + j * b.column + k);
        } else {
          std::array<S, kWidth> values;
          for (int i = 0; i < kWidth; ++i) {
            values[i] = static_cast<S>(from[j * b.column + k + i]);
          }
          block.packet[j] = packets::ploadu<Packet>(values.data());
        }
      }
      packets::ptranspose(block);
      for (int i = 0; i < kWidth; ++i) {
        packets::pstoreu(out + (k + i) * width + first, block.packet[i]);
      }
    }
    for (std::int64_t k = square; k < depth; ++k) {
      for (int j = 0; j < kWidth; ++j) {
        out[k * width + first + j] = j < valid ? static_cast<S>(from[j * b.column + k * b.row]) : S{0};
      }
    }
  }
}

/// The layout of pack_rows' output: row-major or, if columns of `a` are contiguous, column-major. A few padding
/// elements keep rows from mapping to the same cache sets.
template <class S, class T>
Matrix<S> packed_rows(Matrix<T> a, std::int64_t depth, const S* packed) {
  return a.column == 1 ? Matrix<S>{packed, depth + Tile<S>::kWidth, 1} : Matrix<S>{packed, 1, Tile<S>::kRows};
}

/// Copies the rows of one tile.
template <class S, class T>
void pack_rows(Matrix<T> a, int rows, std::int64_t depth, S* out) {
  if (a.column == 1) {
    for (int r = 0; r < rows; ++r) {
      S* const to = out + r * (depth + Tile<S>::kWidth);
      for (std::int64_t k = 0; k < depth; ++k) {
        to[k] = static_cast<S>(a.data[r * a.row + k]);
      }
    }
    return;
  }
  constexpr int kRows = Tile<S>::kRows;
  for (std::int64_t k = 0; k < depth; ++k) {
    const T* const from = a.data + k * a.column;
    if (rows == kRows) {  // a compile-time length
      std::transform(from, from + kRows, out + k * kRows, [](T value) { return static_cast<S>(value); });
    } else {
      std::transform(from, from + rows, out + k * kRows, [](T value) { return static_cast<S>(value); });
    }
  }
}

/// The number of elements that pack_rows writes for one tile.
template <class S>
std::int64_t packed_rows_size(std::int64_t depth) {
  return Tile<S>::kRows * (depth + Tile<S>::kWidth);
}

/// Whether tiles can read `a` in place: rows of the right type that do not all map to the same cache sets.
template <class S, class T>
bool a_is_direct(Matrix<T> a) {
  return std::is_same_v<S, T> && a.column == 1 && a.row * sizeof(T) % 4096 != 0;
}

/// Computes the tiles of a part of the output, over a part of K. Both operands have the accumulation type S.
template <class S, class Out>
struct Tiles {
  using Size = Tile<S>;

  std::int64_t rows, columns, depth;
  Matrix<S> a;          // of the first row tile
  std::int64_t a_step;  // elements from one row tile to the next
  const S* b;           // packed
  const S* start;       // initial value of each column's sums, unless they are added to the output
  bool add;
  Out* out;  // row-major
  std::int64_t leading;

  void run() const {
    const std::int64_t row_tiles = ceil_div(rows, Size::kRows);
    const std::int64_t column_tiles = ceil_div(columns, Size::kColumns);
    const std::int64_t tile_bytes = Size::kRows * depth * static_cast<std::int64_t>(sizeof(S));
    const std::int64_t block = std::clamp<std::int64_t>(kBlockBytes / tile_bytes, 1, row_tiles);
    const std::int64_t grain = kMultiplyGrain / (Size::kRows * Size::kColumns * depth) + 1;
    parallel_for(row_tiles * column_tiles, grain, [&](std::int64_t begin, std::int64_t end) {
      // Loop order: blocks of row tiles, columns, rows.
      std::int64_t first = begin / (block * column_tiles) * block;
      std::int64_t count = std::min(block, row_tiles - first);
      std::int64_t j = (begin - first * column_tiles) / count;
      std::int64_t i = (begin - first * column_tiles) % count;
      for (; begin < end; ++begin) {
        multiply(first + i, j);
        if (++i == count) {
          i = 0;
          if (++j == column_tiles) {
            j = 0;
            first += count;
            count = std::min(block, row_tiles - first);
          }
        }
      }
    });
  }

  void multiply(std::int64_t i, std::int64_t j) const {
    const int tile_rows = static_cast<int>(std::min<std::int64_t>(Size::kRows, rows - i * Size::kRows));
    const int tile_columns = static_cast<int>(std::min<std::int64_t>(Size::kColumns, columns - j * Size::kColumns));
    const int packets = tile_columns <= Size::kWidth ? 1 : 2;
    Out* const to = out + i * Size::kRows * leading + j * Size::kColumns;
    if constexpr (std::is_same_v<S, Out>) {
      if (tile_columns == packets * Size::kWidth) {
        sum(i, j, tile_rows, packets, to, leading);
        return;
      }
    }
    alignas(64) std::array<S, Size::kRows * Size::kColumns> tile;
    for (int r = 0; add && r < tile_rows; ++r) {
      std::copy_n(to + r * leading, tile_columns, tile.data() + r * Size::kColumns);
    }
    sum(i, j, tile_rows, packets, tile.data(), Size::kColumns);
    for (int r = 0; r < tile_rows; ++r) {
      std::transform(tile.data() + r * Size::kColumns, tile.data() + r * Size::kColumns + tile_columns,
                     to + r * leading, [](S value) { return static_cast<Out>(value); });
    }
  }

  void sum(std::int64_t i, std::int64_t j, int tile_rows, int packets, S* to, std::int64_t to_leading) const {
    static constexpr std::array<S, Size::kColumns> zeros{};
    const S* const tile_a = a.data + i * a_step;
    const S* const tile_b = b + j * Size::kColumns * depth;
    for (std::int64_t k = 0; k < depth; k += kSum) {
      const bool add_here = add || k > 0;
      tile_function<S>(tile_rows, packets, add_here)(
          std::min(kSum, depth - k), tile_a + k * a.column, a.row, a.column, tile_b + k * packets * Size::kWidth,
          add_here ? zeros.data() : start + j * Size::kColumns, to, to_leading);
    }
  }
};

template <class S>
struct Scratch {
  Buffer<S> a, b, start, sums;
};

/// A buffer of `n` elements that belongs to this thread and is reused by later calls.
template <class S>
S* grown(Buffer<S>& buffer, std::int64_t n) {
  if (static_cast<std::int64_t>(buffer.size()) < n) {
    buffer.resize(n);
  }
  return buffer.data();
}

/// out (M, N) = a (M, K) · b (K, N) + start, for each row. `start` has N elements, rounded up to whole tiles.
template <class S, class T, class Out>
void multiply(std::int64_t m, std::int64_t n, std::int64_t depth, Matrix<T> a, Matrix<T> b, const S* start, Out* out,
              Scratch<S>& scratch) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (bfloat16_unit() != Bfloat16Unit::none) {
      multiply_bfloat16(m, n, depth, a, b, start, out);
      return;
    }
  }
  using Size = Tile<S>;
  const bool direct = a_is_direct<S>(a);
  for (std::int64_t k = 0; k < depth; k += kDepth) {
    const std::int64_t part = std::min(kDepth, depth - k);
    const std::int64_t a_tile = packed_rows_size<S>(part);
    const std::int64_t b_tile = Size::kColumns * part;
    const std::int64_t most_rows = direct ? m : std::max<std::int64_t>(kPackedElements / a_tile, 1) * Size::kRows;
    const std::int64_t most_columns = std::max<std::int64_t>(kPackedElements / b_tile, 1) * Size::kColumns;
    for (std::int64_t i = 0; i < m; i += most_rows) {
      const std::int64_t rows = std::min(most_rows, m - i);
      const Matrix<T> a_part{a.data + i * a.row + k * a.column, a.row, a.column};
      Matrix<S> rows_to_read;
      if constexpr (std::is_same_v<S, T>) {
        rows_to_read = a_part;
      }
      if (!direct) {
        const std::int64_t count = ceil_div(rows, Size::kRows);
        S* const packed = grown(scratch.a, count * a_tile);
        parallel_for(count, kPackGrain / a_tile + 1, [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t t = begin; t < end; ++t) {
            const std::int64_t row = t * Size::kRows;
            const int valid = static_cast<int>(std::min<std::int64_t>(Size::kRows, rows - row));
            pack_rows<S, T>({a_part.data + row * a.row, a.row, a.column}, valid, part, packed + t * a_tile);
          }
        });
        rows_to_read = packed_rows(a, part, packed);
      }
      for (std::int64_t j = 0; j < n; j += most_columns) {
        const std::int64_t columns = std::min(most_columns, n - j);
        const std::int64_t count = ceil_div(columns, Size::kColumns);
        S* const packed = grown(scratch.b, count * b_tile);
        const T* const b_part = b.data + k * b.row + j * b.column;
        parallel_for(count, kPackGrain / b_tile + 1, [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t t = begin; t < end; ++t) {
            const std::int64_t column = t * Size::kColumns;
            const int valid = static_cast<int>(std::min<std::int64_t>(Size::kColumns, columns - column));
            const int width = valid <= Size::kWidth ? Size::kWidth : Size::kColumns;
            pack_columns<S, T>({b_part + column * b.column, b.row, b.column}, part, valid, width, packed + t * b_tile);
          }
        });
        Tiles<S, Out>{.rows = rows,
                      .columns = columns,
                      .depth = part,
                      .a = rows_to_read,
                      .a_step = direct ? Size::kRows * a.row : a_tile,
                      .b = packed,
                      .start = start + j,
                      .add = k > 0,
                      .out = out + i * n + j,
                      .leading = n}
            .run();
      }
    }
  }
}

}  // namespace mica::gemm
