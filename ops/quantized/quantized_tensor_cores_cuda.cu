// Products with a quantized weight on tensor cores: which of the two kernels takes one, and that for at most 16 rows of
// x. It is there to keep memory busy with the weight: each warp has 32 columns, whose words of the next 128 rows are on
// their way to its registers while it multiplies by those that have come. Nothing but x goes through shared memory, and
// nobody waits for anybody until all is multiplied.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include <mica/core/cuda/device.h>
#include <mica/core/cuda/launch.h>
#include <mica/core/cuda/mma.cuh>
#include <mica/core/cuda/ptx.cuh>
#include <mica/ops/quantized/fragments_cuda.cuh>
#include <mica/ops/quantized/quantized_cuda.cuh>
#include <mica/ops/quantized/tensor_cores_cuda.cuh>

namespace mica::kernels::quantized_cuda {

namespace {

constexpr int kWarp = 32;
constexpr int kAcross = 4;  // warps of a block that take neighboring columns
constexpr int kAlong = 2;   // … and that take turns along K
constexpr int kThreads = kAcross * kAlong * kWarp;
constexpr int kWarpStrip = 32;  // columns of a warp: 8 times the 4 neighbors of a thread
constexpr int kStrip = kAcross * kWarpStrip;
constexpr int kUnit = 32;  // rows of the weight that lie in one group; a thread has 8 of them in a column
constexpr int kUnits = 4;  // of a chunk, for which a warp loads words at once
constexpr int kChunk = kUnits * kUnit;
constexpr int kOctets = kChunk / 8;
constexpr int kPitch = kStrip + 4;      // floats between rows of sums in shared memory: no bank conflicts
constexpr int kEnoughBlocks = 264;      // a constant, so that sums do not depend on the chip
constexpr int kMostSplits = 8;          // blocks of a cluster, which share the columns of a strip
constexpr int kMostShared = 110 << 10;  // bytes of a block, of which two have room

/// Where things lie in a block's shared memory.
struct Layout {
  int chunks;  // of the block, at most
  int rows;    // of x, a multiple of 8

  __host__ __device__ int x_pitch() const { return chunks * kChunk * 2 + 64; }  // bytes; no bank conflicts
  __host__ __device__ int x_sums_at() const { return rows * x_pitch(); }
  __host__ __device__ int sums_at() const { return x_sums_at() + chunks * kUnits * rows * 4; }
  __host__ __device__ int bytes() const { return sums_at() + kAlong * rows * kPitch * 4; }
};

/// A thread's place in the weight. Threads past the last column take it again, and units past the last one have an x of
/// zeros: whatever they compute goes nowhere.
struct Place {
  int octet;   // of each unit
  int column;  // the first of four
  int last;    // unit
  const std::uint32_t* words;

  __device__ Place(const Product& a, int column, int octet, int row)
      : octet(octet),
        column(min(column, a.columns - 4)),
        last(a.rows / kUnit - 1),
        words(a.words + std::int64_t{row} * a.columns + this->column) {}

  __device__ int factor(const Product& a, int unit) const {
    return (min(unit, last) * kUnit >> a.group_shift) * a.columns + column;
  }
};

/// Words of a thread's four columns in a chunk, and what their groups have.
template <int kBits, int kRun>
struct Chunk {
  uint4 words[kUnits][kWordsEach<kBits>];
  uint2 scales[kUnits / kRun];
  uint2 zeros[kUnits / kRun];

  __device__ void load(const Product& a, const Place& at, int chunk) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const std::int64_t row = min(chunk * kUnits + u, at.last) * kBits;
#pragma unroll
      for (int i = 0; i < kWordsEach<kBits>; ++i) {
        words[u][i] = load_words(at.words + (row + i) * a.columns);
      }
    }
#pragma unroll
    for (int i = 0; i < kUnits / kRun; ++i) {
      const int factor = at.factor(a, chunk * kUnits + i * kRun);
      if (a.grids.scale.kind == FactorMatrix::kNarrow) {
        scales[i] = *reinterpret_cast<const uint2*>(static_cast<const std::uint16_t*>(a.grids.scale.data) + factor);
      }
      if (a.grids.zero.kind == FactorMatrix::kNarrow) {
        zeros[i] = *reinterpret_cast<const uint2*>(static_cast<const std::uint16_t*>(a.grids.zero.data) + factor);
      }
    }
  }

 private:
  __device__ static uint4 load_words(const std::uint32_t* from) {
    uint4 to;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
                 : "l"(from));
    return to;
  }
};

