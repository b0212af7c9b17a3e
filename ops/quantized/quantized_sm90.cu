// Products of 16-bit rows with a quantized weight on the tensor cores of compute capability 9.0. The weight is the
// first factor: yᵀ = wᵀ · xᵀ, so that its integers become 16-bit fragments in registers, and x, the second one, lies in
// shared memory. README.md has the picture of the fragments and of how x is put in order for them.

#include <algorithm>
#include <cstddef>

#include <mica/core/creation.h>
#include <mica/core/cuda/device.h>
#include <mica/core/cuda/launch.h>
#include <mica/core/cuda/tensor_copy.cuh>
#include <mica/core/cuda/wgmma.cuh>
#include <mica/ops/quantized/fragments_sm90.cuh>
#include <mica/ops/quantized/plan_sm90.cuh>
#include <mica/ops/quantized/quantized_cuda.cuh>

namespace mica::kernels::quantized_cuda {

namespace {

struct Product {
  const std::uint32_t* words;
  Grids grids;
  int columns;
  int rows;            // of the weight
  int group_shift;     // a group is 1 << group_shift rows
  const std::byte* x;  // as order_x_kernel leaves it
  const float* x_sums;
  int m;
  int tiles;  // of kTile rows of the weight
  void* y;
  const float* row_factors;
  const float* column_factors;
  float* partials;  // (splits, m, columns)
  int* done;        // blocks of each strip and rows that have written theirs
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The stages of shared memory, one after the other.
template <int kStages>
struct Ring {
  int stage = 0;
  unsigned turn = 0;  // parity of the times that it has been around

  __device__ void advance() {
    stage = stage + 1 == kStages ? 0 : stage + 1;
    turn ^= stage == 0 ? 1 : 0;
  }
};

// What a block works on, and where it lies in shared memory.
template <int kBits, int kRows>
struct Block {
  using P = Plan<kBits, kRows>;
  std::byte* memory;
  std::uint64_t* full;   // a stage has arrived
  std::uint64_t* empty;  // it has been used
  int column;            // the first of the strip
  int row;               // the first of x
  int first;             // tile
  int tiles;

