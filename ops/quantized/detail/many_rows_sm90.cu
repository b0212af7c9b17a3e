// Products of 16-bit rows with a quantized weight by wgmma, for compute capability 9.0, as yᵀ = wᵀ · xᵀ: the left
// operand of wgmma may be in registers, where the weight's integers are converted to 16-bit fragments. README.md shows
// these.

#include <algorithm>
#include <cstddef>

#include <mica/core/creation.h>
#include <mica/core/cuda/detail/tensor_copy.cuh>
#include <mica/core/cuda/detail/wgmma.cuh>
#include <mica/core/cuda/device.h>
#include <mica/core/cuda/launch.h>
#include <mica/ops/quantized/detail/plan_sm90.cuh>
#include <mica/ops/quantized/detail/quantized_cuda.cuh>
#include <mica/ops/quantized/detail/tensor_cores_cuda.cuh>
#include <mica/ops/quantized/detail/weights_sm90.cuh>

namespace mica::kernels::quantized_cuda {

namespace {

struct ManyRowsProduct : Product {
  int tiles = 0;              // tiles of kTile rows of the weight
  float* partials = nullptr;  // (clusters, m, columns)
  int* done = nullptr;        // for each half of a block's elements, how many clusters have written their partials
};

// The tensor maps. Scales and zeros have one only if they are matrices.
struct Maps {
  CUtensorMap x;
  CUtensorMap words;
  CUtensorMap scales;
  CUtensorMap zeros;
};

/// If K is split into an even number of parts, two parts form a cluster.
__host__ __device__ int blocks_of_cluster(int splits) { return splits % 2 == 0 ? 2 : 1; }

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A block's work and its layout in shared memory.
template <int kBits, int kRows>
struct Block {
  std::byte* memory;
  std::uint64_t* full;   // barriers: the stage has been loaded
  std::uint64_t* empty;  // barriers: the stage has been consumed
  int column;            // the strip's first column
  int row;               // the first row of x
  int first;             // the first tile
  int tiles;
};

/// The producer's loop, which runs in one thread.
template <int kBits, int kRows>
__device__ void copy_all(const ManyRowsProduct& a, const Maps& maps, const Block<kBits, kRows>& b) {
  using P = BlockPlan<kBits, kRows>;
  const int units = a.group_shift == 5 ? kUnits : 1;
  const auto bytes_of_factors = [&](const FactorMatrix& f) { return f.each() ? units * kStrip * f.size() : 0; };
  const int bytes = P::kXBytes + P::kWordBytes + bytes_of_factors(a.grids.scale) + bytes_of_factors(a.grids.zero);
  int stage = 0;
  unsigned parity = 1;
#pragma unroll 1
  for (int tile = b.first; tile < b.first + b.tiles; ++tile) {
    cuda::wait(&b.empty[stage], parity);
    std::uint64_t* const barrier = &b.full[stage];
    std::byte* const to = b.memory + stage * P::kStageBytes;
    cuda::arrive_expecting(barrier, bytes);
    cuda::load_tile(to + P::kWordsAt, &maps.words, b.column, tile * P::kWordRows, barrier);
    cuda::load_tile(to, &maps.x, tile * kTile, b.row, barrier);
    if (a.grids.scale.each()) {
      cuda::load_tile(to + P::kScalesAt, &maps.scales, b.column, tile * kTile >> a.group_shift, barrier);
    }
    if (a.grids.zero.each()) {
      cuda::load_tile(to + P::kZerosAt, &maps.zeros, b.column, tile * kTile >> a.group_shift, barrier);
    }
    if (++stage == P::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

template <int kRows>
using Sums = float[kRows / 2];

// A thread's index among the consumers, and the offsets of its data in a stage. They are opaque, since the compiler
// would compute them again at each use.
template <int kBits, int kRows>
struct StageOffsets {
  using P = BlockPlan<kBits, kRows>;
  int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
  int pair = thread % 4;  // which of the four pairs along K, in every 8 rows, the thread has
  int column = static_cast<int>(threadIdx.x) / 4 * kColumnsEach;
  int words = P::kWordsAt + (kBits == 8 ? pair / 2 * kWordPitch : 0) + column * 4;
  int scales;
  int zeros;

  __device__ explicit StageOffsets(const ManyRowsProduct& a)
      : scales(P::kScalesAt + column * a.grids.scale.size()), zeros(P::kZerosAt + column * a.grids.zero.size()) {
    for (int* const i : {&words, &scales, &zeros}) {
      asm volatile("" : "+r"(*i));
    }
  }
};

constexpr int kSteps = kTile / 16;
using Fragments = std::uint32_t[kSteps][4];  // a tile's

__device__ void pin_all(Fragments& fragments) {
#pragma unroll
  for (auto& fragment : fragments) {
    cuda::pin(fragment);
  }
}

/// Loads a thread's integers of a tile from its words.
template <class T, int kBits>
__device__ void load_integers(const PairReader<T, kBits>& reader, std::uint32_t words, Fragments& fragments) {
  constexpr int kEights = PairReader<T, kBits>::kEights;
#pragma unroll
  for (int first = 0; first < kTile / 8; first += kEights) {
    std::uint32_t columns[kColumnsEach];
    load_words(words + (kBits == 8 ? 2 * first : first / kEights) * kWordPitch, columns);
#pragma unroll
    for (int i = first; i < first + kEights; ++i) {
#pragma unroll
      for (int c = 0; c < kColumnsEach; ++c) {
        fragments[i / 2][i % 2 * 2 + c] = reader.get(columns[c], i - first);
      }
    }
  }
}

/// Accumulates the products of a block's tiles. The weights of the next tile are converted while the products of the
/// current one run. kEachUnit: each unit has its own scales and zeros.
template <class T, bool kEachUnit, int kBits, int kRows, class Converter>
__device__ void multiply_tiles(const ManyRowsProduct& a, const Block<kBits, kRows>& b, const Converter& converter,
                               const StageOffsets<kBits, kRows>& at, Sums<kRows>& sums) {
  using P = BlockPlan<kBits, kRows>;
  constexpr std::uint64_t kNextStep = cuda::kNextDepth<cuda::Lines::depth>;
  const PairReader<T, kBits> reader(at.pair);
  const std::uint32_t first_stage = cuda::shared_address(b.memory);
  const std::uint32_t first_full = cuda::shared_address(b.full);
  const int scales_of_unit = kStrip * a.grids.scale.size();
  const int zeros_of_unit = kStrip * a.grids.zero.size();
  const bool leads = at.thread % kWarp == 0;
  std::uint32_t stage = first_stage;
  std::uint32_t full = first_full;
  unsigned parity = 0;  // parity of the round in the ring
  std::uint32_t before_empty = 0;
  const auto multiply_tile = [&](int i, Fragments& fragments, Fragments& before) {
    cuda::wait(full, parity);
    load_integers(reader, stage + at.words, fragments);
    constexpr int kParts = kEachUnit ? kUnits : 1;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      converter.template convert<kSteps / kParts>(stage + at.scales + part * scales_of_unit,
                                                  stage + at.zeros + part * zeros_of_unit,
                                                  fragments + part * (kSteps / kParts));
    }
    pin_all(fragments);
    const std::uint64_t x = cuda::depth_lines(stage);
    cuda::begin_products();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      cuda::multiply_add<T, kRows, cuda::Lines::depth>(sums, fragments[step], x + step * kNextStep);
    }
    cuda::commit_products();
    cuda::wait_products<1>();  // for those of the previous tile, so that its fragments may be overwritten
    pin_all(before);
    __syncwarp();
    if (leads && i > 0) {
      cuda::arrive(before_empty);
    }
    before_empty = full + P::kStages * 8;
    full += 8;
    stage += P::kStageBytes;
    if (full == first_full + P::kStages * 8) {
      full = first_full;
      stage = first_stage;
      parity ^= 1;
    }
  };
  Fragments even = {};
  Fragments odd = {};
  int i = 0;
#pragma unroll 1
  for (; i + 1 < b.tiles; i += 2) {  // in pairs, since a branch would make the compiler serialize the products
    multiply_tile(i, even, odd);
    multiply_tile(i + 1, odd, even);
  }
  if (i < b.tiles) {
    multiply_tile(i, even, odd);
  }
  cuda::wait_products<0>();
  cuda::pin(sums);
}

template <class T, int kBits, int kRows, class Converter>
__device__ void multiply(const ManyRowsProduct& a, const Block<kBits, kRows>& b, const Converter& converter,
                         const StageOffsets<kBits, kRows>& at, Sums<kRows>& sums) {
  if (a.group_shift == 5) {
    multiply_tiles<T, true>(a, b, converter, at, sums);
  } else {
    multiply_tiles<T, false>(a, b, converter, at, sums);
  }
}

/// Writes a thread's sums to shared memory as (kRows, kPitch).
template <int kBits, int kRows>
__device__ void write_sums(const StageOffsets<kBits, kRows>& at, const Sums<kRows>& sums, float* to) {
  to += 2 * at.pair * kPitch + at.column;
#pragma unroll
  for (int j = 0; j < kRows / 2; j += 4) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      *reinterpret_cast<float2*>(to + (j * 2 + e) * kPitch) = make_float2(sums[j + e], sums[j + 2 + e]);
    }
  }
}

/// Adds up the sums of all parts of K for the block's strip and rows, in a fixed order, and writes y. The blocks of a
/// cluster read each other's shared memory, and each adds every other group of rows. The sums of several clusters go
/// through global memory, and the cluster that finishes last adds them.
template <class T, int kBits, int kRows>
__device__ void finish(const ManyRowsProduct& a, const Block<kBits, kRows>& b, float* sums, volatile bool* is_last) {
  constexpr int kQuads = kStrip / 4;
  constexpr int kStep = kConsumerThreads / kQuads;  // rows per pass
  constexpr int kBatch = 4;                         // elements that a thread loads together
  const int splits = static_cast<int>(gridDim.x);
  const int split = static_cast<int>(blockIdx.x);
  const int in_cluster = blocks_of_cluster(splits);
  const int clusters = splits / in_cluster;
  const int own_cluster = split / in_cluster;
  const int thread = static_cast<int>(threadIdx.x);
  const int column = thread % kQuads * 4;
  const int rows = b.column + column < a.columns ? min(kRows, a.m - b.row) : 0;
  const int step = in_cluster * kStep;

  // Calls use(row, part(0, row) + … + part(count − 1, row)) for each of this thread's rows.
  const auto add = [&](int count, const auto& part, const auto& use) {
    for (int from = split % in_cluster * kStep + thread / kQuads; from < rows; from += kBatch * step) {
      float4 batch[kBatch] = {};
      for (int p = 0; p < count; ++p) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          batch[i] = plus(batch[i], part(p, from + i * step < rows ? from + i * step : from));
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
  const auto own = [&](int row) { return reinterpret_cast<float4*>(sums + row * kPitch + column); };
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
  add(in_cluster, of_block, [&](int row, float4 sum) {
    *partial(own_cluster, row) = sum;
    *own(row) = sum;  // only this thread reads it again
  });
  cuda::barrier_sync(1, kConsumerThreads);
  if (thread == 0) {
    cuda::wait_for_previous_kernel();  // which clears the counters
    const int block = static_cast<int>(blockIdx.z * gridDim.y + blockIdx.y);
    *is_last = cuda::exchange_add(&a.done[block * 2 + split % in_cluster], 1) == clusters - 1;
  }
  cuda::barrier_sync(1, kConsumerThreads);
  if (*is_last) {
    add(
        clusters,
        [&](int cluster, int row) { return cluster == own_cluster ? *own(row) : __ldcg(partial(cluster, row)); },
        store);
  }
}

#endif

/// Thread block (split, strip, i) multiplies kStrip columns of the weight, in a part of K, by the i-th kRows rows of x.
/// Two splits form a cluster.
template <class T, int kBits, int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    many_rows_tensor_kernel([[maybe_unused]] const __grid_constant__ ManyRowsProduct a,
                            [[maybe_unused]] const __grid_constant__ Maps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using P = BlockPlan<kBits, kRows>;
  extern __shared__ __align__(kAlignment) std::byte memory[];
  auto* const barriers = reinterpret_cast<std::uint64_t*>(memory + P::kMemory);
  const int splits = static_cast<int>(gridDim.x);
  const int split = static_cast<int>(blockIdx.x);
  const int first = a.tiles * split / splits;
  const Block<kBits, kRows> b{.memory = memory,
                              .full = barriers,
                              .empty = barriers + P::kStages,
                              .column = static_cast<int>(blockIdx.y) * kStrip,
                              .row = static_cast<int>(blockIdx.z) * kRows,
                              .first = first,
                              .tiles = a.tiles * (split + 1) / splits - first};
  constexpr int kReady = 2;  // the named barrier at which consumers wait until the mbarriers are initialized
  constexpr int kReadyThreads = kConsumerThreads + kWarp;
  if (threadIdx.x >= kConsumerThreads) {
    cuda::release_registers<kCopyRegisters>();
    const int thread = static_cast<int>(threadIdx.x) - kConsumerThreads;
    if (thread < kWarp) {
      if (thread == 0) {
        for (int i = 0; i < P::kStages; ++i) {
          cuda::init_barrier(&b.full[i], 1);
          cuda::init_barrier(&b.empty[i], kConsumerThreads / kWarp);
        }
        cuda::publish_barriers();
      }
      __syncwarp();
      cuda::barrier_arrive(kReady, kReadyThreads);
      if (thread == 0) {
        copy_all(a, maps, b);
      }
    }
  } else {
    cuda::acquire_registers<kConsumerRegisters>();
    // If there are no scales, or no zeros, fills in constants.
    const auto fill = [&](const FactorMatrix& factors, int at, float value) {
      if (!factors.each()) {
        for (int i = static_cast<int>(threadIdx.x); i < P::kStages * kStrip; i += kConsumerThreads) {
          auto* const to = reinterpret_cast<std::uint32_t*>(memory + i / kStrip * P::kStageBytes + at) + i % kStrip;
          *to = Pair<T>::of(value);
        }
      }
    };
    fill(a.grids.scale, P::kScalesAt, 1);
    fill(a.grids.zero, P::kZerosAt, a.grids.one_zero());
    cuda::barrier_sync(kReady, kReadyThreads);
    const StageOffsets<kBits, kRows> at(a);
    Sums<kRows> sums = {};
    if (PairConverter<T, kBits>::serves(a.grids)) {
      multiply<T>(a, b, PairConverter<T, kBits>(a.grids), at, sums);
    } else {
      multiply<T>(a, b, FloatConverter<T, kBits>(a.grids), at, sums);
    }
    auto* const shared_sums = reinterpret_cast<float*>(memory);
    cuda::barrier_sync(1, kConsumerThreads);  // all stages have been consumed
    write_sums(at, sums, shared_sums);
    cuda::arrive_in_cluster();
    cuda::wait_for_cluster();
    finish<T>(a, b, shared_sums, reinterpret_cast<bool*>(barriers + 2 * P::kStages));
    cuda::arrive_in_cluster_relaxed();  // a block must not exit while another one reads its shared memory
    cuda::wait_for_cluster();
  }
#endif
}

__global__ void __launch_bounds__(kSimpleThreads) clear_kernel(int* counters, int count) {
  cuda::allow_dependents();
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kSimpleThreads) {
    counters[i] = 0;
  }
}

// On the host.

/// The number of parts of K that is fastest according to a model, in units of the time of a tile. Its constants were
/// fitted to shapes from 1024 × 1024 to 14336 × 4096 on an H200.
int splits_for(std::int64_t blocks, int rows, int tiles) {
  constexpr int kOwnCost = 30;
  int best = 1;
  std::int64_t least = INT64_MAX;
  for (int splits = 1; splits <= std::min(kMaxSplits, tiles); ++splits) {
    const std::int64_t waves = (blocks * splits + kBlocksAtOnce - 1) / kBlocksAtOnce;
    const int clusters = splits / blocks_of_cluster(splits);
    const std::int64_t cost =
        waves * ((tiles + splits - 1) / splits + kOwnCost) + (clusters > 1 ? 8 + rows * clusters / 48 : 0);
    if (cost < least) {
      least = cost;
      best = splits;
    }
  }
  return best;
}

template <class T, int kBits, int kRows>
void launch(const Tensor& x, ManyRowsProduct a) {
  using P = BlockPlan<kBits, kRows>;
  const int blocks = (a.m + kRows - 1) / kRows;
  const int strips = (a.columns + kStrip - 1) / kStrip;
  const int splits = splits_for(std::int64_t{strips} * blocks, kRows, a.tiles);
  const int in_cluster = blocks_of_cluster(splits);
  const int clusters = splits / in_cluster;

  const Device device = x.device();
  const Tensor partials = clusters > 1 ? empty({clusters, a.m, a.columns}, float32, device) : Tensor{};
  const Tensor done = clusters > 1 ? empty({blocks, strips, 2}, int32, device) : Tensor{};
  if (clusters > 1) {
    a.partials = partials.data<float>();
    a.done = done.data<std::int32_t>();
    cuda::Launch(dim3(1), dim3(kSimpleThreads))
        .run(clear_kernel, "clear_kernel", a.done, static_cast<int>(done.numel()));
  }
  const int units = a.group_shift == 5 ? kUnits : 1;
  const auto map_of_factors = [&](const FactorMatrix& f) {
    return f.each() ? cuda::plain_tensor_map({.dtype = f.kind == FactorMatrix::kWide ? float32 : x.dtype(),
                                              .data = f.data,
                                              .lines = ((a.rows - 1) >> a.group_shift) + 1,
                                              .length = a.columns,
                                              .leading = a.columns,
                                              .box_lines = static_cast<std::uint32_t>(units),
                                              .box_length = kStrip})
                    : CUtensorMap{};
  };
  const Maps maps{.x = cuda::swizzled_tensor_map({.dtype = x.dtype(),
                                                  .data = x.raw_data(),
                                                  .lines = a.m,
                                                  .length = a.rows,
                                                  .leading = a.rows,
                                                  .box_lines = kRows,
                                                  .box_length = kTile}),
                  .words = cuda::plain_tensor_map({.dtype = int32,
                                                   .data = a.words,
                                                   .lines = a.rows / 32 * kBits,
                                                   .length = a.columns,
                                                   .leading = a.columns,
                                                   .box_lines = P::kWordRows,
                                                   .box_length = kStrip}),
                  .scales = map_of_factors(a.grids.scale),
                  .zeros = map_of_factors(a.grids.zero)};
  cuda::Launch grid(dim3(splits, strips, blocks), dim3(kThreads), P::kBytes);
  grid.cluster(in_cluster);
  if (clusters > 1) {
    grid.dependent();
  }
  grid.run(many_rows_tensor_kernel<T, kBits, kRows>, "many_rows_tensor_kernel", a, maps);
}

template <class T, int kBits>
void launch_for_rows(const Tensor& x, const ManyRowsProduct& a) {
  if (a.m <= 32) {
    launch<T, kBits, 32>(x, a);
  } else if (a.m <= 64) {
    launch<T, kBits, 64>(x, a);
  } else if (a.m <= 128) {
    launch<T, kBits, 128>(x, a);
  } else {
    launch<T, kBits, 256>(x, a);
  }
}

}  // namespace

bool multiply_many_rows(const Tensor& x, int bits, const Product& product) {
  constexpr int kMaxRows = 2048;  // for more, dequantizing the weight once for all rows is faster
  if (!cuda::device_has_wgmma() || product.m > kMaxRows) {
    return false;
  }
  ManyRowsProduct work{product};
  work.tiles = (product.rows + kTile - 1) / kTile;
  on_dtype(Types<Float16, BFloat16>{}, x.dtype(), "quantized_matmul",
           [&]<class T>() { quantized::on_bits(bits, [&]<int kBits>() { launch_for_rows<T, kBits>(x, work); }); });
  return true;
}

}  // namespace mica::kernels::quantized_cuda
