#pragma once

#include <mica/core/tensor.h>
#include <mica/ops/cross_entropy/cross_entropy.h>

namespace mica {

struct CtcOptions {
  std::int64_t blank = 0;      ///< the class that stands for no label
  bool zero_infinity = false;  ///< whether infinite losses count as 0, and their gradients too
  Reduction reduction = Reduction::mean;
};

/// The connectionist temporal classification loss (Graves et al., ICML 2006): −log of the probability that the classes
/// drawn at each time, with repetitions merged and blanks removed, are the target. It is infinite if the input is too
/// short for its target, which takes a time for each label and for each pair of equal neighbors.
///
/// @param log_probs       (T, N, C), or (T, C) for a single sample, floating: log-probabilities of C classes at T
/// times,
///                        such as log_softmax() computes. 16-bit floats are computed in float32.
/// @param targets         labels from 0 to C − 1 that are not the blank, int64 or int32: (N, S), of which each sample
///                        uses the first; or those of all samples one after the other, with one axis, which on CUDA
///                        waits for the device.
/// @param input_lengths   (N) int64 or int32: the times of each sample, from 0 to T.
/// @param target_lengths  (N) int64 or int32: the labels of each sample, from 0 to S.
/// @return a scalar, or (N) with Reduction::none. Reduction::mean is the mean of the losses divided by their target's
///         length (at least 1). Differentiable once, in log_probs.
///
/// All tensors are on one device. Labels and lengths out of range are an Error on the CPU; on CUDA, where an error
/// would have to wait for the device, the loss of their sample is NaN.
Tensor ctc_loss(const Tensor& log_probs, const Tensor& targets, const Tensor& input_lengths,
                const Tensor& target_lengths, const CtcOptions& options = {});

}  // namespace mica
