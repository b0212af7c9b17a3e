#pragma once

// The inner loops of a bfloat16 product on CPUs that have instructions for it. There are no templates, since
// bfloat16_tiles_x86.cpp is compiled for more instructions than the rest of the library.

#include <cstdint>

#include <mica/core/half.h>

namespace mica::gemm {

/// Instruction sets for bfloat16 products, slowest first.
enum class Bfloat16Unit {
  none,    // no such instructions: gemm_cpu.h converts to float
  avx512,  // AVX512-BF16's dot product: twice the rate of float
  amx      // AMX-BF16's tiles: 16 times the rate of float
};

/// The best unit supported by this CPU, the operating system and the compiler, up to limit_bfloat16_unit().
Bfloat16Unit bfloat16_unit();

/// Limits bfloat16_unit() to `most`. For tests: each unit rounds sums differently.
void limit_bfloat16_unit(Bfloat16Unit most);

// A tile of an operand: 16 vectors (rows of a, columns of b) of 32 elements, along which products are summed.
inline constexpr int kTileVectors = 16;
inline constexpr int kTileDepth = 32;
inline constexpr int kTileElements = kTileVectors * kTileDepth;

/// Some rows of a, or some columns of b, in memory. One stride is 1.
struct Vectors {
  const BFloat16* data;
  std::int64_t stride;   // elements from one vector to the next
  std::int64_t element;  // … and from one element of a vector to the next
  int count;             // from 1 to kTileVectors
  std::int64_t depth;    // elements of a vector
};

/// Packs `vectors` into consecutive tiles along the depth, with zeros at the end and for missing vectors. A tile of a
/// (as_pairs false) stores one vector after another; a tile of b (as_pairs true) stores 16 pairs of elements of each
/// vector.
void pack_tiles(const Vectors& vectors, bool as_pairs, BFloat16* out);

/// The same for float32. The elements of a vector are contiguous: element is 1.
struct FloatVectors {
  const float* data;
  std::int64_t stride, element;
  int count;
  std::int64_t depth;
};

/// Packs each element x as two: high, x rounded to bfloat16, and low, x − high rounded. Each tile of high elements is
/// followed by that of the low ones. For Bfloat16Unit::amx only.
void pack_tiles(const FloatVectors& vectors, bool as_pairs, BFloat16* out);

/// Up to 2 x 2 tiles of the output.
struct TileBlock {
  int row_tiles, column_tiles;  // 1 or 2
  std::int64_t depth_tiles;
  const BFloat16* a;
  std::int64_t a_row;          // elements from one row of a tile to the next
  std::int64_t a_next;         // … from one tile to the next along the depth
  std::int64_t a_row_tile;     // … from the first row tile to the second
  const BFloat16* b;           // packed
  std::int64_t b_column_tile;  // elements from the first column tile to the second
  const float* start;          // initial value of each column's sums, 16 per column tile; nullptr: the values in `out`
  float* out;
  std::int64_t leading;  // elements from one row of the output to the next
  // Whether a and b were packed from FloatVectors. Then a_next is 2 kTileElements, and the product is that of the high
  // parts plus those of high and low: all but low · low.
  bool split = false;
};

/// While it exists, its thread may call multiply_tiles(). Several threads may have one each.
class TileSession {
 public:
  TileSession();
  ~TileSession();
  TileSession(const TileSession&) = delete;
  TileSession& operator=(const TileSession&) = delete;

  Bfloat16Unit unit() const { return unit_; }

 private:
  Bfloat16Unit unit_;
};

/// out (16 row_tiles, 16 column_tiles) = start + a · b, in float32. Subnormal elements are treated as zero.
void multiply_tiles(const TileSession& session, const TileBlock& block);

}  // namespace mica::gemm