/// Scales or zeros of a thread's columns.
template <class T>
__device__ void unpack_factors(const FactorMatrix& factors, uint2 narrow, int at, float absent, float (&to)[4]) {
  if (factors.kind == FactorMatrix::kNarrow) {
    const float2 low = to_floats<T>(narrow.x);
    const float2 high = to_floats<T>(narrow.y);
    to[0] = low.x;
    to[1] = low.y;
    to[2] = high.x;
    to[3] = high.y;
  } else if (factors.kind == FactorMatrix::kWide) {
    const float4 four = *reinterpret_cast<const float4*>(static_cast<const float*>(factors.data) + at);
    to[0] = four.x;
    to[1] = four.y;
    to[2] = four.z;
    to[3] = four.w;
  } else {
    to[0] = to[1] = to[2] = to[3] = absent;
  }
}

/// The block's part of x to shared memory, in the order of the fragments, and its sums over the units of a run. Zeros
/// past its ends.
template <class T, int kRun>
__device__ void load_x(const Product& a, const T* x, int first_chunk, const Layout& layout, std::byte* memory) {
  const int octets = layout.chunks * kOctets;
  // A multiple of 128, so that whole warps take part.
  for (int i = threadIdx.x; i < layout.rows * octets; i += kThreads) {
    const int row = i / octets;
    const int octet = i % octets;
    const int k = first_chunk * kChunk + octet * 8;
    uint4 in = {};
    if (row < a.m && k < a.rows) {
      in = *reinterpret_cast<const uint4*>(x + std::int64_t{row} * a.rows + k);
    }
    // Pair c is of members c and c + 4.
    *reinterpret_cast<uint4*>(memory + row * layout.x_pitch() + octet * 16) =
        make_uint4(bytes_of(in.x, in.z, 0x5410), bytes_of(in.x, in.z, 0x7632), bytes_of(in.y, in.w, 0x5410),
                   bytes_of(in.y, in.w, 0x7632));
    float sum = 0;
    for (const std::uint32_t pair : {in.x, in.y, in.z, in.w}) {
      const float2 two = to_floats<T>(pair);
      sum += two.x + two.y;
    }
#pragma unroll
    for (int mask = 1; mask < 4 * kRun; mask *= 2) {
      sum += __shfl_xor_sync(0xffffffff, sum, mask);
    }
    if (octet % (4 * kRun) == 0) {
      reinterpret_cast<float*>(memory + layout.x_sums_at())[octet / (4 * kRun) * layout.rows + row] = sum;
    }
  }
}

/// Where a thread finds its own in shared memory: of the block's first chunk.
struct Shared {
  const std::byte* x;
  const std::byte* x_sums;
  int tile_step;  // from one tile of 8 rows of x to the next

  __device__ Shared(const Layout& layout, const std::byte* memory, int lane)
      : x(memory + lane / 4 * layout.x_pitch() + lane % 4 * 16),
        x_sums(memory + layout.x_sums_at() + lane % 4 * 8),
        tile_step(8 * layout.x_pitch()) {}
};

/// sums += the products of a chunk: those of the integers, scaled, and those of the offset, which meets the sums of x.
template <class T, int kBits, int kTiles, int kRun>
__device__ void add_chunk(const Product& a, const Place& at, int chunk, int in_block, float one_zero,
                          const Chunk<kBits, kRun>& own, const Shared& shared, float (&sums)[kTiles][2][4]) {
  float of_run[kTiles][2][4] = {};
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    Octets<kBits, 4> octets;
#pragma unroll
    for (int i = 0; i < kWordsEach<kBits>; ++i) {
      octets.words[0][i] = spread<kBits>(own.words[u][i].x, at.octet);
      octets.words[1][i] = spread<kBits>(own.words[u][i].y, at.octet);
      octets.words[2][i] = spread<kBits>(own.words[u][i].z, at.octet);
      octets.words[3][i] = spread<kBits>(own.words[u][i].w, at.octet);
    }
    uint4 x[kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      x[tile] =
          *reinterpret_cast<const uint4*>(shared.x + tile * shared.tile_step + in_block * (kOctets * 16) + u * 64);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        std::uint32_t fragment[4];
        octets.template get<T>(half, step, fragment);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          cuda::multiply_add_16_8_16<T>(of_run[tile][half], fragment, step == 0 ? x[tile].x : x[tile].z,
                                        step == 0 ? x[tile].y : x[tile].w);
        }
      }
    }
    if ((u + 1) % kRun == 0) {
      constexpr int kRuns = kUnits / kRun;
      const int run = u / kRun;
      const int factor = at.factor(a, chunk * kUnits + run * kRun);
      float scale[4];
      float zero[4];
      unpack_factors<T>(a.grids.scale, own.scales[run], factor, 1, scale);
      unpack_factors<T>(a.grids.zero, own.zeros[run], factor, one_zero, zero);
#pragma unroll
      for (int c = 0; c < 4; ++c) {  // zero becomes the offset
        zero[c] = a.grids.adds ? fmaf(-kAdded<T, kBits>, scale[c], zero[c]) : (-kAdded<T, kBits> - zero[c]) * scale[c];
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const float2 x_sums =
            *reinterpret_cast<const float2*>(shared.x_sums + ((in_block * kRuns + run) * (kTiles * 8) + tile * 8) * 4);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            float& sum = sums[tile][c / 2][c % 2 * 2 + r];
            float& part = of_run[tile][c / 2][c % 2 * 2 + r];
            sum = fmaf(scale[c], part, fmaf(zero[c], r == 0 ? x_sums.x : x_sums.y, sum));
            part = 0;
          }
        }
      }
    }
  }
}

