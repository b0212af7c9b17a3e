#pragma once

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>

namespace mica::kernels {

/// All row-major; indices int64 of n elements.
struct EmbeddingForward {
  const Tensor& weight;   // (V, C)
  const Tensor& indices;  // (n)
  const Tensor& y;        // (n, C)
};

struct EmbeddingBackward {
  const Tensor& dy;       // (n, C)
  const Tensor& indices;  // (n)
  const Tensor& dweight;  // (V, C): the sums; 0 for unused rows
  bool accumulate;        // add to dweight instead of overwriting it
};

void embedding_forward(Cpu, const EmbeddingForward& args);
void embedding_forward(Cuda, const EmbeddingForward& args);
void embedding_backward(Cpu, const EmbeddingBackward& args);
void embedding_backward(Cuda, const EmbeddingBackward& args);

}  // namespace mica::kernels
