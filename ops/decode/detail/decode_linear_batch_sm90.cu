// Products of 9 to 32 rows with one to three weights side by side, by wgmma. The weight is its first operand, 64
// outputs at a time; the rows of x are its second. The time is that of reading the weights and of waiting, so the copy
// engine starts to load them before the previous kernel has ended.
//
//     block: 64 outputs (SwiGLU: 32 of gate and the same 32 of up) and a part of the terms
//
//         pieces of 64 terms:     | w 64 x 64, x 32 x 64 | w, x | w, x | ...      a ring of 8 stages
//         first, without waiting:   w                      w      w    ...
//         then:                          x                     x      x
//                                         |
//         consumers: x times the norm's weight, in place, and the sums of squares; then the products, which run while
//         the next piece is prepared
//                                         |
//         blocks of a cluster have the same outputs and other terms; each adds up some rows of all blocks' sums, in
//         their order, divides by the root mean square, adds bias and residual, and writes them
//
// The number of blocks depends on the shape alone, and so does the order of sums.

#include <algorithm>

#include <mica/core/cuda/launch.h>
#include <mica/core/cuda/pack.cuh>
#include <mica/core/cuda/reduce.cuh>
#include <mica/core/cuda/ring.cuh>
#include <mica/core/cuda/tensor_copy.cuh>
#include <mica/core/cuda/wgmma.cuh>
#include <mica/ops/decode/detail/decode_kernels.h>

namespace mica::kernels {

namespace {

using cuda::Lines;

constexpr int kWarp = 32;
constexpr int kConsumers = 128;  // threads: a warpgroup
constexpr int kThreads = kConsumers + kWarp;
constexpr int kOutputs = 64;  // rows of a piece of the weight
constexpr int kTerms = 64;    // of a piece: lines of 128 bytes
constexpr int kLineBytes = 128;
constexpr int kPacks = 8;  // of 16 bytes in a line
constexpr int kPackTerms = 8;
constexpr int kStages = 8;
constexpr int kMostBlocks = 8;         // of a cluster
constexpr int kStride = kOutputs + 4;  // of sums in shared memory, so that lanes use different banks
constexpr int kEnoughBlocks = 192;

struct Part {
  int first_column;
  const void* bias;  // or null
};

struct Arguments {
  CUtensorMap x;
  CUtensorMap weights[kMostDecodeWeights];
  Part parts[kMostDecodeWeights];
  int part_count;
  const void* norm;      // or null
  const void* residual;  // or null
  void* y;
  int rows;
  int columns;  // of y
  int depth;
  int pieces;  // of a block
  int blocks;  // of a cluster
  float eps;
};

template <int kRows>
struct Shared {
  unsigned char w[kStages][kOutputs * kLineBytes];
  unsigned char x[kStages][kRows * kLineBytes];
  float sums[kRows][kStride];  // of this block's terms
  float squares[kRows];
  std::uint64_t full[kStages];
  std::uint64_t empty[kStages];
};

// A block's part of the work.
template <bool kSwiglu>
struct Place {
  int rank;    // in the cluster
  int column;  // of y
  int part;

