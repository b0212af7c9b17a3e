#pragma once

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>

namespace mica::kernels {

// logits (N, V) and targets (N), int64 or int32, are row-major. "V-type" is the logits' accumulate dtype.

using IndexTypes = Types<std::int64_t, std::int32_t>;

struct CrossEntropyForward {
  const Tensor& logits;
  const Tensor& targets;
  std::int64_t ignore_index;
  const Tensor& logsumexp;  // (N), V-type, for backward; what ignored rows get is of no use
  const Tensor& losses;     // (N), V-type, 0 for ignored rows
};
/// Throws, on the CPU only, before anything is written, if a target is neither a class nor ignore_index.
void cross_entropy_forward(Cpu, const CrossEntropyForward& args);
void cross_entropy_forward(Cuda, const CrossEntropyForward& args);

/// loss = Σ losses / count, where count is the number of rows not ignored if it is defined, else 1. All on the device.
struct CrossEntropyReduce {
  const Tensor& losses;
  const Tensor& targets;
  std::int64_t ignore_index;
  const Tensor& count;  // (1), V-type, or undefined
  const Tensor& loss;   // (1), the logits' dtype
};
void cross_entropy_reduce(Cpu, const CrossEntropyReduce& args);
void cross_entropy_reduce(Cuda, const CrossEntropyReduce& args);

/// dlogits = (softmax(logits) - onehot(targets)) · dloss / count, 0 for ignored rows.
struct CrossEntropyBackward {
  const Tensor& logits;
  const Tensor& targets;
  std::int64_t ignore_index;
  const Tensor& logsumexp;
  bool per_row;         // dloss is (N), else (1)
  const Tensor& dloss;  // the logits' dtype
  const Tensor& count;  // as in CrossEntropyReduce
  const Tensor& dlogits;
};
void cross_entropy_backward(Cpu, const CrossEntropyBackward& args);
void cross_entropy_backward(Cuda, const CrossEntropyBackward& args);

}  // namespace mica::kernels
