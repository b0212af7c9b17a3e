// The rows of a table, and their gradients:
//
//     forward     indices ──> rows of weight ──> y                       one pack of columns per thread
//
//     backward    indices ──> sorted, with their positions ──> runs of equal indices
//                                                                │
//                 dy ────────────────────────────────────────────┴──> sums of runs ──> dweight
//
// Sums of sorted runs need no atomics. See below for runs that are longer than a thread's part.

#include <cub/device/device_radix_sort.cuh>

#include <algorithm>
#include <bit>
#include <climits>
#include <type_traits>

#include <mica/core/creation.h>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/pack.cuh>
#include <mica/core/cuda/stream.h>
#include <mica/core/detail/ceil_div.h>
#include <mica/ops/embedding/detail/embedding_kernels.h>

namespace mica::kernels {

namespace {

using cuda::load;
using cuda::Pack;
using cuda::store;

constexpr int kThreads = 256;

int blocks_for(std::int64_t n) {
  return static_cast<int>(std::clamp<std::int64_t>((n + kThreads - 1) / kThreads, 1, 1 << 20));
}

// y[i, c] = weight[indices[i], c], with V columns per thread. T is an unsigned integer of the dtype's size, since
// elements are only moved. `absent` is the value for an index that is out of range.
template <class T, int V>
__global__ void embedding_forward_kernel(const T* weight, const std::int64_t* indices, T* y, std::int64_t n,
                                         std::int64_t rows, std::int64_t packs, T absent) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; at < n * packs; at += step) {
    const std::int64_t i = at / packs;
    const std::int64_t row = indices[i];
    Pack<T, V> pack;
    if (row >= 0 && row < rows) {
      pack = load<V>(weight + (row * packs + at - i * packs) * V);
    } else {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        pack.at[j] = absent;
      }
    }
    store(y + at * V, pack);
  }
}

// Prepares the sort: keys[i] = indices[i], or `rows` if it is out of range; positions[i] = i. Clears the list of long
// runs.
__global__ void embedding_keys_kernel(const std::int64_t* indices, int n, std::int64_t rows, std::uint32_t* keys,
                                      std::uint32_t* positions, int* run_count) {
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *run_count = 0;
  }
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    const std::int64_t row = indices[i];
    keys[i] = static_cast<std::uint32_t>(row >= 0 && row < rows ? row : rows);
    positions[i] = static_cast<std::uint32_t>(i);
  }
}

// The gradient: dweight[r] = Σ dy[i] over all i with indices[i] == r. The keys (indices) have been sorted, so that
// equal keys form a run, and are split into segments of kSegment keys:
//
//     sorted keys   | 3 3 5 5 5 7 7 7 | 7 7 7 7 7 7 7 7 | 7 7 8 9 9 9 9 9 |
//     runs            3 3: short        7: long, from the tail of segment 0 over segment 1 to the head of segment 2
//
// In the first kernel, the threads along x sum one segment, V columns per thread; for short rows, a block has several
// segments, along y. A run within one segment is written to dweight directly. A longer run has a partial sum in each
// segment: the segment's head if it began before, else its tail. The second kernel adds up the partial sums of the runs
// that begin in the segments that the first one has listed.
constexpr int kSegment = 16;
constexpr int kColumnThreads = 128;
constexpr int kRunLines = 4;     // threads that share a column of a long run
constexpr int kRunBlocks = 256;  // blocks of the second kernel, which share the long runs

template <class T>
struct Gradient {
  const T* dy;
  const std::uint32_t* keys;       // sorted
  const std::uint32_t* positions;  // where the keys were before they were sorted, ascending among equal keys
  T* dweight;
  Accumulate<T>* partial;  // (segments, 2, width): head and tail
  int* run_starts;         // the segments in which long runs begin
  int* run_count;
  int n;
  std::uint32_t rows;
  std::int64_t width;
  bool accumulate;

  __device__ std::int64_t end_of(int segment) const {
    return min(std::int64_t{n}, std::int64_t{segment + 1} * kSegment);
  }
  __device__ std::uint32_t last_key(int segment) const { return keys[end_of(segment) - 1]; }
  __device__ bool continues(int segment) const {  // whether the segment's last run continues in the next segment
    const std::int64_t next = end_of(segment);
    return next < n && keys[next] == keys[next - 1];
  }
  // The last segment of the run that continues after this segment. The search doubles its distance until the run has
  // ended, then halves it, since most runs end in the next segment.
  __device__ int last_segment(int segment) const {
    const std::uint32_t key = last_key(segment);
    const int segments = (n - 1) / kSegment + 1;
    const auto reaches = [&](int other) { return other < segments && keys[std::int64_t{other} * kSegment] == key; };
    int last = segment + 1;
    int step = 1;
    while (reaches(last + step)) {
      last += step;
      step *= 2;
    }
    while ((step /= 2) > 0) {
      if (reaches(last + step)) {
        last += step;
      }
    }
    return last;
  }
  __device__ Accumulate<T>* sums(int segment, int tail) const { return partial + (2LL * segment + tail) * width; }
};

