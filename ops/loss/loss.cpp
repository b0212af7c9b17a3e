#include <algorithm>
#include <limits>

#include <mica/autograd/autocast.h>
#include <mica/ops/distance/distance.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/elementwise/where.h>
#include <mica/ops/index/detail/gather_for.h>
#include <mica/ops/loss/loss.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

void check_pair(const char* op, const Tensor& x, const Tensor& target) {
  check(is_floating(x.dtype()), "{}: expected a floating dtype, got {}", op, x.dtype());
  check(target.shape() == x.shape(), "{}: expected a target of shape {}, got {}", op, x.shape(), target.shape());
  check(target.dtype() == x.dtype(), "{}: expected a target of {}, got {}", op, x.dtype(), target.dtype());
  check(target.device() == x.device(), "{}: expected a target on {}, got {}", op, x.device(), target.device());
}

// Checks weights, which broadcast to x's shape and may be undefined.
void check_weight(const char* op, const char* name, const Tensor& weight, const Tensor& x) {
  if (!weight.defined()) {
    return;
  }
  check(is_floating(weight.dtype()) && accumulate_dtype(weight.dtype()) == accumulate_dtype(x.dtype()),
        "{}: expected a {} of {}, got {}", op, name, x.dtype(), weight.dtype());
  check(weight.device() == x.device(), "{}: expected a {} on {}, got {}", op, name, x.device(), weight.device());
  check(broadcast_shapes(x.shape(), weight.shape(), op) == x.shape(), "{}: expected a {} that broadcasts to {}, got {}",
        op, name, x.shape(), weight.shape());
}

// The loss from its elements, in the dtype of the predictions x, or in float32 under autocast.
Tensor reduced(const char* op, const Tensor& losses, Reduction reduction, const Tensor& x) {
  check(reduction <= Reduction::sum, "{}: expected the reduction none, mean or sum, got {}", op,
        static_cast<int>(reduction));
  const Tensor result = reduction == Reduction::none   ? losses
                        : reduction == Reduction::mean ? mean(losses)
                                                       : sum(losses);
  return autograd::autocast_widens(x) ? result : result.to(x.dtype());
}

// weight · loss for losses of at least 0. A weight of 0 makes an infinite loss 0, too.
Tensor weighted(const Tensor& weight, const Tensor& losses) {
  const Tensor absent = logical_and(eq(weight, 0), eq(losses, std::numeric_limits<double>::infinity()));
  return weight * where(absent, 0, losses);
}

// Converts 16-bit floats to float32, since their differences would lose too many digits.
Tensor wide(const Tensor& x) { return x.defined() && size_of(x.dtype()) == 2 ? x.to(float32) : x; }

}  // namespace

Tensor mse_loss(const Tensor& x, const Tensor& target, Reduction reduction) {
  check_pair("mse_loss", x, target);
  const Tensor a = wide(x), b = wide(target);
  return reduced("mse_loss", pow(a - b, 2), reduction, x);
}

Tensor l1_loss(const Tensor& x, const Tensor& target, Reduction reduction) {
  check_pair("l1_loss", x, target);
  const Tensor a = wide(x), b = wide(target);
  return reduced("l1_loss", abs(a - b), reduction, x);
}

namespace {

// Huber's function of distances, times `scale`.
Tensor huber(const Tensor& distance, double delta, double scale) {
  const Tensor near = le(distance, delta);
  // The square would overflow for large distances, and its derivative would become 0 · ∞.
  return where(near, pow(where(near, distance, 0), 2) * (0.5 * scale), (distance - 0.5 * delta) * (delta * scale));
}

}  // namespace

Tensor huber_loss(const Tensor& x, const Tensor& target, double delta, Reduction reduction) {
  check_pair("huber_loss", x, target);
  check(delta > 0, "huber_loss: expected delta > 0, got {}", delta);
  return reduced("huber_loss", huber(abs(wide(x) - wide(target)), delta, 1), reduction, x);
}

Tensor smooth_l1_loss(const Tensor& x, const Tensor& target, double beta, Reduction reduction) {
  check_pair("smooth_l1_loss", x, target);
  check(beta >= 0, "smooth_l1_loss: expected beta >= 0, got {}", beta);
  const Tensor distance = abs(wide(x) - wide(target));
  return reduced("smooth_l1_loss", beta == 0 ? distance : huber(distance, beta, 1 / beta), reduction, x);
}