  __device__ explicit Place(const Arguments& a)
      : rank(static_cast<int>(blockIdx.x) % a.blocks),
        column(static_cast<int>(blockIdx.x) / a.blocks * (kSwiglu ? kOutputs / 2 : kOutputs)),
        part(0) {
    while (!kSwiglu && part + 1 < a.part_count && column >= a.parts[part + 1].first_column) {
      ++part;
    }
  }
  __device__ int term(const Arguments& a, int piece) const { return (rank * a.pieces + piece) * kTerms; }
};

// One thread starts all copies.
template <int kRows, bool kSwiglu>
__device__ void produce(Shared<kRows>& s, const Arguments& a, const Place<kSwiglu>& place) {
  constexpr int kBytes = (kOutputs + kRows) * kLineBytes;
  const auto load_weights = [&](int piece, int stage) {
    const int term = place.term(a, piece);
    if constexpr (kSwiglu) {
      constexpr int kHalf = kOutputs / 2;
      cuda::load_tile(s.w[stage], &a.weights[0], term, place.column, &s.full[stage]);
      cuda::load_tile(s.w[stage] + kHalf * kLineBytes, &a.weights[1], term, place.column, &s.full[stage]);
    } else {
      cuda::load_tile(s.w[stage], &a.weights[place.part], term, place.column - a.parts[place.part].first_column,
                      &s.full[stage]);
    }
  };
  const auto load_x = [&](int piece, int stage) {
    cuda::load_tile(s.x[stage], &a.x, place.term(a, piece), 0, &s.full[stage]);
  };
  const int first = min(a.pieces, kStages);
  for (int piece = 0; piece < first; ++piece) {
    cuda::arrive_expecting(&s.full[piece], kBytes);
    load_weights(piece, piece);
  }
  cuda::wait_for_previous_kernel();
  for (int piece = 0; piece < first; ++piece) {
    load_x(piece, piece);
  }
  cuda::Ring<kStages> ring;
  for (int piece = first; piece < a.pieces; ++piece, ring.advance()) {
    cuda::wait(&s.empty[ring.stage], ring.parity);
    cuda::arrive_expecting(&s.full[ring.stage], kBytes);
    load_weights(piece, ring.stage);
    load_x(piece, ring.stage);
  }
}

// Multiplies a piece of x by the norm's weight. Adds the squares of a thread's rows, of which it has every 16th.
template <class T, int kRows>
__device__ void scale(unsigned char (&x)[kRows * kLineBytes], const cuda::Pack<T, kPackTerms>& norm,
                      float (&squares)[kRows / 16]) {
  float factors[kPackTerms];
  cuda::unpack(norm, factors);
#pragma unroll
  for (int i = 0; i < kRows / 16; ++i) {
    auto* const at = reinterpret_cast<T*>(x + (static_cast<int>(threadIdx.x) + i * kConsumers) * 16);
    float values[kPackTerms];
    cuda::unpack(cuda::load<kPackTerms>(at), values);
#pragma unroll
    for (int j = 0; j < kPackTerms; ++j) {
      squares[i] += values[j] * values[j];
      values[j] *= factors[j];
    }
    cuda::store(at, cuda::pack_of<T>(values));
  }
}

// The sums of this block's terms, to shared memory.
template <class T, int kRows, bool kNorm, bool kSwiglu>
__device__ void consume(Shared<kRows>& s, const Arguments& a, const Place<kSwiglu>& place) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarp;
  // Of each line, a thread has the pack that the swizzle puts at one place; lines 16 apart have the same.
  const int pack = (thread % kPacks) ^ (thread / kPacks % kPacks);
  float sums[kRows / 2];
  float squares[kRows / 16] = {};
  cuda::Ring<kStages> ring;
  int last = 0;
  const auto release = [&](int stage) {  // by each warp: others may still multiply
    if (lane == 0) {
      cuda::arrive(&s.empty[stage]);
    }
  };
  const auto norm_of = [&](int piece) {
    return cuda::load<kPackTerms>(static_cast<const T*>(a.norm) + place.term(a, piece) + pack * kPackTerms);
  };
  cuda::Pack<T, kPackTerms> norm = {};
  if constexpr (kNorm) {
    norm = norm_of(0);
  }
  for (int piece = 0; piece < a.pieces; ++piece, ring.advance()) {
    const cuda::Pack<T, kPackTerms> factors = norm;
    if constexpr (kNorm) {
      norm = norm_of(min(piece + 1, a.pieces - 1));
    }
    cuda::wait(&s.full[ring.stage], ring.parity);
    if constexpr (kNorm) {
      scale<T, kRows>(s.x[ring.stage], factors, squares);
      cuda::fence_async_proxy();
      cuda::barrier_sync(1, kConsumers);
    }
    std::uint64_t w = cuda::depth_lines(s.w[ring.stage]);
    std::uint64_t x = cuda::depth_lines(s.x[ring.stage]);
    cuda::begin_products();
#pragma unroll
    for (int k = 0; k < kTerms; k += 16) {
      cuda::multiply_add<T, kRows, Lines::depth, Lines::depth>(sums, w, x, piece > 0 || k > 0);
      w += cuda::kNextDepth<Lines::depth>;
      x += cuda::kNextDepth<Lines::depth>;
    }
    cuda::commit_products();
    if (piece > 0) {
      cuda::wait_products<1>();
      release(last);
    }
    last = ring.stage;
  }
  cuda::wait_products<0>();
  cuda::pin(sums);
  const int output = thread / kWarp * 16 + lane / 4;
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s.sums[8 * j + lane % 4 * 2 + i % 2][output + i / 2 * 8] = sums[4 * j + i];
    }
  }
  if constexpr (kNorm) {
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) {
      const float of_row = cuda::sum_lanes<kPacks>(squares[i]);
      if (thread % kPacks == 0) {
        s.squares[thread / kPacks + 16 * i] = of_row;
      }
    }
  }
}