/// Blocks that a multiprocessor has room for: two where nothing is spilled then.
template <class T, int kBits, int kTiles, int kRun>
constexpr int kLeastBlocks = kBits == 8 || kRun == 1 || (kTiles == 2 && (kBits < 4 || std::is_same_v<T, Half>)) ? 1 : 2;

/// A cluster has the columns of a strip, each of its blocks a part of K.
template <class T, int kBits, int kTiles, int kRun>
__global__ void __launch_bounds__(kThreads, (kLeastBlocks<T, kBits, kTiles, kRun>))
    few_rows_tensor_kernel([[maybe_unused]] const Product a, [[maybe_unused]] const T* x,
                           [[maybe_unused]] const Layout layout) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) std::byte memory[];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int splits = static_cast<int>(gridDim.x);
  const int split = static_cast<int>(blockIdx.x);
  const int chunks = (a.rows + kChunk - 1) / kChunk;
  const int first = static_cast<int>(std::int64_t{chunks} * split / splits);
  const int end = static_cast<int>(std::int64_t{chunks} * (split + 1) / splits);
  const int strip = static_cast<int>(blockIdx.y) * kStrip;
  const int in_strip = warp % kAcross * kWarpStrip + lane / 4 * 4;
  const Place at(a, strip + in_strip, lane % 4, lane % 4 * kBits / 4);
  const Shared shared(layout, memory, lane);
  const float one_zero = a.grids.zero.kind == FactorMatrix::kOne ? *static_cast<const float*>(a.grids.zero.data) : 0;

  float sums[kTiles][2][4] = {};
  int chunk = first + warp / kAcross;
  Chunk<kBits, kRun> even = {};
  Chunk<kBits, kRun> odd = {};
  const auto load = [&](Chunk<kBits, kRun>& to, int number) {
    if (number < end) {
      to.load(a, at, number);
    }
  };
  load(even, chunk);
  load_x<T, kRun>(a, x, first, layout, memory);
  __syncthreads();
  // One is used while the other is on its way.
#pragma unroll 1
  for (; chunk < end; chunk += 2 * kAlong) {
    load(odd, chunk + kAlong);
    add_chunk<T, kBits, kTiles, kRun>(a, at, chunk, chunk - first, one_zero, even, shared, sums);
    load(even, chunk + 2 * kAlong);
    if (chunk + kAlong < end) {
      add_chunk<T, kBits, kTiles, kRun>(a, at, chunk + kAlong, chunk + kAlong - first, one_zero, odd, shared, sums);
    }
  }

  auto* const shared_sums = reinterpret_cast<float*>(memory + layout.sums_at());  // (kAlong, rows, kPitch)
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = warp / kAcross * layout.rows + tile * 8 + 2 * at.octet + r;
      *reinterpret_cast<float4*>(shared_sums + row * kPitch + in_strip) =
          make_float4(sums[tile][0][r], sums[tile][0][2 + r], sums[tile][1][r], sums[tile][1][2 + r]);
    }
  }
  cuda::arrive_in_cluster();
  cuda::wait_for_cluster();
  // Each block finishes some elements. All parts are added in the order of blocks and warps.
  constexpr int kQuads = kStrip / 4;
  for (int i = static_cast<int>(threadIdx.x) * splits + split; i < a.m * kQuads; i += kThreads * splits) {
    const int row = i / kQuads;
    const int quad = i % kQuads * 4;
    if (strip + quad < a.columns) {
      float sum[4] = {};
      for (int from = 0; from < splits; ++from) {
#pragma unroll
        for (int along = 0; along < kAlong; ++along) {
          const float* const part = shared_sums + (along * layout.rows + row) * kPitch + quad;
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            sum[c] += cuda::load_from_block(part + c, from);
          }
        }
      }
      store_row<T>(a, row, strip + quad, make_float4(sum[0], sum[1], sum[2], sum[3]));
    }
  }
  cuda::arrive_in_cluster();  // nobody reads from a block that has ended
  cuda::wait_for_cluster();
