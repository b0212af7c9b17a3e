#pragma once

#include <cstdint>

namespace mica::kernels::detail {

inline constexpr int kCascadeLevels = 48;

/// Combines a sequence of partial results of unknown length pairwise, as a balanced binary tree. Level i of the tree is
/// stored at levels + i · stride; combine(left, right) overwrites `left` with the result.
template <class Level, class Combine>
class Cascade {
 public:
  Cascade(Level* levels, std::int64_t stride, const Combine& combine)
      : levels_(levels), stride_(stride), combine_(combine) {}

  /// Where the caller writes the next partial result before it calls push().
  Level* next() const { return level(depth_); }
  /// Adds the partial result at next(). It may itself be a balanced tree of `leaves` partial results, a power of two
  /// that divides the number of those pushed before.
  void push(std::uint64_t leaves = 1) {
    ++depth_;
    for (std::uint64_t n = count_ / leaves; n & 1; n >>= 1) {
      combine_two();
    }
    count_ += leaves;
  }
  /// Combines the remaining levels into level 0, which is the result if anything was pushed.
  void finish() {
    while (depth_ > 1) {
      combine_two();
    }
  }
  bool empty() const { return depth_ == 0; }

 private:
  Level* level(int i) const { return levels_ + i * stride_; }
  void combine_two() {
    --depth_;
    combine_(level(depth_ - 1), level(depth_));
  }

  Level* levels_;
  std::int64_t stride_;
  Combine combine_;
  int depth_ = 0;
  std::uint64_t count_ = 0;
};

}  // namespace mica::kernels::detail