  __device__ int steps() const { return (tiles + P::kParts - 1) / P::kParts; }  // each of a stage
  __device__ std::byte* stage(int i) const { return memory + i * P::kStageBytes; }
};

// The warps that copy: each of them every fourth stage. Words and factors come in pieces of 16 bytes, whose addresses
// the lanes compute: rows are too short for the copy engine, which takes longer to be asked than to copy one.

constexpr int kCopyWarps = kGroupThreads / kWarp;
constexpr int kPiece = 16;
static_assert(kWarp * kPiece == kStrip * 4);

__device__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }

/// A stage's part of a matrix of scales or zeros: a row of each tile, or of each unit where that is a group.
template <int kBits, int kRows>
__device__ void copy_factors(const Product& a, const Block<kBits, kRows>& b, const FactorMatrix& factors, int first_k,
                             std::byte* to) {
  using P = Plan<kBits, kRows>;
  const int size = factors.size();
  if (!factors.each() || lane() * kPiece >= min(a.columns - b.column, kStrip) * size) {
    return;
  }
  const std::byte* const from =
      static_cast<const std::byte*>(factors.data) + std::int64_t{b.column} * size + lane() * kPiece;
  const int group = a.group_shift == 5 ? 1 : kUnits;
#pragma unroll 1
  for (int unit = 0; unit < P::kParts * kUnits; unit += group) {
    const int k = first_k + unit * kUnit;
    if (k < a.rows) {
      cuda::copy_async<kPiece>(to + unit * 2 * kFactorBytes,
                               from + std::int64_t{k >> a.group_shift} * (a.columns * size));
    }
  }
}

/// The weight's part of a stage; zeros past the matrix. All lanes arrive.
template <int kBits, int kRows>
__device__ void copy_weight(const Product& a, const Block<kBits, kRows>& b, int step, int stage) {
  using P = Plan<kBits, kRows>;
  const int tile = b.first + step * P::kParts;
  const int rows = (a.rows - tile * kTile) * kBits / 32;  // of words, from here on
  const bool inside = b.column + lane() * 4 < a.columns;
  const std::uint32_t* from = a.words + std::int64_t{tile} * P::kWordRows * a.columns + b.column + lane() * 4;
  std::byte* const to = b.stage(stage) + lane() * kPiece;
#pragma unroll 8
  for (int i = 0; i < P::kParts * P::kWordRows; ++i) {
    cuda::copy_async<kPiece>(to + P::kWordsAt + i * P::kWordPitch, from, inside && i < rows);
    from += a.columns;
  }
  copy_factors(a, b, a.grids.scale, tile * kTile, to + P::kFactorsAt);
  copy_factors(a, b, a.grids.zero, tile * kTile, to + P::kFactorsAt + kFactorBytes);
  cuda::arrive_after_copies(&b.full[stage]);
}

/// Its part of x. One lane arrives.
template <int kBits, int kRows>
__device__ void copy_x(const Product& a, const Block<kBits, kRows>& b, int step, int stage) {
  using P = Plan<kBits, kRows>;
  if (lane() == 0) {
    std::uint64_t* const barrier = &b.full[stage];
    const int tile = step * P::kParts;
    const int rows = min(P::kParts, b.tiles - tile) * kRows;
    const std::int64_t from = std::int64_t{b.row} * a.tiles + std::int64_t{b.first + tile} * kRows;
    cuda::load_bytes(b.stage(stage), a.x + from * kLine, rows * kLine, barrier);
    int sum_bytes = 0;
    if constexpr (P::kScalesSums) {
      sum_bytes = rows * kUnits * 4;
      cuda::load_bytes(b.stage(stage) + P::kXSumsAt, a.x_sums + from * kUnits, sum_bytes, barrier);
    }
    cuda::arrive_expecting(barrier, rows * kLine + sum_bytes);
  }
}

template <int kBits, int kRows>
__device__ void copy_all(const Product& a, const Block<kBits, kRows>& b) {
  using P = Plan<kBits, kRows>;
  const int first = (static_cast<int>(threadIdx.x) - kConsumerThreads) / kWarp;
  for (int i = first; i < b.steps(); i += kCopyWarps) {
    const int stage = i % P::kStages;
    if (i >= P::kStages) {
      cuda::wait(&b.empty[stage], (i / P::kStages - 1) & 1);
    }
    copy_weight(a, b, i, stage);
    if (i == first) {
      cuda::wait_for_previous_kernel();  // which puts x in order
    }
    copy_x(a, b, i, stage);
  }
}

// The warps that multiply.

template <int kHalves, int kRows>
using Sums = float[kHalves][kRows / 2];

// A thread's place among those that multiply, and where it finds its own in a stage. These numbers are kept, which the
// compiler would rather compute again and again.
template <int kBits, int kRows>
struct Place {
  using P = Plan<kBits, kRows>;
  int group = static_cast<int>(threadIdx.x) / kGroupThreads;
  int in_group = static_cast<int>(threadIdx.x) % kGroupThreads;
  int octet = in_group % 4;
  int part = P::kParts == 1 ? 0 : group;
  int column = (P::kParts == 1 ? group * (kStrip / kConsumers) : 0) + in_group / 4 * P::kColumnsEach;
  int lane = in_group % kWarp;

  int x = part * kRows * kLine;
  int x_sums = P::kXSumsAt + (part * kUnits * kRows + 2 * octet) * 4;
  int words = P::kWordsAt + (part * P::kWordRows + octet * kBits / 4) * P::kWordPitch + column * 4;
  int scales;
  int zeros;