#endif
}

// On the host.

template <class T, int kBits, int kTiles, int kRun>
bool launch(const Product& a, const T* x) {
  const int strips = (a.columns + kStrip - 1) / kStrip;
  const int chunks = (a.rows + kChunk - 1) / kChunk;
  const int splits = std::clamp(kEnoughBlocks / strips, 1, std::min(kMostSplits, std::max(1, chunks / kAlong)));
  const Layout layout{.chunks = (chunks + splits - 1) / splits, .rows = 8 * kTiles};
  if (layout.bytes() > kMostShared) {
    return false;
  }
  const auto kernel = few_rows_tensor_kernel<T, kBits, kTiles, kRun>;
  cuda::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, layout.bytes()),
              "cudaFuncSetAttribute");
  cuda::Launch(dim3(splits, strips), dim3(kThreads), layout.bytes())
      .cluster(splits)
      .run(kernel, "few_rows_tensor_kernel", a, x, layout);
  return true;
}

bool multiply_few_rows(const QuantizedMatmulForward& args, const Product& a) {
  bool done = false;
  on_dtype(Types<Half, BFloat16>{}, args.x.dtype(), "quantized_matmul", [&]<class T>() {
    const T* const x = args.x.data<T>();
    quantized::on_bits(args.weight.bits, [&]<int kBits>() {
      const auto with_run = [&]<int kRun>() {
        done = a.m <= 8 ? launch<T, kBits, 1, kRun>(a, x) : launch<T, kBits, 2, kRun>(a, x);
      };
      if (a.group_shift == 5) {
        with_run.template operator()<1>();
      } else if (a.group_shift == 6) {
        with_run.template operator()<2>();
      } else {
        with_run.template operator()<4>();
      }
    });
  });
  return done;
}

bool aligned(const Tensor& x) {
  return !x.defined() || x.dim() == 0 || reinterpret_cast<std::uintptr_t>(x.raw_data()) % 16 == 0;
}

// Of what the kernels read: a number is a float32.
Tensor readable(const Tensor& x, DType dtype) {
  return x.defined() && (x.dim() == 0 || x.dtype() != dtype) ? converted(x, float32) : x;
}

}  // namespace

bool multiply_on_tensor_cores(const QuantizedMatmulForward& args) {
  constexpr std::int64_t kFewRows = 16;
  const QuantizedWeight& weight = args.weight;
  const DType dtype = args.x.dtype();
  const std::int64_t m = args.x.size(0);
  if ((dtype != float16 && dtype != bfloat16) || !cuda::device_has_clusters() || weight.rows % kUnit != 0 ||
      weight.columns() % 8 != 0 || weight.rows / kUnit * weight.columns() > INT32_MAX || m >= 1 << 16 ||
      weight.rows >= 1 << 24 || weight.columns() >= 1 << 22 || !aligned(args.x) || !aligned(args.y) ||
      !aligned(weight.packed) || !aligned(weight.scale) || !aligned(weight.zero)) {
    return false;
  }
  const Tensor scale = readable(weight.scale, dtype);
  const Tensor zero = readable(weight.zero, dtype);
  int group_shift = 31;
  for (const int shift : {5, 6, 7}) {
    group_shift = weight.group_size == 1 << shift ? shift : group_shift;
  }
  const Product product{.words = reinterpret_cast<const std::uint32_t*>(weight.packed.data<std::int32_t>()),
                        .grids = {.scale = FactorMatrix(scale),
                                  .zero = FactorMatrix(zero),
                                  .adds = weight.mode == QuantizationMode::fused_multiply_add},
                        .columns = static_cast<int>(weight.columns()),
                        .rows = static_cast<int>(weight.rows),
                        .group_shift = group_shift,
                        .m = static_cast<int>(m),
                        .y = args.y.raw_data(),
                        .row_factors = Numbers<float>(args.rows).data,
                        .column_factors = Numbers<float>(args.columns).data};
  return (m <= kFewRows && multiply_few_rows(args, product)) || multiply_many_rows(args, product);
}

}  // namespace mica::kernels::quantized_cuda
