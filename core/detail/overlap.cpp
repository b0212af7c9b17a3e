#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include <mica/core/detail/overlap.h>

namespace mica {

namespace {

// The address range of a tensor: from its first byte to one past its last.
struct Range {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;

  bool intersects(const Range& other) const { return begin < other.end && other.begin < end; }
};

// An empty range if there are no elements.
Range range_of(const Tensor& x) {
  if (x.numel() == 0) {
    return {};
  }
  std::int64_t low = 0;
  std::int64_t high = 0;
  for (int axis = 0; axis < x.dim(); ++axis) {
    const std::int64_t reach = (x.shape()[axis] - 1) * x.strides()[axis];
    (reach < 0 ? low : high) += reach;
  }
  const auto first = reinterpret_cast<std::uintptr_t>(x.raw_data());
  const auto size = static_cast<std::int64_t>(size_of(x.dtype()));
  return {first + low * size, first + (high + 1) * size};
}

// Calls f(address) for every element until it returns false.
template <class F>
void each_address(const Tensor& x, F&& f) {
  const auto size = static_cast<std::int64_t>(size_of(x.dtype()));
  const auto first = reinterpret_cast<std::uintptr_t>(x.raw_data());
  Dims index = Dims::filled(x.dim(), 0);
  std::int64_t offset = 0;
  for (std::int64_t n = 0; n < x.numel() && f(first + offset * size); ++n) {
    for (int axis = x.dim() - 1; axis >= 0; --axis) {
      offset += x.strides()[axis];
      if (++index[axis] < x.shape()[axis]) {
        break;
      }
      offset -= index[axis] * x.strides()[axis];
      index[axis] = 0;
    }
  }
}

// Marks the bytes of a range that belong to an element.
class Marks {
 public:
  explicit Marks(Range range) : range_(range), marked_(range.end - range.begin) {}

  // False if one of the bytes was marked before.
  bool mark(std::uintptr_t address, std::size_t size) {
    bool fresh = true;
    each(address, size, [&](std::size_t i) {
      fresh = fresh && !marked_[i];
      marked_[i] = true;
    });
    return fresh;
  }
  bool is_marked(std::uintptr_t address, std::size_t size) const {
    bool found = false;
    each(address, size, [&](std::size_t i) { found = found || marked_[i]; });
    return found;
  }

 private:
  template <class F>
  void each(std::uintptr_t address, std::size_t size, F&& f) const {
    const std::uintptr_t end = std::min(address + size, range_.end);
    for (std::uintptr_t at = std::max(address, range_.begin); at < end; ++at) {
      f(at - range_.begin);
    }
  }

  Range range_;
  std::vector<bool> marked_;
};

bool overlap(const Tensor& a, const Range& range_a, const Tensor& b, const Range& range_b) {
  if (a.is_contiguous() && b.is_contiguous()) {
    return true;  // both fill their address ranges, which intersect
  }
  Marks marks({std::max(range_a.begin, range_b.begin), std::min(range_a.end, range_b.end)});
  each_address(a, [&](std::uintptr_t at) {
    marks.mark(at, size_of(a.dtype()));
    return true;
  });
  bool found = false;
  each_address(b, [&](std::uintptr_t at) {
    found = marks.is_marked(at, size_of(b.dtype()));
    return !found;
  });
  return found;
}

bool overlaps_itself(const Tensor& x) {
  if (x.is_contiguous()) {
    return false;
  }
  // No element is shared if, in order of increasing stride, each stride exceeds the extent of all smaller ones.
  std::vector<std::pair<std::int64_t, std::int64_t>> axes;  // stride and size
  for (int axis = 0; axis < x.dim(); ++axis) {
    if (x.shape()[axis] > 1) {
      axes.emplace_back(std::abs(x.strides()[axis]), x.shape()[axis]);
    }
  }
  std::sort(axes.begin(), axes.end());
  std::int64_t reach = 0;
  bool nested = true;
  for (const auto& [stride, size] : axes) {
    nested = nested && stride > reach;
    reach += (size - 1) * stride;
  }
  if (nested) {
    return false;
  }
  Marks marks(range_of(x));
  bool found = false;
  each_address(x, [&](std::uintptr_t at) {
    found = !marks.mark(at, size_of(x.dtype()));
    return !found;
  });
  return found;
}

}  // namespace

bool may_overlap(const Tensor& a, const Tensor& b) {
  return a.device() == b.device() && range_of(a).intersects(range_of(b));
}

std::optional<std::pair<std::size_t, std::size_t>> find_overlap(const Tensors& tensors) {
  std::vector<Range> ranges;
  for (const Tensor& x : tensors) {
    ranges.push_back(range_of(x));
  }
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return ranges[a].begin < ranges[b].begin; });
  for (std::size_t i = 0; i < order.size(); ++i) {
    const std::size_t a = order[i];
    if (overlaps_itself(tensors[a])) {
      return std::pair(a, a);
    }
    for (std::size_t k = i + 1; k < order.size() && ranges[order[k]].begin < ranges[a].end; ++k) {
      const std::size_t b = order[k];
      if (tensors[a].device() == tensors[b].device() && ranges[a].intersects(ranges[b]) &&
          overlap(tensors[a], ranges[a], tensors[b], ranges[b])) {
        return std::minmax(a, b);
      }
    }
  }
  return std::nullopt;
}

}  // namespace mica
