#include <mica/core/detail/handle_copies.h>
#include <mica/core/tensor.h>

namespace mica {

namespace detail {

thread_local constinit const HandleCopies* handle_copies = nullptr;

std::shared_ptr<TensorImpl> copy_of(const std::shared_ptr<TensorImpl>& handle) noexcept {
  const HandleCopies::Map& copies = handle_copies->copies();
  const auto copy = copies.find(handle.get());
  return copy == copies.end() ? handle : copy->second;
}

}  // namespace detail

namespace {

bool is_row_major(const Shape& shape, const Strides& strides) {
  std::int64_t step = 1;
  for (int axis = shape.size() - 1; axis >= 0; --axis) {
    if (shape[axis] != 1 && strides[axis] != step) {
      return false;
    }
    step *= shape[axis];
  }
  return true;
}

}  // namespace

Tensor empty(const Shape& shape, DType dtype, Device device) {
  check(size_of(dtype) > 0, "empty: expected a dtype, got number {}", static_cast<int>(dtype));
  auto impl = std::make_shared<detail::TensorImpl>();
  impl->numel = numel_of(shape);
  check(impl->numel <= INT64_MAX / static_cast<std::int64_t>(size_of(dtype)), "empty: {} of {} has too many bytes",
        shape, dtype);
  impl->storage = std::make_shared<Storage>(static_cast<std::size_t>(impl->numel) * size_of(dtype), device);
  impl->shape = shape;
  impl->strides = contiguous_strides(shape);
  impl->dtype = dtype;
  return Tensor(std::move(impl));
}

Tensor as_strided(const Tensor& x, const Shape& shape, const Strides& strides, std::int64_t offset) {
  const DType dtype = x.dtype();  // throws if x is undefined
  check(shape.size() == strides.size(), "as_strided: expected as many strides as axes, got shape {} and strides {}",
        shape, strides);
  auto impl = std::make_shared<detail::TensorImpl>();
  impl->storage = x.handle()->storage;
  impl->shape = shape;
  impl->strides = strides;
  impl->offset = offset;
  impl->numel = numel_of(shape);
  impl->dtype = dtype;
  impl->contiguous = impl->numel == 0 || is_row_major(shape, strides);
  return Tensor(std::move(impl));
}

Tensor broadcast_view(const Tensor& x, const Shape& shape) {
  const int added = shape.size() - x.dim();
  check(added >= 0, "expand: expected at least {} axes, got shape {}", x.dim(), shape);
  Strides strides = Strides::filled(shape.size(), 0);
  for (int axis = 0; axis < x.dim(); ++axis) {
    const std::int64_t from = x.shape()[axis];
    const std::int64_t to = shape[axis + added];
    check(from == to || from == 1, "expand: shape {} does not broadcast to {}", x.shape(), shape);
    strides[axis + added] = from == to ? x.strides()[axis] : 0;
  }
  return as_strided(x, shape, strides, x.handle()->offset);
}

}  // namespace mica
