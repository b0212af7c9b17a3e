#pragma once

// The reduction on CUDA. Included by *_cuda.cu only.
//
// The order of additions depends on the lengths and strides of the axes alone, never on timing or the GPU: results are
// bit-identical from run to run, and a row's result does not depend on the number of rows.
//
// There are three kernels, depending on which axis is contiguous in memory:
//
//     short rows    x x x x | x x x x | …      some or all lanes of a warp reduce a row of up to kShortRow elements
//
//     long rows     x x x x … | x x x x … | …  a thread block reduces a part of a row, kPart elements
//                      │           │
//                      └──> y <────┘           a second pass combines the parts' results
//
//     columns       x x x x                    a thread reduces 16 bytes of adjacent columns, over some of their rows;
//                   x x x x                    the block's threads are combined in shared memory. Tall columns are cut
//                   x x x x                    into parts of rows, which a second pass combines
//                   │ │ │ │
//                   y y y y

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <mica/core/cuda/error.h>
#include <mica/core/cuda/pack.cuh>
#include <mica/core/cuda/stream.h>
#include <mica/core/dispatch.h>
#include <mica/ops/reduce/detail/reduce_plan.h>

namespace mica::kernels {

namespace reduce_detail {

inline constexpr int kThreads = 256;
inline constexpr std::int64_t kShortRow = 1024;
inline constexpr std::int64_t kPart = 32768;           // elements per part of a long row
inline constexpr std::int64_t kPartRows = 256;         // the fewest rows per part of a tall column
inline constexpr std::int64_t kMaxColumnParts = 1024;  // for taller columns, parts grow instead
inline constexpr std::int64_t kEnoughBlocks = 512;     // to keep a GPU busy
inline constexpr int kMinColumnThreads = 4;            // the fewest threads along x, so that they read whole sectors
inline constexpr std::int64_t kMaxBlocks = 1 << 30;

/// The reduction of the second pass: combines partial results of Op.
template <class Op>
struct JoinOp {
  using Value = typename Op::Acc;
  using Acc = typename Op::Acc;
  using Out = typename Op::Out;
  using Shift = ShiftOf<Op>;  // may differ from Value here
  static constexpr bool kShifted = Op::kShifted;

  Op op;

  MICA_HOST_DEVICE static Acc identity() { return Op::identity(); }
  MICA_HOST_DEVICE Acc map(Acc x, Shift, std::int64_t) const { return x; }
  MICA_HOST_DEVICE Acc combine(Acc a, Acc b) const { return op.combine(a, b); }
  MICA_HOST_DEVICE Acc finish(Acc acc, Shift shift) const { return op.finish(acc, shift); }
};

template <class Op>
struct JoinOf {
  using type = JoinOp<Op>;
  static type of(const Op& op) { return {op}; }
};
template <class Op>
struct JoinOf<JoinOp<Op>> {
  using type = JoinOp<Op>;
  static type of(const type& op) { return op; }
};

/// Where a kernel writes: finished results to y or, if a second pass follows, partial results.
template <class Op, class Shifts>
struct Target {
  using Acc = typename Op::Acc;
  Shifts shifts;
  typename Op::Out* y;
  Acc* partials;  // null if there is no second pass

