#pragma once

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>

namespace mica::kernels {

/// Converts indices along the middle axis of a row-major tensor (outer, size, inner) to positions in the flattened
/// tensor:
///
///     rows[o, j, i] = (o · size + index[o, j, i]) · inner + i
///
/// `index` is (outer, length, inner); or, if `shared`, (length) for all o, with inner = 1. An index out of range is an
/// Error on the CPU, which begins with `op`; on CUDA, it gives −1.
struct IndexRows {
  const Tensor& index;  // int64, row-major
  std::int64_t outer;
  std::int64_t size;
  std::int64_t length;
  std::int64_t inner;
  bool shared;
  const Tensor& rows;  // (outer, length, inner) int64
  const char* op;
};

void index_rows(Cpu, const IndexRows& args);
void index_rows(Cuda, const IndexRows& args);

/// The positions of the true elements of a row-major bool tensor, flattened: int64, in increasing order.
Tensor positions_of(Cpu, const Tensor& mask);
Tensor positions_of(Cuda, const Tensor& mask);

}  // namespace mica::kernels