  __device__ explicit Place(const Product& a)
      : scales(P::kFactorsAt + part * kUnits * 2 * kFactorBytes + column * a.grids.scale.size()),
        zeros(P::kFactorsAt + (part * kUnits * 2 + 1) * kFactorBytes + column * a.grids.zero.size()) {
    for (int* const i : {&x, &x_sums, &words, &scales, &zeros}) {
      asm volatile("" : "+r"(*i));
    }
  }
};

/// Lets the copying warps have a stage.
template <int kBits, int kRows>
__device__ void release(const Block<kBits, kRows>& b, const Place<kBits, kRows>& at, int stage) {
  __syncwarp();
  if (at.lane == 0) {
    cuda::arrive(&b.empty[stage]);
  }
}

/// What lies at an address of shared memory.
__device__ const void* at_address(std::uint32_t address) {
  return reinterpret_cast<const void*>(__cvta_shared_to_generic(address));
}

/// Units of a tile that are within K; of those past it, x is 0.
template <int kBits, int kRows>
__device__ int units_in(const Product& a, const Block<kBits, kRows>& b, int tile) {
  return min(kUnits, a.rows / kUnit - (b.first + tile) * kUnits);
}

constexpr std::uint64_t kNextStep = cuda::kNextDepth<cuda::Lines::depth>;

/// sums += the products of kCount units of one group: those of the integers, scaled, and those of the offset, which
/// meets the sums of x.
template <class T, int kBits, int kRows, int kCount>
__device__ void add_group(const Product& a, const Place<kBits, kRows>& at, std::uint32_t stage, int first,
                          float one_zero, Sums<Plan<kBits, kRows>::kHalves, kRows>& sums) {
  using P = Plan<kBits, kRows>;
  constexpr int kSteps = 2 * kCount;
  std::uint32_t fragments[kSteps][P::kHalves][4];
#pragma unroll
  for (int i = 0; i < kSteps; i += 2) {
    Octets<kBits, P::kColumnsEach> octets;
    octets.load(stage + at.words + (first + i / 2) * kBits * P::kWordPitch, P::kWordPitch, at.octet);
#pragma unroll
    for (int j = 0; j < 2 * P::kHalves; ++j) {
      auto& fragment = fragments[i + j % 2][j / 2];
      octets.template get<T>(j / 2, j % 2, fragment);
      cuda::pin(fragment);
    }
  }
  const std::uint64_t x = cuda::depth_lines(at_address(stage + at.x));
  Sums<P::kHalves, kRows> group_sums = {};
  cuda::begin_products();
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
#pragma unroll
    for (int half = 0; half < P::kHalves; ++half) {
      cuda::multiply_add<T, kRows, cuda::Lines::depth>(group_sums[half], fragments[i][half],
                                                       x + (2 * first + i) * kNextStep, i > 0);
    }
  }
  cuda::commit_products();
  const std::uint32_t factors = stage + first * 2 * kFactorBytes;
  const auto own = load_factors<T, kBits, P::kColumnsEach>(a.grids, one_zero, factors + at.scales, factors + at.zeros);
  cuda::wait_products<0>();
#pragma unroll
  for (int half = 0; half < P::kHalves; ++half) {
    cuda::pin(group_sums[half]);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      cuda::pin(fragments[i][half]);  // they were being read
    }
  }
#pragma unroll
  for (int j = 0; j < kRows / 2; j += 4) {
    float x_sum[2] = {};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      std::uint32_t of_unit[2];
      load_words(stage + at.x_sums + ((first + i) * kRows + 2 * j) * 4, of_unit);
      x_sum[0] += __uint_as_float(of_unit[0]);
      x_sum[1] += __uint_as_float(of_unit[1]);
    }
#pragma unroll
    for (int i = 0; i < 4 * P::kHalves; ++i) {
      const int c = i / 2;
      float& sum = sums[i / 4][j + i % 4];
      sum = fmaf(own.scale[c], group_sums[i / 4][j + i % 4], sum);
      sum = fmaf(own.offset[c], x_sum[i % 2], sum);
    }
  }
}

/// The products of a few rows: scales sums.
template <class T, int kBits, int kRows>
__device__ void multiply_integers(const Product& a, const Block<kBits, kRows>& b, const Place<kBits, kRows>& at,
                                  float one_zero, Sums<Plan<kBits, kRows>::kHalves, kRows>& sums) {
  using P = Plan<kBits, kRows>;
  const int steps = b.steps();
  Ring<P::kStages> ring;
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    cuda::wait(&b.full[ring.stage], ring.turn);
    const int tile = i * P::kParts + at.part;
    if (tile < b.tiles) {
      const std::uint32_t stage = cuda::shared_address(b.stage(ring.stage));
      if (a.group_shift == 5) {
#pragma unroll 1
        for (int unit = 0; unit < units_in(a, b, tile); ++unit) {
          add_group<T, kBits, kRows, 1>(a, at, stage, unit, one_zero, sums);
        }
      } else {
        add_group<T, kBits, kRows, kUnits>(a, at, stage, 0, one_zero, sums);
      }
    }
    release(b, at, ring.stage);
    ring.advance();
  }
}

