#include <limits>
#include <optional>

#include <mica/autograd/autocast.h>
#include <mica/ops/distance/distance.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/elementwise/where.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

void check_vectors(const char* op, const Tensor& x, const Tensor& y) {
  check(is_floating(x.dtype()) && x.dtype() == y.dtype(), "{}: expected tensors of one floating dtype, got {} and {}",
        op, x.dtype(), y.dtype());
  check(x.device() == y.device(), "{}: expected tensors on one device, got {} and {}", op, x.device(), y.device());
}

// max(norm, eps), of which the gradient is 0 where eps is larger.
Tensor at_least(const Tensor& norm, double eps) { return clamp(norm, eps, std::numeric_limits<double>::infinity()); }

// √x, with derivative 0 where x is not positive.
Tensor root_of(const Tensor& x) {
  const Tensor positive = gt(x, 0);
  return where(positive, sqrt(where(positive, x, 1)), where(isnan(x), x, 0));
}

}  // namespace

Tensor normalize(const Tensor& x, double p, std::int64_t axis, double eps) {
  check(is_floating(x.dtype()), "normalize: expected a floating dtype, got {}", x.dtype());
  const int at = normalize_axis(axis, x.dim(), "normalize");
  const Tensor wide = x.to(accumulate_dtype(x.dtype()));
  return (wide / at_least(vector_norm(wide, {at}, p, true), eps)).to(x.dtype());
}

Tensor cosine_similarity(const Tensor& x, const Tensor& y, std::int64_t axis, double eps) {
  check_vectors("cosine_similarity", x, y);
  const Shape shape = broadcast_shapes(x.shape(), y.shape(), "cosine_similarity");
  const int at = normalize_axis(axis, shape.size(), "cosine_similarity");
  const Tensor a = expand(x, shape).to(accumulate_dtype(x.dtype()));
  const Tensor b = expand(y, shape).to(accumulate_dtype(x.dtype()));
  const Tensor products =
      (a / at_least(vector_norm(a, {at}, 2, true), eps)) * (b / at_least(vector_norm(b, {at}, 2, true), eps));
  return sum(products, {at}).to(x.dtype());
}

Tensor pairwise_distance(const Tensor& x, const Tensor& y, double p, double eps, bool keepdim) {
  check_vectors("pairwise_distance", x, y);
  const DType wide = accumulate_dtype(x.dtype());
  return vector_norm(x.to(wide) - y.to(wide) + eps, {-1}, p, keepdim).to(x.dtype());
}

Tensor cdist(const Tensor& x, const Tensor& y, double p) {
  check_vectors("cdist", x, y);
  check(p >= 0, "cdist: expected p of at least 0, got {}", p);
  check(x.dim() >= 2 && y.dim() >= 2 && x.size(-1) == y.size(-1),
        "cdist: expected shapes (…, M, K) and (…, R, K), got {} and {}", x.shape(), y.shape());
  const autograd::Autocast off(std::nullopt);  // 16 bits would not be enough for differences of squares
  const DType wide = accumulate_dtype(x.dtype());
  const Tensor a = x.to(wide), b = y.to(wide);
  constexpr std::int64_t kFew = 25;
  if (p != 2 || (x.size(-2) <= kFew && y.size(-2) <= kFew) || y.size(-2) == 0) {
    return vector_norm(unsqueeze(a, a.dim() - 1) - unsqueeze(b, b.dim() - 2), {-1}, p).to(x.dtype());
  }
  // ‖a − b‖² = ‖a‖² + ‖b‖² − 2 a · b
  const Tensor center = mean(b.detach(), {-2}, true);
  const Tensor u = a - center, v = b - center;
  const Tensor squares = sum(pow(u, 2), {-1}, true) + transpose(sum(pow(v, 2), {-1}, true), -1, -2);
  return root_of(squares - matmul(u, transpose(v, -1, -2)) * 2).to(x.dtype());
}

}  // namespace mica
