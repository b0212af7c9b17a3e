#include <mica/core/creation.h>
#include <mica/core/cuda/launch.h>
#include <mica/core/cuda/ptx.cuh>
#include <mica/ops/norm/detail/norm_backward_cuda.cuh>

// The backward of all norms on CUDA. Stage 1 writes dx and G rows of partial sums of dweight and dbias;
// plan_norm_backward() chooses its kernel. Stage 2 adds up the partial sums:
//
//     x, dy ──stage 1──▶ dx
//                └──▶ partials (G, N) ──stage 2──▶ dweight, dbias

namespace mica::kernels {

namespace norm_cuda {

namespace {

constexpr int kStage2Warps = 16;

template <class S, class W>
struct Stage2 {
  const S* partials;  // (G, N); null: not wanted
  W* out;             // (N)
};

// Adds every 16th partial row, from row i on, in order. It always loads kAtOnce rows at a time, so that no load waits
// for another one; the zeros of absent rows change no bit, as `sum` is never -0.
template <class S>
__device__ S add_rows(const S* partials, std::int64_t rows, std::int64_t columns, int i) {
  constexpr int kAtOnce = 9;
  const S* next = partials + i * columns;
  S sum = 0;
#pragma unroll 1
  for (int left = (static_cast<int>(rows) - i + kStage2Warps - 1) / kStage2Warps; left > 0; left -= kAtOnce) {
    S values[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j, next += kStage2Warps * columns) {
      values[j] = j < left ? *next : S(0);
    }
#pragma unroll
    for (const S value : values) {
      sum += value;
    }
  }
  return sum;
}

// Adds all of up to 32 rows, which it loads at once, with the bits of the sum of add_rows() for i from 0 to 15.
template <class S>
__device__ S add_few_rows(const S* partials, int rows, std::int64_t columns) {
  S values[2 * kStage2Warps];
#pragma unroll
  for (int row = 0; row < 2 * kStage2Warps; ++row) {
    values[row] = partials[min(row, rows - 1) * columns];
  }
  S total = 0;
#pragma unroll
  for (int i = 0; i < kStage2Warps; ++i) {
    S sum = 0;
    sum += i < rows ? values[i] : S(0);
    sum += i + kStage2Warps < rows ? values[i + kStage2Warps] : S(0);
    total += sum;
  }
  return total;
}

// out[c] = Σ partials[g][c], for dweight (blockIdx.y = 0), dbias (1) or dx_bias (2). kWarpAddsAll: a warp has 32
// columns and adds all their rows. Otherwise the warps of a block share 32 columns: each adds every 16th row, and the
// first warp adds the sums of all warps in order. Both ways give the same bits.
template <bool kWarpAddsAll, class S, class W, class T>
__global__ void __launch_bounds__(kStage2Warps* kWarp)
    norm_backward_sum_kernel(const Stage2<S, W> dweight, const Stage2<S, W> dbias, const Stage2<S, T> dx_bias,
                             std::int64_t partial_rows, std::int64_t columns) {
  __shared__ S fold[kStage2Warps][kWarp];
  cuda::wait_for_previous_kernel();
  const S* const partials = blockIdx.y == 0 ? dweight.partials : blockIdx.y == 1 ? dbias.partials : dx_bias.partials;
  if (partials == nullptr) {
    return;
  }
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const std::int64_t column =
      (kWarpAddsAll ? std::int64_t{blockIdx.x} * kStage2Warps + warp : blockIdx.x) * kWarp + lane;
  const bool inside = column < columns;
  S total = 0;
  if constexpr (kWarpAddsAll) {
    total = inside ? add_few_rows(partials + column, static_cast<int>(partial_rows), columns) : S(0);
  } else {
    fold[warp][lane] = inside ? add_rows(partials + column, partial_rows, columns, warp) : S(0);
    __syncthreads();
    if (warp > 0) {
      return;
    }
#pragma unroll
    for (int i = 0; i < kStage2Warps; ++i) {
      total += fold[i][lane];
    }
  }
  if (inside) {
    if (blockIdx.y == 2) {
      dx_bias.out[column] = static_cast<T>(total);
    } else {
      (blockIdx.y == 0 ? dweight.out : dbias.out)[column] = static_cast<W>(total);
    }
  }
}

NormBackwardPlan plan_of(const NormBackward& args, bool adds) {
  return plan_norm_backward({.rows = args.rows,
                             .columns = args.columns,
                             .size = static_cast<int>(size_of(args.x.dtype())),
                             .weight_size = static_cast<int>(size_of(parameter_of(args).dtype())),
                             .centered = args.centered,
                             .packs = fit_packs(args.columns, args.x.dtype(), args.dy, args.x, args.weight, args.dx,
                                                args.dsum, args.dx_dropped),
                             .clusters = cuda::device_has_clusters(),
                             .adds = adds});
}

}  // namespace

Tensor allocate_partials(const NormBackward& args, std::int64_t partial_rows) {
  const int wanted = args.dweight.defined() + args.dbias.defined() + args.dx_bias.defined();
  return wanted == 0 ? Tensor() : empty({wanted, partial_rows, args.columns}, args.rstd.dtype(), args.x.device());
}

void add_partials(const NormBackward& args, const Tensor& partials) {
  if (!partials.defined()) {
    return;
  }
  const std::int64_t partial_rows = partials.size(1);
  const int results = args.dx_bias.defined() ? 3 : args.dbias.defined() ? 2 : 1;
  // With fewer columns, too few warps would have work.
  const bool warp_adds_all = partial_rows <= 2 * kStage2Warps && args.columns >= 32768;
  const std::int64_t block_columns = warp_adds_all ? kStage2Warps * kWarp : kWarp;
  cuda::Launch launch(dim3(grid_of((args.columns + block_columns - 1) / block_columns), results), kStage2Warps * kWarp);
  on_norm<8>(args, [&]<bool, class T, class W>() {
    using S = Accumulate<T>;
    const auto a = rows_of<T, W>(args, partials);
    launch.dependent().run(
        warp_adds_all ? norm_backward_sum_kernel<true, S, W, T> : norm_backward_sum_kernel<false, S, W, T>,
        "norm_backward_sum_kernel", Stage2<S, W>{a.dweights, a.dweight}, Stage2<S, W>{a.dbiases, a.dbias},
        Stage2<S, T>{a.dx_biases, a.dx_bias}, partial_rows, args.columns);
  });
}

}  // namespace norm_cuda

using namespace norm_cuda;

void norm_backward(Cuda, const NormBackward& args) {
  if (!args.dx.defined() || args.rows == 0) {
    return backward_parameters(args);
  }
  const NormBackwardPlan plan = plan_of(args, /*adds=*/false);
  if (plan.kernel == NormBackwardKernel::looped) {
    backward_looped(args);
    return backward_parameters(args);
  }
  const Tensor partials = allocate_partials(args, plan.partial_rows);
  plan.kernel == NormBackwardKernel::streamed ? backward_streamed(args, plan, partials)
                                              : backward_in_registers(args, plan, partials);
  add_partials(args, partials);
}

bool add_norm_backward(Cuda, const NormBackward& args) {
  const NormBackwardPlan plan = plan_of(args, /*adds=*/true);
  const bool sums_dx = size_of(args.x.dtype()) == 2 && plan.pack > 1 && plan.shape.packs == 1;
  if (plan.kernel != NormBackwardKernel::streamed || (args.dx_bias.defined() && !sums_dx)) {
    return false;
  }
  const Tensor partials = allocate_partials(args, plan.partial_rows);
  backward_streamed_sum(args, plan, partials);
  add_partials(args, partials);
  return true;
}

}  // namespace mica::kernels
