#pragma once

#include <mica/core/tensor.h>

namespace mica {

/// What becomes of a loss for each row: all of them, their mean, their sum.
enum class Reduction { none, mean, sum };

struct CrossEntropyOptions {
  std::int64_t ignore_index = -100;  ///< rows with this target have loss 0, gradient 0 and no part in the mean
  Reduction reduction = Reduction::mean;
};

/// The loss of classifying each row of logits (…, V) as its target (…), an integer (int64 or int32) in [0, V):
///
///   loss = log Σ exp(logits) - logits[target]
///
/// in one pass without the probabilities being stored; float16 and bfloat16 logits are worked on in float32. The
/// result has the logits' dtype: a scalar, or shape (…) with Reduction::none. The mean is over the rows that are not
/// ignored, and NaN if all are. A target that is neither in [0, V) nor ignore_index is an error on the CPU; on CUDA,
/// where telling would mean waiting, the row's loss and gradient are NaN.
Tensor cross_entropy(const Tensor& logits, const Tensor& targets, const CrossEntropyOptions& options = {});

}  // namespace mica