template <class T, int V>
__global__ void __launch_bounds__(kColumnThreads) embedding_segments_kernel(Gradient<T> g) {
  using S = Accumulate<T>;
  const std::int64_t column = (std::int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * V;
  const std::int64_t segments = (g.n - 1) / kSegment + 1;
  if (column >= g.width || std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y >= segments) {
    return;
  }
  const int segment = static_cast<int>(blockIdx.x * blockDim.y + threadIdx.y);
  const int first = segment * kSegment;
  const int count = min(kSegment, g.n - first);
  // Loads all keys before it uses the first, so that the loads overlap.
  std::uint32_t keys[kSegment];
  Pack<T, V> packs[kSegment];
#pragma unroll
  for (int k = 0; k < kSegment; ++k) {
    if (k < count) {
      keys[k] = g.keys[first + k];
      packs[k] = load<V>(g.dy + g.positions[first + k] * g.width + column);
    }
  }
  bool is_head = segment > 0 && g.continues(segment - 1);
  const bool goes_on = g.continues(segment);
  if (goes_on && column == 0 && g.last_key(segment) < g.rows && !(is_head && keys[0] == g.last_key(segment))) {
    g.run_starts[atomicAdd(g.run_count, 1)] = segment;
  }
  S sums[V] = {};
#pragma unroll
  for (int k = 0; k < kSegment; ++k) {
    if (k >= count) {
      break;
    }
#pragma unroll
    for (int j = 0; j < V; ++j) {
      sums[j] += static_cast<S>(packs[k].at[j]);
    }
    const bool last = k + 1 == count;
    if (!last && keys[k + 1 < kSegment ? k + 1 : k] == keys[k]) {
      continue;
    }
    if (keys[k] < g.rows) {
      if (is_head || (last && goes_on)) {
        S* const to = g.sums(segment, is_head ? 0 : 1) + column;
#pragma unroll
        for (int j = 0; j < V; ++j) {
          to[j] = sums[j];
        }
      } else {
        T* const to = g.dweight + keys[k] * g.width + column;
        if (g.accumulate) {
          const Pack<T, V> before = load<V>(to);
#pragma unroll
          for (int j = 0; j < V; ++j) {
            sums[j] += static_cast<S>(before.at[j]);
          }
        }
        store(to, cuda::pack_of<T>(sums));
      }
    }
#pragma unroll
    for (int j = 0; j < V; ++j) {
      sums[j] = 0;
    }
    is_head = false;
  }
}

// The second kernel: sums long runs, with kColumnThreads columns per block. Floats are added in double: float would
// lose the small terms of a long run.
template <class T>
__global__ void __launch_bounds__(kColumnThreads* kRunLines) embedding_runs_kernel(Gradient<T> g) {
  using S = std::conditional_t<std::is_integral_v<T>, Accumulate<T>, double>;
  __shared__ S lines[kRunLines][kColumnThreads];
  const int thread = threadIdx.x % kColumnThreads;
  const int line = threadIdx.x / kColumnThreads;
  const std::int64_t column = std::int64_t{blockIdx.y} * kColumnThreads + thread;
  for (int run = blockIdx.x; run < *g.run_count; run += gridDim.x) {
    const int first = g.run_starts[run];
    const int last = g.last_segment(first);
    S sum = 0;
    if (column < g.width) {
#pragma unroll 8
      for (int s = first + 1 + line; s <= last; s += kRunLines) {
        sum += g.sums(s, 0)[column];
      }
    }
    lines[line][thread] = sum;
    __syncthreads();
    if (line == 0 && column < g.width) {
      sum = g.sums(first, 1)[column];
      for (int k = 0; k < kRunLines; ++k) {
        sum += lines[k][thread];
      }
      T& to = g.dweight[g.last_key(first) * g.width + column];
      to = static_cast<T>(g.accumulate ? sum + static_cast<S>(to) : sum);
    }
    __syncthreads();
  }
}

unsigned blocks_of(std::int64_t n, std::int64_t d) { return static_cast<unsigned>(ceil_div(n, d)); }

}  // namespace

