#include <algorithm>

#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/ops/search/detail/search_kernels.h>

namespace mica::kernels {

namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void search_sorted_kernel(const T* sorted, const T* values, std::int64_t* positions, std::int64_t count,
                                     std::int64_t n, std::int64_t m, bool shared, bool right) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    positions[i] = position_in(sorted + (shared ? 0 : i / m * n), n, values[i], right);
  }
}

}  // namespace

void search_sorted(Cuda, const SearchSorted& args) {
  const std::int64_t count = args.values.numel();
  if (count == 0) {
    return;
  }
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>((count + kThreads - 1) / kThreads, 1 << 20));
  on_dtype(NumericTypes{}, args.sorted.dtype(), "searchsorted", [&]<class T>() {
    search_sorted_kernel<T><<<blocks, kThreads, 0, cuda::current_stream()>>>(
        args.sorted.data<T>(), args.values.data<T>(), args.positions.data<std::int64_t>(), count,
        args.sorted.shape()[1], args.values.shape()[1], args.sorted.shape()[0] == 1, args.right);
    cuda::check_launch("search_sorted_kernel");
  });
}

}  // namespace mica::kernels
