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
struct LaneSplit {
  int lanes;
  int elements;

  constexpr int columns() const { return lanes * elements; }
};

/// The most threads per block in backward of 4-byte elements in clusters, if a multiprocessor is to have two blocks.
inline constexpr int kMostThreadsOfTwo = 384;

// The splits of a row that kernels are compiled for. A row gets the first one that is large enough.

inline constexpr LaneSplit kSplitsOfPacks[] = {{8, 8}, {8, 16}, {8, 32}, {8, 40}, {32, 16}, {32, 24}, {32, 32}};
// Read element by element: rows that are not aligned to 16 bytes, and doubles.
inline constexpr LaneSplit kSplitsOfElements[] = {{8, 8}, {32, 8}, {32, 16}, {32, 32}};

}  // namespace mica::kernels