/// The products of many rows: scales weights. While the products of one step run, the next one's weights are made.
template <class T, int kBits, int kRows>
__device__ void multiply_weights(const Product& a, const Block<kBits, kRows>& b, const Place<kBits, kRows>& at,
                                 float one_zero, Sums<Plan<kBits, kRows>::kHalves, kRows>& sums) {
  using P = Plan<kBits, kRows>;
  static_assert(P::kParts == 1 && P::kHalves == 1);
  const auto factors_at = [&](std::uint32_t from) {
    return load_factors<T, kBits, P::kColumnsEach>(a.grids, one_zero, from + at.scales, from + at.zeros);
  };
  std::uint32_t fragments[2][4] = {};
  const int steps = b.steps();
  Ring<P::kStages> ring;
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    cuda::wait(&b.full[ring.stage], ring.turn);
    const std::uint32_t stage = cuda::shared_address(b.stage(ring.stage));
    Octets<kBits, P::kColumnsEach> octets[kUnits];
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      octets[unit].load(stage + at.words + unit * kBits * P::kWordPitch, P::kWordPitch, at.octet);
    }
    auto factors = factors_at(stage);
    const std::uint64_t x = cuda::depth_lines(at_address(stage + at.x));
#pragma unroll
    for (int step = 0; step < 2 * kUnits; ++step) {
      const int unit = step / 2;
      if (step % 2 == 0 && unit > 0 && a.group_shift == 5) {
        factors = factors_at(stage + unit * 2 * kFactorBytes);
        factors.keep_if(unit < units_in(a, b, i));
      }
      auto& fragment = fragments[step % 2];
      octets[unit].template get<T>(0, step % 2, fragment);
      scale<T>(fragment, factors);
      cuda::pin(fragment);
      cuda::begin_products();
      cuda::multiply_add<T, kRows, cuda::Lines::depth>(sums[0], fragment, x + step * kNextStep);
      cuda::commit_products();
      cuda::wait_products<1>();  // the step before, whose fragment was still being read
      cuda::pin(fragments[(step + 1) % 2]);
      if (step == 0 && i > 0) {
        release(b, at, ring.stage == 0 ? P::kStages - 1 : ring.stage - 1);
      }
    }
    ring.advance();
  }
  cuda::wait_products<0>();
  cuda::pin(sums[0]);
}

/// A thread's sums to shared memory: (parts, kRows, kPitch).
template <int kBits, int kRows>
__device__ void write_sums(const Place<kBits, kRows>& place, const Sums<Plan<kBits, kRows>::kHalves, kRows>& sums,
                           float* to) {
  using P = Plan<kBits, kRows>;
  to += (place.part * kRows + 2 * place.octet) * kPitch + place.column;
#pragma unroll
  for (int j = 0; j < kRows / 2; j += 4) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float* const at = to + (j * 2 + e) * kPitch;
      if constexpr (P::kHalves == 2) {
        *reinterpret_cast<float4*>(at) =
            make_float4(sums[0][j + e], sums[0][j + 2 + e], sums[1][j + e], sums[1][j + 2 + e]);
      } else {
        *reinterpret_cast<float2*>(at) = make_float2(sums[0][j + e], sums[0][j + 2 + e]);
      }
    }
  }
}

template <class T>
__device__ void store_row(const Product& a, int row, int column, float4 sum) {
  float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    values[c] *= a.column_factors != nullptr ? a.column_factors[column + c] : 1.0f;
    values[c] *= a.row_factors != nullptr ? a.row_factors[row] : 1.0f;
  }
  *reinterpret_cast<uint2*>(static_cast<T*>(a.y) + std::int64_t{row} * a.columns + column) =
      make_uint2(cuda::pair_of<T>(values[0], values[1]), cuda::pair_of<T>(values[2], values[3]));
}

