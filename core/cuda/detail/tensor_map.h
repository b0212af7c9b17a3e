#pragma once

// Tensor maps: descriptions of a matrix from which the copy engine of compute capability 9.0 copies tiles. They are
// created on the host and passed to kernels by value, as `const __grid_constant__ CUtensorMap`.

#include <cuda.h>

#include <cstdint>

#include <mica/core/dtype.h>

namespace mica::cuda {

/// A matrix in global memory: lines of consecutive elements.
struct TensorMapArgs {
  DType dtype;               // float16, bfloat16, float32 or int32
  const void* data;          // aligned to 16 bytes
  std::int64_t lines;        // number of lines
  std::int64_t length;       // elements in a line
  std::int64_t leading;      // elements from one line to the next; a multiple of 16 bytes
  std::uint32_t box_lines;   // of a tile; at most 256
  std::uint32_t box_length;  // of a tile; at most 256, and 128 bytes if swizzled
};

/// Whether `data` and `leading` are aligned as a tensor map requires.
bool fits_tensor_map(DType dtype, const void* data, std::int64_t lines, std::int64_t length, std::int64_t leading);

/// A map for tiles in shared memory with the 128-byte swizzle: consecutive lines of 128 bytes, with 16-byte chunk c of
/// line r at c ^ (r % 8). So the chunks of one column in 8 consecutive lines are in different banks. Tiles start at
/// multiples of 1024 bytes. Elements outside the matrix read as zeros and are not written.
CUtensorMap swizzled_tensor_map(const TensorMapArgs& args);

/// A map for tiles in shared memory without a swizzle, at a multiple of 128 bytes; a line of a tile is a multiple of 16
/// bytes.
CUtensorMap plain_tensor_map(const TensorMapArgs& args);

/// The matrices of a batch's heads: (batches, heads, lines, length), strides in elements. Strides of axes of length 1
/// are ignored.
struct HeadsMapArgs {
  DType dtype;  // float16 or bfloat16
  const void* data;
  std::int64_t sizes[4];
  std::int64_t strides[3];  // of batches, heads and lines
  std::uint32_t box_lines;  // lines of a tile; it has 128 bytes per line and lies within one head
};

bool fits_heads_map(const HeadsMapArgs& args);

/// Like swizzled_tensor_map(), for tiles of one head.
CUtensorMap swizzled_heads_map(const HeadsMapArgs& args);

}  // namespace mica::cuda
