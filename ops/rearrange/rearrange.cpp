#include <array>

#include <mica/core/creation.h>
#include <mica/core/detail/number.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/index/index.h>
#include <mica/ops/join/join.h>
#include <mica/ops/rearrange/rearrange.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

namespace mica {

Tensor roll(const Tensor& x, std::int64_t shift, std::int64_t axis) {
  const int at = normalize_axis(axis, x.dim(), "roll");
  const std::int64_t size = x.shape()[at];
  const std::int64_t forward = size == 0 ? 0 : (shift % size + size) % size;
  if (forward == 0) {
    return clone(x);
  }
  return cat({slice(x, at, size - forward, size), slice(x, at, 0, size - forward)}, at);
}

Tensor flip(const Tensor& x, const Dims& axes) {
  std::array<bool, kMaxRank> flipped{};
  for (const std::int64_t axis : axes) {
    const int at = normalize_axis(axis, x.dim(), "flip");
    check(!flipped[at], "flip: expected each axis once, got {}", axes);
    flipped[at] = true;
  }
  Tensor y = x;
  for (int axis = 0; axis < x.dim(); ++axis) {
    if (axes.empty() || flipped[axis]) {
      const auto last = static_cast<double>(x.shape()[axis] - 1);
      y = index_select(y, axis, last - arange(last + 1, int64, x.device()));
    }
  }
  return y.is_same(x) ? clone(x) : y;
}

Tensor repeat(const Tensor& x, const Dims& counts) {
  check(counts.size() >= x.dim(), "repeat: expected a count for each of {} axes, got {}", x.dim(), counts);
  for (const std::int64_t count : counts) {
    check(count >= 0, "repeat: expected counts that are not negative, got {}", counts);
  }
  Tensor y = clone(x);
  while (y.dim() < counts.size()) {
    y = unsqueeze(y, 0);
  }
  for (int axis = 0; axis < counts.size(); ++axis) {
    if (counts[axis] != 1) {
      Shape repeated = y.shape();
      check(counts[axis] == 0 || repeated[axis] <= INT64_MAX / counts[axis],
            "repeat: {} copies of {} elements are too many", counts[axis], repeated[axis]);
      repeated[axis] *= counts[axis];
      const Tensor copies = unsqueeze(y, axis);
      Shape expanded = copies.shape();
      expanded[axis] = counts[axis];
      y = reshape(expand(copies, expanded), repeated);
    }
  }
  return y;
}

Tensor tile(const Tensor& x, const Dims& counts) {
  Dims all = counts;
  while (all.size() < x.dim()) {
    all.insert(0, 1);
  }
  return repeat(x, all);
}

Tensor pad(const Tensor& x, std::int64_t axis, std::int64_t before, std::int64_t after, double value) {
  const int at = normalize_axis(axis, x.dim(), "pad");
  check(before >= 0 && after >= 0, "pad: expected numbers of elements that are not negative, got {} and {}", before,
        after);
  detail::check_number(value, x.dtype(), "pad");
  const auto filled = [&](std::int64_t count) {
    Shape shape = x.shape();
    shape[at] = count;
    return full(shape, value, x.dtype(), x.device());
  };
  return cat({filled(before), x, filled(after)}, at);
}

Tensor one_hot(const Tensor& indices, std::int64_t classes, DType dtype) {
  check(indices.dtype() == int64 || indices.dtype() == int32, "one_hot: expected indices of int64 or int32, got {}",
        indices.dtype());
  constexpr std::int64_t kMostClasses = std::int64_t{1} << 53;
  check(classes >= 1, "one_hot: expected at least one class, got {}", classes);
  check(classes <= kMostClasses, "one_hot: expected at most {} classes, got {}", kMostClasses, classes);
  if (indices.device().is_cpu() && indices.numel() > 0) {
    const std::int64_t least = to_vector<std::int64_t>(min(indices))[0];
    const std::int64_t most = to_vector<std::int64_t>(max(indices))[0];
    check(least >= 0 && most < classes, "one_hot: expected indices in [0, {}), got {}", classes,
          least < 0 ? least : most);
  }
  const Tensor wide = indices.to(int64);
  return eq(unsqueeze(wide, wide.dim()), arange(classes, int64, indices.device())).to(dtype);
}

}  // namespace mica
