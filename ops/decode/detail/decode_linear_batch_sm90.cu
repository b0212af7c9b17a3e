// Products of 9 to 32 rows with one to three weights side by side, by wgmma. The weight is its first operand, 64
// outputs at a time; the rows of x are its second. The time is that of reading the weights and of waiting, so the copy
// engine starts to load them before the previous kernel has ended.
//
//     block: 64 outputs (SwiGLU: 32 of gate and the same 32 of up) and a part of the terms
//
//         pieces of 64 terms:     | w 64 x 64, x 32 x 64 | w, x | w, x | ...      a ring of stages
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
#include <mica/core/cuda/reduce.cuh>
#include <mica/ops/decode/detail/decode_linear_pieces.cuh>

namespace mica::kernels {

namespace batch {

using namespace pieces;

namespace {

constexpr int kThreads = kWarpgroup + kWarp;
constexpr int kMostStages = 6;  // two blocks, or one and one of the kernel for many outputs, fit a multiprocessor
constexpr int kMostBlocks = 8;  // of a cluster
constexpr int kEnoughBlocks = 192;

struct Arguments {
  Operands operands;
  int pieces;  // of a block
  int blocks;  // of a cluster
  int stages;
};

template <int kRows>
struct Shared {
  float sums[kRows][kStride];   // of this block's terms; in column kOutputs, the row's squares
  float parts[kRows][kStride];  // the same of all blocks of the cluster, one after the other, for this block's rows
  alignas(16) unsigned char norm[kMostStages][kLineBytes];
  std::uint64_t full[kMostStages];
  std::uint64_t empty[kMostStages];
  std::uint64_t received;
};

// A block's memory: its stages of the weight and of x, no more than it has pieces, so that more kernels' blocks find
// room on a multiprocessor; then the rest.
template <int kRows>
struct Memory {
  static constexpr int kInputBytes = kRows * kLineBytes;
  unsigned char* first;
  int stages;

  __device__ unsigned char* w(int stage) const { return first + stage * kWeightBytes; }
  __device__ unsigned char* x(int stage) const { return w(stages) + stage * kInputBytes; }
  __device__ Shared<kRows>& rest() const { return *reinterpret_cast<Shared<kRows>*>(x(stages)); }
  static std::size_t bytes(int stages) {
    return static_cast<std::size_t>(stages) * (kWeightBytes + kInputBytes) + sizeof(Shared<kRows>);
  }
};

// A block's part of the work.
template <bool kSwiglu>
struct Share : Place<kSwiglu> {
  int rank;  // in the cluster