Tensor bce_with_logits(const Tensor& logits, const Tensor& targets, const BceOptions& options) {
  check_pair("bce_with_logits", logits, targets);
  check_weight("bce_with_logits", "weight", options.weight, logits);
  check_weight("bce_with_logits", "pos_weight", options.pos_weight, logits);
  const Tensor x = wide(logits), t = wide(targets);
  // −log sigmoid(x) = softplus(−x) and −log(1 − sigmoid(x)) = softplus(x). Both terms are at least 0, so that their sum
  // keeps its digits in the tails, where softplus(x) − t x would not. Beyond 40, softplus(x) is x in float64, too.
  const Tensor positive = options.pos_weight.defined() ? t * wide(options.pos_weight) : t;
  Tensor losses = weighted(positive, softplus(-x, 1, 40)) + weighted(1 - t, softplus(x, 1, 40));
  if (options.weight.defined()) {
    losses = weighted(wide(options.weight), losses);
  }
  return reduced("bce_with_logits", losses, options.reduction, logits);
}

Tensor kl_div(const Tensor& x, const Tensor& target, bool log_target, Reduction reduction) {
  check_pair("kl_div", x, target);
  const Tensor a = wide(x), t = wide(target);
  // Where t = 0, its logarithm and x may be infinite.
  if (log_target) {
    const Tensor none = eq(t, -std::numeric_limits<double>::infinity());
    return reduced("kl_div", exp(t) * (where(none, 0, t) - where(none, 0, a)), reduction, x);
  }
  const Tensor none = eq(t, 0);
  return reduced("kl_div", t * (log(where(none, 1, t)) - where(none, 0, a)), reduction, x);
}

Tensor gaussian_nll_loss(const Tensor& x, const Tensor& target, const Tensor& var, const GaussianNllOptions& options) {
  check_pair("gaussian_nll_loss", x, target);
  check(options.eps > 0, "gaussian_nll_loss: expected eps > 0, got {}", options.eps);
  const Shape rows = x.shape().slice(0, std::max(x.dim() - 1, 0));
  Shape column = rows;
  if (x.dim() > 0) {
    column.push_back(1);
  }
  check(var.shape() == x.shape() || var.shape() == rows || var.shape() == column,
        "gaussian_nll_loss: expected var of shape {}, {} or {}, got {}", x.shape(), column, rows, var.shape());
  check(var.dtype() == x.dtype() && var.device() == x.device(),
        "gaussian_nll_loss: expected var of {} on {}, got {} on {}", x.dtype(), x.device(), var.dtype(), var.device());
  if (var.device().is_cpu() && var.numel() > 0) {
    const double least = min(var.detach()).item();
    check(!(least < 0), "gaussian_nll_loss: expected variances that are not negative, got {}", least);
  }
  const Tensor given = wide(var.shape() == x.shape() ? var : reshape(var, column));
  const Tensor raised = where(lt(given, options.eps), options.eps - given.detach(), 0);
  const Tensor variance = given + raised;
  Tensor losses = (log(variance) + pow(wide(x) - wide(target), 2) / variance) * 0.5;
  if (options.full) {
    losses = losses + 0.91893853320467274;  // ½ log 2π
  }
  return reduced("gaussian_nll_loss", losses, options.reduction, x);
}

Tensor poisson_nll_loss(const Tensor& x, const Tensor& target, const PoissonNllOptions& options) {
  check_pair("poisson_nll_loss", x, target);
  const Tensor a = wide(x), t = wide(target);
  Tensor losses = options.log_input ? exp(a) - t * a : a - t * log(a + options.eps);
  if (options.full) {
    const Tensor large = gt(t, 1);
    const Tensor n = where(large, t, 1);
    losses = losses + where(large, n * log(n) - n + log(n * 6.2831853071795862) * 0.5, 0);  // 2π
  }
  return reduced("poisson_nll_loss", losses, options.reduction, x);
}

Tensor triplet_margin_loss(const Tensor& anchor, const Tensor& positive, const Tensor& negative,
                           const TripletOptions& options) {
  check_pair("triplet_margin_loss", anchor, positive);
  check_pair("triplet_margin_loss", anchor, negative);
  check(options.margin > 0, "triplet_margin_loss: expected margin > 0, got {}", options.margin);
  const auto distance = [&](const Tensor& a, const Tensor& b) {
    return pairwise_distance(wide(a), wide(b), options.p, options.eps);
  };
  Tensor apart = distance(anchor, negative);
  if (options.swap) {
    apart = minimum(apart, distance(positive, negative));
  }
  return reduced("triplet_margin_loss", relu(distance(anchor, positive) - apart + options.margin), options.reduction,
                 anchor);
}

