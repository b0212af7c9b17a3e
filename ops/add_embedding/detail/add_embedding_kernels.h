#pragma once

#include <cstdint>

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>
#include <mica/ops/dropout/detail/element_dropout.h>

namespace mica::kernels {

/// y[i] = dropout(weight[indices[i]] + addend[i % R]), for each row i. All tensors are row-major, of the same dtype,
/// and not empty. There is a kernel for CUDA only, and not for every shape: it returns false, and computes nothing, if
/// it does not support the arguments. The op then uses the kernels of other ops.
struct AddEmbedding {
  const Tensor& weight;   // (V, C)
  const Tensor& indices;  // n elements, int64
  const Tensor& addend;   // R rows of C elements
  ElementDropout dropout;
  const Tensor& y;  // out, n rows of C elements
};

inline bool add_embedding(Cpu, const AddEmbedding&) { return false; }
bool add_embedding(Cuda, const AddEmbedding& args);

}  // namespace mica::kernels