  __device__ ShiftOf<Op> shift_at(std::int64_t out) const {
    if constexpr (Op::kShifted) {
      return static_cast<ShiftOf<Op>>(shifts[out]);
    } else {
      return ShiftOf<Op>{};
    }
  }
  __device__ void write(const Op& op, Acc value, std::int64_t out, std::int64_t partial) const {
    if (partials != nullptr) {
      partials[partial] = value;
    } else {
      y[out] = static_cast<typename Op::Out>(op.finish(value, shift_at(out)));
    }
  }
};

/// Reduces the part of thread `t` out of `threads` of the elements [begin, end) of one result; begin is a multiple of
/// the pack size. Which elements a thread has does not depend on alignment.
template <class T, class Op>
__device__ typename Op::Acc accumulate(const Op& op, const T* x, const ReducePlan::Axes& reduced, std::int64_t begin,
                                       std::int64_t end, int t, int threads, ShiftOf<Op> shift) {
  using Acc = typename Op::Acc;
  using Value = typename Op::Value;
  constexpr int kPack = 16 / sizeof(T);
  constexpr int kAccumulators = kPack < 4 ? 4 : kPack;
  Acc acc[kAccumulators];
#pragma unroll
  for (int j = 0; j < kAccumulators; ++j) {
    acc[j] = Op::identity();
  }
  if (reduced.rank == 1 && reduced.axis[0].in == 1) {
    // Alignment decides only how a pack is read. The order of additions is always the same.
    const bool aligned = reinterpret_cast<std::uintptr_t>(x + begin) % 16 == 0;
    const std::int64_t packed_end = begin + (end - begin) / kPack * kPack;
#pragma unroll 4
    for (std::int64_t i = begin + static_cast<std::int64_t>(t) * kPack; i < packed_end;
         i += static_cast<std::int64_t>(threads) * kPack) {
      cuda::Pack<T, kPack> pack;
      if (aligned) {
        pack = cuda::load<kPack>(x + i);
      } else {
#pragma unroll
        for (int j = 0; j < kPack; ++j) {
          pack.at[j] = x[i + j];
        }
      }
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        acc[j] = op.combine(acc[j], op.map(static_cast<Value>(pack.at[j]), shift, i + j));
      }
    }
    for (std::int64_t i = packed_end + t; i < end; i += threads) {
      acc[0] = op.combine(acc[0], op.map(static_cast<Value>(x[i]), shift, i));
    }
  } else {
    const bool simple = reduced.rank == 1;
    const std::int64_t stride = reduced.axis[0].in;
    for (std::int64_t i = begin + t; i < end; i += static_cast<std::int64_t>(threads) * 4) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const std::int64_t k = i + static_cast<std::int64_t>(threads) * j;
        if (k < end) {
          const std::int64_t in = simple ? k * stride : ReduceOffsets(reduced, k).in;
          acc[j] = op.combine(acc[j], op.map(static_cast<Value>(x[in]), shift, k));
        }
      }
    }
  }
#pragma unroll
  for (int width = kAccumulators / 2; width > 0; width /= 2) {
#pragma unroll
    for (int j = 0; j < width; ++j) {
      acc[j] = op.combine(acc[j], acc[j + width]);
    }
  }
  return acc[0];
}

/// Combines the results of `lanes` neighboring threads of a warp (a power of two) in the first of them. All threads of
/// the warp participate.
template <class Op>
__device__ typename Op::Acc join_lanes(const Op& op, typename Op::Acc acc, int lanes) {
  using Acc = typename Op::Acc;
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    acc = op.combine(acc, static_cast<Acc>(__shfl_down_sync(0xffffffffu, acc, offset, lanes)));
  }
  return acc;
}

template <class T, class Op, class Shifts>
__global__ void __launch_bounds__(kThreads)
    reduce_short_rows(Op op, ReducePlan plan, const T* x, Target<Op, Shifts> target, int lanes) {
  const int rows_per_block = kThreads / lanes;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * rows_per_block;
  // All threads of the block run the same number of iterations, so that whole warps reach the shuffles.
  for (std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * rows_per_block; first < plan.kept.numel;
       first += stride) {
    const std::int64_t row = first + threadIdx.x / lanes;
    const bool valid = row < plan.kept.numel;
    const ReduceOffsets at(plan.kept, valid ? row : 0);
    typename Op::Acc acc = Op::identity();
    if (valid) {
      acc = accumulate(op, x + at.in, plan.reduced, 0, plan.reduced.numel, lane, lanes, target.shift_at(at.out));
    }
    acc = join_lanes(op, acc, lanes);
    if (valid && lane == 0) {
      target.write(op, acc, at.out, row);
    }
  }
}