// The sum over the cluster's blocks, in their order.
__device__ inline float sum_of_blocks(const float* p, int blocks) {
  float parts[kMostBlocks];
#pragma unroll
  for (int block = 0; block < kMostBlocks; ++block) {
    parts[block] = block < blocks ? cuda::load_from_block(p, block) : 0;
  }
  float sum = parts[0];
#pragma unroll
  for (int block = 1; block < kMostBlocks; ++block) {
    sum += parts[block];
  }
  return sum;
}

template <class T>
__device__ float element(const void* data, std::int64_t at) {
  return data == nullptr ? 0.0f : static_cast<float>(static_cast<const T*>(data)[at]);
}

// Writes this block's share of the rows, by the consumers: racecheck takes their barrier in front of the products for
// one of all threads, and would report what others read. kAlone: there are no other blocks.
template <class T, int kRows, bool kNorm, bool kSwiglu, bool kAlone>
__device__ void write_out(const Shared<kRows>& s, const Arguments& a, const Place<kSwiglu>& place) {
  constexpr int kColumns = kSwiglu ? kOutputs / 2 : kOutputs;
  const int rows = kRows / a.blocks;
  const Part& part = a.parts[place.part];
  const auto sum_of = [&](const float* p) { return kAlone ? *p : sum_of_blocks(p, a.blocks); };
  for (int i = static_cast<int>(threadIdx.x); i < rows * kColumns; i += kConsumers) {
    const int row = place.rank * rows + i / kColumns;
    const int column = i % kColumns;
    if (row >= a.rows) {
      return;
    }
    float factor = 1;
    if constexpr (kNorm) {
      factor = rsqrtf(sum_of(&s.squares[row]) / static_cast<float>(a.depth) + a.eps);
    }
    const int at_part = place.column + column - part.first_column;
    const std::int64_t at = static_cast<std::int64_t>(row) * a.columns + place.column + column;
    const float residual = element<T>(a.residual, at);
    float value = sum_of(&s.sums[row][column]) * factor + element<T>(part.bias, at_part);
    if constexpr (kSwiglu) {
      const float up = sum_of(&s.sums[row][kColumns + column]) * factor + element<T>(a.parts[1].bias, at_part);
      value = value / (1 + __expf(-value)) * up;
    }
    static_cast<T*>(a.y)[at] = static_cast<T>(value + residual);
  }
}

template <class T, int kRows, bool kNorm, bool kSwiglu>
__global__ void __launch_bounds__(kThreads) decode_linear_batch_kernel(const __grid_constant__ Arguments a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<kRows>*>(memory);
  const Place<kSwiglu> place(a);
  if (threadIdx.x == kConsumers) {
    for (int stage = 0; stage < kStages; ++stage) {
      cuda::init_barrier(&shared.full[stage], 1);
      cuda::init_barrier(&shared.empty[stage], kConsumers / kWarp);
    }
    cuda::publish_barriers();
  }
  cuda::allow_dependents();
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    if (threadIdx.x == kConsumers) {
      produce<kRows, kSwiglu>(shared, a, place);
    }
    __syncwarp();
  } else {
    consume<T, kRows, kNorm, kSwiglu>(shared, a, place);
  }
  cuda::wait_for_previous_kernel();  // it may still write the residual
  cuda::arrive_in_cluster();
  cuda::wait_for_cluster();
  if (threadIdx.x < kConsumers) {
    if (a.blocks == 1) {
      write_out<T, kRows, kNorm, kSwiglu, true>(shared, a, place);
    } else {
      write_out<T, kRows, kNorm, kSwiglu, false>(shared, a, place);
    }
  }
  // Others may still read this block's sums.
  cuda::arrive_in_cluster();
  cuda::wait_for_cluster();
