#pragma once

#include <mica/core/tensor.h>
#include <mica/ops/cross_entropy/cross_entropy.h>

namespace mica {

// Losses of predictions and targets, which have one shape, floating dtype and device; there is no broadcasting. The
// result is a scalar, or of that shape with Reduction::none. Differentiable any number of times in both arguments; at a
// kink the derivative is 0. A mean over nothing is NaN. 16-bit floats are computed in float32 and the result is rounded
// once; under Autocast it stays float32.
//
// For classes there are cross_entropy() and, from logarithms of probabilities, nll_loss().

/// (x − target)².
Tensor mse_loss(const Tensor& x, const Tensor& target, Reduction reduction = Reduction::mean);

/// |x − target|.
Tensor l1_loss(const Tensor& x, const Tensor& target, Reduction reduction = Reduction::mean);

/// ½ d² where d = |x − target| is at most `delta`, else delta · (d − ½ delta) (Huber, 1964,
/// doi:10.1214/aoms/1177703732). Throws unless delta > 0.
Tensor huber_loss(const Tensor& x, const Tensor& target, double delta = 1, Reduction reduction = Reduction::mean);

struct BceOptions {
  Tensor weight{};      ///< of each element; broadcasts to the logits' shape
  Tensor pos_weight{};  ///< of targets, against 1 − targets; broadcasts to the logits' shape
  Reduction reduction = Reduction::mean;
};

/// The binary cross entropy of sigmoid(x) and targets in [0, 1], without overflow:
///
///     loss = −w (p t log sigmoid(x) + (1 − t) log(1 − sigmoid(x)))      p = pos_weight
Tensor bce_with_logits(const Tensor& logits, const Tensor& targets, const BceOptions& options = {});

/// The terms of the Kullback-Leibler divergence, t (log t − x), of targets t from exp(x): x has logarithms of
/// probabilities, as log_softmax() gives them. Where t = 0 it is 0. With `log_target` the targets are logarithms, too.
/// The mean is over all elements; the divergence of distributions along an axis is a sum over that axis.
Tensor kl_div(const Tensor& x, const Tensor& target, bool log_target = false, Reduction reduction = Reduction::mean);

struct NllOptions {
  std::int64_t ignore_index = -100;  ///< rows with this target have loss 0, gradient 0 and no part in the mean
  Tensor weight{};                   ///< (V), of x's dtype: what each class counts for; undefined: 1
  Reduction reduction = Reduction::mean;
};

/// The negative log likelihood of classes: −w[t] x[…, t], for logarithms of probabilities x (…, V), as log_softmax()
/// gives them, and targets t (…), int64 or int32 in [0, V). The result is a scalar, or (…) with Reduction::none. The
/// mean divides by the sum of the weights w[t] of rows that are not ignored; over no rows it is NaN. A target that is
/// neither in [0, V) nor ignore_index is an error on the CPU; on CUDA, where a check would have to wait, its row is
/// NaN.
///
/// cross_entropy() does the same from logits in one pass, without the logarithms of all probabilities.
Tensor nll_loss(const Tensor& x, const Tensor& targets, const NllOptions& options = {});

}  // namespace mica
