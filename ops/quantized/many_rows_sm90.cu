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
#include <mica/ops/quantized/fragments_cuda.cuh>
#include <mica/ops/quantized/plan_sm90.cuh>
#include <mica/ops/quantized/quantized_cuda.cuh>
#include <mica/ops/quantized/tensor_cores_cuda.cuh>

namespace mica::kernels::quantized_cuda {

namespace {

struct Work : Product {
  const std::byte* x = nullptr;  // as order_x_kernel leaves it
  int tiles = 0;                 // of kTile rows of the weight
  float* partials = nullptr;     // (clusters, m, columns)
  int* done = nullptr;           // clusters that have written theirs, for each half of a block's elements
};

/// Where parts of K are of an even number, two of them form a cluster.
__host__ __device__ int blocks_of_cluster(int splits) { return splits % 2 == 0 ? 2 : 1; }

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

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

  __device__ std::byte* stage(int i) const { return memory + i * P::kStageBytes; }
};

// The warps that copy: each of them every fourth stage. Words and factors come in pieces of 16 bytes, whose addresses
// the lanes compute: rows are too short for the copy engine, which takes longer to be asked than to copy one.

constexpr int kPiece = 16;
static_assert(kWarp * kPiece == kStrip * 4);

__device__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }

/// A stage's part of a matrix of scales or zeros: a row of each tile, or of each unit where that is a group. Columns
/// past the matrix keep the zeros that they began with.
template <int kBits, int kRows>
__device__ void copy_factors(const Work& a, const Block<kBits, kRows>& b, const FactorMatrix& factors, int first_k,
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
  for (int unit = 0; unit < kUnits; unit += group) {
    const int k = first_k + unit * kUnit;
    cuda::copy_async<kPiece>(to + unit * 2 * kFactorBytes, from + std::int64_t{k >> a.group_shift} * (a.columns * size),
                             k < a.rows);
  }
}

/// The weight's part of a stage; zeros past the matrix. All lanes arrive.
template <int kBits, int kRows>
__device__ void copy_weight(const Work& a, const Block<kBits, kRows>& b, int step, int stage) {
  using P = Plan<kBits, kRows>;
  const int tile = b.first + step;
  const int rows = (a.rows - tile * kTile) * kBits / 32;  // of words, from here on
  const bool inside = b.column + lane() * 4 < a.columns;
  const std::uint32_t* from = a.words + std::int64_t{tile} * P::kWordRows * a.columns + b.column + lane() * 4;
  std::byte* const to = b.stage(stage) + lane() * kPiece;
#pragma unroll 8
  for (int i = 0; i < P::kWordRows; ++i) {
    cuda::copy_async<kPiece>(to + P::kWordsAt + i * P::kWordPitch, from, inside && i < rows);
    from += a.columns;
  }
  copy_factors(a, b, a.grids.scale, tile * kTile, to + P::kFactorsAt);
  copy_factors(a, b, a.grids.zero, tile * kTile, to + P::kFactorsAt + kFactorBytes);
  cuda::arrive_after_copies(&b.full[stage]);
}

/// Its part of x. One lane arrives.
template <int kBits, int kRows>
__device__ void copy_x(const Work& a, const Block<kBits, kRows>& b, int step, int stage) {
  using P = Plan<kBits, kRows>;
  if (lane() == 0) {
    std::uint64_t* const barrier = &b.full[stage];
    const std::int64_t from = std::int64_t{b.row} * a.tiles + std::int64_t{b.first + step} * kRows;
    cuda::load_bytes(b.stage(stage), a.x + from * kLine, kRows * kLine, barrier);
    cuda::arrive_expecting(barrier, kRows * kLine);
  }
}

