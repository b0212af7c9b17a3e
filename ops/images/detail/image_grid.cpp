#include <cstdint>

#include <mica/core/copy.h>
#include <mica/ops/images/detail/image_grid.h>

namespace mica::images {

bool is_last(const Tensor& x) { return !x.is_contiguous() && is_channels_last(x); }

Tensor in_layout(const Tensor& x, bool channels_last) {
  if (!channels_last) {
    return contiguous_data(x);
  }
  if (is_channels_last(x)) {
    return x;
  }
  const Tensor copy = empty_channels_last(x.shape(), x.dtype(), x.device());
  copy_into(copy, x);
  return copy;
}

Tensor empty_images(const Shape& shape, DType dtype, Device device, bool channels_last) {
  return channels_last ? empty_channels_last(shape, dtype, device) : empty(shape, dtype, device);
}

Dims of_axes(const char* op, const char* option, const Dims& given, int axes, std::int64_t least) {
  check(given.size() == 1 || given.size() == axes, "{}: expected {} of 1 or {} numbers, got {}", op, option, axes,
        given);
  Dims result;
  for (int i = 0; i < axes; ++i) {
    result.push_back(given[given.size() == 1 ? 0 : i]);
    check(result[i] >= least && result[i] <= INT32_MAX, "{}: expected {} of at least {}, got {}", op, option, least,
          given);
  }
  return result;
}

Grid grid_of(const Tensor& x, bool channels_last, const char* op) {
  const int axes = x.dim() - 2;
  Grid grid{.outer = x.shape()[0], .sizes = {1, 1, 1}, .inner = x.shape()[1]};
  for (int i = 0; i < axes; ++i) {
    const std::int64_t size = x.shape()[2 + i];
    check(size <= INT32_MAX, "{}: expected sizes of less than 2^31, got {}", op, x.shape());
    grid.sizes[3 - axes + i] = static_cast<int>(size);
  }
  if (!channels_last) {
    grid.outer *= grid.inner;
    grid.inner = 1;
  }
  return grid;
}

void check_images(const char* op, const Tensor& x, int axes) {
  check(x.defined() && is_floating(x.dtype()), "{}: expected a floating x, got {}", op,
        x.defined() ? name_of(x.dtype()) : "an undefined one");
  bool fits = x.dim() == axes + 1 || x.dim() == axes + 2;
  for (int i = x.dim() == axes + 2 ? 1 : 0; fits && i < x.dim(); ++i) {
    fits = x.shape()[i] > 0;
  }
  check(fits, "{}: expected x of shape (N, C, {} spatial axes) or (C, …), where only N may be 0, got {}", op, axes,
        x.shape());
}

}  // namespace mica::images
