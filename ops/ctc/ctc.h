#pragma once

#include <mica/core/tensor.h>
#include <mica/ops/cross_entropy/cross_entropy.h>

namespace mica {

struct CtcOptions {
  std::int64_t blank = 0;      ///< the class that stands for no label
  bool zero_infinity = false;  ///< whether infinite losses count as 0, and their gradients too
  Reduction reduction = Reduction::mean;
};

/// Connectionist temporal classification (Graves et al., ICML 2006): −log of the probability that a class drawn at each
/// time step, with repetitions merged and blanks removed, gives the target. A target needs one step per label, and one
/// more between equal labels; the loss of a shorter input is infinite.
///
/// @param log_probs       (T, N, C), or (T, C) for one sample, floating: the output of log_softmax() over C classes.
///                        16-bit floats are computed in float32.
/// @param targets         int64 or int32 labels from 0 to C − 1, without the blank: (N, S), padded at the end; or the
///                        labels of all samples in a row, with one axis, for which CUDA waits for the device.
/// @param input_lengths   (N) int64 or int32, from 0 to T.
/// @param target_lengths  (N) int64 or int32, from 0 to S.
/// @return a scalar, or (N) with Reduction::none. Reduction::mean divides each loss by its target's length (at least 1)
///         before it averages. Differentiable once, in log_probs.
///
/// All tensors are on one device. Labels and lengths out of range are an Error on the CPU. On CUDA they make the loss
/// of their sample NaN, so that nothing waits for the device.
Tensor ctc_loss(const Tensor& log_probs, const Tensor& targets, const Tensor& input_lengths,
                const Tensor& target_lengths, const CtcOptions& options = {});

}  // namespace mica
