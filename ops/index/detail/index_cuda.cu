// Where to read for an index, and where a mask is true:
//
//     index along an axis ──> index_rows_kernel ──> offsets of elements, −1 if out of range
//     boolean mask ──> cub::DeviceSelect ──> positions, in order

#include <cub/device/device_select.cuh>
#include <thrust/iterator/counting_iterator.h>

#include <algorithm>
#include <climits>

#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/ops/index/detail/index_kernels.h>

namespace mica::kernels {

namespace {

constexpr int kThreads = 256;

__global__ void index_rows_kernel(const std::int64_t* index, std::int64_t* rows, std::int64_t count, std::int64_t size,
                                  std::int64_t length, std::int64_t inner, bool shared) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; at < count; at += step) {
    const std::int64_t line = at / inner;  // outer · length + j
    const std::int64_t outer = line / length;
    const std::int64_t row = index[shared ? line - outer * length : at];
    rows[at] = row >= 0 && row < size ? (outer * size + row) * inner + (at - line * inner) : -1;
  }
}

}  // namespace

void index_rows(Cuda, const IndexRows& args) {
  const std::int64_t count = args.rows.numel();
  if (count == 0) {
    return;
  }
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>((count + kThreads - 1) / kThreads, 1 << 20));
  index_rows_kernel<<<blocks, kThreads, 0, cuda::current_stream()>>>(args.index.data<std::int64_t>(),
                                                                     args.rows.data<std::int64_t>(), count, args.size,
                                                                     args.length, args.inner, args.shared);
  cuda::check_launch("index_rows_kernel");
}

Tensor positions_of(Cuda, const Tensor& mask) {
  const std::int64_t n = mask.numel();
  const Device device = mask.device();
  const cudaStream_t stream = cuda::current_stream();
  const Tensor positions = empty({n}, int64, device);
  const Tensor count = empty({1}, int64, device);
  std::size_t bytes = 0;
  const auto select = [&](void* scratch) {
    cuda::check(
        cub::DeviceSelect::Flagged(scratch, bytes, thrust::counting_iterator<std::int64_t>{0}, mask.data<bool>(),
                                   positions.data<std::int64_t>(), count.data<std::int64_t>(), n, stream),
        "cub::DeviceSelect::Flagged");
  };
  select(nullptr);
  const Tensor scratch = empty({static_cast<std::int64_t>(bytes)}, uint8, device);
  select(scratch.raw_data());
  const auto selected = static_cast<std::int64_t>(count.item());
  // Copied, so that the result does not keep the buffer, which has room for all elements.
  const Tensor result = empty({selected}, int64, device);
  cuda::check(
      cudaMemcpyAsync(result.raw_data(), positions.raw_data(), result.bytes(), cudaMemcpyDeviceToDevice, stream),
      "cudaMemcpyAsync");
  return result;
}

}  // namespace mica::kernels
