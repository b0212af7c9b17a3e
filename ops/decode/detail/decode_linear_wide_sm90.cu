// Products of up to 32 rows with weights of many outputs, by wgmma: the head, and gate and up of a batch. All of x
// stays in shared memory, normalized once, while pieces of the weights pass through a ring of stages.
//
//     block: 64 outputs (SwiGLU: 32 of gate and the same 32 of up) after another, all terms
//
//         x, all pieces of 64 terms:       | x 32 x 64 | x | x | x | ...        times the norm's weight, in place
//
//         a ring of pieces of the weight:  | w 64 x 64 | w | w | w | ...        loaded before the previous kernel ended
//                                               |        |
//         two warpgroups                    even pieces  odd pieces
//                                               |        |
//                                          sums of each in shared memory --> y

#include <algorithm>

#include <mica/core/cuda/launch.h>
#include <mica/core/cuda/reduce.cuh>
#include <mica/ops/decode/detail/decode_linear_pieces.cuh>

namespace mica::kernels {

namespace wide {

using namespace pieces;

namespace {

constexpr int kConsumers = 2;  // warpgroups
constexpr int kConsumerThreads = kConsumers * kWarpgroup;
constexpr int kThreads = kConsumerThreads + kWarp;
constexpr int kMostStages = 16;
constexpr int kStagesOfOneTile = 6;    // so that blocks of the kernels before and after it fit beside it
constexpr int kMostInput = 128 << 10;  // bytes of x in shared memory

struct Arguments {
  Operands operands;
  int pieces;  // of the terms
  int tiles;   // of 64 outputs
  int stages;
};

template <int kRows>
struct Shared {
  static constexpr int kGroups = kConsumerThreads / (kRows * kPacks);  // pieces of x that are scaled at a time
  float sums[kConsumers][kRows][kStride];
  float squares[kGroups][kRows];
  std::uint64_t full[kMostStages];
  std::uint64_t empty[kMostStages];
  std::uint64_t input_full;
};

/// A block's memory: the stages, x, the norm's weight, and the rest.
template <int kRows>
struct Memory {
  static constexpr int kPieceBytes = kRows * kLineBytes;  // of x
  unsigned char* w;
  unsigned char* x;
  unsigned char* norm;
  Shared<kRows>* rest;