template <int kBits, int kRows>
__device__ void copy_all(const Work& a, const Block<kBits, kRows>& b) {
  using P = Plan<kBits, kRows>;
  const int first = (static_cast<int>(threadIdx.x) - kConsumerThreads) / kWarp;
  for (int i = first; i < b.tiles; i += kCopyWarps) {
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

template <int kRows>
using Sums = float[kRows / 2];

// A thread's place among those that multiply, and where it finds its own in a stage. These numbers are kept, which the
// compiler would rather compute again and again.
template <int kBits, int kRows>
struct Place {
  using P = Plan<kBits, kRows>;
  int group = static_cast<int>(threadIdx.x) / kGroupThreads;
  int in_group = static_cast<int>(threadIdx.x) % kGroupThreads;
  int octet = in_group % 4;
  int column = group * (kStrip / kConsumers) + in_group / 4 * kColumnsEach;
  int lane = in_group % kWarp;

  int words = P::kWordsAt + octet * kBits / 4 * P::kWordPitch + column * 4;
  int scales;
  int zeros;

  __device__ explicit Place(const Work& a)
      : scales(P::kFactorsAt + column * a.grids.scale.size()),
        zeros(P::kFactorsAt + kFactorBytes + column * a.grids.zero.size()) {
    for (int* const i : {&words, &scales, &zeros}) {
      asm volatile("" : "+r"(*i));
    }
  }
};

// A stage and its barriers, by their addresses in shared memory.
template <int kStages, int kStageBytes>
class Ring {
 public:
  __device__ Ring(const std::byte* memory, const std::uint64_t* barriers)
      : first_stage_(cuda::shared_address(memory)), first_full_(cuda::shared_address(barriers)) {
    asm volatile("" : "+r"(first_stage_), "+r"(first_full_));
    stage = first_stage_;
    full = first_full_;
  }

  std::uint32_t stage;
  std::uint32_t full;
  unsigned turn = 0;  // parity of the times that it has been around

  __device__ std::uint32_t empty() const { return full + kStages * 8; }

  __device__ void advance() {
    full += 8;
    stage += kStageBytes;
    if (full == first_full_ + kStages * 8) {
      full = first_full_;
      stage = first_stage_;
      turn ^= 1;
    }
  }

 private:
  std::uint32_t first_stage_;
  std::uint32_t first_full_;
};

constexpr std::uint64_t kNextStep = cuda::kNextDepth<cuda::Lines::depth>;

constexpr int kSteps = kTile / 16;
using Fragments = std::uint32_t[kSteps][4];  // of a tile

/// Makes weights of a thread's integers in a tile. kPairs: tries to do it two at a time.
template <bool kPairs, class T, int kBits, int kRows>
__device__ void make_weights(const Product& a, const PairGrids<T, kBits>& pair_grids, const Place<kBits, kRows>& at,
                             bool each_unit, std::uint32_t stage, Fragments& fragments) {
  using P = Plan<kBits, kRows>;
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit) {
    Octets<T, kBits, kColumnsEach> octets;
    octets.load(stage + at.words + unit * kBits * P::kWordPitch, P::kWordPitch, at.octet);
    octets.get(0, 0, fragments[2 * unit]);
    octets.get(0, 1, fragments[2 * unit + 1]);
  }
  const auto scale_steps = [&]<int kFirst, int kCount>() {
    const std::uint32_t scales = stage + kFirst / 2 * (2 * kFactorBytes) + at.scales;
    const std::uint32_t zeros = stage + kFirst / 2 * (2 * kFactorBytes) + at.zeros;
    if constexpr (kPairs) {
      PairFactors factors;
      if (pair_grids.load(scales, zeros, factors)) {
#pragma unroll
        for (int i = kFirst; i < kFirst + kCount; ++i) {
          scale<T>(fragments[i], factors);
        }
        return;
      }
    }
    const auto own = load_grids<T, kColumnsEach>(a.grids, scales, zeros);
#pragma unroll
    for (int i = kFirst; i < kFirst + kCount; ++i) {
      scale<T, kBits>(fragments[i], a.grids.adds, own);
    }
  };
  if (each_unit) {
    scale_steps.template operator()<0, 2>();
    scale_steps.template operator()<2, 2>();
  } else {
    scale_steps.template operator()<0, kSteps>();
  }
}

/// While the products of one tile run, the next one's weights are made.
template <bool kPairs, class T, int kBits, int kRows>
__device__ void multiply(const Product& a, const Block<kBits, kRows>& b, const PairGrids<T, kBits>& pair_grids,
                         const Place<kBits, kRows>& at, Sums<kRows>& sums) {
  using P = Plan<kBits, kRows>;
  Ring<P::kStages, P::kStageBytes> ring(b.memory, b.full);
  std::uint32_t before_empty = 0;
  int each_unit = a.group_shift == 5;
  int leads = at.lane == 0;
  asm volatile("" : "+r"(each_unit), "+r"(leads));
  const auto pin = [](Fragments& fragments) {
#pragma unroll
    for (auto& fragment : fragments) {
      cuda::pin(fragment);
    }
  };
  const auto multiply_tile = [&](int i, Fragments& fragments, Fragments& before) {
    cuda::wait(ring.full, ring.turn);
    make_weights<kPairs>(a, pair_grids, at, each_unit != 0, ring.stage, fragments);
    pin(fragments);
    const std::uint64_t x = cuda::depth_lines(ring.stage);
    cuda::begin_products();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      cuda::multiply_add<T, kRows, cuda::Lines::depth>(sums, fragments[step], x + step * kNextStep);
    }
    cuda::commit_products();
    cuda::wait_products<1>();  // the tile before, whose fragments were still being read
    pin(before);
    if (i > 0) {
      __syncwarp();
      if (leads != 0) {
        cuda::arrive(before_empty);
      }
    }
    before_empty = ring.empty();
    ring.advance();
  };
  Fragments even = {};
  Fragments odd = {};
#pragma unroll 1
  for (int i = 0; i < b.tiles; i += 2) {
    multiply_tile(i, even, odd);
    if (i + 1 < b.tiles) {
      multiply_tile(i + 1, odd, even);
    }
  }
  cuda::wait_products<0>();
  cuda::pin(sums);
}

