#pragma once

#include <cub/block/block_reduce.cuh>

#include <mica/optim/detail/grad_norm_kernels.h>

namespace mica::kernels {

inline constexpr int kNormThreads = 512;

/// GradNorm as kernel arguments.
struct GradNormPointers {
  const double* sums = nullptr;  // null: nothing to finish
  std::int64_t count = 0;
  double max_norm = 0;
  double* scaler = nullptr;
  double* norm = nullptr;
  StepControl* control = nullptr;

  explicit GradNormPointers(const GradNorm& args)
      : sums(args.sums.data_or_null<double>()),
        count(args.sums.defined() ? args.sums.numel() : 0),
        max_norm(args.max_norm),
        scaler(args.scaler.data_or_null<double>()),
        norm(args.norm.data_or_null<double>()),
        control(reinterpret_cast<StepControl*>(args.control.data_or_null<double>())) {}
};

/// Finishes the norm, if any, with the kNormThreads threads of the only block, all of which then see its outputs.
__device__ inline void finish_grad_norm_in_block(const GradNormPointers& args) {
  if (args.norm == nullptr) {
    return;
  }
  double sum = 0;
  for (std::int64_t i = threadIdx.x; i < args.count; i += kNormThreads) {
    sum += args.sums[i];
  }
  using Reduce = cub::BlockReduce<double, kNormThreads>;
  __shared__ typename Reduce::TempStorage storage;
  sum = Reduce(storage).Sum(sum);
  if (threadIdx.x == 0) {
    finish_grad_norm(sum, args.max_norm, args.scaler, args.norm, args.control);
  }
  __syncthreads();
}

}  // namespace mica::kernels
