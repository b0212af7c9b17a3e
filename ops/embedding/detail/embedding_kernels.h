#pragma once

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>

namespace mica::kernels {

// Reading rows of a table by index, and adding rows to it by index; also used by ops/index. All tensors are row-major;
// indices are int64. Errors begin with `op`.

/// y[i] = weight[indices[i]], for any dtype. An index out of range is an Error on the CPU; on CUDA, it gives a row of
/// NaN, or of 0 if the dtype is not floating.
struct EmbeddingForward {
  const Tensor& weight;   // (V, C)
  const Tensor& indices;  // (n)
  const Tensor& y;        // (n, C)
  const char* op = "embedding";
};

/// dweight[indices[i]] += dy[i], for floats, int64 and int32. On CUDA, rows whose index is out of range are skipped.
struct EmbeddingBackward {
  const Tensor& dy;       // (n, C)
  const Tensor& indices;  // (n)
  const Tensor& dweight;  // (V, C)
  bool accumulate;        // whether to add to dweight's elements; otherwise they are set to 0 first
  const char* op = "embedding";
};

using SummedTypes = Types<float, double, Float16, BFloat16, std::int64_t, std::int32_t>;

void embedding_forward(Cpu, const EmbeddingForward& args);
void embedding_forward(Cuda, const EmbeddingForward& args);
void embedding_backward(Cpu, const EmbeddingBackward& args);
void embedding_backward(Cuda, const EmbeddingBackward& args);

}  // namespace mica::kernels
