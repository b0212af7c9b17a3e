// Products of up to 32 rows with weights of many outputs, by wgmma: the head, and gate and up of a batch. All of x
// stays in shared memory and is normalized once, while the weights pass through a ring of stages. Both are divided
// along K into slices of 64 terms.
//
//     block (persistent): computes tile after tile of 64 outputs (SwiGLU: 32 of gate and the same 32 of up), with all
//     terms
//
//         x, all slices of 64 terms:       | x 32 x 64 | x | x | x | ...    multiplied by the norm's weight, in place
//
//         a ring of slices of the weight:  | w 64 x 64 | w | w | w | ...    loads start before the previous kernel ends
//                                               |        |
//         two warpgroups                    even slices  odd slices
//                                               |        |
//                                          sums of each in shared memory --> y
//
// With a packed weight, a stage has two slices, and four warpgroups take stages round-robin.

#include <algorithm>

#include <mica/core/cuda/launch.h>
#include <mica/core/cuda/reduce.cuh>
#include <mica/infer/kernels/detail/decode_linear_slices.cuh>

namespace mica::kernels {

namespace wide {

using namespace slices;

namespace {

template <class Weights>
constexpr int kConsumerThreads = Weights::kConsumers* kWarpgroup;
template <class Weights>
constexpr int kThreads = kConsumerThreads<Weights> + kWarp;
constexpr int kMostStages = 16;
constexpr int kUnits = 2;              // slices per stage of a packed weight
constexpr int kMostInput = 128 << 10;  // bytes of x in shared memory

// The most bytes of stages of a block that has only one tile. This leaves shared memory for blocks of the previous and
// the next kernel on the same multiprocessor.
template <class Weights>
constexpr int kBytesOfOneTile = Weights::kIsPacked ? 40 << 10 : 48 << 10;

template <class Weights>
struct Arguments {
  Operands<Weights> operands;
  int slices;  // slices that the terms are divided into
  int tiles;   // of 64 outputs
  int stages;
  int tiles_of_block;
  int longer_blocks;  // this many blocks, the first ones, have one more tile
};

template <class Weights, int kRows>
struct Shared {
  static constexpr int kGroups = kConsumerThreads<Weights> / (kRows * kPacks);  // slices of x that are scaled at a time
  float sums[Weights::kConsumers][kRows][kStride];
  float squares[kGroups][kRows];
  std::uint64_t full[kMostStages];
  std::uint64_t empty[kMostStages];
  std::uint64_t input_full;
};

/// The layout of a block's shared memory: the stages, x, the scales of the stages, the norm's weight, sums of x, and
/// the rest.
template <class Weights, int kRows>
struct Memory {
  static constexpr int kSliceBytes = kRows * kLineBytes;  // of x
  unsigned char* w;
  unsigned char* x;
  unsigned char* scales;
  unsigned char* norm;
  float* x_sums;  // for packed weights: [slice][row]
  Shared<Weights, kRows>* rest;

