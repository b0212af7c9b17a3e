#include <cub/device/device_radix_sort.cuh>

#include <algorithm>
#include <bit>

#include <mica/core/creation.h>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/ops/embedding/embedding_kernels.h>

namespace mica::kernels {

namespace {

constexpr int kThreads = 256;

int blocks_for(std::int64_t n) {
  return static_cast<int>(std::clamp<std::int64_t>((n + kThreads - 1) / kThreads, 1, 1 << 20));
}

// y[i, c] = weight[indices[i], c]
template <class T>
__global__ void embedding_forward_kernel(const T* weight, const std::int64_t* indices, T* y, std::int64_t n,
                                         std::int64_t rows, std::int64_t width) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; at < n * width; at += step) {
    const std::int64_t row = indices[at / width];
    const bool known = row >= 0 && row < rows;
    y[at] = known ? weight[row * width + at % width] : static_cast<T>(static_cast<Accumulate<T>>(NAN));
  }
}

// keys[i] = indices[i], with `rows` standing for what is out of range; positions[i] = i.
__global__ void embedding_keys_kernel(const std::int64_t* indices, std::int64_t n, std::int64_t rows,
                                      std::uint64_t* keys, std::int64_t* positions) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step) {
    const std::int64_t row = indices[i];
    keys[i] = static_cast<std::uint64_t>(row >= 0 && row < rows ? row : rows);
    positions[i] = i;
  }
}

__device__ std::int64_t lower_bound(const std::uint64_t* keys, std::int64_t n, std::uint64_t key) {
  std::int64_t low = 0;
  std::int64_t high = n;
  while (low < high) {
    const std::int64_t middle = low + (high - low) / 2;
    if (keys[middle] < key) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

constexpr int kColumns = 32;  // of one block
constexpr int kGroups = 8;    // threads that share a column's sum

// dweight[r, c] = sum of dy[i, c] over the i with indices[i] == r: a run of the sorted keys. Thread (x, y) of a block
// adds every eighth use of row r to column x; the eight sums are added in order.
template <class T>
__global__ void embedding_backward_kernel(const T* dy, const std::uint64_t* keys, const std::int64_t* positions,
                                          T* dweight, std::int64_t n, std::int64_t rows, std::int64_t width) {
  using Sum = Accumulate<T>;
  __shared__ Sum sums[kGroups][kColumns];
  const std::int64_t column_blocks = (width + kColumns - 1) / kColumns;
  for (std::int64_t task = blockIdx.x; task < rows * column_blocks; task += gridDim.x) {
    const std::int64_t row = task / column_blocks;
    const std::int64_t column = task % column_blocks * kColumns + threadIdx.x;
    const std::int64_t begin = lower_bound(keys, n, static_cast<std::uint64_t>(row));
    const std::int64_t end = lower_bound(keys, n, static_cast<std::uint64_t>(row) + 1);
    Sum sum{0};
    if (column < width) {
      for (std::int64_t i = begin + threadIdx.y; i < end; i += kGroups) {
        sum += static_cast<Sum>(dy[positions[i] * width + column]);
      }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && column < width) {
      for (int group = 1; group < kGroups; ++group) {
        sum += sums[group][threadIdx.x];
      }
      dweight[row * width + column] = static_cast<T>(sum);
    }
    __syncthreads();
  }
}

}  // namespace

void embedding_forward(Cuda, const EmbeddingForward& args) {
  if (args.y.numel() == 0) {
    return;
  }
  on_dtype(FloatTypes{}, args.weight.dtype(), "embedding", [&]<class T>() {
    embedding_forward_kernel<<<blocks_for(args.y.numel()), kThreads, 0, cuda::current_stream()>>>(
        args.weight.data<T>(), args.indices.data<std::int64_t>(), args.y.data<T>(), args.indices.numel(),
        args.weight.shape()[0], args.weight.shape()[1]);
    cuda::check_launch("embedding_forward_kernel");
  });
}

void embedding_backward(Cuda, const EmbeddingBackward& args) {
  if (args.dweight.numel() == 0) {
    return;
  }
  const cudaStream_t stream = cuda::current_stream();
  const Device device = args.dweight.device();
  const std::int64_t n = args.indices.numel();
  const std::int64_t rows = args.dweight.shape()[0];
  const std::int64_t width = args.dweight.shape()[1];

  // A stable sort by row keeps the uses of each row in their order, so the sums are the same on every run.
  const Tensor keys = empty({2, n}, int64, device);
  const Tensor positions = empty({2, n}, int64, device);
  auto* keys_in = reinterpret_cast<std::uint64_t*>(keys.data<std::int64_t>());
  auto* positions_in = positions.data<std::int64_t>();
  if (n > 0) {
    embedding_keys_kernel<<<blocks_for(n), kThreads, 0, stream>>>(args.indices.data<std::int64_t>(), n, rows, keys_in,
                                                                  positions_in);
    cuda::check_launch("embedding_keys_kernel");
    const int bits = std::bit_width(static_cast<std::uint64_t>(rows));
    std::size_t bytes = 0;
    const auto sort = [&](void* scratch) {
      cuda::check(cub::DeviceRadixSort::SortPairs(scratch, bytes, keys_in, keys_in + n, positions_in, positions_in + n,
                                                  n, 0, bits, stream),
                  "cub::DeviceRadixSort::SortPairs");
    };
    sort(nullptr);
    const Tensor scratch = empty({static_cast<std::int64_t>(bytes)}, uint8, device);
    sort(scratch.raw_data());
    cuda::check_launch("cub::DeviceRadixSort::SortPairs");
  }
  on_dtype(FloatTypes{}, args.dweight.dtype(), "embedding", [&]<class T>() {
    const std::int64_t tasks = rows * ((width + kColumns - 1) / kColumns);
    const int blocks = static_cast<int>(std::min<std::int64_t>(tasks, 1 << 20));
    embedding_backward_kernel<<<blocks, dim3(kColumns, kGroups), 0, stream>>>(
        args.dy.data<T>(), keys_in + n, positions_in + n, args.dweight.data<T>(), n, rows, width);
    cuda::check_launch("embedding_backward_kernel");
  });
}

}  // namespace mica::kernels