void embedding_forward(Cuda, const EmbeddingForward& args) {
  if (args.y.numel() == 0) {
    return;
  }
  const auto copy_rows = [&]<class T>(T absent) {
    const std::int64_t width = args.weight.shape()[1];
    const T* const weight = reinterpret_cast<const T*>(args.weight.raw_data());
    T* const y = reinterpret_cast<T*>(args.y.raw_data());
    cuda::with_pack_size<T>(
        width,
        [&]<int V>(std::integral_constant<int, V>) {
          embedding_forward_kernel<T, V><<<blocks_for(args.y.numel() / V), kThreads, 0, cuda::current_stream()>>>(
              weight, args.indices.data<std::int64_t>(), y, args.indices.numel(), args.weight.shape()[0], width / V,
              absent);
          cuda::check_launch("embedding_forward_kernel");
        },
        weight, y);
  };
  switch (args.weight.dtype()) {
    case float64: return copy_rows(std::uint64_t{0x7ff8000000000000});
    case float32: return copy_rows(std::uint32_t{0x7fc00000});
    case float16: return copy_rows(std::uint16_t{0x7e00});
    case bfloat16: return copy_rows(std::uint16_t{0x7fc0});
    case int64: return copy_rows(std::uint64_t{0});
    case int32: return copy_rows(std::uint32_t{0});
    case uint8:
    case boolean: return copy_rows(std::uint8_t{0});
  }
}

void embedding_backward(Cuda, const EmbeddingBackward& args) {
  if (args.dweight.numel() == 0) {
    return;
  }
  const cudaStream_t stream = cuda::current_stream();
  const Device device = args.dweight.device();
  const std::int64_t count = args.indices.numel();
  const std::int64_t rows = args.dweight.shape()[0];
  const std::int64_t width = args.dweight.shape()[1];
  check(count <= INT_MAX && rows <= INT_MAX, "{}: expected at most {} indices and rows to sum on CUDA, got {} and {}",
        args.op, INT_MAX, count, rows);
  if (!args.accumulate) {
    cuda::check(cudaMemsetAsync(args.dweight.raw_data(), 0, args.dweight.bytes(), stream), "cudaMemsetAsync");
  }
  if (count == 0) {
    return;
  }
  const int n = static_cast<int>(count);

  // The sort is stable, so that the positions of equal keys remain in order, and sums have the same bits in every run.
  const Tensor buffers = empty({4, n}, int32, device);
  auto* const keys = reinterpret_cast<std::uint32_t*>(buffers.data<std::int32_t>());
  std::uint32_t* const positions = keys + 2LL * n;
  const unsigned segments = blocks_of(n, kSegment);
  const Tensor runs = empty({1 + static_cast<std::int64_t>(segments)}, int32, device);
  std::int32_t* const run_count = runs.data<std::int32_t>();
  embedding_keys_kernel<<<blocks_for(n), kThreads, 0, stream>>>(args.indices.data<std::int64_t>(), n, rows, keys,
                                                                positions, run_count);
  cuda::check_launch("embedding_keys_kernel");
  const int bits = std::bit_width(static_cast<std::uint64_t>(rows));
  std::size_t bytes = 0;
  const auto sort = [&](void* scratch) {
    cuda::check(
        cub::DeviceRadixSort::SortPairs(scratch, bytes, keys, keys + n, positions, positions + n, n, 0, bits, stream),
        "cub::DeviceRadixSort::SortPairs");
  };
  sort(nullptr);
  const Tensor scratch = empty({static_cast<std::int64_t>(bytes)}, uint8, device);
  sort(scratch.raw_data());

  on_dtype(SummedTypes{}, args.dweight.dtype(), args.op, [&]<class T>() {
    using S = Accumulate<T>;
    const Tensor partial = empty({segments, 2, width}, dtype_of<S>, device);
    const Gradient<T> gradient{.dy = args.dy.data<T>(),
                               .keys = keys + n,
                               .positions = positions + n,
                               .dweight = args.dweight.data<T>(),
                               .partial = partial.data<S>(),
                               .run_starts = run_count + 1,
                               .run_count = run_count,
                               .n = n,
                               .rows = static_cast<std::uint32_t>(rows),
                               .width = width,
                               .accumulate = args.accumulate};
    cuda::with_pack_size<T>(
        width,
        [&]<int V>(std::integral_constant<int, V>) {
          const unsigned across = static_cast<unsigned>(
              std::min<std::uint64_t>(kColumnThreads, std::bit_ceil(static_cast<std::uint64_t>(width / V))));
          const dim3 block(across, kColumnThreads / across);
          const dim3 grid(blocks_of(segments, block.y), blocks_of(width, across * V));
          embedding_segments_kernel<T, V><<<grid, block, 0, stream>>>(gradient);
          cuda::check_launch("embedding_segments_kernel");
        },
        gradient.dy, gradient.dweight);
    if (segments > 1) {
      const dim3 grid(std::min<unsigned>(segments - 1, kRunBlocks), blocks_of(width, kColumnThreads));
      embedding_runs_kernel<T><<<grid, kColumnThreads * kRunLines, 0, stream>>>(gradient);
      cuda::check_launch("embedding_runs_kernel");
    }
  });
}

}  // namespace mica::kernels
