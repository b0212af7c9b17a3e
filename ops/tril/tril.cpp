#include <algorithm>

#include <mica/core/creation.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/where.h>
#include <mica/ops/tril/tril.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

// column − row for each element of the last two axes, which is the number of its diagonal.
Tensor diagonals_of(const Tensor& x, const char* op) {
  check(x.dim() >= 2, "{}: expected at least 2 axes, got shape {}", op, x.shape());
  const Tensor rows = arange(static_cast<double>(x.size(-2)), int64, x.device());
  const Tensor columns = arange(static_cast<double>(x.size(-1)), int64, x.device());
  return sub(columns, unsqueeze(rows, 1));
}

// The diagonal, clamped to the range where it has an effect.
double clamped_diagonal(const Tensor& x, std::int64_t diagonal) {
  return static_cast<double>(std::clamp(diagonal, -x.size(-2) - 1, x.size(-1) + 1));
}

}  // namespace

Tensor tril(const Tensor& x, std::int64_t diagonal) {
  const Tensor diagonals = diagonals_of(x, "tril");
  return masked_fill(x, gt(diagonals, clamped_diagonal(x, diagonal)), 0);
}

Tensor triu(const Tensor& x, std::int64_t diagonal) {
  const Tensor diagonals = diagonals_of(x, "triu");
  return masked_fill(x, lt(diagonals, clamped_diagonal(x, diagonal)), 0);
}

}  // namespace mica
