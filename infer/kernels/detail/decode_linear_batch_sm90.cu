// Products of up to 32 rows with one to three weights side by side, by wgmma. The weight is the first operand of wgmma,
// 64 outputs at a time; the rows of x are the second. Most of the time is spent reading the weights and waiting, so the
// copy engine starts to load weights before the previous kernel has ended.
//
//     block: 64 outputs (SwiGLU: 32 of gate and the same 32 of up) and a part of the terms
//
//         slices of 64 terms:     | w 64 x 64, x 32 x 64 | w, x | w, x | ...      a ring of stages
//         first, without waiting:   w                      w      w    ...
//         after the wait:                x                     x      x
//                                         |
//         consumers multiply x by the norm's weight, in place, and sum its squares; then they start the products, which
//         run while the next slice is prepared
//                                         |
//         the blocks of a cluster have the same outputs, but different terms. Each block finishes some of the rows: it
//         adds up the sums of all blocks in order, divides by the root mean square, adds bias and residual, and writes
//         the result
//
// The number of blocks depends on the shape alone, and so does the order of sums.

#include <algorithm>

#include <mica/core/cuda/launch.h>
#include <mica/core/cuda/reduce.cuh>
#include <mica/infer/kernels/detail/decode_linear_slices.cuh>

namespace mica::kernels {

namespace batch {

using namespace slices;

namespace {

constexpr int kThreads = kWarpgroup + kWarp;
constexpr int kMostStages = 8;
// With this many stages, two blocks fit on a multiprocessor, or one of them and one block of decode_linear_wide().
template <class Weights>
constexpr int kUsedStages = Weights::kIsPacked ? 8 : 6;
constexpr int kMostBlocks = 8;  // per cluster
constexpr int kEnoughBlocks = 192;

template <class Weights>
struct Arguments {
  Operands<Weights> operands;
  int slices;  // per block
  int blocks;  // per cluster
  int stages;
};

template <int kRows>
struct SharedMemory {
  float sums[kRows][kStride];  // of this block's terms; in column kOutputs, the row's squares
  // The same from all blocks of the cluster, one after the other, for this block's rows.
  float received_sums[kRows][kStride];
  alignas(16) unsigned char norm[kMostStages][kLineBytes];
  std::uint64_t full[kMostStages];
  std::uint64_t x_full[kMostStages];  // for packed weights only, which are converted before x has arrived
  std::uint64_t empty[kMostStages];
  std::uint64_t received;
};

// The layout of a block's shared memory: stages of the weight, of x and of scales, then the rest. There are no more
// stages than the block has slices, so that blocks of other kernels also fit on the multiprocessor.
template <class Weights, int kRows>
struct Memory {
  static constexpr int kInputBytes = kRows * kLineBytes;
  unsigned char* first;
  int stages;

  __device__ unsigned char* w(int stage) const { return first + stage * Weights::kStageBytes; }
  __device__ unsigned char* x(int stage) const { return w(stages) + stage * kInputBytes; }
  __device__ unsigned char* scales(int stage) const { return x(stages) + stage * Weights::kScaleBytes; }
  __device__ SharedMemory<kRows>& rest() const { return *reinterpret_cast<SharedMemory<kRows>*>(scales(stages)); }
  static std::size_t bytes(int stages) {
    return static_cast<std::size_t>(stages) * (Weights::kStageBytes + kInputBytes + Weights::kScaleBytes) +
           sizeof(SharedMemory<kRows>);
  }
};

// A block's part of the work.
template <bool kSwiglu>
struct BlockPart : TileColumns<kSwiglu> {
  int rank;  // in the cluster

