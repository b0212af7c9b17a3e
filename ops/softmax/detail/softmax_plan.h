#pragma once

// Which CUDA kernel softmax uses for rows of a given length.

#include <mica/ops/rows/detail/row_plan.h>

namespace mica::kernels {

using rows::Group;

/// A kernel for rows that are aligned to 16 bytes: it reads them once, in packs of 16 bytes, into registers.
struct SoftmaxLayout {
  Group group = Group::warp;
  int lanes = 32;                         // of a warp, that share a row or a part of it
  int elements;                           // the most elements of a row that a thread has
  bool packed = false;                    // whether a register holds two 16-bit elements (backward's always do)
  bool streamed = false;                  // whether blocks are persistent and process row after row
  int threads = rows::kMostGroupThreads;  // the most per block
  int blocks = 0;                         // that fit on a multiprocessor, at least; 0: as many as registers allow
  int forward = 0;                        // the element sizes that it is compiled for: 2 or 4 bytes, or 2 | 4
  int backward = 0;
  bool masked = true;  // whether it is also compiled for masked rows

  constexpr bool serves(int element_size, bool is_backward, bool is_masked) const {
    return ((is_backward ? backward : forward) & element_size) != 0 && (masked || !is_masked);
  }
};

/// All kernels for rows in registers. plan_softmax() chooses among them, and softmax_rows_cuda.cuh compiles them.
inline constexpr SoftmaxLayout kSoftmaxLayouts[] = {
    // Lanes of a warp. A row gets the first that is large enough.
    {.lanes = 8, .elements = 8, .threads = 256, .forward = 2 | 4, .backward = 2 | 4},
    {.lanes = 8, .elements = 16, .threads = 256, .forward = 2 | 4, .backward = 2 | 4},
    {.lanes = 8, .elements = 32, .threads = 256, .forward = 2 | 4, .backward = 2 | 4},
    {.lanes = 8, .elements = 40, .threads = 256, .forward = 2 | 4, .backward = 2 | 4},
    {.elements = 16, .threads = 256, .forward = 2 | 4, .backward = 2 | 4},
    {.elements = 24, .threads = 256, .forward = 2 | 4, .backward = 2 | 4},
    {.elements = 32, .threads = 256, .forward = 2 | 4, .backward = 2 | 4},
    // A block. A row gets the one that leaves the fewest threads without elements; of equal ones, the first.
    {.group = Group::block, .elements = 16, .backward = 4},
    {.group = Group::block, .elements = 32, .forward = 2 | 4, .backward = 2 | 4},
    {.group = Group::block, .elements = 24, .forward = 2 | 4, .backward = 2},
    {.group = Group::block, .elements = 32, .packed = true, .forward = 2},
    {.group = Group::block, .elements = 24, .packed = true, .forward = 2},
    // A cluster. A row gets the first that is large enough.
    {.group = Group::cluster, .elements = 32, .streamed = true, .forward = 2 | 4, .masked = false},
    {.group = Group::cluster, .elements = 32, .threads = 384, .blocks = 2, .backward = 4, .masked = false},
    {.group = Group::cluster, .elements = 32, .forward = 4, .backward = 2 | 4},
    {.group = Group::cluster, .elements = 32, .packed = true, .forward = 2},
};

struct SoftmaxProblem {
  std::int64_t columns;
  int element_size;  // bytes
  int alignment;     // of all pointers, in bytes; at most 16
  bool clusters;     // whether the GPU has thread block clusters
  bool backward;
  bool masked = false;  // whether columns are masked, as in attention
};

/// The kernel for rows of a given length, and how many threads share a row.
struct SoftmaxPlan {
  int layout = -1;  // of kSoftmaxLayouts; −1: softmax_looped, element by element
  int threads = 0;  // per block, that share a row
  int rows = 1;     // per block
  int cluster = 1;  // blocks that share a row
  int slab = 0;     // columns of a row per block, if it is in registers
};
SoftmaxPlan plan_softmax(const SoftmaxProblem& problem);

}  // namespace mica::kernels