template <class T, class Op, class Shifts>
__global__ void __launch_bounds__(kThreads)
    reduce_long_rows(Op op, ReducePlan plan, const T* x, Target<Op, Shifts> target, std::int64_t parts) {
  using Acc = typename Op::Acc;
  __shared__ Acc warps[kThreads / 32];
  for (std::int64_t block = blockIdx.x; block < plan.kept.numel * parts; block += gridDim.x) {
    const ReduceOffsets at(plan.kept, block / parts);
    const std::int64_t begin = block % parts * kPart;
    const std::int64_t end = begin + kPart < plan.reduced.numel ? begin + kPart : plan.reduced.numel;
    Acc acc = accumulate(op, x + at.in, plan.reduced, begin, end, static_cast<int>(threadIdx.x), kThreads,
                         target.shift_at(at.out));
    acc = join_lanes(op, acc, 32);
    if (threadIdx.x % 32 == 0) {
      warps[threadIdx.x / 32] = acc;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      acc = join_lanes(op, threadIdx.x < kThreads / 32 ? warps[threadIdx.x] : Op::identity(), kThreads / 32);
      if (threadIdx.x == 0) {
        target.write(op, acc, at.out, block);
      }
    }
    __syncthreads();  // before the next iteration overwrites `warps`
  }
}

/// Adjacent columns per thread: 16 bytes, unless their accumulators need too many registers.
template <class T, class Op>
inline constexpr int kColumnPack =
    static_cast<int>(std::bit_floor(std::max(std::min(16 / sizeof(T), 64 / sizeof(typename Op::Acc)), std::size_t{1})));

/// A thread's columns of a block's tile, kColumnPack of them.
template <class T, class Op>
struct ThreadColumns {
  using Acc = typename Op::Acc;
  using Value = typename Op::Value;
  static constexpr int kPack = kColumnPack<T, Op>;
  static constexpr int kRowsInFlight = 4;
  using Loaded = cuda::Pack<T, kPack>;

  const Op& op;
  const ReducePlan::Axes& reduced;
  const T* base;  // the tile's first column
  int rest;       // columns from there on
  bool packed;    // whether packs can be read
  int width;      // of the block's threads
  int height;
  int x_lane = static_cast<int>(threadIdx.x) % width;
  int y_lane = static_cast<int>(threadIdx.x) / width;
  Acc acc[kPack];
  ShiftOf<Op> shifts[kPack];

  /// The v-th column. If columns are read one by one instead of in packs, they are interleaved between threads, so that
  /// loads coalesce.
  __device__ int column(int v) const { return packed ? x_lane * kPack + v : v * width + x_lane; }

  template <class Shifts>
  __device__ void begin(const Target<Op, Shifts>& target, std::int64_t out, std::int64_t stride) {
#pragma unroll
    for (int v = 0; v < kPack; ++v) {
      acc[v] = Op::identity();
      shifts[v] = column(v) < rest ? target.shift_at(out + column(v) * stride) : ShiftOf<Op>{};
    }
  }

  __device__ const T* row_at(std::int64_t i) const {
    return base + (reduced.rank == 1 ? i * reduced.axis[0].in : ReduceOffsets(reduced, i).in);
  }

  __device__ void add(const Loaded& loaded, std::int64_t i) {
#pragma unroll
    for (int v = 0; v < kPack; ++v) {
      acc[v] = op.combine(acc[v], op.map(static_cast<Value>(loaded.at[v]), shifts[v], i));
    }
  }

  /// Adds every height-th row from `row` to `end`.
  __device__ void add_rows(std::int64_t row, std::int64_t end) {
    if (packed) {
      for (; row + (kRowsInFlight - 1) * height < end; row += kRowsInFlight * height) {
        Loaded loaded[kRowsInFlight];
#pragma unroll
        for (int j = 0; j < kRowsInFlight; ++j) {
          loaded[j] = *reinterpret_cast<const Loaded*>(row_at(row + j * height) + x_lane * kPack);
        }
#pragma unroll
        for (int j = 0; j < kRowsInFlight; ++j) {
          add(loaded[j], row + j * height);
        }
      }
    }
    for (; row < end; row += height) {
      const T* const from = row_at(row);
      Loaded loaded;
#pragma unroll
      for (int v = 0; v < kPack; ++v) {
        loaded.at[v] = column(v) < rest ? from[column(v)] : T{};
      }
      add(loaded, row);
    }
  }