  template <class Weights>
  __device__ explicit BlockPart(const Arguments<Weights>& a)
      : TileColumns<kSwiglu>(a.operands, static_cast<int>(blockIdx.x) / a.blocks),
        rank(static_cast<int>(blockIdx.x) % a.blocks) {}
  template <class Weights>
  __device__ int slice(const Arguments<Weights>& a, int own) const {
    return rank * a.slices + own;
  }
};

// Starts all copies. Runs in one thread.
template <class Weights, int kRows, bool kNorm, bool kSwiglu>
__device__ void produce(const Memory<Weights, kRows>& m, const Arguments<Weights>& a,
                        const BlockPart<kSwiglu>& block_part) {
  constexpr int kInputBytes = kRows * kLineBytes;
  constexpr int kConstantBytes = Weights::kCopiedBytes + (kNorm ? kLineBytes : 0);
  constexpr int kBytes = Weights::kIsPacked ? kConstantBytes : kConstantBytes + kInputBytes;
  SharedMemory<kRows>& s = m.rest();
  const auto load_constants = [&](int slice, int stage) {
    const int at = block_part.slice(a, slice);
    if constexpr (kNorm) {
      cuda::load_bytes(s.norm[stage], static_cast<const unsigned char*>(a.operands.norm) + at * kLineBytes, kLineBytes,
                       &s.full[stage]);
    }
    load_weights<kSwiglu>(m.w(stage), m.scales(stage), a.operands, block_part, at, &s.full[stage]);
  };
  const auto load_x = [&](int slice, int stage) {
    std::uint64_t* full = &s.full[stage];
    if constexpr (Weights::kIsPacked) {
      full = &s.x_full[stage];
      cuda::arrive_expecting(full, kInputBytes);
    }
    cuda::load_tile(m.x(stage), &a.operands.x, block_part.slice(a, slice) * kTerms, 0, full);
  };
  const int first = min(a.slices, a.stages);
  for (int slice = 0; slice < first; ++slice) {
    cuda::arrive_expecting(&s.full[slice], kBytes);
    load_constants(slice, slice);
  }
  cuda::wait_for_previous_kernel();
  for (int slice = 0; slice < first; ++slice) {
    load_x(slice, slice);
  }
  Ring ring{.stages = a.stages};
  for (int slice = first; slice < a.slices; ++slice, ring.advance()) {
    cuda::wait(&s.empty[ring.stage], ring.parity);
    cuda::arrive_expecting(&s.full[ring.stage], kBytes);
    load_constants(slice, ring.stage);
    load_x(slice, ring.stage);
  }
}

// Multiplies a slice of x by the norm's weight, and adds the squares of x to `squares`. A thread has every 16th row.
template <class T, int kRows>
__device__ void scale(unsigned char* x, const T* norm, float (&squares)[kRows / 16]) {
  // A thread has one pack of each of its lines, at the same offset: its lines are 16 apart, so they are swizzled alike.
  const int thread = static_cast<int>(threadIdx.x);
  const int pack = (thread % kPacks) ^ (thread / kPacks % kPacks);
#pragma unroll
  for (int i = 0; i < kRows / 16; ++i) {
    scale_pack(reinterpret_cast<T*>(x + (thread + i * kWarpgroup) * 16), norm + pack * kPackTerms, squares[i]);
  }
}

// Multiplies a slice of x, which has arrived, by the norm's weight, if there is a norm.
template <class T, int kRows, bool kNorm>
__device__ void prepare(SharedMemory<kRows>& s, unsigned char* x, const Ring& ring, float (&squares)[kRows / 16]) {
  if constexpr (kNorm) {
    scale<T, kRows>(x, reinterpret_cast<const T*>(s.norm[ring.stage]), squares);
    cuda::fence_async_proxy();
    cuda::barrier_sync(1, kWarpgroup);
  }
}

// Computes the sums for floating weights.
template <class Weights, int kRows, bool kNorm, bool kSwiglu>
__device__ void multiply_floats(const Memory<Weights, kRows>& m, const Arguments<Weights>& a, float (&sums)[kRows / 2],
                                float (&squares)[kRows / 16]) {
  using T = typename Weights::T;
  SharedMemory<kRows>& s = m.rest();
  Ring ring{.stages = a.stages};
  int last = 0;
  for (int slice = 0; slice < a.slices; ++slice, ring.advance()) {
    cuda::wait(&s.full[ring.stage], ring.parity);
    prepare<T, kRows, kNorm>(s, m.x(ring.stage), ring, squares);
    multiply_slice<T, kRows>(sums, m.w(ring.stage), m.x(ring.stage), slice > 0);
    if (slice > 0) {
      cuda::wait_products<1>();
      release(&s.empty[last]);
    }
    last = ring.stage;
  }
  cuda::wait_products<0>();
  cuda::pin(sums);
}

// A first operand whose elements are all 1.
template <class T>
struct Ones {
  static constexpr std::uint32_t kOne = std::is_same_v<T, Float16> ? 0x3c003c00 : 0x3f803f80;
  using Pairs = std::uint32_t[4];
  Pairs pairs = {kOne, kOne, kOne, kOne};
  __device__ const Pairs& operator()(int) const { return pairs; }
};

// Computes the sums for packed weights, and the sums of x as products with ones. A slice is converted while the
// previous one is multiplied; the first two are converted before x has arrived.
template <class Weights, int kRows, bool kNorm, bool kSwiglu>
__device__ void multiply_packed(const Memory<Weights, kRows>& m, const Arguments<Weights>& a, float (&sums)[kRows / 2],
                                float (&squares)[kRows / 16]) {
  using T = typename Weights::T;
  using Fragment = typename Weights::Fragment;
  SharedMemory<kRows>& s = m.rest();
  const typename Weights::template Reader<kSwiglu> reader(static_cast<int>(threadIdx.x));
  const Ones<T> ones;
#pragma unroll
  for (float& sum : sums) {
    sum = 0;
  }
  float of_slice[kRows / 2] = {};
  float of_x[kRows / 2] = {};
  Ring words{.stages = a.stages};
  Ring input{.stages = a.stages};
  const auto load = [&](Fragment& f) {
    cuda::wait(&s.full[words.stage], words.parity);
    reader.load(f, m.w(words.stage), m.scales(words.stage), 0, a.operands.scales.group_shift);
    words.advance();
  };
  const auto wait_for_x = [&] {
    cuda::wait(&s.x_full[input.stage], input.parity);
    prepare<T, kRows, kNorm>(s, m.x(input.stage), input, squares);
  };
  const auto start = [&](Fragment& f) {
    f.pin();
    cuda::begin_products();
    multiply_pairs<T, kRows>(of_slice, f, m.x(input.stage));
    multiply_pairs<T, kRows>(of_x, ones, m.x(input.stage));
    cuda::commit_products();
    input.advance();
  };
  const auto end = [&](Fragment& f, int stage) {
    cuda::wait_products<0>();
    f.pin();
    cuda::pin(of_slice);
    cuda::pin(of_x);
    release(&s.empty[stage]);
    f.add(sums, of_slice, [&](int j) { return float2{of_x[4 * j], of_x[4 * j + 1]}; });
  };
  Fragment first;
  Fragment second;
  load(first);
  if (a.slices > 1) {
    load(second);
  }
  wait_for_x();
#pragma unroll 1
  for (int slice = 0; slice < a.slices; slice += 2) {
    const bool has_second = slice + 1 < a.slices;
    int stage = input.stage;
    start(first);
    if (has_second) {
      if (slice > 0) {
        load(second);
      }
      wait_for_x();
    }
    end(first, stage);
    if (has_second) {
      stage = input.stage;
      start(second);
      if (slice + 2 < a.slices) {
        load(first);
        wait_for_x();
      }
      end(second, stage);
    }
  }
}

// Writes the sums of this block's terms to shared memory.
template <class Weights, int kRows, bool kNorm, bool kSwiglu>
__device__ void consume(const Memory<Weights, kRows>& m, const Arguments<Weights>& a) {
  SharedMemory<kRows>& s = m.rest();
  const int thread = static_cast<int>(threadIdx.x);
  float sums[kRows / 2];
  float squares[kRows / 16] = {};
  if constexpr (Weights::kIsPacked) {
    multiply_packed<Weights, kRows, kNorm, kSwiglu>(m, a, sums, squares);
  } else {
    multiply_floats<Weights, kRows, kNorm, kSwiglu>(m, a, sums, squares);
  }
  store_sums<Weights, kRows>(s.sums, sums);
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

template <int kRows, class Weights>
__device__ int rows_of_block(const Arguments<Weights>& a) {
  return kRows / a.blocks;
}

// Sends the sums of each row to the block that writes the row.
template <int kRows, bool kNorm, bool kSwiglu, class Weights>
__device__ void send_sums(SharedMemory<kRows>& s, const Arguments<Weights>& a, const BlockPart<kSwiglu>& block_part) {
  constexpr int kFours = kOutputs / 4;
  const int rows = rows_of_block<kRows>(a);
  const auto send_at = [&](int row, int column, const float4& four) {
    send_four(&s.received_sums[block_part.rank * rows + row % rows][column], four, row / rows, &s.received);
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

// Loads the residual of the first kAhead elements that a thread writes.
constexpr int kAhead = 2;
template <int kRows, bool kSwiglu, class Weights>
__device__ void load_residual(const Arguments<Weights>& a, const BlockPart<kSwiglu>& block_part,
                              float (&first)[kAhead]) {
  using T = typename Weights::T;
  constexpr int kColumns = slices::kColumns<kSwiglu>;
  const int rows = rows_of_block<kRows>(a);
#pragma unroll
  for (int k = 0; k < kAhead; ++k) {
    const int i = static_cast<int>(threadIdx.x) + k * kWarpgroup;
    const int row = block_part.rank * rows + i / kColumns;
    const bool has = i < rows * kColumns && row < a.operands.rows;
    first[k] = has ? element<T>(a.operands.residual,
                                static_cast<std::int64_t>(row) * a.operands.columns + block_part.column + i % kColumns)
                   : 0.0f;
  }
}

// Writes this block's part of the rows. kAlone: the cluster has no other blocks.
template <int kRows, bool kNorm, bool kSwiglu, bool kAlone, class Weights>
__device__ void write_out(const SharedMemory<kRows>& s, const Arguments<Weights>& a,
                          const BlockPart<kSwiglu>& block_part, const float (&first)[kAhead]) {
  using T = typename Weights::T;
  constexpr int kColumns = slices::kColumns<kSwiglu>;
  const int rows = rows_of_block<kRows>(a);
  const WeightColumns& part = a.operands.parts[block_part.part];
  // Adds up the sums of the cluster's blocks, in order.
  const auto sum_of = [&](int row, int column) {
    if constexpr (kAlone) {
      return s.sums[row][column];
    }
    float sum = s.received_sums[row][column];
#pragma unroll
    for (int block = 1; block < kMostBlocks; ++block) {
      sum += block < a.blocks ? s.received_sums[block * rows + row][column] : 0;
    }
    return sum;
  };
  int ahead = 0;
  for (int i = static_cast<int>(threadIdx.x); i < rows * kColumns; i += kWarpgroup, ++ahead) {
    const int own_row = i / kColumns;
    const int row = block_part.rank * rows + own_row;
    const int column = i % kColumns;
    if (row >= a.operands.rows) {
      return;
    }
    float factor = 1;
    if constexpr (kNorm) {
      factor = rsqrtf(sum_of(own_row, kOutputs) / static_cast<float>(a.operands.depth) + a.operands.eps);
    }
    const int at_part = block_part.column + column - part.first_column;
    const std::int64_t at = static_cast<std::int64_t>(row) * a.operands.columns + block_part.column + column;
    const float residual = ahead == 0 ? first[0] : ahead == 1 ? first[1] : element<T>(a.operands.residual, at);
    float value = sum_of(own_row, column) * factor + element<T>(part.bias, at_part);
    if constexpr (kSwiglu) {
      const float up = sum_of(own_row, kColumns + column) * factor + element<T>(a.operands.parts[1].bias, at_part);
      value = silu(value) * up;
    }
    static_cast<T*>(a.operands.y)[at] = static_cast<T>(value + residual);
  }
}

template <class Weights, int kRows, bool kNorm, bool kSwiglu>
__global__ void __launch_bounds__(kThreads) decode_linear_batch_kernel(const __grid_constant__ Arguments<Weights> a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
  const Memory<Weights, kRows> m{.first = memory, .stages = a.stages};
  SharedMemory<kRows>& shared = m.rest();
  const BlockPart<kSwiglu> block_part(a);
  const bool alone = a.blocks == 1;
  if (threadIdx.x == kWarpgroup) {
    for (int stage = 0; stage < a.stages; ++stage) {
      cuda::init_barrier(&shared.full[stage], 1);
      cuda::init_barrier(&shared.x_full[stage], 1);
      cuda::init_barrier(&shared.empty[stage], kWarpgroup / kWarp);
    }
    cuda::init_barrier(&shared.received, 1);
    cuda::arrive_expecting(&shared.received, kRows * (kOutputs + (kNorm ? 4 : 0)) * static_cast<int>(sizeof(float)));
    cuda::publish_barriers();
  }
  cuda::allow_dependents();
  __syncthreads();
  if (!alone) {
    cuda::arrive_in_cluster();  // from here on, other blocks may send to this one
  }
  if (threadIdx.x >= kWarpgroup) {
    if (threadIdx.x == kWarpgroup) {
      produce<Weights, kRows, kNorm, kSwiglu>(m, a, block_part);
    }
    __syncwarp();
    if (!alone) {
      cuda::wait_for_cluster();
    }
    return;
  }
  cuda::wait_for_previous_kernel();  // which may write the residual, or read the old contents of y's memory
  float first[kAhead];
  load_residual<kRows>(a, block_part, first);
  consume<Weights, kRows, kNorm, kSwiglu>(m, a);
  cuda::barrier_sync(1, kWarpgroup);
  if (alone) {
    write_out<kRows, kNorm, kSwiglu, true>(shared, a, block_part, first);
    return;
  }
  cuda::wait_for_cluster();
  send_sums<kRows, kNorm>(shared, a, block_part);
  cuda::wait(&shared.received, 0);
  write_out<kRows, kNorm, kSwiglu, false>(shared, a, block_part, first);
#endif
}

// The number of blocks among which the terms of an output are split: as many as possible while the grid has at most
// kEnoughBlocks blocks.
int blocks_of_cluster(std::int64_t tiles, std::int64_t slices, int rows) {
  int blocks = 1;
  while (2 * blocks <= std::min(kMostBlocks, rows) && slices % (2 * blocks) == 0 &&
         2 * blocks * tiles <= kEnoughBlocks) {
    blocks *= 2;
  }
  return blocks;
}

template <class Weights, int kRows, bool kNorm, bool kSwiglu>
void launch(const DecodeLinearArgs& args) {
  const std::int64_t tiles = args.y.size(1) / kColumns<kSwiglu>;
  const std::int64_t all_slices = args.x.size(1) / kTerms;
  const int blocks = blocks_of_cluster(tiles, all_slices, kRows);
  const int of_block = static_cast<int>(all_slices) / blocks;
  const Arguments<Weights> a{.operands = operands_of<Weights, kRows, kSwiglu>(args),
                             .slices = of_block,
                             .blocks = blocks,
                             .stages = std::min(kUsedStages<Weights>, of_block)};
  cuda::Launch(static_cast<unsigned>(tiles * blocks), kThreads, Memory<Weights, kRows>::bytes(a.stages))
      .cluster(dim3(static_cast<unsigned>(blocks)))
      .dependent()
      .run(decode_linear_batch_kernel<Weights, kRows, kNorm, kSwiglu>, "decode_linear_batch_kernel", a);
}

}  // namespace

}  // namespace batch

void decode_linear_batch(Cuda, const DecodeLinearArgs& args) {
  on_dtype(Types<Float16, BFloat16>{}, args.x.dtype(), "decode_linear", [&]<class T>() {
    slices::on_weights<T, 1>(args.weights[0], [&]<class Weights>() {
      slices::on_options(args.options, [&]<bool kNorm, bool kSwiglu>() {
        if constexpr (Weights::kTakesFewRows) {
          if (args.x.size(0) <= 16) {
            return batch::launch<Weights, 16, kNorm, kSwiglu>(args);
          }
        }
        batch::launch<Weights, 32, kNorm, kSwiglu>(args);
      });
    });
  });
}

}  // namespace mica::kernels
