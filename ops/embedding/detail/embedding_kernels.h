#pragma once

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>

namespace mica::kernels {

// Rows of a table by index, and their sums by index: also used by ops/index. All row-major; indices int64 of n
// elements. Errors begin with `op`.

/// Any dtype. For an index out of range: an error on the CPU; on CUDA a row of NaN, or of 0 in other dtypes than
/// floats.
struct EmbeddingForward {
  const Tensor& weight;   // (V, C)
  const Tensor& indices;  // (n)
  const Tensor& y;        // (n, C)
  const char* op = "embedding";
};

/// Floats, int64 and int32. On CUDA, rows with an index out of range are left out.
struct EmbeddingBackward {
  const Tensor& dy;       // (n, C)
  const Tensor& indices;  // (n)
  const Tensor& dweight;  // (V, C): the sums; 0 for unused rows
  bool accumulate;        // add to dweight instead of overwriting it
  const char* op = "embedding";
};

using SummedTypes = Types<float, double, Half, BFloat16, std::int64_t, std::int32_t>;

void embedding_forward(Cpu, const EmbeddingForward& args);
void embedding_forward(Cuda, const EmbeddingForward& args);
void embedding_backward(Cpu, const EmbeddingBackward& args);
void embedding_backward(Cuda, const EmbeddingBackward& args);

}  // namespace mica::kernels
