#include <cub/device/device_radix_sort.cuh>

#include <algorithm>
#include <bit>
#include <climits>

#include <mica/core/creation.h>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/ops/sort/detail/sort_kernels.h>
#include <mica/ops/sort/detail/sort_key.h>

namespace mica::kernels {

namespace {

// All rows are sorted together, by stable radix sorts of 64-bit keys; the elements' positions are the values:
//
//   elements of up to 32 bits:  key = row · 2^bits | sort_key(x)     one sort, by the bits that are in use
//   elements of 64 bits:        key = sort_key(x), then key = row    two sorts; the second keeps the order within rows

constexpr int kThreads = 256;

unsigned blocks_for(std::int64_t n) {
  return static_cast<unsigned>(std::clamp<std::int64_t>((n + kThreads - 1) / kThreads, 1, 1 << 20));
}

template <class T>
__global__ void sort_keys_kernel(const T* x, std::uint64_t* keys, std::uint32_t* positions, std::uint32_t count,
                                 std::uint32_t n, bool descending) {
  for (std::uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads) {
    std::uint64_t key = sort_key(x[i], descending);
    if constexpr (kSortKeyBits<T> < 64) {
      key |= static_cast<std::uint64_t>(i / n) << kSortKeyBits<T>;
    }
    keys[i] = key;
    positions[i] = i;
  }
}

__global__ void sort_rows_kernel(const std::uint32_t* positions, std::uint64_t* keys, std::uint32_t count,
                                 std::uint32_t n) {
  for (std::uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads) {
    keys[i] = positions[i] / n;
  }
}

// indices[r, j] = the position in row r of the row's j-th element in sorted order.
__global__ void sort_indices_kernel(const std::uint32_t* positions, std::int64_t* indices, std::uint32_t count,
                                    std::uint32_t n, std::uint32_t k) {
  for (std::uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads) {
    const std::uint32_t row = i / k;
    indices[i] = positions[row * n + (i - row * k)] - row * n;
  }
}

}  // namespace

void argsort(Cuda, const Argsort& args) {
  const std::int64_t total = args.x.numel();
  const std::int64_t rows = args.x.shape()[0];
  check(total <= INT_MAX, "sort: expected at most {} elements on CUDA, got {}", INT_MAX, total);
  if (args.indices.numel() == 0) {
    return;
  }
  const cudaStream_t stream = cuda::current_stream();
  const Device device = args.x.device();
  const auto count = static_cast<std::uint32_t>(total);
  const auto n = static_cast<std::uint32_t>(args.x.shape()[1]);
  const Tensor key_buffers = empty({2, total}, int64, device);
  const Tensor position_buffers = empty({2, total}, int32, device);
  auto* const keys = reinterpret_cast<std::uint64_t*>(key_buffers.raw_data());
  auto* const positions = reinterpret_cast<std::uint32_t*>(position_buffers.raw_data());
  cub::DoubleBuffer<std::uint64_t> key_pair(keys, keys + total);
  cub::DoubleBuffer<std::uint32_t> position_pair(positions, positions + total);

  std::size_t bytes = 0;
  const auto sort = [&](void* scratch, int bits) {
    cuda::check(cub::DeviceRadixSort::SortPairs(scratch, bytes, key_pair, position_pair, static_cast<int>(count), 0,
                                                bits, stream),
                "cub::DeviceRadixSort::SortPairs");
  };
  sort(nullptr, 64);
  const Tensor scratch = empty({static_cast<std::int64_t>(bytes)}, uint8, device);

  const int row_bits = std::bit_width(static_cast<std::uint64_t>(rows - 1));
  on_dtype(AllTypes{}, args.x.dtype(), "sort", [&]<class T>() {
    sort_keys_kernel<T><<<blocks_for(total), kThreads, 0, stream>>>(args.x.data<T>(), key_pair.Current(),
                                                                    position_pair.Current(), count, n, args.descending);
    cuda::check_launch("sort_keys_kernel");
    constexpr bool kRowInKey = kSortKeyBits<T> < 64;
    sort(scratch.raw_data(), kSortKeyBits<T> + (kRowInKey ? row_bits : 0));
    if (!kRowInKey && rows > 1) {
      sort_rows_kernel<<<blocks_for(total), kThreads, 0, stream>>>(position_pair.Current(), key_pair.Current(), count,
                                                                   n);
      cuda::check_launch("sort_rows_kernel");
      sort(scratch.raw_data(), row_bits);
    }
  });
  const auto k = static_cast<std::uint32_t>(args.indices.shape()[1]);
  sort_indices_kernel<<<blocks_for(args.indices.numel()), kThreads, 0, stream>>>(
      position_pair.Current(), args.indices.data<std::int64_t>(), static_cast<std::uint32_t>(args.indices.numel()), n,
      k);
  cuda::check_launch("sort_indices_kernel");
}

}  // namespace mica::kernels
