#pragma once

#include <mica/core/tensor.h>
#include <mica/ops/cross_entropy/cross_entropy.h>

namespace mica {

// Losses. Unless stated otherwise, predictions and targets have the same shape, floating dtype and device, and do not
// broadcast; anything else throws. The result is a scalar, or with Reduction::none of their shape. Losses are
// differentiable any number of times in predictions and targets; where a loss has a kink, its derivative is 0. A mean
// over no elements is NaN. 16-bit floats are computed in float32 and the result is rounded once; under Autocast, the
// result stays float32.
//
// For classification, see cross_entropy(), which takes logits, and nll_loss(), which takes log-probabilities.

/// The squared error (x − target)².
Tensor mse_loss(const Tensor& x, const Tensor& target, Reduction reduction = Reduction::mean);

/// The absolute error |x − target|.
Tensor l1_loss(const Tensor& x, const Tensor& target, Reduction reduction = Reduction::mean);

/// With d = |x − target|: ½ d² where d ≤ delta, else delta · (d − ½ delta) (Huber, 1964,
/// doi:10.1214/aoms/1177703732). Throws unless delta > 0.
Tensor huber_loss(const Tensor& x, const Tensor& target, double delta = 1, Reduction reduction = Reduction::mean);

/// With d = |x − target|: ½ d² / beta where d < beta, else d − ½ beta; for beta = 0, the absolute error. It is
/// huber_loss() divided by beta. Throws unless beta ≥ 0.
Tensor smooth_l1_loss(const Tensor& x, const Tensor& target, double beta = 1, Reduction reduction = Reduction::mean);

struct BceOptions {
  Tensor weight{};      ///< of each element's loss; broadcasts to the logits' shape; undefined: all 1
  Tensor pos_weight{};  ///< of the positive part of the loss; broadcasts to the logits' shape; undefined: all 1
  Reduction reduction = Reduction::mean;
};

/// The binary cross entropy between targets t in [0, 1] and sigmoid(x), where x are the logits, without overflow:
///
///     loss = −weight · (pos_weight · t · log sigmoid(x) + (1 − t) · log(1 − sigmoid(x)))
///
/// A term whose weight, t or 1 − t is 0 is 0, even if x is infinite.
Tensor bce_with_logits(const Tensor& logits, const Tensor& targets, const BceOptions& options = {});

/// The elements of the Kullback-Leibler divergence: t · (log t − x), and 0 where t = 0, even if x = −∞. x are
/// log-probabilities, such as log_softmax() computes; `target` has probabilities t or, if `log_target` is true, their
/// logarithms.
///
/// The divergence of one distribution from another is the sum over their axis. Reduction::mean divides by the number of
/// all elements instead, as in PyTorch.
Tensor kl_div(const Tensor& x, const Tensor& target, bool log_target = false, Reduction reduction = Reduction::mean);

struct GaussianNllOptions {
  bool full = false;  ///< whether to add the constant ½ log 2π
  double eps = 1e-6;  ///< the least variance; a smaller one is replaced, but gets the gradient
  Reduction reduction = Reduction::mean;
};

/// The negative log likelihood of targets under normal distributions with means x: ½ (log var + (x − target)² / var).
/// `var` has x's shape, or shape[…, 1], or that without the last axis. Throws unless eps > 0, and on the CPU if a
/// variance is negative.
Tensor gaussian_nll_loss(const Tensor& x, const Tensor& target, const Tensor& var,
                         const GaussianNllOptions& options = {});

struct PoissonNllOptions {
  bool log_input = true;  ///< whether x are the logarithms of the rates
  bool full = false;      ///< whether to add Stirling's formula for log target!, where the target exceeds 1
  double eps = 1e-8;      ///< added to the rates, before the logarithm is taken
  Reduction reduction = Reduction::mean;
};

/// The negative log likelihood of counts under Poisson distributions, without the term log target!: exp(x) − target ·
/// x, or x − target · log(x + eps) if x are the rates themselves.
Tensor poisson_nll_loss(const Tensor& x, const Tensor& target, const PoissonNllOptions& options = {});

struct TripletOptions {
  double margin = 1;
  double p = 2;       ///< the norm of the distances
  double eps = 1e-6;  ///< see pairwise_distance()
  bool swap = false;  ///< whether to use the distance of positive and negative, if it is smaller
  Reduction reduction = Reduction::mean;
};

/// max(d(anchor, positive) − d(anchor, negative) + margin, 0) with d = pairwise_distance(), for three tensors (…, D) of
/// the same shape, dtype and device. Reduction::none gives shape (…). Throws unless margin > 0.
Tensor triplet_margin_loss(const Tensor& anchor, const Tensor& positive, const Tensor& negative,
                           const TripletOptions& options = {});

/// With the cosine c of x and y, (…, D): 1 − c where the target (…), of x's dtype or an integer, is 1, and max(c −
/// margin, 0) where it is −1.
Tensor cosine_embedding_loss(const Tensor& x, const Tensor& y, const Tensor& target, double margin = 0,
                             Reduction reduction = Reduction::mean);

/// max(−target · (x − y) + margin, 0), for targets of 1 (x should be larger than y) and −1.
Tensor margin_ranking_loss(const Tensor& x, const Tensor& y, const Tensor& target, double margin = 0,
                           Reduction reduction = Reduction::mean);

/// x where the target is 1, max(margin − x, 0) where it is −1.
Tensor hinge_embedding_loss(const Tensor& x, const Tensor& target, double margin = 1,
                            Reduction reduction = Reduction::mean);

/// log(1 + exp(−target · x)), for targets of 1 and −1, without overflow.
Tensor soft_margin_loss(const Tensor& x, const Tensor& target, Reduction reduction = Reduction::mean);

/// The mean over the last axis, the classes, of bce_with_logits(); `weight` is that of each class. Reduction::none
/// gives the shape without that axis.
Tensor multilabel_soft_margin_loss(const Tensor& x, const Tensor& target, const Tensor& weight = {},
                                   Reduction reduction = Reduction::mean);

struct NllOptions {
  std::int64_t ignore_index = -100;  ///< rows with this target have loss and gradient 0, and do not count in the mean
  Tensor weight{};                   ///< (V), of x's dtype: the weight of each class; undefined: all 1
  Reduction reduction = Reduction::mean;
};

/// The negative log likelihood of classes: −weight[t] · x[…, t].
///
/// @param x        (…, V), floating: log-probabilities, such as log_softmax() computes.
/// @param targets  the classes t (…), int64 or int32 in [0, V).
/// @return a scalar, or (…) with Reduction::none.
///
/// The mean divides by the sum of weight[t] over the rows that are not ignored; over no rows it is NaN. A target that
/// is neither in [0, V) nor ignore_index is an Error on the CPU. On CUDA, where an error would have to wait for the
/// device, the loss of its row is NaN instead.
///
/// nll_loss(log_softmax(logits), targets) equals cross_entropy(logits, targets), which takes a single pass and does not
/// store the log-probabilities.
Tensor nll_loss(const Tensor& x, const Tensor& targets, const NllOptions& options = {});

}  // namespace mica
