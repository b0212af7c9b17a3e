#include <mica/ops/gemm/detail/bfloat16_tiles.h>

// Compiled for AVX-512 and AMX (cmake/MicaTarget.cmake): call these functions only on a CPU that has both. Include no
// inline functions, since the linker could use this file's copy of them in the rest of the library.
#if defined(__AMX_BF16__) && defined(__AVX512BF16__)

#include <immintrin.h>

namespace mica::gemm::x86 {

namespace {

// Transposes a 16 x 16 matrix of 32-bit units.
void transpose(__m512i (&x)[16]) {
  __m512i y[16];
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
  // The 4 x 4 blocks in the four lanes of each group are transposed; now exchange the blocks.
  for (int i = 0; i < 4; ++i) {
    y[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
    y[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
    y[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
    y[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
    x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
    x[i + 4] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0x88);
    x[i + 12] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0xdd);
  }
}

__mmask32 first(std::int64_t n) { return n >= 32 ? ~__mmask32{0} : (__mmask32{1} << n) - 1; }

}  // namespace

void pack_tiles(const Vectors& vectors, bool as_pairs, BFloat16* out) {
  for (std::int64_t k = 0; k < vectors.depth; k += kTileDepth) {
    const std::int64_t left = vectors.depth - k;
    __m512i rows[16];
    const bool dense = vectors.element == 1;
    if (dense) {
      const __mmask32 mask = first(left);
      for (int i = 0; i < 16; ++i) {
        // There are more vectors than the hardware prefetcher follows. Past their end, a prefetch does nothing.
        __builtin_prefetch(
            reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(vectors.data) +
                                          static_cast<std::uintptr_t>(2 * (i * vectors.stride + k) + 512)));
        rows[i] = i < vectors.count ? _mm512_maskz_loadu_epi16(mask, vectors.data + i * vectors.stride + k)
                                    : _mm512_setzero_si512();
      }
    } else {
      // Row i: elements 2i and 2i + 1 of each vector.
      const auto mask = static_cast<__mmask16>(first(vectors.count));
      for (int i = 0; i < 16; ++i) {
        const BFloat16* const from = vectors.data + (k + 2 * i) * vectors.element;
        const __m256i even = 2 * i < left ? _mm256_maskz_loadu_epi16(mask, from) : _mm256_setzero_si256();
        const __m256i odd =
            2 * i + 1 < left ? _mm256_maskz_loadu_epi16(mask, from + vectors.element) : _mm256_setzero_si256();
        rows[i] = _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
      }
    }
    if (dense == as_pairs) {
      transpose(rows);
    }
    for (int i = 0; i < 16; ++i) {
      _mm512_store_si512(out + i * kTileDepth, rows[i]);
    }
    out += kTileElements;
  }
}

namespace {

// 16 elements of bfloat16 as float32.
__m512 widened(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

}  // namespace

void pack_tiles(const FloatVectors& vectors, bool as_pairs, BFloat16* out) {
  for (std::int64_t k = 0; k < vectors.depth; k += kTileDepth) {
    const __mmask32 mask = first(vectors.depth - k);
    __m512i high[16], low[16];
    for (int i = 0; i < 16; ++i) {
      high[i] = low[i] = _mm512_setzero_si512();
      if (i < vectors.count) {
        const float* const from = vectors.data + i * vectors.stride + k;
        const __m512 x = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), from);
        const __m512 y = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), from + 16);
        high[i] = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(y, x));
        const __m512 rest_x = _mm512_sub_ps(x, widened(_mm512_castsi512_si256(high[i])));
        const __m512 rest_y = _mm512_sub_ps(y, widened(_mm512_extracti64x4_epi64(high[i], 1)));
        low[i] = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(rest_y, rest_x));
      }
    }
    if (as_pairs) {
      transpose(high);
      transpose(low);
    }
    for (int i = 0; i < 16; ++i) {
      _mm512_store_si512(out + i * kTileDepth, high[i]);
      _mm512_store_si512(out + kTileElements + i * kTileDepth, low[i]);
    }
    out += 2 * kTileElements;
  }
}

