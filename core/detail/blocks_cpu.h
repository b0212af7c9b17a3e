#pragma once

// Elements of a tensor as blocks of adjacent elements, in the type that the CPU computes in. Included by *_cpu.cpp
// only.

#include <cstddef>
#include <cstdint>

#include <mica/core/dtype.h>

namespace mica {

/// Part of a tensor: `rows` rows of n elements each. Strides are in elements.
struct Patch {
  std::int64_t n, stride;
  std::int64_t rows, row_stride;
};

/// How elements of one dtype are stored. In a block, 16-bit floats are float32; other elements are as in the tensor.
struct ElementFormat {
  std::int64_t bytes;        // of an element in a tensor
  std::int64_t block_bytes;  // of an element in a block
  /// Copies a patch that starts at `from` to a block.
  void (*gather)(const std::byte* from, const Patch& patch, std::byte* to);
  /// Copies a block to a patch that starts at `to`.
  void (*scatter)(const std::byte* from, const Patch& patch, std::byte* to);

  bool converts() const { return bytes != block_bytes; }
};

const ElementFormat& element_format(DType dtype);

}  // namespace mica
