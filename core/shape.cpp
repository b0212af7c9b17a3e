#include <fmt/ranges.h>

#include <ostream>

#include <mica/core/shape.h>

namespace mica {

std::int64_t numel_of(const Shape& shape) {
  std::int64_t product = 1;
  bool empty = false;
  for (const std::int64_t size : shape) {
    check(size >= 0, "shape: expected sizes of at least 0, got {}", shape);
    empty = empty || size == 0;
    check(size == 0 || !__builtin_mul_overflow(product, size, &product), "shape: {} has too many elements", shape);
  }
  return empty ? 0 : product;
}

void Dims::fail_index(int i, int size) { fail("shape: axis {} is out of range for {} axes", i, size); }

Strides contiguous_strides(const Shape& shape) {
  Strides strides = shape;
  std::int64_t step = 1;
  for (int axis = shape.size() - 1; axis >= 0; --axis) {
    strides[axis] = step;
    step *= std::max<std::int64_t>(shape[axis], 1);
  }
  return strides;
}

Shape broadcast_shapes(const Shape& a, const Shape& b, const char* op) {
  const int rank = std::max(a.size(), b.size());
  Shape result = Shape::filled(rank, 1);
  for (int i = 1; i <= rank; ++i) {
    const std::int64_t m = i <= a.size() ? a[a.size() - i] : 1;
    const std::int64_t n = i <= b.size() ? b[b.size() - i] : 1;
    check(m == n || m == 1 || n == 1, "{}: shapes {} and {} do not broadcast", op, a, b);
    result[rank - i] = m == 1 ? n : m;
  }
  return result;
}

int normalize_axis(std::int64_t axis, int rank, const char* op) {
  check(rank > 0, "{}: expected a tensor with axes, got a scalar and axis {}", op, axis);
  check(axis >= -rank && axis < rank, "{}: expected an axis in [{}, {}), got {}", op, -rank, rank, axis);
  return static_cast<int>(axis < 0 ? axis + rank : axis);
}

std::string to_string(const Dims& dims) { return fmt::format("[{}]", fmt::join(dims.begin(), dims.end(), ", ")); }

std::ostream& operator<<(std::ostream& out, const Dims& dims) { return out << to_string(dims); }

}  // namespace mica
