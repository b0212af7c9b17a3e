#pragma once

#include <mica/core/tensor.h>

namespace mica {

/// What a loss function returns: the individual losses, their mean or their sum.
enum class Reduction { none, mean, sum };

struct CrossEntropyOptions {
  std::int64_t ignore_index = -100;  ///< rows with this label have loss and gradient 0, and do not count in the mean
  Reduction reduction = Reduction::mean;
  Tensor weight{};             ///< (V), of the logits' dtype or float32: the weight of each class; undefined: all 1
  double label_smoothing = 0;  ///< in [0, 1]: the part of a target that is spread evenly over all classes
  double logit_scale = 1;      ///< logits x are first replaced by logit_scale · x,
  double softcap = 0;          ///< then by softcap · tanh(x / softcap); 0: no cap
  bool in_place = false;       ///< overwrite the logits with their gradient: see cross_entropy()
};

/// The cross entropy between each row's target and softmax(z), where z are the row's logits, scaled and capped:
///
///   loss = Σᵢ wᵢ tᵢ (log Σⱼ exp(zⱼ) − zᵢ)      t = (1 − label_smoothing) · target + label_smoothing / V
///
/// @param logits   (…, V), floating, V ≥ 1; 16-bit logits are computed in float32. Any number of rows.
/// @param targets  labels or probabilities. Labels (…), int64 or int32 in [0, V), stand for a target of 1 at the label
///                 and 0 elsewhere. Probabilities are (…, V), of the logits' dtype; their rows need not sum to 1.
/// @return a scalar, or (…) with Reduction::none; float32 for 16-bit logits, else of their dtype. Differentiable any
///         number of times in the logits and in probabilities, not in the class weights.
///
/// For labels, the mean divides by the sum of w[label] over the rows that are not ignored; without class weights, that
/// is their number. For probabilities, it divides by the number of rows. A mean over no rows is NaN. A logit may be
/// −inf if its class contributes nothing (w t = 0). A row whose logits are all −inf gives NaN.
///
/// A label that is neither in [0, V) nor ignore_index is an Error on the CPU. On CUDA, where an error would have to
/// wait for the device, the loss and gradient of its row are NaN instead; nothing is read out of bounds. The result of
/// a row does not depend on other rows and is the same from run to run (on CUDA: for the same alignment of the row).
///
/// With `in_place`, and if a gradient is needed, forward overwrites the logits with their gradient in one pass;
/// backward only multiplies that by the incoming gradient, if it is not 1. The gradient then needs no memory, but:
/// - The logits must be row-major and not a leaf. Afterwards they hold their gradient, so autograd throws if they are
///   used in a computation that is recorded, or if the backward of the op that produced them needs their values.
/// - Backward can run only once, there are no second derivatives, and probabilities get no gradient.
/// - The gradient is rounded to the logits' dtype before a loss scale is applied, so small elements become 0. This
///   matters for a mean over float16 logits: use Reduction::sum there, or leave in_place off.
///
/// Throws Error before anything is computed if a shape, dtype, device or option does not match.
///
/// Label smoothing: Szegedy et al. (2015), arXiv:1512.00567. Softcap: Gemma 2 (2024), arXiv:2408.00118. Derivation and
/// kernels: README.md in this folder.
Tensor cross_entropy(const Tensor& logits, const Tensor& targets, const CrossEntropyOptions& options = {});

}  // namespace mica