/// Finishes the elements of the block's strip and rows, or leaves that to the last one of the blocks that share them,
/// which adds up their sums in the order of K.
template <class T, int kBits, int kRows>
__device__ void add_sums(const Product& a, const Block<kBits, kRows>& b, const float* sums, volatile bool* is_last) {
  using P = Plan<kBits, kRows>;
  const int splits = static_cast<int>(gridDim.x);
  constexpr int kQuads = kStrip / 4;
  const auto for_each = [&](const auto& f) {
    const int size = min(kRows, a.m - b.row) * kQuads;
    for (int i = static_cast<int>(threadIdx.x); i < size; i += kConsumerThreads) {
      const int column = i % kQuads * 4;
      if (b.column + column < a.columns) {
        f(i / kQuads, column);
      }
    }
  };
  const auto plus = [](float4 x, float4 y) { return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w); };
  const auto own = [&](int row, int column) {
    float4 sum = {};
#pragma unroll
    for (int part = 0; part < P::kParts; ++part) {
      sum = plus(sum, *reinterpret_cast<const float4*>(sums + (part * kRows + row) * kPitch + column));
    }
    return sum;
  };
  if (splits == 1) {
    for_each([&](int row, int column) { store_row<T>(a, b.row + row, b.column + column, own(row, column)); });
    return;
  }

  const auto partial = [&](int split, int row, int column) {
    return reinterpret_cast<float4*>(a.partials + (std::int64_t{split} * a.m + b.row + row) * a.columns + b.column +
                                     column);
  };
  for_each([&](int row, int column) { *partial(static_cast<int>(blockIdx.x), row, column) = own(row, column); });
  cuda::meet(1, kConsumerThreads);
  if (threadIdx.x == 0) {
    cuda::wait_for_previous_kernel();  // which set them to 0
    *is_last = cuda::exchange_add(&a.done[blockIdx.z * gridDim.y + blockIdx.y], 1) == splits - 1;
  }
  cuda::meet(1, kConsumerThreads);
  if (!*is_last) {
    return;
  }
  constexpr int kBatch = 8;  // elements whose sums are under way together
  constexpr int kRowsAtOnce = kConsumerThreads / kQuads;
  const int column = static_cast<int>(threadIdx.x) % kQuads * 4;
  const int rows = b.column + column < a.columns ? min(kRows, a.m - b.row) : 0;
  for (int first = static_cast<int>(threadIdx.x) / kQuads; first < rows; first += kBatch * kRowsAtOnce) {
    float4 batch[kBatch] = {};
    for (int split = 0; split < splits; ++split) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int row = first + i * kRowsAtOnce;
        batch[i] = plus(batch[i], row < rows ? __ldcg(partial(split, row, column)) : float4{});
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = first + i * kRowsAtOnce;
      if (row < rows) {
        store_row<T>(a, b.row + row, b.column + column, batch[i]);
      }
    }
  }
}

#endif

/// Block (split, strip, i): the products of kStrip columns, in a part of K, with the i-th kRows rows of x.
template <class T, int kBits, int kRows>
__global__ void __launch_bounds__(kThreads, Plan<kBits, kRows>::kBlocks)
    tensor_cores_kernel([[maybe_unused]] const __grid_constant__ Product a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using P = Plan<kBits, kRows>;
  extern __shared__ __align__(kAlignment) std::byte memory[];
  auto* const barriers = reinterpret_cast<std::uint64_t*>(memory + P::kMemory);
  const int splits = static_cast<int>(gridDim.x);
  const int split = static_cast<int>(blockIdx.x);
  const int first = static_cast<int>(std::int64_t{a.tiles} * split / splits);
  const Block<kBits, kRows> b{.memory = memory,
                              .full = barriers,
                              .empty = barriers + P::kStages,
                              .column = static_cast<int>(blockIdx.y) * kStrip,
                              .row = static_cast<int>(blockIdx.z) * kRows,
                              .first = first,
                              .tiles = static_cast<int>(std::int64_t{a.tiles} * (split + 1) / splits) - first};
  if (threadIdx.x == 0) {
    for (int i = 0; i < P::kStages; ++i) {
      cuda::init_barrier(&b.full[i], kWarp + 1);
      cuda::init_barrier(&b.empty[i], kConsumerThreads / kWarp);
    }
    cuda::publish_barriers();
  }
  __syncthreads();

  if (threadIdx.x >= kConsumerThreads) {
    cuda::keep_registers<P::kCopyRegisters>();
    copy_all(a, b);
  } else {
    cuda::claim_registers<P::kConsumerRegisters>();
    const float one_zero =
        a.grids.zero.kind == FactorMatrix::kOne ? *static_cast<const float*>(a.grids.zero.data) : 0.0f;
    const Place<kBits, kRows> at(a);
    Sums<P::kHalves, kRows> sums = {};
    if constexpr (P::kScalesSums) {
      multiply_integers<T>(a, b, at, one_zero, sums);
    } else {
      multiply_weights<T>(a, b, at, one_zero, sums);
    }
    auto* const shared_sums = reinterpret_cast<float*>(memory);
    cuda::meet(1, kConsumerThreads);  // all stages have been used
    write_sums(at, sums, shared_sums);
    cuda::meet(1, kConsumerThreads);
    add_sums<T>(a, b, shared_sums, reinterpret_cast<bool*>(barriers + 2 * P::kStages));
  }
#endif
}

