#pragma once

// The inner loops of a bfloat16 product on CPUs that have instructions for it. Plain pointers and no templates, because
// bfloat16_tiles_x86.cpp is compiled for more instructions than the rest of the library.

#include <cstdint>

#include <mica/core/half.h>

namespace mica::gemm {

/// What multiplies bfloat16, worst first.
enum class Bfloat16Unit {
  none,    // nothing of its own: gemm_cpu.h converts to float
  avx512,  // AVX512-BF16's dot product: twice the rate of float
  amx      // AMX-BF16's tiles: 16 times the rate of float
};

/// The best unit that this CPU has, the operating system allows and the compiler knew, up to limit_bfloat16_unit().
Bfloat16Unit bfloat16_unit();

/// No better unit than `most` from now on. For tests: each unit rounds sums differently.
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

/// The tiles of `vectors`, one after the other along the depth, zeros at the end and for missing vectors. In a tile of
/// a (as_pairs false) vector follows vector; in one of b (as_pairs true) there are 16 times two elements of each
/// vector.
void pack_tiles(const Vectors& vectors, bool as_pairs, BFloat16* out);

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
  const float* start;          // what each column's sums begin with, 16 a column tile; nullptr: what is in `out`
  float* out;
  std::int64_t leading;  // elements from one row of the output to the next
};

/// Lets this thread call multiply_tiles() as long as it lives. Others may do so at the same time.
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

/// out (16 row_tiles, 16 column_tiles) = start + a · b, in float32. Denormal elements count as zero.
void multiply_tiles(const TileSession& session, const TileBlock& block);

}  // namespace mica::gemm
