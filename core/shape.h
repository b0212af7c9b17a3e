#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <span>
#include <string>

#include <mica/core/check.h>

namespace mica {

/// The most axes a tensor can have.
inline constexpr int kMaxRank = 8;

/// A short list of int64 with inline storage: a shape, strides, or axes.
class Dims {
 public:
  Dims() = default;
  Dims(std::initializer_list<std::int64_t> values) : Dims(std::span(values.begin(), values.size())) {}
  Dims(std::span<const std::int64_t> values) {
    check(values.size() <= kMaxRank, "shape: expected at most {} axes, got {}", kMaxRank, values.size());
    std::copy(values.begin(), values.end(), values_.begin());
    size_ = static_cast<int>(values.size());
  }

  static Dims filled(int size, std::int64_t value) {
    Dims dims;
    for (int i = 0; i < size; ++i) {
      dims.push_back(value);
    }
    return dims;
  }

  int size() const { return size_; }
  bool empty() const { return size_ == 0; }
  /// Throws unless 0 <= i < size().
  std::int64_t operator[](int i) const { return values_[checked(i)]; }
  std::int64_t& operator[](int i) { return values_[checked(i)]; }
  /// The last entry. Throws if there is none.
  std::int64_t back() const { return values_[checked(size_ - 1)]; }
  std::int64_t& back() { return values_[checked(size_ - 1)]; }
  const std::int64_t* begin() const { return values_.data(); }
  const std::int64_t* end() const { return values_.data() + size_; }
  std::int64_t* begin() { return values_.data(); }
  std::int64_t* end() { return values_.data() + size_; }

  void push_back(std::int64_t value) {
    check(size_ < kMaxRank, "shape: expected at most {} axes", kMaxRank);
    values_[size_++] = value;
  }
  void pop_back() { size_ = checked(size_ - 1); }
  /// Inserts `value` before entry `at`, or at the end if at == size().
  void insert(int at, std::int64_t value) {
    check(at >= 0 && at <= size_, "shape: cannot insert at position {} of {} axes", at, size_);
    push_back(value);
    std::rotate(begin() + at, end() - 1, end());
  }
  void erase(int at) {
    std::copy(begin() + checked(at) + 1, end(), begin() + at);
    --size_;
  }

  /// The entries in [from, to), or from `from` on.
  Dims slice(int from, int to) const {
    check(from >= 0 && from <= to && to <= size_, "shape: axes {} to {} are out of range for {} axes", from, to, size_);
    return std::span(begin() + from, begin() + to);
  }
  Dims slice(int from) const { return slice(from, size_); }

  friend bool operator==(const Dims& a, const Dims& b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); }

 private:
  int checked(int i) const {
    if (static_cast<unsigned>(i) >= static_cast<unsigned>(size_)) [[unlikely]] {
      fail_index(i, size_);
    }
    return i;
  }
  // Out of line, so that the check adds one comparison to the callers and nothing else.
  [[noreturn]] static void fail_index(int i, int size);

  std::array<std::int64_t, kMaxRank> values_{};
  int size_ = 0;
};

using Shape = Dims;
using Strides = Dims;

/// The number of elements; 1 for the empty shape of a scalar. Throws if the product of the nonzero sizes does not fit
/// in 63 bits, since strides would not fit either.
std::int64_t numel_of(const Shape& shape);

/// The strides, in elements, of a row-major tensor without gaps.
Strides contiguous_strides(const Shape& shape);

/// The shape both broadcast to (NumPy's rule: aligned at the last axis, sizes of 1 expand). Errors start with `op`.
Shape broadcast_shapes(const Shape& a, const Shape& b, const char* op);

/// Maps an axis in [-rank, rank) to [0, rank); throws for any other. Errors start with `op`.
int normalize_axis(std::int64_t axis, int rank, const char* op);

/// As text: "[2, 3]".
std::string to_string(const Dims& dims);
std::ostream& operator<<(std::ostream& out, const Dims& dims);

}  // namespace mica

template <>
struct fmt::formatter<mica::Dims> : mica::detail::TextFormatter {
  template <class FormatContext>
  auto format(const mica::Dims& dims, FormatContext& context) const {
    return write(mica::to_string(dims), context);
  }
};