void begin_amx() {
  // A constant: g++ 12 assumes that the instruction reads only eight bytes, and drops stores to the others.
  struct alignas(64) Config {
    unsigned char palette, start_row, reserved[14];
    unsigned short row_bytes[16];
    unsigned char rows[16];
  };
  static constexpr Config config{1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
  _tile_loadconfig(&config);
}

void end_amx() { _tile_release(); }

// Tiles 0 to 3 are sums, 4 and 5 hold a, 6 and 7 hold b.
template <int kRowTiles, int kColumnTiles>
static void load_sums(const TileBlock& block) {
  // g++ 12 does not know that the loads read memory.
  __asm__ volatile("" ::: "memory");
  const float* const from = block.start != nullptr ? block.start : block.out;
  const std::int64_t row_bytes = block.start != nullptr ? 0 : 4 * block.leading;
  const std::int64_t down = block.start != nullptr ? 0 : 16 * block.leading;
  _tile_loadd(0, from, row_bytes);
  if constexpr (kColumnTiles == 2) {
    _tile_loadd(1, from + 16, row_bytes);
  }
  if constexpr (kRowTiles == 2) {
    _tile_loadd(2, from + down, row_bytes);
  }
  if constexpr (kRowTiles == 2 && kColumnTiles == 2) {
    _tile_loadd(3, from + down + 16, row_bytes);
  }
}

template <int kRowTiles, int kColumnTiles>
static void store_sums(const TileBlock& block) {
  _tile_stored(0, block.out, 4 * block.leading);
  if constexpr (kColumnTiles == 2) {
    _tile_stored(1, block.out + 16, 4 * block.leading);
  }
  if constexpr (kRowTiles == 2) {
    _tile_stored(2, block.out + 16 * block.leading, 4 * block.leading);
  }
  if constexpr (kRowTiles == 2 && kColumnTiles == 2) {
    _tile_stored(3, block.out + 16 * block.leading + 16, 4 * block.leading);
  }
}

// Adds the products of the tiles of a and b that are loaded.
template <int kRowTiles, int kColumnTiles>
static void add_products() {
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (kColumnTiles == 2) {
    _tile_dpbf16ps(1, 4, 7);
  }
  if constexpr (kRowTiles == 2) {
    _tile_dpbf16ps(2, 5, 6);
  }
  if constexpr (kRowTiles == 2 && kColumnTiles == 2) {
    _tile_dpbf16ps(3, 5, 7);
  }
}

template <int kRowTiles>
static void load_a(const BFloat16* a, const TileBlock& block) {
  _tile_loadd(4, a, 2 * block.a_row);
  if constexpr (kRowTiles == 2) {
    _tile_loadd(5, a + block.a_row_tile, 2 * block.a_row);
  }
}

template <int kColumnTiles>
static void load_b(const BFloat16* b, const TileBlock& block) {
  _tile_loadd(6, b, 64);
  if constexpr (kColumnTiles == 2) {
    _tile_loadd(7, b + block.b_column_tile, 64);
  }
}

template <int kRowTiles, int kColumnTiles>
static void multiply_amx(const TileBlock& block) {
  load_sums<kRowTiles, kColumnTiles>(block);
  const BFloat16* a = block.a;
  const BFloat16* b = block.b;
  for (std::int64_t k = 0; k < block.depth_tiles; ++k) {
    load_a<kRowTiles>(a, block);
    load_b<kColumnTiles>(b, block);
    add_products<kRowTiles, kColumnTiles>();
    a += block.a_next;
    b += kTileElements;
  }
  store_sums<kRowTiles, kColumnTiles>(block);
}

template <int kRowTiles, int kColumnTiles>
static void multiply_split_amx(const TileBlock& block) {
  load_sums<kRowTiles, kColumnTiles>(block);
  const BFloat16* a = block.a;
  const BFloat16* b = block.b;
  for (std::int64_t k = 0; k < block.depth_tiles; ++k) {
    load_a<kRowTiles>(a, block);                     // high
    load_b<kColumnTiles>(b + kTileElements, block);  // low
    add_products<kRowTiles, kColumnTiles>();
    load_b<kColumnTiles>(b, block);
    add_products<kRowTiles, kColumnTiles>();
    load_a<kRowTiles>(a + kTileElements, block);
    add_products<kRowTiles, kColumnTiles>();
    a += block.a_next;
    b += 2 * kTileElements;
  }
  store_sums<kRowTiles, kColumnTiles>(block);
}

void multiply_amx(const TileBlock& block) {
  if (block.row_tiles == 2) {
    block.column_tiles == 2 ? multiply_amx<2, 2>(block) : multiply_amx<2, 1>(block);
  } else {
    block.column_tiles == 2 ? multiply_amx<1, 2>(block) : multiply_amx<1, 1>(block);
  }
}

void multiply_split_amx(const TileBlock& block) {
  if (block.row_tiles == 2) {
    block.column_tiles == 2 ? multiply_split_amx<2, 2>(block) : multiply_split_amx<2, 1>(block);
  } else {
    block.column_tiles == 2 ? multiply_split_amx<1, 2>(block) : multiply_split_amx<1, 1>(block);
  }
}

// Computes 8 rows at a time: their sums and a line of b take most of the registers.
template <int kColumnTiles>
static void multiply_rows(const TileBlock& block, const BFloat16* a, const float* from, std::int64_t from_row,
                          float* out) {
  __m512 sums[8][kColumnTiles];
#pragma GCC unroll 8
  for (int r = 0; r < 8; ++r) {
#pragma GCC unroll 2
    for (int c = 0; c < kColumnTiles; ++c) {
      sums[r][c] = _mm512_loadu_ps(from + r * from_row + 16 * c);
    }
  }
  const BFloat16* b = block.b;
  for (std::int64_t k = 0; k < block.depth_tiles; ++k) {
    for (int pair = 0; pair < 16; ++pair) {
      __m512i line[kColumnTiles];
#pragma GCC unroll 2
      for (int c = 0; c < kColumnTiles; ++c) {
        line[c] = _mm512_load_si512(b + c * block.b_column_tile + 32 * pair);
      }
#pragma GCC unroll 8
      for (int r = 0; r < 8; ++r) {
        int two;
        __builtin_memcpy(&two, a + r * block.a_row + 2 * pair, sizeof(two));
        const __m512i x = _mm512_set1_epi32(two);
#pragma GCC unroll 2
        for (int c = 0; c < kColumnTiles; ++c) {
          sums[r][c] = _mm512_dpbf16_ps(sums[r][c], reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(line[c]));
        }
      }
    }
    a += block.a_next;
    b += kTileElements;
  }
#pragma GCC unroll 8
  for (int r = 0; r < 8; ++r) {
#pragma GCC unroll 2
    for (int c = 0; c < kColumnTiles; ++c) {
      _mm512_storeu_ps(out + r * block.leading + 16 * c, sums[r][c]);
    }
  }
}

void multiply_avx512(const TileBlock& block) {
  for (int tile = 0; tile < block.row_tiles; ++tile) {
    for (int r = 0; r < 16; r += 8) {
      const std::int64_t row = 16 * tile + r;
      float* const out = block.out + row * block.leading;
      const float* const from = block.start != nullptr ? block.start : out;
      const std::int64_t from_row = block.start != nullptr ? 0 : block.leading;
      const BFloat16* const a = block.a + tile * block.a_row_tile + r * block.a_row;
      if (block.column_tiles == 2) {
        multiply_rows<2>(block, a, from, from_row, out);
      } else {
        multiply_rows<1>(block, a, from, from_row, out);
      }
    }
  }
}

bool compiled() { return true; }

}  // namespace mica::gemm::x86

#else

namespace mica::gemm::x86 {

bool compiled() { return false; }
void pack_tiles(const Vectors&, bool, BFloat16*) {}
void pack_tiles(const FloatVectors&, bool, BFloat16*) {}
void begin_amx() {}
void end_amx() {}
void multiply_amx(const TileBlock&) {}
void multiply_split_amx(const TileBlock&) {}
void multiply_avx512(const TileBlock&) {}

}  // namespace mica::gemm::x86

#endif