/// x in the order of the fragments: tiles of `rows` rows and kTile columns, with the 128-byte swizzle. Of the kUnit
/// columns of a unit, an 8 × 4 matrix, the transpose is stored; zeros past the last unit. A thread takes a row of a
/// unit.
template <class T>
__global__ void __launch_bounds__(kSimpleThreads) order_x_kernel(const T* x, int m, int units, int tiles, int rows,
                                                                 std::byte* out, float* sums, int* done, int counters) {
  cuda::allow_dependents();
  const int i = static_cast<int>(blockIdx.x) * kSimpleThreads + static_cast<int>(threadIdx.x);
  for (int j = i; j < counters; j += static_cast<int>(gridDim.x) * kSimpleThreads) {
    done[j] = 0;
  }
  const int row = i / (tiles * kUnits);
  const int unit = i % (tiles * kUnits);
  if (row >= m) {
    return;
  }
  std::uint32_t pairs[kUnit / 2];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const auto* const from = reinterpret_cast<const uint4*>(x + (std::int64_t{row} * units + unit) * kUnit);
    const uint4 eight = unit < units ? from[j] : uint4{};
    pairs[4 * j] = eight.x;
    pairs[4 * j + 1] = eight.y;
    pairs[4 * j + 2] = eight.z;
    pairs[4 * j + 3] = eight.w;
  }
  const int line = row % rows;
  if (sums != nullptr) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kUnit / 2; ++j) {
      const float2 two = to_floats<T>(pairs[j]);
      sum += two.x + two.y;
    }
    sums[(std::int64_t{row} / rows * tiles * kUnits + unit) * rows + line] = sum;
  }
  std::byte* const to = out + ((std::int64_t{row} / rows * tiles + unit / kUnits) * rows + line) * kLine;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    std::uint32_t four[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // members c and c + 4 of octet j
      four[j] = __byte_perm(pairs[4 * j + c / 2], pairs[4 * j + 2 + c / 2], c % 2 == 0 ? 0x5410 : 0x7632);
    }
    const int chunk = unit % kUnits * 4 + c;
    *reinterpret_cast<uint4*>(to + (chunk ^ line % 8) * 16) = make_uint4(four[0], four[1], four[2], four[3]);
  }
}

// On the host.

// As many parts of K as finish first, if a part has a cost of its own beside its tiles. M has a say where there is more
// than one block of rows.
int splits_for(std::int64_t blocks, int at_once, int tiles) {
  constexpr int kOwnCost = 6;
  int best = 1;
  std::int64_t least = INT64_MAX;
  for (int splits = 1; splits <= std::min(kMostSplits, tiles); ++splits) {
    const std::int64_t waves = (blocks * splits + at_once - 1) / at_once;
    const std::int64_t cost = waves * ((tiles + splits - 1) / splits + kOwnCost);
    if (cost < least) {
      least = cost;
      best = splits;
    }
  }
  return best;
}