/// A thread's sums to shared memory: (kRows, kPitch).
template <int kBits, int kRows>
__device__ void write_sums(const Place<kBits, kRows>& place, const Sums<kRows>& sums, float* to) {
  to += 2 * place.octet * kPitch + place.column;
#pragma unroll
  for (int j = 0; j < kRows / 2; j += 4) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      *reinterpret_cast<float2*>(to + (j * 2 + e) * kPitch) = make_float2(sums[j + e], sums[j + 2 + e]);
    }
  }
}

/// Finishes the elements of the block's strip and rows: all, or every second few rows where two blocks of a cluster
/// have parts of their sums. Those of a cluster are read from shared memory; those of several clusters go through
/// global memory, and the last one adds them. All are added in the order of K.
template <class T, int kBits, int kRows>
__device__ void finish(const Work& a, const Block<kBits, kRows>& b, const float* sums, volatile bool* is_last) {
  constexpr int kQuads = kStrip / 4;
  constexpr int kStep = kConsumerThreads / kQuads;  // rows at once
  constexpr int kBatch = 4;                         // elements of a thread that are under way together
  const int splits = static_cast<int>(gridDim.x);
  const int split = static_cast<int>(blockIdx.x);
  const int in_cluster = blocks_of_cluster(splits);
  const int clusters = splits / in_cluster;
  const int thread = static_cast<int>(threadIdx.x);
  const int column = thread % kQuads * 4;
  const int rows = b.column + column < a.columns ? min(kRows, a.m - b.row) : 0;
  const int step = in_cluster * kStep;

  // For rows of this thread: part(0, row) + … + part(count - 1, row) to use(row, sum).
  const auto add = [&](int count, const auto& part, const auto& use) {
    for (int from = split % in_cluster * kStep + thread / kQuads; from < rows; from += kBatch * step) {
      float4 batch[kBatch] = {};
      for (int p = 0; p < count; ++p) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          batch[i] = plus(batch[i], part(p, min(from + i * step, rows - 1)));
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (from + i * step < rows) {
          use(from + i * step, batch[i]);
        }
      }
    }
  };
  const auto of_block = [&](int rank, int row) {
    return cuda::load_four_from_block(sums + row * kPitch + column, rank);
  };
  const auto partial = [&](int cluster, int row) {
    return reinterpret_cast<float4*>(a.partials + (std::int64_t{cluster} * a.m + b.row + row) * a.columns + b.column +
                                     column);
  };
  const auto store = [&](int row, float4 sum) { store_row<T>(a, b.row + row, b.column + column, sum); };
  if (clusters == 1) {
    add(in_cluster, of_block, store);
    return;
  }
  add(in_cluster, of_block, [&](int row, float4 sum) { *partial(split / in_cluster, row) = sum; });
  cuda::meet(1, kConsumerThreads);
  if (thread == 0) {
    cuda::wait_for_previous_kernel();  // which set them to 0
    const int block = static_cast<int>(blockIdx.z * gridDim.y + blockIdx.y);
    *is_last = cuda::exchange_add(&a.done[block * 2 + split % in_cluster], 1) == clusters - 1;
  }
  cuda::meet(1, kConsumerThreads);
  if (*is_last) {
    add(
        clusters, [&](int cluster, int row) { return __ldcg(partial(cluster, row)); }, store);
  }
}

#endif

