#pragma once

#include <mica/core/tensor.h>

namespace mica {

/// The reduction of the rows' losses: none, their mean, their sum.
enum class Reduction { none, mean, sum };

struct CrossEntropyOptions {
  std::int64_t ignore_index = -100;  ///< rows with this label have loss 0, gradient 0 and no part in the mean
  Reduction reduction = Reduction::mean;
  Tensor weight{};             ///< (V), of the logits' dtype or float32: what each class counts for; undefined: 1
  double label_smoothing = 0;  ///< in [0, 1]: the part of a target that is spread evenly over all classes
  double logit_scale = 1;      ///< logits x are first made scale · x
  double softcap = 0;          ///< and then cap · tanh(x / cap), unless it is 0
  bool in_place = false;       ///< the gradient is written over the logits: see cross_entropy()
};

/// The cross entropy of softmax(z) and a row's target, where z are the row's logits (…, V), scaled and capped:
///
///   loss = Σᵢ wᵢ tᵢ (log Σ eᶻ − zᵢ)      t = (1 − label_smoothing) · target + label_smoothing / V
///
/// @param logits (…, V), floating, V ≥ 1. 16-bit ones are computed in float32. Any number of rows. @param targets
/// either labels (…), int64 or int32 in [0, V): 1 there and 0 elsewhere; or probabilities (…, V) of the
///                 logits' dtype, whose rows need not sum to 1.
/// @return a scalar, or (…) with Reduction::none; float32 for 16-bit logits, else of their dtype. Differentiable any
///         number of times in the logits and in probabilities, not in the weights.
///
/// The mean divides by the sum of the labels' weights over the rows that are not ignored, which without weights is
/// their number, and for probabilities by the number of rows; a mean over no rows is NaN. If a class contributes
/// nothing (w t = 0), its logit may be −inf. A row of −inf only gives NaN.
///
/// A label that is neither in [0, V) nor ignore_index is an Error on the CPU; on CUDA, where a check would have to
/// wait, its row's loss and gradient are NaN and nothing is read out of bounds. The result of a row does not depend on
/// other rows and is the same from run to run (CUDA: for the same alignment of the row).
///
/// With `in_place`, and if a gradient is needed, forward overwrites the logits with their gradient in one pass, and
/// backward only multiplies by the incoming gradient, if that is not 1. The logits must be row-major and not a leaf.
/// Reading them later gives their gradient; autograd throws if they are used in a differentiated computation, or if the
/// op that produced them needs their values. Backward can run only once, there are no second derivatives, and
/// probabilities get no gradient. Gradients below the range of the logits' dtype are lost before a loss scale could
/// help, which is significant for a mean over float16 logits: use Reduction::sum there, or leave in_place off.
///
/// Throws Error before anything is computed if a shape, dtype, device or option does not match.
///
/// Label smoothing: Szegedy et al. (2015), arXiv:1512.00567. Softcap: Gemma 2 (2024), arXiv:2408.00118. Derivation and
/// kernels: README.md in this folder.
Tensor cross_entropy(const Tensor& logits, const Tensor& targets, const CrossEntropyOptions& options = {});

}  // namespace mica
