#include <mica/core/channels_last.h>

namespace mica {

namespace {

bool has_images(const Shape& shape) { return shape.size() == 4 || shape.size() == 5; }

Strides channels_last_strides(const Shape& shape) {
  Shape in_memory = shape;
  in_memory.erase(1);
  in_memory.push_back(shape[1]);
  Strides strides = contiguous_strides(in_memory);
  strides.insert(1, 1);
  strides.pop_back();
  return strides;
}

}  // namespace

bool is_channels_last(const Tensor& x) {
  if (!has_images(x.shape())) {
    return false;
  }
  const Strides expected = channels_last_strides(x.shape());
  for (int axis = 0; axis < x.dim(); ++axis) {
    if (x.shape()[axis] != 1 && x.strides()[axis] != expected[axis]) {
      return x.numel() == 0;
    }
  }
  return true;
}

Tensor empty_channels_last(const Shape& shape, DType dtype, Device device) {
  check(has_images(shape), "empty_channels_last: expected a shape of 4 or 5 axes, got {}", shape);
  return as_strided(empty(shape, dtype, device), shape, channels_last_strides(shape), 0);
}

Tensor empty_in_layout(const Shape& shape, DType dtype, Device device, std::initializer_list<const Tensor*> like) {
  bool permuted = false;
  if (has_images(shape)) {
    for (const Tensor* const x : like) {
      if (x == nullptr || !x->defined() || x->shape() != shape) {
        continue;
      }
      if (!is_channels_last(*x)) {
        return empty(shape, dtype, device);
      }
      permuted = permuted || !x->is_contiguous();
    }
  }
  return permuted ? empty_channels_last(shape, dtype, device) : empty(shape, dtype, device);
}

Tensor empty_in_layout(const Shape& shape, const Tensor& like) {
  const bool permuted = has_images(shape) && !like.is_contiguous() && is_channels_last(like);
  return permuted ? empty_channels_last(shape, like.dtype(), like.device()) : empty(shape, like.dtype(), like.device());
}

}  // namespace mica