template <class T, int kBits, int kRows>
void launch(const QuantizedMatmulForward& args, Product a) {
  using P = Plan<kBits, kRows>;
  const int blocks = (a.m + kRows - 1) / kRows;
  const int strips = (a.columns + kStrip - 1) / kStrip;
  const int splits = splits_for(std::int64_t{strips} * blocks, kBlocksAtOnce * P::kBlocks, a.tiles);

  const Device device = args.x.device();
  const std::int64_t padded = std::int64_t{blocks} * kRows;
  const Tensor ordered = empty({padded * a.tiles * kTile}, args.x.dtype(), device);
  const Tensor x_sums = P::kScalesSums ? empty({padded * a.tiles * kUnits}, float32, device) : Tensor{};
  const Tensor partials = splits > 1 ? empty({splits, a.m, a.columns}, float32, device) : Tensor{};
  const Tensor done = splits > 1 ? empty({blocks, strips}, int32, device) : Tensor{};
  a.x = ordered.raw_data();
  a.x_sums = Numbers<float>(x_sums).data;
  if (splits > 1) {
    a.partials = partials.data<float>();
    a.done = done.data<std::int32_t>();
  }

  cuda::Launch(dim3(blocks_for(std::int64_t{a.m} * a.tiles * kUnits)), dim3(kSimpleThreads))
      .run(order_x_kernel<T>, "order_x_kernel", args.x.data<T>(), a.m, a.rows / kUnit, a.tiles, kRows,
           ordered.raw_data(), P::kScalesSums ? x_sums.data<float>() : nullptr, a.done,
           splits > 1 ? blocks * strips : 0);
  const auto kernel = tensor_cores_kernel<T, kBits, kRows>;
  cuda::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, P::kBytes),
              "cudaFuncSetAttribute");
  cuda::Launch(dim3(splits, strips, blocks), dim3(kThreads), P::kBytes)
      .dependent()
      .run(kernel, "tensor_cores_kernel", a);
}

template <class T, int kBits>
void launch_for_rows(const QuantizedMatmulForward& args, const Product& a) {
  if (a.m <= 8) {
    launch<T, kBits, 8>(args, a);
  } else if (a.m <= 16) {
    launch<T, kBits, 16>(args, a);
  } else if (a.m <= 32) {
    launch<T, kBits, 32>(args, a);
  } else if (a.m <= 64) {
    launch<T, kBits, 64>(args, a);
  } else if (a.m <= 128) {
    launch<T, kBits, 128>(args, a);
  } else {
    launch<T, kBits, 256>(args, a);
  }
}

bool aligned(const Tensor& x) {
  return !x.defined() || x.dim() == 0 || reinterpret_cast<std::uintptr_t>(x.raw_data()) % 16 == 0;
}

// Of what the kernel reads: a number is a float32.
Tensor readable(const Tensor& x, DType dtype) {
  return x.defined() && (x.dim() == 0 || x.dtype() != dtype) ? converted(x, float32) : x;
}

}  // namespace

bool multiply_on_tensor_cores(const QuantizedMatmulForward& args) {
  constexpr std::int64_t kMostRows = 2048;  // beyond, it pays to dequantize the weight once for all rows
  const QuantizedWeight& weight = args.weight;
  const DType dtype = args.x.dtype();
  const std::int64_t m = args.x.size(0);
  if ((dtype != float16 && dtype != bfloat16) || !cuda::device_has_wgmma() || weight.rows % kUnit != 0 ||
      weight.columns() % 8 != 0 || m > kMostRows || weight.rows >= 1 << 24 || weight.columns() >= 1 << 22 ||
      m * weight.rows >= std::int64_t{1} << 35 || !aligned(args.x) || !aligned(args.y) || !aligned(weight.packed) ||
      !aligned(weight.scale) || !aligned(weight.zero)) {
    return false;
  }
  const Tensor scale = readable(weight.scale, dtype);
  const Tensor zero = readable(weight.zero, dtype);
  int group_shift = 31;
  for (const int shift : {5, 6, 7}) {
    group_shift = weight.group_size == 1 << shift ? shift : group_shift;
  }
  const Product a{.words = reinterpret_cast<const std::uint32_t*>(weight.packed.data<std::int32_t>()),
                  .grids = {.scale = FactorMatrix(scale),
                            .zero = FactorMatrix(zero),
                            .adds = weight.mode == QuantizationMode::fused_multiply_add},
                  .columns = static_cast<int>(weight.columns()),
                  .rows = static_cast<int>(weight.rows),
                  .group_shift = group_shift,
                  .x = nullptr,
                  .x_sums = nullptr,
                  .m = static_cast<int>(m),
                  .tiles = static_cast<int>((weight.rows + kTile - 1) / kTile),
                  .y = args.y.raw_data(),
                  .row_factors = Numbers<float>(args.rows).data,
                  .column_factors = Numbers<float>(args.columns).data,
                  .partials = nullptr,
                  .done = nullptr};
  on_dtype(Types<Half, BFloat16>{}, dtype, "quantized_matmul", [&]<class T>() {
    quantized::on_bits(weight.bits, [&]<int kBits>() { launch_for_rows<T, kBits>(args, a); });
  });
  return true;
}

}  // namespace mica::kernels::quantized_cuda
