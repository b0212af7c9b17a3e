#pragma once

// Which kernel of softmax a row gets on CUDA.

#include <mica/ops/detail/row_team.h>

namespace mica::kernels {

struct SoftmaxProblem {
  std::int64_t columns;
  int element_size;  // bytes
  bool aligned;      // all pointers, to 16 bytes
  bool clusters;     // the GPU has them
  bool backward;
};

/// Where rows are held, and by whom.
held::RowPlan plan_softmax(const SoftmaxProblem& problem);

}  // namespace mica::kernels