#endif
}

CUtensorMap map_of(const Tensor& matrix, int box_lines) {
  return cuda::swizzled_tensor_map({.dtype = matrix.dtype(),
                                    .data = matrix.raw_data(),
                                    .lines = matrix.size(0),
                                    .length = matrix.size(1),
                                    .leading = matrix.size(1),
                                    .box_lines = static_cast<std::uint32_t>(box_lines),
                                    .box_length = kTerms});
}

// So many blocks share the terms of an output: as many as find a multiprocessor.
int blocks_of_cluster(std::int64_t tiles, std::int64_t pieces, int rows) {
  int blocks = 1;
  while (2 * blocks <= std::min(kMostBlocks, rows) && pieces % (2 * blocks) == 0 &&
         2 * blocks * tiles <= kEnoughBlocks) {
    blocks *= 2;
  }
  return blocks;
}

template <class T, int kRows, bool kNorm, bool kSwiglu>
void launch(const DecodeLinearArgs& args) {
  constexpr int kColumns = kSwiglu ? kOutputs / 2 : kOutputs;
  const DecodeLinearOptions& options = args.options;
  const std::int64_t tiles = args.y.size(1) / kColumns;
  const std::int64_t pieces = args.x.size(1) / kTerms;
  const int blocks = blocks_of_cluster(tiles, pieces, kRows);
  Arguments a{.x = map_of(args.x, kRows),
              .weights = {},
              .parts = {},
              .part_count = static_cast<int>(args.weights.size()),
              .norm = kNorm ? options.norm_weight.raw_data() : nullptr,
              .residual = options.residual.defined() ? options.residual.raw_data() : nullptr,
              .y = args.y.raw_data(),
              .rows = static_cast<int>(args.x.size(0)),
              .columns = static_cast<int>(args.y.size(1)),
              .depth = static_cast<int>(args.x.size(1)),
              .pieces = static_cast<int>(pieces) / blocks,
              .blocks = blocks,
              .eps = static_cast<float>(options.eps)};
  std::int64_t column = 0;
  for (int i = 0; i < a.part_count; ++i) {
    const DecodeWeight& w = args.weights[static_cast<std::size_t>(i)];
    a.weights[i] = map_of(w.matrix, kColumns);
    a.parts[i] = {.first_column = kSwiglu ? 0 : static_cast<int>(column),
                  .bias = w.bias.defined() ? w.bias.raw_data() : nullptr};
    column += w.out();
  }
  cuda::Launch(static_cast<unsigned>(tiles * blocks), kThreads, sizeof(Shared<kRows>))
      .cluster(dim3(static_cast<unsigned>(blocks)))
      .dependent()
      .run(decode_linear_batch_kernel<T, kRows, kNorm, kSwiglu>, "decode_linear_batch_kernel", a);
}

}  // namespace

void decode_linear_batch(Cuda, const DecodeLinearArgs& args) {
  on_dtype(Types<Half, BFloat16>{}, args.x.dtype(), "decode_linear", [&]<class T>() {
    const auto with_rows = [&]<int kRows>() {
      const bool norm = args.options.norm_weight.defined();
      if (args.options.swiglu) {
        norm ? launch<T, kRows, true, true>(args) : launch<T, kRows, false, true>(args);
      } else {
        norm ? launch<T, kRows, true, false>(args) : launch<T, kRows, false, false>(args);
      }
    };
    args.x.size(0) <= 16 ? with_rows.template operator()<16>() : with_rows.template operator()<32>();
  });
}

}  // namespace mica::kernels
