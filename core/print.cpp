#include <algorithm>
#include <cmath>
#include <ostream>
#include <type_traits>

#include <mica/core/creation.h>
#include <mica/core/tensor.h>

namespace mica {

namespace {

constexpr std::int64_t kEdgeItems = 3;     // shown at either end of a long axis
constexpr std::int64_t kFullNumel = 1000;  // tensors up to this size are printed completely

/// The number format shared by all elements of a tensor.
template <class V>
class Format {
 public:
  Format(const std::vector<V>& values, DType dtype) : dtype_(dtype) {
    if constexpr (std::is_floating_point_v<V>) {
      double largest = 0;
      double smallest = INFINITY;
      bool whole = true;
      for (const double v : values) {
        if (std::isfinite(v) && v != 0) {
          largest = std::max(largest, std::abs(v));
          smallest = std::min(smallest, std::abs(v));
          whole = whole && v == std::trunc(v);
        }
      }
      pattern_ = largest >= 1e6 || (smallest < 1e-4 && largest > 0) ? "{:.4e}" : whole ? "{:.0f}." : "{:.4f}";
    }
    for (const V v : values) {
      width_ = std::max(width_, text(v).size());
    }
  }

  std::string operator()(V value) const { return fmt::format("{:>{}}", text(value), width_); }

 private:
  std::string text(V value) const {
    if (dtype_ == boolean) {
      return value != 0 ? "true" : "false";
    }
    if constexpr (std::is_floating_point_v<V>) {
      return std::isfinite(value) ? fmt::format(fmt::runtime(pattern_), value) : fmt::format("{}", value);
    } else {
      return fmt::format("{}", value);
    }
  }

  DType dtype_;
  std::string pattern_;
  std::size_t width_ = 0;
};

// The positions shown along an axis; -1 marks the gap.
std::vector<std::int64_t> shown(std::int64_t size, bool all) {
  std::vector<std::int64_t> result;
  for (std::int64_t i = 0; i < size; ++i) {
    if (all || size <= 2 * kEdgeItems || i < kEdgeItems || i >= size - kEdgeItems) {
      result.push_back(i);
    } else if (result.back() != -1) {
      result.push_back(-1);
    }
  }
  return result;
}

template <class V>
void collect(const Tensor& x, bool all, std::vector<V>& values) {
  if (x.dim() == 0) {
    values.push_back(to_vector<V>(x)[0]);
    return;
  }
  for (const std::int64_t i : shown(x.shape()[0], all)) {
    if (i >= 0) {
      collect(as_strided(x, x.shape().slice(1), x.strides().slice(1), x.handle()->offset + i * x.strides()[0]), all,
              values);
    }
  }
}

template <class V>
void write(std::string& out, const Shape& shape, bool all, const Format<V>& format, const V*& next, int depth) {
  if (depth == shape.size()) {
    out += format(*next++);
    return;
  }
  const bool last = depth + 1 == shape.size();
  const std::string between = last ? ", " : ",\n" + std::string(static_cast<std::size_t>(depth) + 1, ' ');
  out += "[";
  bool first = true;
  for (const std::int64_t i : shown(shape[depth], all)) {
    if (!first) {
      out += between;
    }
    first = false;
    if (i < 0) {
      out += "...";
    } else {
      write(out, shape, all, format, next, depth + 1);
    }
  }
  out += "]";
}

/// V is double, or std::int64_t for integers and bools, some of which a double would round.
template <class V>
std::string elements(const Tensor& x) {
  if (x.numel() == 0) {
    return "[]";
  }
  const bool all = x.numel() <= kFullNumel;
  std::vector<V> values;
  if (all) {
    values = to_vector<V>(x);
  } else {
    collect(x, all, values);
  }
  std::string out;
  const V* next = values.data();
  write(out, x.shape(), all, Format<V>(values, x.dtype()), next, 0);
  return out;
}

}  // namespace

std::string to_string(const Tensor& x) {
  if (!x.defined()) {
    return "tensor(undefined)";
  }
  const std::string out = is_floating(x.dtype()) ? elements<double>(x) : elements<std::int64_t>(x);
  return fmt::format("{}\ntensor of {} {} on {}{}", out, x.dtype(), x.shape(), x.device(),
                     x.requires_grad() ? ", requires grad" : "");
}

std::ostream& operator<<(std::ostream& out, const Tensor& x) { return out << to_string(x); }

}  // namespace mica