  __device__ explicit Share(const Arguments& a)
      : Place<kSwiglu>(a.operands, static_cast<int>(blockIdx.x) / a.blocks),
        rank(static_cast<int>(blockIdx.x) % a.blocks) {}
  __device__ int term(const Arguments& a, int piece) const { return (rank * a.pieces + piece) * kTerms; }
};

// One thread starts all copies.
template <int kRows, bool kNorm, bool kSwiglu>
__device__ void produce(const Memory<kRows>& m, const Arguments& a, const Share<kSwiglu>& share) {
  constexpr int kBytes = (kOutputs + kRows + (kNorm ? 1 : 0)) * kLineBytes;
  Shared<kRows>& s = m.rest();
  const auto load_constants = [&](int piece, int stage) {
    const int term = share.term(a, piece);
    if constexpr (kNorm) {
      cuda::load_bytes(s.norm[stage], static_cast<const unsigned char*>(a.operands.norm) + term * (kLineBytes / kTerms),
                       kLineBytes, &s.full[stage]);
    }
    load_weights<kSwiglu>(m.w(stage), a.operands, share, term, &s.full[stage]);
  };
  const auto load_x = [&](int piece, int stage) {
    cuda::load_tile(m.x(stage), &a.operands.x, share.term(a, piece), 0, &s.full[stage]);
  };
  const int first = min(a.pieces, a.stages);
  for (int piece = 0; piece < first; ++piece) {
    cuda::arrive_expecting(&s.full[piece], kBytes);
    load_constants(piece, piece);
  }
  cuda::wait_for_previous_kernel();
  for (int piece = 0; piece < first; ++piece) {
    load_x(piece, piece);
  }
  Ring ring{.stages = a.stages};
  for (int piece = first; piece < a.pieces; ++piece, ring.advance()) {
    cuda::wait(&s.empty[ring.stage], ring.parity);
    cuda::arrive_expecting(&s.full[ring.stage], kBytes);
    load_constants(piece, ring.stage);
    load_x(piece, ring.stage);
  }
}

// Multiplies a piece of x by the norm's weight. Adds the squares of a thread's rows, of which it has every 16th.
template <class T, int kRows>
__device__ void scale(unsigned char* x, const T* norm, float (&squares)[kRows / 16]) {
  // Of each line, a thread has the pack that the swizzle puts at one place; lines 16 apart have the same.
  const int thread = static_cast<int>(threadIdx.x);
  const int pack = (thread % kPacks) ^ (thread / kPacks % kPacks);
#pragma unroll
  for (int i = 0; i < kRows / 16; ++i) {
    scale_pack(reinterpret_cast<T*>(x + (thread + i * kWarpgroup) * 16), norm + pack * kPackTerms, squares[i]);
  }
}

// The sums of this block's terms, to shared memory.
template <class T, int kRows, bool kNorm>
__device__ void consume(const Memory<kRows>& m, const Arguments& a) {
  Shared<kRows>& s = m.rest();
  const int thread = static_cast<int>(threadIdx.x);
  float sums[kRows / 2];
  float squares[kRows / 16] = {};
  Ring ring{.stages = a.stages};
  int last = 0;
  const auto release = [&](int stage) {  // by each warp: others may still multiply
    if (thread % kWarp == 0) {
      cuda::arrive(&s.empty[stage]);
    }
  };
  for (int piece = 0; piece < a.pieces; ++piece, ring.advance()) {
    cuda::wait(&s.full[ring.stage], ring.parity);
    if constexpr (kNorm) {
      scale<T, kRows>(m.x(ring.stage), reinterpret_cast<const T*>(s.norm[ring.stage]), squares);
      cuda::fence_async_proxy();
      cuda::barrier_sync(1, kWarpgroup);
    }
    multiply_piece<T, kRows>(sums, m.w(ring.stage), m.x(ring.stage), piece > 0);
    if (piece > 0) {
      cuda::wait_products<1>();
      release(last);
    }
    last = ring.stage;
  }
  cuda::wait_products<0>();
  cuda::pin(sums);
  store_sums<kRows>(s.sums, sums);
  if constexpr (kNorm) {
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) {
      const float of_row = cuda::sum_lanes<kPacks>(squares[i]);
      if (thread % kPacks == 0) {
        s.sums[thread / kPacks + 16 * i][kOutputs] = of_row;
      }
    }
  }
}

template <class T>
__device__ float element(const void* data, std::int64_t at) {
  return data == nullptr ? 0.0f : static_cast<float>(static_cast<const T*>(data)[at]);
}

template <int kRows>
__device__ int rows_of_block(const Arguments& a) {
  return kRows / a.blocks;
}

// Sends the sums of each row to the block that writes it.
template <int kRows, bool kNorm, bool kSwiglu>
__device__ void send_sums(Shared<kRows>& s, const Arguments& a, const Share<kSwiglu>& share) {
  constexpr int kFours = kOutputs / 4;
  const int rows = rows_of_block<kRows>(a);
  const auto send_at = [&](int row, int column, const float4& four) {
    send_four(&s.parts[share.rank * rows + row % rows][column], four, row / rows, &s.received);
  };
#pragma unroll
  for (int i = 0; i < kRows * kFours / kWarpgroup; ++i) {
    const int at = static_cast<int>(threadIdx.x) + i * kWarpgroup;
    const int row = at / kFours;
    const int column = at % kFours * 4;
    send_at(row, column, *reinterpret_cast<const float4*>(&s.sums[row][column]));
  }
  if (kNorm && threadIdx.x < kRows) {
    const int row = static_cast<int>(threadIdx.x);
    send_at(row, kOutputs, {s.sums[row][kOutputs], 0, 0, 0});
  }
}

// The residual of a thread's first elements.
constexpr int kAhead = 2;
template <class T, int kRows, bool kSwiglu>
__device__ void load_residual(const Arguments& a, const Share<kSwiglu>& share, float (&first)[kAhead]) {
  constexpr int kColumns = pieces::kColumns<kSwiglu>;
  const int rows = rows_of_block<kRows>(a);
#pragma unroll
  for (int k = 0; k < kAhead; ++k) {
    const int i = static_cast<int>(threadIdx.x) + k * kWarpgroup;
    const int row = share.rank * rows + i / kColumns;
    const bool has = i < rows * kColumns && row < a.operands.rows;
    first[k] = has ? element<T>(a.operands.residual,
                                static_cast<std::int64_t>(row) * a.operands.columns + share.column + i % kColumns)
                   : 0.0f;
  }
}

// Writes this block's share of the rows. kAlone: there are no other blocks.
template <class T, int kRows, bool kNorm, bool kSwiglu, bool kAlone>
__device__ void write_out(const Shared<kRows>& s, const Arguments& a, const Share<kSwiglu>& share,
                          const float (&first)[kAhead]) {
  constexpr int kColumns = pieces::kColumns<kSwiglu>;
  const int rows = rows_of_block<kRows>(a);
  const Part& part = a.operands.parts[share.part];
  // Over the cluster's blocks, in their order.
  const auto sum_of = [&](int row, int column) {
    if constexpr (kAlone) {
      return s.sums[row][column];
    }
    float sum = s.parts[row][column];
#pragma unroll
    for (int block = 1; block < kMostBlocks; ++block) {
      sum += block < a.blocks ? s.parts[block * rows + row][column] : 0;
    }
    return sum;
  };
  int ahead = 0;
  for (int i = static_cast<int>(threadIdx.x); i < rows * kColumns; i += kWarpgroup, ++ahead) {
    const int own_row = i / kColumns;
    const int row = share.rank * rows + own_row;
    const int column = i % kColumns;
    if (row >= a.operands.rows) {
      return;
    }
    float factor = 1;
    if constexpr (kNorm) {
      factor = rsqrtf(sum_of(own_row, kOutputs) / static_cast<float>(a.operands.depth) + a.operands.eps);
    }
    const int at_part = share.column + column - part.first_column;
    const std::int64_t at = static_cast<std::int64_t>(row) * a.operands.columns + share.column + column;
    const float residual = ahead == 0 ? first[0] : ahead == 1 ? first[1] : element<T>(a.operands.residual, at);
    float value = sum_of(own_row, column) * factor + element<T>(part.bias, at_part);
    if constexpr (kSwiglu) {
      const float up = sum_of(own_row, kColumns + column) * factor + element<T>(a.operands.parts[1].bias, at_part);
      value = silu(value) * up;
    }
    static_cast<T*>(a.operands.y)[at] = static_cast<T>(value + residual);
  }
}

template <class T, int kRows, bool kNorm, bool kSwiglu>
__global__ void __launch_bounds__(kThreads) decode_linear_batch_kernel(const __grid_constant__ Arguments a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
  const Memory<kRows> m{.first = memory, .stages = a.stages};
  Shared<kRows>& shared = m.rest();
  const Share<kSwiglu> share(a);
  const bool alone = a.blocks == 1;
  if (threadIdx.x == kWarpgroup) {
    for (int stage = 0; stage < a.stages; ++stage) {
      cuda::init_barrier(&shared.full[stage], 1);
      cuda::init_barrier(&shared.empty[stage], kWarpgroup / kWarp);
    }
    cuda::init_barrier(&shared.received, 1);
    cuda::arrive_expecting(&shared.received, kRows * (kOutputs + (kNorm ? 4 : 0)) * static_cast<int>(sizeof(float)));
    cuda::publish_barriers();
  }
  cuda::allow_dependents();
  __syncthreads();
  if (!alone) {
    cuda::arrive_in_cluster();  // others may send
  }
  if (threadIdx.x >= kWarpgroup) {
    if (threadIdx.x == kWarpgroup) {
      produce<kRows, kNorm, kSwiglu>(m, a, share);
    }
    __syncwarp();
    if (!alone) {
      cuda::wait_for_cluster();
    }
    return;
  }
  cuda::wait_for_previous_kernel();  // it may write the residual, or read what y's memory held
  float first[kAhead];
  load_residual<T, kRows>(a, share, first);
  consume<T, kRows, kNorm>(m, a);
  cuda::barrier_sync(1, kWarpgroup);
  if (alone) {
    write_out<T, kRows, kNorm, kSwiglu, true>(shared, a, share, first);
    return;
  }
  cuda::wait_for_cluster();
  send_sums<kRows, kNorm>(shared, a, share);
  cuda::wait(&shared.received, 0);
  write_out<T, kRows, kNorm, kSwiglu, false>(shared, a, share, first);
#endif
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
  const std::int64_t tiles = args.y.size(1) / kColumns<kSwiglu>;
  const std::int64_t all_pieces = args.x.size(1) / kTerms;
  const int blocks = blocks_of_cluster(tiles, all_pieces, kRows);
  const int of_block = static_cast<int>(all_pieces) / blocks;
  const Arguments a{.operands = operands_of<kRows, kSwiglu>(args),
                    .pieces = of_block,
                    .blocks = blocks,
                    .stages = std::min(kMostStages, of_block)};
  cuda::Launch(static_cast<unsigned>(tiles * blocks), kThreads, Memory<kRows>::bytes(a.stages))
      .cluster(dim3(static_cast<unsigned>(blocks)))
      .dependent()
      .run(decode_linear_batch_kernel<T, kRows, kNorm, kSwiglu>, "decode_linear_batch_kernel", a);
}

}  // namespace

}  // namespace batch

void decode_linear_batch(Cuda, const DecodeLinearArgs& args) {
  on_dtype(Types<Half, BFloat16>{}, args.x.dtype(), "decode_linear", [&]<class T>() {
    pieces::on_options(args.options, [&]<bool kNorm, bool kSwiglu>() {
      args.x.size(0) <= 16 ? batch::launch<T, 16, kNorm, kSwiglu>(args) : batch::launch<T, 32, kNorm, kSwiglu>(args);
    });
  });
}

}  // namespace mica::kernels