  /// Combines the accumulators of the block's threads into the first row of `shared`, (height, width · kPack).
  __device__ void join(Acc* shared) const {
    const int block_columns = width * kPack;
#pragma unroll
    for (int v = 0; v < kPack; ++v) {
      shared[y_lane * block_columns + column(v)] = acc[v];
    }
    for (int half = height / 2; half > 0; half /= 2) {
      __syncthreads();
      for (int i = static_cast<int>(threadIdx.x); i < half * block_columns; i += kThreads) {
        shared[i] = op.combine(shared[i], shared[i + half * block_columns]);
      }
    }
    __syncthreads();
  }
};

/// Columns run along the innermost kept axis. A block's threads form a grid of `width` columns, a power of two up to
/// 32, and each has kColumnPack columns of x. A thread's rows do not depend on alignment.
template <class T, class Op, class Shifts>
__global__ void __launch_bounds__(kThreads)
    reduce_columns(Op op, ReducePlan plan, const T* x, Target<Op, Shifts> target, int width, std::int64_t part_rows,
                   std::int64_t parts) {
  using Columns = ThreadColumns<T, Op>;
  constexpr int kPack = Columns::kPack;
  __shared__ typename Op::Acc shared[kThreads * kPack];
  const ReducePlan::Axis columns = plan.kept.inner();
  const int block_columns = width * kPack;
  const std::int64_t tiles = (columns.size + block_columns - 1) / block_columns;
  const std::int64_t blocks = plan.kept.numel / columns.size * tiles * parts;
  bool packed_rows = true;
  for (int i = 0; i < plan.reduced.rank; ++i) {
    packed_rows = packed_rows && plan.reduced.axis[i].in % kPack == 0;
  }

  for (std::int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const std::int64_t tile = block % tiles;
    const std::int64_t part = block / tiles % parts;
    const std::int64_t outer = block / tiles / parts;
    const ReduceOffsets at(plan.kept, outer, 1);
    const std::int64_t first = tile * block_columns;
    const T* const base = x + at.in + first;
    const std::int64_t out = at.out + first * columns.out;
    const auto rest = static_cast<int>(columns.size - first < block_columns ? columns.size - first : block_columns);
    const std::int64_t begin = part * part_rows;
    const std::int64_t end = begin + part_rows < plan.reduced.numel ? begin + part_rows : plan.reduced.numel;
    const bool packed = packed_rows && rest == block_columns &&
                        reinterpret_cast<std::uintptr_t>(base) % sizeof(typename Columns::Loaded) == 0;

    Columns own{op, plan.reduced, base, rest, packed, width, kThreads / width};
    own.begin(target, out, columns.out);
    own.add_rows(begin + own.y_lane, end);
    own.join(shared);
    for (int i = static_cast<int>(threadIdx.x); i < rest; i += kThreads) {
      target.write(op, shared[i], out + i * columns.out, part * plan.kept.numel + outer * columns.size + first + i);
    }
    __syncthreads();  // before the next iteration overwrites `shared`
  }
}

inline unsigned grid_of(std::int64_t blocks) { return static_cast<unsigned>(std::min(blocks, kMaxBlocks)); }

inline int power_of_two_from(std::int64_t n) {
  int power = 1;
  while (power < n) {
    power *= 2;
  }
  return power;
}

template <class T, class Op, class Shifts>
void launch(const Op& op, const ReducePlan& plan, const T* x, Shifts shifts, typename Op::Out* y, Device device);

/// The second pass: combines `parts` partial results for each result. They are `step` elements apart; those of the
/// next result begin `next` elements later.
template <class Op, class Shifts>
void join(const Op& op, ReducePlan plan, const typename Op::Acc* partials, std::int64_t parts, std::int64_t step,
          std::int64_t next, Shifts shifts, typename Op::Out* y, Device device) {
  for (int i = plan.kept.rank - 1; i >= 0; --i) {  // partials are in row-major order of the plan's kept axes
    plan.kept.axis[i].in = next;
    next *= plan.kept.axis[i].size;
  }
  plan.reduced = {};
  plan.reduced.rank = 1;
  plan.reduced.numel = parts;
  plan.reduced.axis[0] = {parts, step, 0};
  launch(JoinOf<Op>::of(op), plan, partials, shifts, y, device);
}

