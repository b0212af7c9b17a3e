#include <mica/core/capture.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/index/index.h>
#include <mica/ops/index/scatter.h>
#include <mica/ops/join/join.h>
#include <mica/ops/scan/scan.h>
#include <mica/ops/search/detail/search_kernels.h>
#include <mica/ops/search/search.h>
#include <mica/ops/sort/sort.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

Tensor searched(const char* op, const Tensor& sorted, const Tensor& values, bool right) {
  check(sorted.dtype() == values.dtype() && sorted.dtype() != boolean,
        "{}: expected tensors of one numeric dtype, got {} and {}", op, sorted.dtype(), values.dtype());
  check(sorted.device() == values.device(), "{}: expected tensors on one device, got {} and {}", op, sorted.device(),
        values.device());
  check(sorted.dim() >= 1, "{}: expected at least one axis to search, got a scalar", op);
  const bool shared = sorted.dim() == 1;
  check(shared || (values.dim() == sorted.dim() &&
                   values.shape().slice(0, values.dim() - 1) == sorted.shape().slice(0, sorted.dim() - 1)),
        "{}: expected values of shape {} except for the last axis, got {}", op, sorted.shape(), values.shape());
  const Tensor positions = empty(values.shape(), int64, values.device());
  if (values.numel() > 0) {
    const std::int64_t n = sorted.size(-1), m = shared ? values.numel() : values.size(-1);
    const std::int64_t rows = values.numel() / m;
    const Tensor in = reshape(contiguous_data(sorted.detach()), {rows, n});
    const Tensor from = reshape(contiguous_data(values.detach()), {rows, m}), to = view(positions, {rows, m});
    const kernels::SearchSorted args{.sorted = in, .values = from, .positions = to, .right = right};
    on_device(values.device(), [&](auto device) { kernels::search_sorted(device, args); });
  }
  return positions;
}

}  // namespace

Tensor searchsorted(const Tensor& sorted, const Tensor& values, bool right) {
  return searched("searchsorted", sorted, values, right);
}

Tensor bucketize(const Tensor& x, const Tensor& boundaries, bool right) {
  check(boundaries.dim() == 1, "bucketize: expected boundaries of one axis, got shape {}", boundaries.shape());
  return searched("bucketize", boundaries, x, right);
}

UniqueResult unique(const Tensor& x) {
  if (x.device().is_cuda()) {
    check_not_capturing("unique");
  }
  const std::int64_t n = x.numel();
  const Tensor elements = reshape(x.detach(), {n});
  if (n == 0) {
    return {
        .values = elements, .inverse = empty(x.shape(), int64, x.device()), .counts = empty({0}, int64, x.device())};
  }
  const SortResult sorted = sort(elements, 0);
  const Tensor is_first =
      cat({ones({1}, boolean, x.device()), ne(slice(sorted.values, 0, 1, n), slice(sorted.values, 0, 0, n - 1))});
  const Tensor starts = masked_select(arange(static_cast<double>(n), int64, x.device()), is_first);
  const Tensor ends = cat({slice(starts, 0, 1, n), full({1}, static_cast<double>(n), int64, x.device())});
  const Tensor inverse = scatter(sorted.indices, 0, sorted.indices, cumsum(is_first, 0) - 1);
  return {.values = index_select(sorted.values, 0, starts),
          .inverse = reshape(inverse, x.shape()),
          .counts = ends - starts};
}

}  // namespace mica
