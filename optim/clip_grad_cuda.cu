#include <cub/block/block_reduce.cuh>

#include <algorithm>

#include <mica/optim/clip_grad_kernels.h>
#include <mica/optim/update.cuh>

namespace mica::kernels {

namespace {

constexpr int kThreads = 256;

// sums[b] = Σ x² over what block b comes by: packs of x in strides of the grid, then the tail one by one. The order
// follows from n, the grid and the alignment alone.
template <class T>
__global__ void sum_of_squares_kernel(const T* x, std::int64_t n, std::int64_t vectorized, double* sums) {
  constexpr int kVector = mica::detail::kUpdateVector<T>;
  using Pack = mica::detail::UpdatePack<T>;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  double sum = 0;
  for (std::int64_t i = first; i < vectorized / kVector; i += step) {
    const Pack pack = reinterpret_cast<const Pack*>(x)[i];
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const auto value = static_cast<double>(static_cast<Accumulate<T>>(pack.value[k]));
      sum += value * value;
    }
  }
  for (std::int64_t i = vectorized + first; i < n; i += step) {
    const auto value = static_cast<double>(static_cast<Accumulate<T>>(x[i]));
    sum += value * value;
  }
  using Reduce = cub::BlockReduce<double, kThreads>;
  __shared__ typename Reduce::TempStorage storage;
  sum = Reduce(storage).Sum(sum);
  if (threadIdx.x == 0) {
    sums[blockIdx.x] = sum;
  }
}

// out = Σ sums, by one block.
__global__ void sum_kernel(const double* sums, int n, double* out) {
  double sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) {
    sum += sums[i];
  }
  using Reduce = cub::BlockReduce<double, kThreads>;
  __shared__ typename Reduce::TempStorage storage;
  sum = Reduce(storage).Sum(sum);
  if (threadIdx.x == 0) {
    *out = sum;
  }
}

}  // namespace

void sum_of_squares(Cuda, const Tensor& x, const Tensor& out) {
  on_dtype(FloatTypes{}, x.dtype(), "sum_of_squares", [&]<class T>() {
    constexpr int kVector = mica::detail::kUpdateVector<T>;
    constexpr std::int64_t kPerBlock = kThreads * 32;  // elements, up to the most blocks
    const std::int64_t n = x.numel();
    const bool aligned = mica::detail::is_aligned<mica::detail::UpdatePack<T>>(x.raw_data());
    const std::int64_t vectorized = aligned ? n / kVector * kVector : 0;
    const auto blocks = static_cast<int>(std::clamp<std::int64_t>((n + kPerBlock - 1) / kPerBlock, 1, 1024));
    const Tensor sums = blocks == 1 ? out : empty({blocks}, float64, x.device());
    const cudaStream_t stream = cuda::current_stream();
    sum_of_squares_kernel<T><<<blocks, kThreads, 0, stream>>>(x.data<T>(), n, vectorized, sums.data<double>());
    cuda::check_launch("sum_of_squares_kernel");
    if (blocks > 1) {
      sum_kernel<<<1, kThreads, 0, stream>>>(sums.data<double>(), blocks, out.data<double>());
      cuda::check_launch("sum_kernel");
    }
  });
}

void scale(Cuda device, const Tensor& x, double factor) { update<ScaleRule>(device, factor, "scale", x, x); }

}  // namespace mica::kernels