template <class T, class Op, class Shifts>
void launch(const Op& op, const ReducePlan& plan, const T* x, Shifts shifts, typename Op::Out* y, Device device) {
  using Acc = typename Op::Acc;
  const cudaStream_t stream = cuda::current_stream();
  const std::int64_t results = plan.kept.numel;
  const std::int64_t n = plan.reduced.numel;
  const ReducePlan::Axis columns = plan.kept.inner();
  Target<Op, Shifts> target{shifts, y, nullptr};
  Tensor partials;
  const auto two_passes = [&](std::int64_t parts) {
    partials = empty({results, parts}, dtype_of<Acc>, device);
    target.partials = partials.data<Acc>();
  };

  if (columns.in == 1 && columns.size > 1 && plan.reduced.inner().in != 1 && n > 1) {
    constexpr std::int64_t kPack = kColumnPack<T, Op>;
    const std::int64_t part_rows = std::max(kPartRows, (n + kMaxColumnParts - 1) / kMaxColumnParts);
    const std::int64_t parts = (n + part_rows - 1) / part_rows;
    // If there are few rows, one longer pass is faster than two.
    const bool whole = n <= 4 * kPartRows;
    if (!whole) {
      two_passes(parts);
    }
    const auto tiles_of = [&](int width) { return (columns.size + width * kPack - 1) / (width * kPack); };
    int width = std::min(power_of_two_from((columns.size + kPack - 1) / kPack), 32);
    while (width > kMinColumnThreads && tiles_of(width) * (whole ? 1 : parts) < kEnoughBlocks) {
      width /= 2;  // a narrower block has more threads per column
    }
    const std::int64_t blocks = results / columns.size * tiles_of(width) * (whole ? 1 : parts);
    reduce_columns<T, Op, Shifts><<<grid_of(blocks), kThreads, 0, stream>>>(op, plan, x, target, width,
                                                                            whole ? n : part_rows, whole ? 1 : parts);
    cuda::check_launch("reduce_columns");
    if (!whole) {
      join(op, plan, target.partials, parts, results, 1, shifts, y, device);
    }
  } else if (n <= kShortRow) {
    constexpr int kPack = 16 / sizeof(T);
    const int lanes = std::min(power_of_two_from((n + kPack - 1) / kPack), 32);
    const std::int64_t rows_per_block = kThreads / lanes;
    const std::int64_t blocks = (results + rows_per_block - 1) / rows_per_block;
    reduce_short_rows<T, Op, Shifts><<<grid_of(blocks), kThreads, 0, stream>>>(op, plan, x, target, lanes);
    cuda::check_launch("reduce_short_rows");
  } else {
    const std::int64_t parts = (n + kPart - 1) / kPart;
    if (parts > 1) {
      two_passes(parts);
    }
    reduce_long_rows<T, Op, Shifts><<<grid_of(results * parts), kThreads, 0, stream>>>(op, plan, x, target, parts);
    cuda::check_launch("reduce_long_rows");
    if (parts > 1) {
      join(op, plan, target.partials, parts, 1, parts, shifts, y, device);
    }
  }
}

}  // namespace reduce_detail

/// Reduces x by `op` over the axes that have length 1 in y, and writes the results to y. If the op has shifts,
/// shifts[i] is that of element i of y in row-major order.
template <class T, class Op, class Shifts = const typename Op::Value*>
void reduce(Cuda, const Op& op, const Tensor& x, const Tensor& y, const Shifts& shifts = {}) {
  if (y.numel() > 0) {
    reduce_detail::launch(op, ReducePlan(x, y), static_cast<const T*>(x.data<T>()), shifts, y.data<typename Op::Out>(),
                          x.device());
  }
}

}  // namespace mica::kernels