  __host__ __device__ static std::size_t norm_bytes(const Arguments& a) { return std::size_t{2} * kTerms * a.pieces; }
  __device__ Memory(unsigned char* memory, const Arguments& a)
      : w(memory),
        x(w + a.stages * kWeightBytes),
        norm(x + a.pieces * kPieceBytes),
        rest(reinterpret_cast<Shared<kRows>*>(norm + norm_bytes(a))) {}
  static std::size_t bytes(const Arguments& a) {
    return static_cast<std::size_t>(a.stages) * kWeightBytes + static_cast<std::size_t>(a.pieces) * kPieceBytes +
           norm_bytes(a) + sizeof(Shared<kRows>);
  }
};

// One thread starts all copies.
template <int kRows, bool kNorm, bool kSwiglu>
__device__ void produce(const Memory<kRows>& m, const Arguments& a) {
  Shared<kRows>& s = *m.rest;
  cuda::arrive_expecting(&s.input_full,
                         a.pieces * Memory<kRows>::kPieceBytes + (kNorm ? static_cast<int>(m.norm_bytes(a)) : 0));
  if constexpr (kNorm) {
    cuda::load_bytes(m.norm, a.operands.norm, static_cast<int>(m.norm_bytes(a)), &s.input_full);
  }
  const auto load_input = [&] {
    cuda::wait_for_previous_kernel();
    for (int piece = 0; piece < a.pieces; ++piece) {
      cuda::load_tile(m.x + piece * Memory<kRows>::kPieceBytes, &a.operands.x, piece * kTerms, 0, &s.input_full);
    }
  };
  Ring ring{.stages = a.stages};
  int early = a.stages;  // pieces that wait for nothing
  for (int tile = static_cast<int>(blockIdx.x); tile < a.tiles; tile += static_cast<int>(gridDim.x)) {
    const Place<kSwiglu> place(a.operands, tile);
    for (int piece = 0; piece < a.pieces; ++piece, ring.advance()) {
      if (early > 0) {
        --early;
      } else {
        if (early == 0) {
          --early;
          load_input();
        }
        cuda::wait(&s.empty[ring.stage], ring.parity ^ 1);
      }
      std::uint64_t* const full = &s.full[ring.stage];
      unsigned char* const to = m.w + ring.stage * kWeightBytes;
      cuda::arrive_expecting(full, kWeightBytes);
      load_weights<kSwiglu>(to, a.operands, place, piece * kTerms, full);
    }
  }
  if (early >= 0) {
    load_input();
  }
}

// Multiplies x by the norm's weight, and sums up the squares of its rows.
template <class T, int kRows>
__device__ void scale(const Memory<kRows>& m, const Arguments& a) {
  constexpr int kOfPiece = kRows * kPacks;
  constexpr int kGroups = Shared<kRows>::kGroups;
  const int thread = static_cast<int>(threadIdx.x);
  const int at = thread % kOfPiece;
  const int row = at / kPacks;
  const int pack = (at % kPacks) ^ (row % kPacks);  // that the swizzle puts there
  float squares = 0;
#pragma unroll 4
  for (int piece = thread / kOfPiece; piece < a.pieces; piece += kGroups) {
    scale_pack(reinterpret_cast<T*>(m.x + piece * Memory<kRows>::kPieceBytes + at * 16),
               reinterpret_cast<const T*>(m.norm) + piece * kTerms + pack * kPackTerms, squares);
  }
  squares = cuda::sum_lanes<kPacks>(squares);
  if (thread % kPacks == 0) {
    m.rest->squares[thread / kOfPiece][row] = squares;
  }
}

template <class T>
__device__ float2 two_of(const void* data, std::int64_t at) {
  if (data == nullptr) {
    return {0, 0};
  }
  float values[2];
  cuda::unpack(cuda::load<2>(static_cast<const T*>(data) + at), values);
  return {values[0], values[1]};
}

template <class T, int kRows, bool kNorm, bool kSwiglu>
__device__ void write_out(const Shared<kRows>& s, const Operands& a, const Place<kSwiglu>& place) {
  constexpr int kColumns = pieces::kColumns<kSwiglu>;
  constexpr int kPairs = kColumns / 2;
  const Part& part = a.parts[place.part];
  const auto sums_of = [&](int row, int column) {
    const float2 x = *reinterpret_cast<const float2*>(&s.sums[0][row][column]);
    const float2 y = *reinterpret_cast<const float2*>(&s.sums[1][row][column]);
    return float2{x.x + y.x, x.y + y.y};
  };
  for (int i = static_cast<int>(threadIdx.x); i < a.rows * kPairs; i += kConsumerThreads) {
    const int row = i / kPairs;
    const int column = i % kPairs * 2;
    float factor = 1;
    if constexpr (kNorm) {
      float squares = 0;
#pragma unroll
      for (int group = 0; group < Shared<kRows>::kGroups; ++group) {
        squares += s.squares[group][row];
      }
      factor = rsqrtf(squares / static_cast<float>(a.depth) + a.eps);
    }
    const int at_part = place.column + column - part.first_column;
    const std::int64_t at = static_cast<std::int64_t>(row) * a.columns + place.column + column;
    const float2 residual = two_of<T>(a.residual, at);
    const float2 bias = two_of<T>(part.bias, at_part);
    float2 value = sums_of(row, column);
    value = {value.x * factor + bias.x, value.y * factor + bias.y};
    if constexpr (kSwiglu) {
      const float2 up_bias = two_of<T>(a.parts[1].bias, at_part);
      float2 up = sums_of(row, kColumns + column);
      up = {up.x * factor + up_bias.x, up.y * factor + up_bias.y};
      value = {silu(value.x) * up.x, silu(value.y) * up.y};
    }
    *reinterpret_cast<std::uint32_t*>(static_cast<T*>(a.y) + at) =
        cuda::pair_of<T>(value.x + residual.x, value.y + residual.y);
  }
}

template <class T, int kRows, bool kNorm, bool kSwiglu>
__device__ void consume(const Memory<kRows>& m, const Arguments& a) {
  Shared<kRows>& s = *m.rest;
  const int consumer = static_cast<int>(threadIdx.x) / kWarpgroup;
  cuda::wait(&s.input_full, 0);
  cuda::wait_for_previous_kernel();  // it may still read what y's memory held, or write the residual
  if constexpr (kNorm) {
    scale<T, kRows>(m, a);
    cuda::fence_async_proxy();
    cuda::barrier_sync(1, kConsumerThreads);
  }
  const auto release = [&](int stage) {  // by each warp: others may still multiply
    if (threadIdx.x % kWarp == 0) {
      cuda::arrive(&s.empty[stage]);
    }
  };
  Ring ring{.stages = a.stages};
  for (int tile = static_cast<int>(blockIdx.x); tile < a.tiles; tile += static_cast<int>(gridDim.x)) {
    float sums[kRows / 2];
#pragma unroll
    for (float& sum : sums) {
      sum = 0;
    }
    cuda::pin(sums);
    int last = -1;
    for (int piece = 0; piece < a.pieces; ++piece, ring.advance()) {
      if (piece % kConsumers != consumer) {
        continue;
      }
      cuda::wait(&s.full[ring.stage], ring.parity);
      multiply_piece<T, kRows>(sums, m.w + ring.stage * kWeightBytes, m.x + piece * Memory<kRows>::kPieceBytes, true);
      if (last >= 0) {
        cuda::wait_products<1>();
        release(last);
      }
      last = ring.stage;
    }
    cuda::wait_products<0>();
    cuda::pin(sums);
    if (last >= 0) {
      release(last);
    }
    store_sums<kRows>(s.sums[consumer], sums);
    cuda::barrier_sync(1, kConsumerThreads);
    write_out<T, kRows, kNorm, kSwiglu>(s, a.operands, Place<kSwiglu>(a.operands, tile));
    cuda::barrier_sync(1, kConsumerThreads);  // all have read the sums
  }
}

template <class T, int kRows, bool kNorm, bool kSwiglu>
__global__ void __launch_bounds__(kThreads, 1) decode_linear_wide_kernel(const __grid_constant__ Arguments a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
  const Memory<kRows> m(memory, a);
  if (threadIdx.x == kConsumerThreads) {
    for (int stage = 0; stage < a.stages; ++stage) {
      cuda::init_barrier(&m.rest->full[stage], 1);
      cuda::init_barrier(&m.rest->empty[stage], kWarpgroup / kWarp);
    }
    cuda::init_barrier(&m.rest->input_full, 1);
    cuda::publish_barriers();
  }
  cuda::allow_dependents();
  __syncthreads();
  if (threadIdx.x >= kConsumerThreads) {
    if (threadIdx.x == kConsumerThreads) {
      produce<kRows, kNorm, kSwiglu>(m, a);
    }
    __syncwarp();
  } else {
    consume<T, kRows, kNorm, kSwiglu>(m, a);
  }
#endif
}

template <class T, int kRows, bool kNorm, bool kSwiglu>
void launch(const DecodeLinearArgs& args) {
  constexpr std::size_t kMemory = 227 << 10;
  Arguments a{.operands = operands_of<kRows, kSwiglu>(args),
              .pieces = static_cast<int>(args.x.size(1)) / kTerms,
              .tiles = static_cast<int>(args.y.size(1)) / kColumns<kSwiglu>,
              .stages = 0};
  const int blocks = std::min(a.tiles, cuda::multiprocessor_count());
  const int of_block = (a.tiles + blocks - 1) / blocks * a.pieces;
  const int most = blocks < a.tiles ? kMostStages : kStagesOfOneTile;
  a.stages = std::min({most, of_block, static_cast<int>((kMemory - Memory<kRows>::bytes(a)) / kWeightBytes)});
  if (a.stages < of_block) {
    a.stages -= a.stages % kConsumers;  // so that a stage belongs to one warpgroup during a tile
  }
  cuda::Launch(static_cast<unsigned>(blocks), kThreads, Memory<kRows>::bytes(a))
      .dependent()
      .run(decode_linear_wide_kernel<T, kRows, kNorm, kSwiglu>, "decode_linear_wide_kernel", a);
}

int rows_of(std::int64_t rows) { return rows <= 8 ? 8 : rows <= 16 ? 16 : 32; }

}  // namespace

}  // namespace wide

bool can_decode_linear_wide(Cuda, const Tensor& x) {
  return cuda::device_has_wgmma() && x.size(0) <= kMostDecodeRows &&
         wide::rows_of(x.size(0)) * x.size(1) * 2 <= wide::kMostInput;
}

void decode_linear_wide(Cuda, const DecodeLinearArgs& args) {
  using namespace wide;
  on_dtype(Types<Half, BFloat16>{}, args.x.dtype(), "decode_linear", [&]<class T>() {
    on_options(args.options, [&]<bool kNorm, bool kSwiglu>() {
      switch (rows_of(args.x.size(0))) {
        case 8: return launch<T, 8, kNorm, kSwiglu>(args);
        case 16: return launch<T, 16, kNorm, kSwiglu>(args);
        default: return launch<T, 32, kNorm, kSwiglu>(args);
      }
    });
  });
}

}  // namespace mica::kernels
