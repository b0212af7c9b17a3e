// Flash attention: which problems it supports, which kernel a problem gets, and the kernel that every backward runs
// first.
//
//                  ┌─ mask tensor ────────────────> flash_attention_masked_cuda.cu
//     a problem ───┼─ wgmma, fits tensor maps ────> flash_attention_sm90.cu, flash_attention_backward_sm90.cu
//                  └─ any other ──────────────────> here, from flash_attention_portable.cuh
//
//     backward     out, dout, lse ──> stats_kernel ──> stats ──> gradient of queries, gradients of keys and values

#include <algorithm>
#include <cmath>

#include <mica/core/creation.h>
#include <mica/ops/attention/detail/flash_attention_portable.cuh>
#include <mica/ops/attention/detail/fused_attention_kernels.h>

namespace mica::kernels {

namespace flash {

namespace {

/// Computes two statistics for each query, by eight lanes: the binary logarithm of the sum of its unnormalized weights,
/// and Σ out · dout, the weighted mean of its weights' gradients (without the dropout scale). Padding rows, and queries
/// without visible keys, get +inf and 0, so that their weights are 0.
template <class T>
__global__ void __launch_bounds__(kThreads) stats_kernel(const __grid_constant__ Work a) {
  constexpr int kLanes = 8;
  const int padded = a.padded_queries();
  const std::int64_t row_of_all = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const std::int64_t head = row_of_all / padded;
  const int row = static_cast<int>(row_of_all % padded);
  if (head >= std::int64_t{a.batches} * a.heads) {
    return;  // always whole warps, since the padded number of rows is a multiple of 128
  }
  const int b = static_cast<int>(head / a.heads);
  const int h = static_cast<int>(head % a.heads);
  float sum = 0;
  float log2_sum = INFINITY;
  if (row < a.queries) {
    const T* const out = a.out.at<const T>(b, h) + row * a.out.row;
    const T* const dout = a.dout.at<const T>(b, h) + row * a.dout.row;
#pragma unroll
    for (int i = 0; i < kMaxDepth / (kLanes * kPack); ++i) {
      const int element = (i * kLanes + lane) * kPack;
      if (element < a.depth) {
        const uint4 x = *reinterpret_cast<const uint4*>(out + element);
        const uint4 y = *reinterpret_cast<const uint4*>(dout + element);
        const T* const xs = reinterpret_cast<const T*>(&x);
        const T* const ys = reinterpret_cast<const T*>(&y);
#pragma unroll
        for (int j = 0; j < kPack; ++j) {
          sum += static_cast<float>(xs[j]) * static_cast<float>(ys[j]);
        }
      }
    }
    const float lse = a.lse[head * a.queries + row];
    log2_sum = lse == -INFINITY ? INFINITY : lse * kLog2E;
  }
#pragma unroll
  for (int i = kLanes / 2; i > 0; i /= 2) {
    sum += __shfl_xor_sync(~0u, sum, i);
  }
  if (lane == 0) {
    float* const to = a.stats_of(static_cast<int>(head), row);
    to[0] = log2_sum;
    to[kStatsRows] = sum * a.kept_share;
  }
}

}  // namespace

void forward_portable(const Work& work) {
  if (work.drops) {
    launch_forward<Variant::drops>(work);
  } else {
    launch_forward<Variant::plain>(work);
  }
}

void backward_portable(const Work& work) {
  if (work.drops) {
    launch_backward<Variant::drops>(work);
  } else {
    launch_backward<Variant::plain>(work);
  }
}

void fill_stats(const Work& work) {
  on_dtype(DTypes{}, work.dtype, "attention", [&]<class T>() {
    launch(stats_kernel<T>, "flash_stats_kernel",
           std::int64_t{work.padded_queries()} / (kThreads / 8) * work.batches * work.heads, 0, work);
  });
}

namespace {

Operand operand_of(const Tensor& x) {
  return {.data = x.raw_data(), .batch = x.strides()[0], .head = x.strides()[1], .row = x.strides()[2]};
}

/// Whether rows can be read 16 bytes at a time.
bool has_aligned_rows(const Tensor& x) {
  const auto fits = [&](int axis) { return x.size(axis) <= 1 || x.strides()[axis] % kPack == 0; };
  return (x.size(3) <= 1 || x.strides()[3] == 1) && fits(0) && fits(1) && fits(2) &&
         reinterpret_cast<std::uintptr_t>(x.raw_data()) % 16 == 0;
}

/// The Work of a forward or a backward.
template <class Args>
Work work_of(const Args& args) {
  const Tensor& q = args.q;
  const Tensor& k = args.k;
  const Tensor& lse = args.lse;
  const auto keys = k.size(2);
  const auto queries = q.size(2);
  Work work;
  work.q = operand_of(q);
  work.k = operand_of(k);
  work.v = operand_of(args.v);
  work.out = operand_of(args.out);
  work.lse = lse.defined() ? lse.data<float>() : nullptr;
  work.batches = static_cast<int>(q.size(0));
  work.heads = static_cast<int>(q.size(1));
  work.group = static_cast<int>(q.size(1) / k.size(1));
  work.queries = static_cast<int>(queries);
  work.keys = static_cast<int>(keys);
  work.depth = static_cast<int>(q.size(3));
  work.offset = static_cast<int>(args.causal ? std::clamp(args.causal_offset, -queries, keys) : keys);
  work.scale = static_cast<float>(args.scale);
  work.scale_log2 = static_cast<float>(args.scale * kLog2E);
  work.dtype = q.dtype();
  if (const Tensor& mask = args.mask; mask.defined()) {
    work.mask = {.data = mask.raw_data(),
                 .batch = mask.strides()[0],
                 .head = mask.strides()[1],
                 .row = mask.strides()[2],
                 .column = mask.strides()[3],
                 .dtype = mask.dtype(),
                 .factor = static_cast<float>(1 / args.scale)};
  }
  const WeightDropout& dropout = args.dropout;
  work.drops = dropout.drops();
  work.dropout_key = dropout.key;
  for (int i = 0; i < 8; ++i) {
    work.dropped_below[i] = (dropout.threshold >> i & 1) != 0 ? 0 : ~std::uint32_t{0};
  }
  work.kept_share = static_cast<float>(dropout.kept_share());
  work.weight_factor = static_cast<float>(dropout.scale());
  work.gradient_scale = static_cast<float>(args.scale * dropout.scale());
  return work;
}

}  // namespace

}  // namespace flash

bool flash_attention_supports(Cuda, const FusedAttention& problem) {
  const Tensor& q = problem.q;
  const Tensor& k = problem.k;
  constexpr std::int64_t kMax = std::int64_t{1} << 30;  // rows and blocks are ints
  const auto is_usable = [&](const Tensor& x) {
    return x.defined() && x.dim() == 4 && x.numel() > 0 && x.dtype() == q.dtype() && flash::has_aligned_rows(x);
  };
  if (problem.window > 0 || (q.dtype() != float16 && q.dtype() != bfloat16) || !is_usable(q) || !is_usable(k) ||
      !is_usable(problem.v) || !is_usable(problem.out)) {
    return false;
  }
  if (const Tensor& mask = problem.mask; mask.defined()) {
    const bool is_known = mask.dtype() == boolean || mask.dtype() == float32 || mask.dtype() == q.dtype();
    if (!is_known || mask.shape() != Shape{q.size(0), q.size(1), q.size(2), k.size(2)}) {
      return false;
    }
  }
  // The kernels take the maximum of unscaled scores, so the scale must be positive.
  const float scale = static_cast<float>(problem.scale);
  return q.size(3) % flash::kPack == 0 && q.size(3) <= flash::kMaxDepth && q.size(1) % k.size(1) == 0 &&
         k.size(0) == q.size(0) && k.size(3) == q.size(3) && problem.v.shape() == k.shape() &&
         problem.out.shape() == q.shape() && std::isfinite(scale) && scale > 0 && q.size(0) < kMax &&
         q.size(1) < kMax && q.size(2) < kMax && k.size(2) < kMax;
}

void flash_attention_forward(Cuda, const FusedAttention& args) {
  const flash::Work work = flash::work_of(args);
  if (work.mask.data != nullptr) {
    flash::forward_masked(work);
  } else if (flash::fits_sm90(work, /*backward=*/false)) {
    flash::forward_sm90(work);
  } else {
    flash::forward_portable(work);
  }
}

void flash_attention_backward(Cuda, const FusedAttentionBackward& args) {
  flash::Work work = flash::work_of(args);
  work.dout = flash::operand_of(args.dout);
  work.dq = flash::operand_of(args.dq);
  work.dk = flash::operand_of(args.dk);
  work.dv = flash::operand_of(args.dv);
  const Tensor stats = empty({work.batches, work.heads, 2, work.padded_queries()}, float32, args.q.device());
  work.stats = stats.data<float>();
  flash::fill_stats(work);
  if (work.mask.data != nullptr) {
    flash::backward_masked(work);
  } else if (flash::fits_sm90(work, /*backward=*/true)) {
    flash::backward_sm90(work);
  } else {
    flash::backward_portable(work);
  }
}

}  // namespace mica::kernels