Tensor cosine_embedding_loss(const Tensor& x, const Tensor& y, const Tensor& target, double margin,
                             Reduction reduction) {
  check_pair("cosine_embedding_loss", x, y);
  check(x.dim() >= 1, "cosine_embedding_loss: expected shape (…, D), got a scalar");
  const Shape rows = x.shape().slice(0, x.dim() - 1);
  check(target.shape() == rows && target.device() == x.device(),
        "cosine_embedding_loss: expected a target of shape {} on {}, got {} on {}", rows, x.device(), target.shape(),
        target.device());
  check(target.dtype() == x.dtype() || target.dtype() == int64 || target.dtype() == int32,
        "cosine_embedding_loss: expected a target of {}, int64 or int32, got {}", x.dtype(), target.dtype());
  const Tensor a = wide(x), b = wide(y);
  constexpr double kEps = 1e-12;  // keeps the cosine of a vector of zeros finite
  const Tensor squares = (sum(a * a, {-1}) + kEps) * (sum(b * b, {-1}) + kEps);
  const Tensor cosine = sum(a * b, {-1}) / sqrt(squares);
  const Tensor losses = where(eq(target, 1), 1 - cosine, where(eq(target, -1), relu(cosine - margin), 0));
  return reduced("cosine_embedding_loss", losses, reduction, x);
}

Tensor margin_ranking_loss(const Tensor& x, const Tensor& y, const Tensor& target, double margin, Reduction reduction) {
  check_pair("margin_ranking_loss", x, y);
  check_pair("margin_ranking_loss", x, target);
  return reduced("margin_ranking_loss", relu(neg(wide(target)) * (wide(x) - wide(y)) + margin), reduction, x);
}

Tensor hinge_embedding_loss(const Tensor& x, const Tensor& target, double margin, Reduction reduction) {
  check_pair("hinge_embedding_loss", x, target);
  const Tensor a = wide(x), t = target.detach();
  return reduced("hinge_embedding_loss", where(ne(t, -1), a, 0) + where(ne(t, 1), relu(margin - a), 0), reduction, x);
}

Tensor soft_margin_loss(const Tensor& x, const Tensor& target, Reduction reduction) {
  check_pair("soft_margin_loss", x, target);
  return reduced("soft_margin_loss", softplus(neg(wide(target)) * wide(x), 1, 40), reduction, x);
}

Tensor multilabel_soft_margin_loss(const Tensor& x, const Tensor& target, const Tensor& weight, Reduction reduction) {
  check_pair("multilabel_soft_margin_loss", x, target);
  check_weight("multilabel_soft_margin_loss", "weight", weight, x);
  check(x.dim() >= 1, "multilabel_soft_margin_loss: expected shape (…, C), got a scalar");
  const Tensor losses = bce_with_logits(wide(x), wide(target), {.weight = wide(weight), .reduction = Reduction::none});
  return reduced("multilabel_soft_margin_loss", mean(losses, {-1}), reduction, x);
}

Tensor nll_loss(const Tensor& x, const Tensor& targets, const NllOptions& options) {
  check(is_floating(x.dtype()), "nll_loss: expected a floating dtype, got {}", x.dtype());
  check(x.dim() >= 1, "nll_loss: expected x of shape (…, V), got shape {}", x.shape());
  const Shape rows = x.shape().slice(0, x.dim() - 1);
  check(targets.shape() == rows, "nll_loss: expected targets of shape {}, got {}", rows, targets.shape());
  check(targets.dtype() == int64 || targets.dtype() == int32, "nll_loss: expected targets of int64 or int32, got {}",
        targets.dtype());
  check(targets.device() == x.device(), "nll_loss: expected targets on {}, got {}", x.device(), targets.device());
  const Tensor labels = targets.to(int64);
  const Tensor counted = ne(labels, static_cast<double>(options.ignore_index));
  const Tensor index = where(counted, labels, 0);
  Tensor weights = counted.to(accumulate_dtype(x.dtype()));
  if (options.weight.defined()) {
    check(options.weight.shape() == Shape{x.size(-1)} && options.weight.dtype() == x.dtype(),
          "nll_loss: expected a weight of shape [{}] and {}, got {} and {}", x.size(-1), x.dtype(),
          options.weight.shape(), options.weight.dtype());
    check(options.weight.device() == x.device(), "nll_loss: expected a weight on {}, got {}", x.device(),
          options.weight.device());
    const Tensor of_rows =
        detail::gather_for("nll_loss", wide(options.weight.detach()), 0, reshape(index, {index.numel()}));
    weights = weights * reshape(of_rows, rows);
  }
  const Tensor picked = detail::gather_for("nll_loss", wide(x), x.dim() - 1, unsqueeze(index, index.dim()));
  // Ignored rows and classes of weight 0 contribute 0 even where x is −∞.
  const Tensor losses = where(ne(weights, 0), -(weights * squeeze(picked, picked.dim() - 1)), 0);
  if (options.reduction != Reduction::mean) {
    return reduced("nll_loss", losses, options.reduction, x);
  }
  const Tensor mean = sum(losses) / sum(weights);
  return autograd::autocast_widens(x) ? mean : mean.to(x.dtype());
}

}  // namespace mica
