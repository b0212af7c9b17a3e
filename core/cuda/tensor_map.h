#pragma once

// Tensor maps: what the copy engine of compute capability 9.0 has to know of a matrix to copy tiles of it. They are
// made on the host and passed to kernels by value, as `const __grid_constant__ CUtensorMap`.

#include <cuda.h>

#include <cstdint>

#include <mica/core/dtype.h>

namespace mica::cuda {

/// A matrix in global memory, read along the lines of consecutive elements that it consists of.
struct TensorMapArgs {
  DType dtype;               // float16, bfloat16, float32 or int32
  const void* data;          // aligned to 16 bytes
  std::int64_t lines;        // how many
  std::int64_t length;       // elements of a line
  std::int64_t leading;      // elements from one line to the next; their bytes are a multiple of 16
  std::uint32_t box_lines;   // of a tile; at most 256
  std::uint32_t box_length;  // of a tile; at most 256, and 128 bytes if swizzled
};

/// Whether `data` and `leading` are as a tensor map needs them.
bool fits_tensor_map(DType dtype, const void* data, std::int64_t lines, std::int64_t length, std::int64_t leading);

/// A map for tiles that lie in shared memory with the 128-byte swizzle: line after line of 128 bytes, of which 16-byte
/// chunk c of line r is at c ^ (r % 8). So what 8 lines have in one column lies in different banks. A tile begins at a
/// multiple of 1024 bytes. What is outside of the matrix reads as zeros and is not written.
CUtensorMap swizzled_tensor_map(const TensorMapArgs& args);

/// A map for tiles that lie in shared memory line after line, at a multiple of 128 bytes; a line of theirs is of a
/// multiple of 16 bytes.
CUtensorMap plain_tensor_map(const TensorMapArgs& args);

/// Matrices of the heads of a batch: (batches, heads, lines, length), strides in elements. Those of axes of one do not
/// matter.
struct HeadsMapArgs {
  DType dtype;  // float16 or bfloat16
  const void* data;
  std::int64_t sizes[4];
  std::int64_t strides[3];  // of batches, heads and lines
  std::uint32_t box_lines;  // of a tile, which is 128 bytes long and from one head
};

bool fits_heads_map(const HeadsMapArgs& args);

/// As swizzled_tensor_map(), for tiles of one head.
CUtensorMap swizzled_heads_map(const HeadsMapArgs& args);

}  // namespace mica::cuda
