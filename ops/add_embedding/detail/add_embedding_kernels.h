#pragma once

#include <cstdint>

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>
#include <mica/ops/dropout/detail/element_dropout.h>

namespace mica::kernels {

/// y[i] = dropped (weight[indices[i]] + addend[i % R]), row by row. All row-major and of one dtype; no size is 0.
/// Kernels exist for CUDA only, and not for every shape: they return false, without any work, if they do not support
/// the arguments. The op then uses the kernels of other ops.
struct AddEmbedding {
  const Tensor& weight;   // (V, C)
  const Tensor& indices;  // n, int64
  const Tensor& addend;   // R rows of C: the last axes of y
  ElementDropout dropout;
  const Tensor& y;  // out, n rows of C
};

inline bool add_embedding(Cpu, const AddEmbedding&) { return false; }
bool add_embedding(Cuda, const AddEmbedding& args);

}  // namespace mica::kernels