/// Block (split, strip, i): the products of kStrip columns, in a part of K, with the i-th kRows rows of x. Two splits
/// form a cluster.
template <class T, int kBits, int kRows>
__global__ void __launch_bounds__(kThreads, Plan<kBits, kRows>::kBlocks)
    many_rows_tensor_kernel([[maybe_unused]] const __grid_constant__ Work a) {
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
  // Scales and zeros of columns past the matrix, which are never copied, have a say in whether weights are made in
  // pairs.
  constexpr int kPieces = kUnits * 2 * kFactorBytes / kPiece;
  for (int i = static_cast<int>(threadIdx.x); i < P::kStages * kPieces; i += kThreads) {
    *reinterpret_cast<uint4*>(b.stage(i / kPieces) + P::kFactorsAt + i % kPieces * kPiece) = {};
  }
  __syncthreads();

  if (threadIdx.x >= kConsumerThreads) {
    cuda::keep_registers<P::kCopyRegisters>();
    copy_all(a, b);
  } else {
    cuda::claim_registers<P::kConsumerRegisters>();
    const Place<kBits, kRows> at(a);
    Sums<kRows> sums = {};
    const PairGrids<T, kBits> pair_grids(a.grids);
    if (pair_grids.allowed()) {
      multiply<true, T>(a, b, pair_grids, at, sums);
    } else {
      multiply<false, T>(a, b, pair_grids, at, sums);
    }
    auto* const shared_sums = reinterpret_cast<float*>(memory);
    cuda::meet(1, kConsumerThreads);  // all stages have been used
    write_sums(at, sums, shared_sums);
    cuda::arrive_in_cluster();
    cuda::wait_for_cluster();
    finish<T>(a, b, shared_sums, reinterpret_cast<bool*>(barriers + 2 * P::kStages));
    cuda::arrive_in_cluster();  // nobody reads from a block that has ended
    cuda::wait_for_cluster();
  }
#endif
}

/// x in the order of the fragments: tiles of `rows` rows and kTile columns, with the 128-byte swizzle. Of the kUnit
/// columns of a unit, an 8 × 4 matrix, the transpose is stored; zeros past the last unit. A thread takes a row of a
/// unit.
template <class T>
__global__ void __launch_bounds__(kSimpleThreads)
    order_x_kernel(const T* x, int m, int units, int tiles, int rows, std::byte* out, int* done, int counters) {
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

// As many parts of K as finish first, if a part has a cost of its own beside its tiles. M has a say where
// there is more than one block of rows.
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
void launch(const Tensor& x, Work a) {
  using P = Plan<kBits, kRows>;
  const int blocks = (a.m + kRows - 1) / kRows;
  const int strips = (a.columns + kStrip - 1) / kStrip;
  const int splits = splits_for(std::int64_t{strips} * blocks, kBlocksAtOnce * P::kBlocks, a.tiles);

  const Device device = x.device();
  const std::int64_t padded = std::int64_t{blocks} * kRows;
  const Tensor ordered = empty({padded * a.tiles * kTile}, x.dtype(), device);
  const int in_cluster = blocks_of_cluster(splits);
  const int clusters = splits / in_cluster;
  const Tensor partials = clusters > 1 ? empty({clusters, a.m, a.columns}, float32, device) : Tensor{};
  const Tensor done = clusters > 1 ? empty({blocks, strips, 2}, int32, device) : Tensor{};
  a.x = ordered.raw_data();
  if (clusters > 1) {
    a.partials = partials.data<float>();
    a.done = done.data<std::int32_t>();
  }
  cuda::Launch(dim3(blocks_for(std::int64_t{a.m} * a.tiles * kUnits)), dim3(kSimpleThreads))
      .run(order_x_kernel<T>, "order_x_kernel", x.data<T>(), a.m, a.rows / kUnit, a.tiles, kRows, ordered.raw_data(),
           a.done, clusters > 1 ? 2 * blocks * strips : 0);
  const auto kernel = many_rows_tensor_kernel<T, kBits, kRows>;
  cuda::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, P::kBytes),
              "cudaFuncSetAttribute");
  cuda::Launch(dim3(splits, strips, blocks), dim3(kThreads), P::kBytes)
      .cluster(in_cluster)
      .dependent()
      .run(kernel, "many_rows_tensor_kernel", a);
}

template <class T, int kBits>
void launch_for_rows(const Tensor& x, const Work& a) {
  if (a.m <= 64) {
    launch<T, kBits, 64>(x, a);
  } else if (a.m <= 128) {
    launch<T, kBits, 128>(x, a);
  } else {
    launch<T, kBits, 256>(x, a);
  }
}

}  // namespace

bool multiply_many_rows(const Tensor& x, int bits, const Product& product) {
  constexpr int kMostRows = 2048;  // beyond, it pays to dequantize the weight once for all rows
  if (!cuda::device_has_wgmma() || product.m > kMostRows ||
      std::int64_t{product.m} * product.rows >= std::int64_t{1} << 35) {
    return false;
  }
  Work work{product};
  work.tiles = (product.rows + kTile - 1) / kTile;
  on_dtype(Types<Half, BFloat16>{}, x.dtype(), "quantized_matmul",
           [&]<class T>() { quantized::on_bits(bits, [&]<int kBits>() { launch_for_rows<T, kBits>(x, work); }); });
  return true;
}

}  // namespace mica::kernels::quantized_cuda
