#pragma once

// Chooses the CUDA kernel of softmax for rows of a given length.

#include <mica/ops/detail/row_team.h>

namespace mica::kernels {

struct SoftmaxProblem {
  std::int64_t columns;
  int element_size;  // bytes
  int alignment;     // of all pointers, in bytes; at most 16
  bool clusters;     // whether the GPU has thread block clusters
  bool backward;
  bool masked = false;  // whether columns are masked, as in attention
};

/// Where rows are held, and by how many threads.
held::RowPlan plan_softmax(const SoftmaxProblem& problem);

/// How many lanes of a warp share a row, and the most elements of it that each of them holds.
struct LaneShare {
  int lanes;
  int elements;

  constexpr int columns() const { return lanes * elements; }
};

/// The most threads per block in backward of 4-byte elements in clusters, if a multiprocessor is to have two blocks.
inline constexpr int kMostThreadsOfTwo = 384;

// The shares that kernels are compiled for, by the bytes of a pack. A row gets the first one that is large enough.

inline constexpr LaneShare kSharesOf16Bytes[] = {{8, 8}, {8, 16}, {8, 32}, {8, 40}, {32, 16}, {32, 24}, {32, 32}};
inline constexpr LaneShare kSharesOf8Bytes[] = {{8, 12}, {16, 12}, {16, 20}, {32, 16}, {32, 32}};
inline constexpr LaneShare kSharesOfElements[] = {{16, 6}, {16, 8}, {32, 8}, {32, 12}, {32, 16}, {32, 24}, {32, 32}};
// A double takes two registers, so that fewer fit.
inline constexpr LaneShare kSharesOfDoubles[] = {{16, 6}, {16, 8}, {32, 8}, {32, 12}, {32, 16}};

}  // namespace mica::kernels
