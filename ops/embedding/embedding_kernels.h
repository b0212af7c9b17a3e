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
  const Tensor& dweight;  // (V, C): the sums, or 0 where there is nothing to add up
  bool accumulate;        // they are added to what is there
};

void embedding_forward(Cpu, const EmbeddingForward& args);
void embedding_forward(Cuda, const EmbeddingForward& args);
void embedding_backward(Cpu, const EmbeddingBackward& args);
void embedding_backward(Cuda, const EmbeddingBackward& args);

}  // namespace mica::kernels