  __host__ __device__ static std::size_t norm_bytes(const Arguments<Weights>& a) {
    return std::size_t{2} * kTerms * a.slices;
  }
  __host__ __device__ static std::size_t x_sums_bytes(const Arguments<Weights>& a) {
    return Weights::kIsPacked ? sizeof(float) * kRows * a.slices : 0;
  }
  __device__ Memory(unsigned char* memory, const Arguments<Weights>& a)
      : w(memory),
        x(w + a.stages * Weights::kStageBytes),
        scales(x + a.slices * kSliceBytes),
        norm(scales + a.stages * Weights::kScaleBytes),
        x_sums(reinterpret_cast<float*>(norm + norm_bytes(a))),
        rest(reinterpret_cast<Shared<Weights, kRows>*>(norm + norm_bytes(a) + x_sums_bytes(a))) {}
  static std::size_t bytes(const Arguments<Weights>& a) {
    return static_cast<std::size_t>(a.stages) * (Weights::kStageBytes + Weights::kScaleBytes) +
           static_cast<std::size_t>(a.slices) * kSliceBytes + norm_bytes(a) + x_sums_bytes(a) +
           sizeof(Shared<Weights, kRows>);
  }
};

/// The number of stages that a tile takes.
template <class Weights>
__host__ __device__ int stages_of_tile(const Arguments<Weights>& a) {
  return (a.slices + Weights::kUnits - 1) / Weights::kUnits;
}

// Starts all copies. Runs in one thread.
template <class Weights, int kRows, bool kNorm, bool kSwiglu>
__device__ void produce(const Memory<Weights, kRows>& m, const Arguments<Weights>& a) {
  constexpr int kSliceBytes = Memory<Weights, kRows>::kSliceBytes;
  Shared<Weights, kRows>& s = *m.rest;
  cuda::arrive_expecting(&s.input_full, a.slices * kSliceBytes + (kNorm ? static_cast<int>(m.norm_bytes(a)) : 0));
  if constexpr (kNorm) {
    cuda::load_bytes(m.norm, a.operands.norm, static_cast<int>(m.norm_bytes(a)), &s.input_full);
  }
  const auto load_input = [&] {
    cuda::wait_for_previous_kernel();
    for (int slice = 0; slice < a.slices; ++slice) {
      cuda::load_tile(m.x + slice * kSliceBytes, &a.operands.x, slice * kTerms, 0, &s.input_full);
    }
  };
  Ring ring{.stages = a.stages};
  // The number of stages that are not used yet, for which a copy need not wait. When all are used, x is loaded and the
  // number becomes -1: one variable for both saves a register.
  int early = a.stages;
  for (int tile = static_cast<int>(blockIdx.x); tile < a.tiles; tile += static_cast<int>(gridDim.x)) {
    const TileColumns<kSwiglu> columns(a.operands, tile);
    for (int slice = 0; slice < a.slices; slice += Weights::kUnits, ring.advance()) {
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
      unsigned char* const to = m.w + ring.stage * Weights::kStageBytes;
      cuda::arrive_expecting(full, Weights::kCopiedBytes);
      load_weights<kSwiglu>(to, m.scales + ring.stage * Weights::kScaleBytes, a.operands, columns, slice, full);
    }
  }
  if (early >= 0) {
    load_input();
  }
}

// Multiplies x by the norm's weight, and sums the squares of each row. For packed weights, also sums each row of each
// slice, since their zeros are multiplied by these sums.
template <class Weights, int kRows, bool kNorm>
__device__ void scale(const Memory<Weights, kRows>& m, const Arguments<Weights>& a) {
  using T = typename Weights::T;
  constexpr int kOfSlice = kRows * kPacks;
  constexpr int kGroups = Shared<Weights, kRows>::kGroups;
  const int thread = static_cast<int>(threadIdx.x);
  const int at = thread % kOfSlice;
  const int row = at / kPacks;
  const int pack = (at % kPacks) ^ (row % kPacks);  // index in the row's line, before the swizzle
  float squares = 0;
#pragma unroll 4
  for (int slice = thread / kOfSlice; slice < a.slices; slice += kGroups) {
    T* const x = reinterpret_cast<T*>(m.x + slice * Memory<Weights, kRows>::kSliceBytes + at * 16);
    cuda::Pack<T, kPackTerms> scaled;
    if constexpr (kNorm) {
      scaled = scale_pack(x, reinterpret_cast<const T*>(m.norm) + slice * kTerms + pack * kPackTerms, squares);
    } else {
      scaled = cuda::load<kPackTerms>(x);
    }
    if constexpr (Weights::kIsPacked) {
      float values[kPackTerms];
      cuda::unpack(scaled, values);
      float sum = 0;
#pragma unroll
      for (const float value : values) {
        sum += value;
      }
      sum = cuda::sum_lanes<kPacks>(sum);
      if (thread % kPacks == 0) {
        m.x_sums[slice * kRows + row] = sum;
      }
    }
  }
  if constexpr (kNorm) {
    squares = cuda::sum_lanes<kPacks>(squares);
    if (thread % kPacks == 0) {
      m.rest->squares[thread / kOfSlice][row] = squares;
    }
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

template <int kRows, bool kNorm, bool kSwiglu, class Weights>
__device__ void write_out(const Shared<Weights, kRows>& s, const Operands<Weights>& a,
                          const TileColumns<kSwiglu>& tile) {
  using T = typename Weights::T;
  constexpr int kColumns = slices::kColumns<kSwiglu>;
  constexpr int kPairs = kColumns / 2;
  const WeightColumns& part = a.parts[tile.part];
  const auto sums_of = [&](int row, int column) {
    float2 sum = *reinterpret_cast<const float2*>(&s.sums[0][row][column]);
#pragma unroll
    for (int consumer = 1; consumer < Weights::kConsumers; ++consumer) {
      const float2 part = *reinterpret_cast<const float2*>(&s.sums[consumer][row][column]);
      sum = {sum.x + part.x, sum.y + part.y};
    }
    return sum;
  };
  for (int i = thread_now<Weights>(); i < a.rows * kPairs; i += kConsumerThreads<Weights>) {
    const int row = i / kPairs;
    const int column = i % kPairs * 2;
    float factor = 1;
    if constexpr (kNorm) {
      float squares = 0;
#pragma unroll
      for (int group = 0; group < Shared<Weights, kRows>::kGroups; ++group) {
        squares += s.squares[group][row];
      }
      factor = rsqrtf(squares / static_cast<float>(a.depth) + a.eps);
    }
    const int at_part = tile.column + column - part.first_column;
    const std::int64_t at = static_cast<std::int64_t>(row) * a.columns + tile.column + column;
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

// Waits for x, and for the previous kernel, which may still read the old contents of y's memory, or write the residual.
// Then scales x.
template <class Weights, int kRows, bool kNorm>
__device__ void prepare_input(const Memory<Weights, kRows>& m, const Arguments<Weights>& a) {
  cuda::wait(&m.rest->input_full, 0);
  cuda::wait_for_previous_kernel();
  if constexpr (kNorm || Weights::kIsPacked) {
    scale<Weights, kRows, kNorm>(m, a);
    cuda::fence_async_proxy();
    cuda::barrier_sync(1, kConsumerThreads<Weights>);
  }
}

// Adds up the sums of a tile, and writes its columns of y.
template <int kRows, bool kNorm, bool kSwiglu, class Weights>
__device__ void finish_tile(const Memory<Weights, kRows>& m, const Arguments<Weights>& a, int tile,
                            const float (&sums)[kRows / 2]) {
  Shared<Weights, kRows>& s = *m.rest;
  store_sums<Weights, kRows>(s.sums[threadIdx.x / kWarpgroup], sums);
  cuda::barrier_sync(1, kConsumerThreads<Weights>);
  write_out<kRows, kNorm, kSwiglu>(s, a.operands, TileColumns<kSwiglu>(a.operands, tile));
  cuda::barrier_sync(1, kConsumerThreads<Weights>);  // all threads have read the sums
}

template <class Weights, int kRows, bool kNorm, bool kSwiglu>
__device__ void consume_floats(const Memory<Weights, kRows>& m, const Arguments<Weights>& a) {
  using T = typename Weights::T;
  constexpr int kSliceBytes = Memory<Weights, kRows>::kSliceBytes;
  Shared<Weights, kRows>& s = *m.rest;
  const int consumer = static_cast<int>(threadIdx.x) / kWarpgroup;
  prepare_input<Weights, kRows, kNorm>(m, a);
  Ring ring{.stages = a.stages};
  for (int tile = static_cast<int>(blockIdx.x); tile < a.tiles; tile += static_cast<int>(gridDim.x)) {
    float sums[kRows / 2];
#pragma unroll
    for (float& sum : sums) {
      sum = 0;
    }
    cuda::pin(sums);
    int last = -1;
    for (int slice = 0; slice < a.slices; ++slice, ring.advance()) {
      if (slice % Weights::kConsumers != consumer) {
        continue;
      }
      cuda::wait(&s.full[ring.stage], ring.parity);
      multiply_slice<T, kRows>(sums, m.w + ring.stage * Weights::kStageBytes, m.x + slice * kSliceBytes, true);
      if (last >= 0) {
        cuda::wait_products<1>();
        release(&s.empty[last]);
      }
      last = ring.stage;
    }
    cuda::wait_products<0>();
    cuda::pin(sums);
    if (last >= 0) {
      release(&s.empty[last]);
    }
    finish_tile<kRows, kNorm, kSwiglu>(m, a, tile, sums);
  }
}

// A warpgroup's products with a packed weight: it converts a slice while the previous one is multiplied, and the first
// two before x has arrived. The round-robin order of stages continues from tile to tile, so a stage of the ring always
// belongs to the same warpgroup.
template <class Weights, int kRows, bool kNorm, bool kSwiglu>
class PackedConsumer {
  using T = typename Weights::T;
  using Fragment = typename Weights::Fragment;

 public:
  __device__ PackedConsumer(const Memory<Weights, kRows>& m, const Arguments<Weights>& a)
      : m_(m),
        a_(a),
        reader_(static_cast<int>(threadIdx.x) % kWarpgroup),
        consumer_(static_cast<int>(threadIdx.x) / kWarpgroup),
        ring_{.stages = a.stages} {
    const int tiles = a.tiles_of_block + (static_cast<int>(blockIdx.x) < a.longer_blocks ? 1 : 0);
    left_ = (tiles * stages_of_tile(a) - consumer_ + Weights::kConsumers - 1) / Weights::kConsumers;
    for (int i = 0; i < consumer_; ++i) {
      ring_.advance();
    }
  }

  __device__ void run() {
    bool ahead = left_ > 0;  // this stage's second slice is loaded already
    if (ahead) {
      load_first();
      load_second();
    }
    prepare_input<Weights, kRows, kNorm>(m_, a_);
    const int of_tile = stages_of_tile(a_);
    int stage = consumer_;  // within the tile
    for (int tile = static_cast<int>(blockIdx.x); tile < a_.tiles; tile += static_cast<int>(gridDim.x)) {
#pragma unroll
      for (float& sum : sums_) {
        sum = 0;
      }
      for (; stage < of_tile; stage += Weights::kConsumers) {
        const int slice = stage * kUnits;
        start(first_, slice);
        if (!ahead) {
          load_second();
        }
        ahead = false;
        end(first_, slice);
        if (slice + 1 < a_.slices) {
          start(second_, slice + 1);
          load_first();
          end(second_, slice + 1);
        } else {
          load_first();
        }
      }
      stage -= of_tile;
      finish_tile<kRows, kNorm, kSwiglu>(m_, a_, tile, sums_);
    }
  }

 private:
  __device__ void load(Fragment& f, int unit) {
    reader_.load(f, m_.w + ring_.stage * Weights::kStageBytes, m_.scales + ring_.stage * Weights::kScaleBytes, unit,
                 a_.operands.scales.group_shift);
  }
  __device__ void load_first() {
    if (left_ > 0) {
      cuda::wait(&m_.rest->full[ring_.stage], ring_.parity);
      load(first_, 0);
    }
  }
  __device__ void load_second() {
    load(second_, 1);
    __syncwarp();
    release(&m_.rest->empty[ring_.stage]);
    --left_;
#pragma unroll
    for (int i = 0; i < Weights::kConsumers; ++i) {
      ring_.advance();
    }
  }
  __device__ void start(Fragment& f, int slice) {
    f.pin();
    cuda::begin_products();
    multiply_pairs<T, kRows>(of_slice_, f, m_.x + slice * Memory<Weights, kRows>::kSliceBytes);
    cuda::commit_products();
  }
  __device__ void end(Fragment& f, int slice) {
    cuda::wait_products<0>();
    f.pin();
    cuda::pin(of_slice_);
    const float* const x = m_.x_sums + slice * kRows + threadIdx.x % 4 * 2;
    f.add(sums_, of_slice_, [&](int j) { return *reinterpret_cast<const float2*>(x + 8 * j); });
  }

  const Memory<Weights, kRows>& m_;
  const Arguments<Weights>& a_;
  typename Weights::template Reader<kSwiglu> reader_;
  int consumer_;
  Ring ring_;
  int left_;  // the number of stages that this warpgroup has not read yet
  Fragment first_;
  Fragment second_;
  float sums_[kRows / 2];
  float of_slice_[kRows / 2] = {};
};

template <class Weights, int kRows, bool kNorm, bool kSwiglu>
__global__ void __launch_bounds__(kThreads<Weights>, 1)
    decode_linear_wide_kernel(const __grid_constant__ Arguments<Weights> a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
  const Memory<Weights, kRows> m(memory, a);
  if (threadIdx.x == kConsumerThreads<Weights>) {
    for (int stage = 0; stage < a.stages; ++stage) {
      cuda::init_barrier(&m.rest->full[stage], 1);
      cuda::init_barrier(&m.rest->empty[stage], kWarpgroup / kWarp);
    }
    cuda::init_barrier(&m.rest->input_full, 1);
    cuda::publish_barriers();
  }
  cuda::allow_dependents();
  __syncthreads();
  if (threadIdx.x >= kConsumerThreads<Weights>) {
    if (threadIdx.x == kConsumerThreads<Weights>) {
      produce<Weights, kRows, kNorm, kSwiglu>(m, a);
    }
    __syncwarp();
  } else if constexpr (Weights::kIsPacked) {
    PackedConsumer<Weights, kRows, kNorm, kSwiglu>(m, a).run();
  } else {
    consume_floats<Weights, kRows, kNorm, kSwiglu>(m, a);
  }
#endif
}

template <class Weights, int kRows, bool kNorm, bool kSwiglu>
void launch(const DecodeLinearArgs& args) {
  constexpr std::size_t kMemory = 227 << 10;
  constexpr int kStageBytes = Weights::kStageBytes + Weights::kScaleBytes;
  Arguments<Weights> a{.operands = operands_of<Weights, kRows, kSwiglu>(args),
                       .slices = static_cast<int>(args.x.size(1)) / kTerms,
                       .tiles = static_cast<int>(args.y.size(1)) / kColumns<kSwiglu>,
                       .stages = 0,
                       .tiles_of_block = 0,
                       .longer_blocks = 0};
  const int blocks = std::min(a.tiles, cuda::multiprocessor_count());
  a.tiles_of_block = a.tiles / blocks;
  a.longer_blocks = a.tiles % blocks;
  const int of_block = (a.tiles + blocks - 1) / blocks * stages_of_tile(a);
  const int most = blocks < a.tiles ? kMostStages : kBytesOfOneTile<Weights> / kStageBytes;
  const int fitting = static_cast<int>((kMemory - Memory<Weights, kRows>::bytes(a)) / kStageBytes);
  a.stages = std::min({most, of_block, fitting});
  if (a.stages < of_block) {
    a.stages -= a.stages % Weights::kConsumers;  // so that a stage belongs to one warpgroup during a tile
  }
  cuda::Launch(static_cast<unsigned>(blocks), kThreads<Weights>, Memory<Weights, kRows>::bytes(a))
      .dependent()
      .run(decode_linear_wide_kernel<Weights, kRows, kNorm, kSwiglu>, "decode_linear_wide_kernel", a);
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
  on_dtype(Types<Float16, BFloat16>{}, args.x.dtype(), "decode_linear", [&]<class T>() {
    on_weights<T, kUnits>(args.weights[0], [&]<class Weights>() {
      on_options(args.options, [&]<bool kNorm, bool kSwiglu>() {
        const int rows = rows_of(args.x.size(0));
        if constexpr (Weights::kTakesFewRows) {
          if constexpr (!kSwiglu) {  // the head
            if (rows == 8) {
              return launch<Weights, 8, kNorm, kSwiglu>(args);
            }
          }
          if (rows <= 16) {
            return launch<Weights, 16, kNorm, kSwiglu>(args);
          }
        }
        launch<Weights, 32, kNorm, kSwiglu>(args);
      });
    });
  });
}

}  // namespace mica::kernels
