#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/index/index.h>
#include <mica/ops/sort/detail/sort_kernels.h>
#include <mica/ops/sort/sort.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

// The indices of the first k elements along an axis.
Tensor first_indices(const Tensor& x, int axis, std::int64_t k, bool descending) {
  const Tensor last = transpose(x.detach(), axis, -1);
  Shape shape = last.shape();
  const std::int64_t n = shape[shape.size() - 1];
  shape[shape.size() - 1] = k;
  const Tensor indices = empty(shape, int64, x.device());
  if (indices.numel() > 0) {
    const Tensor rows = reshape(contiguous_data(last), {-1, n});
    const Tensor row_indices = view(indices, {-1, k});
    const kernels::Argsort args{.x = rows, .indices = row_indices, .descending = descending};
    on_device(x.device(), [&](auto device) { kernels::argsort(device, args); });
  }
  return contiguous_data(transpose(indices, axis, -1));
}

}  // namespace

SortResult sort(const Tensor& x, std::int64_t axis, bool descending) {
  const int at = normalize_axis(axis, x.dim(), "sort");
  const Tensor indices = first_indices(x, at, x.shape()[at], descending);
  return {gather(x, at, indices), indices};
}

Tensor argsort(const Tensor& x, std::int64_t axis, bool descending) {
  const int at = normalize_axis(axis, x.dim(), "argsort");
  return first_indices(x, at, x.shape()[at], descending);
}

SortResult topk(const Tensor& x, std::int64_t k, std::int64_t axis, bool largest) {
  const int at = normalize_axis(axis, x.dim(), "topk");
  check(k >= 0 && k <= x.shape()[at], "topk: expected k from 0 to {}, the length of the axis, got {}", x.shape()[at],
        k);
  const Tensor indices = first_indices(x, at, k, largest);
  return {gather(x, at, indices), indices};
}

}  // namespace mica
