#pragma once

// Which kernel of softmax a row gets on CUDA.

#include <mica/ops/detail/row_team.h>

namespace mica::kernels {

struct SoftmaxProblem {
  std::int64_t columns;
  int element_size;  // bytes
  int alignment;     // bytes of which all pointers are multiples, up to 16
  bool clusters;     // the GPU has them
  bool backward;
};

/// Where rows are held, and by whom.
held::RowPlan plan_softmax(const SoftmaxProblem& problem);

/// Lanes of a warp that share a row, and the elements of it that each of them holds, at most.
struct LaneShare {
  int lanes;
  int elements;

  constexpr int columns() const { return lanes * elements; }
};

// Those that kernels are made for, by the bytes of a pack. A row gets the first one that is long enough.

inline constexpr LaneShare kSharesOf16Bytes[] = {{8, 8}, {8, 16}, {8, 32}, {8, 40}, {32, 16}, {32, 24}, {32, 32}};
inline constexpr LaneShare kSharesOf8Bytes[] = {{8, 12}, {16, 12}, {16, 20}, {32, 16}, {32, 32}};
inline constexpr LaneShare kSharesOfElements[] = {{16, 6}, {16, 8}, {32, 8}, {32, 12}, {32, 16}, {32, 24}, {32, 32}};
// Doubles take two registers each.
inline constexpr LaneShare kSharesOfDoubles[] = {{16, 6}, {16, 8}, {32, 8}, {32, 12}, {32, 16}};

}  // namespace mica::kernels
