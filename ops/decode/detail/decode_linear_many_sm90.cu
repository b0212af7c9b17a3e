#include <mica/ops/decode/detail/decode_kernels.h>
#include <mica/ops/tiled_matmul/detail/tiled_matmul_sm90.cuh>

// Products of many rows with up to three weights side by side, for prompts. A block computes one tile of y after the
// other, as tiled_matmul's kernel does (its README explains the ring of stages, clusters and the swizzle). Here, b has
// parts: a tile's columns are those of one weight or, for SwiGLU, half of them gate's and half of them up's, so that a
// thread has both sums of an element.
//
//              q      k   v                    gate  up                     o
//           +------+----+----+               +----+----+                +--------+
//           | tile |    |    |               |  64|  64|                |  tile  |
//     x     +------+----+----+          x    +----+----+           x    +--------+  + residual
//     +---+ +------+----+----+        +---+  +---------+         +---+  +--------+
//     |   | |  y   |    |    |        |   |  |  y: 64  |         |   |  |   y    |
//     +---+ +------+----+----+        +---+  +---------+         +---+  +--------+
//
// The residual's tile is loaded to where y's will be, while the product runs. SwiGLU's epilogue is long, so the block's
// two warpgroups take turns as in matmul's kernel with epilogues.

namespace mica::kernels::tiles {

namespace {

constexpr int kConsumerRows = kTileRows / kConsumers;
constexpr int kBuffers = 2;  // of y, 64 rows and columns each

enum class Epilogue { plain, swiglu, residual };

struct Maps {
  CUtensorMap a;
  CUtensorMap b[kMostDecodeWeights];
  CUtensorMap residual;
  CUtensorMap y;
};

/// One weight's part of y.
struct Part {
  int first_column;
  const void* bias;  // or null
};

struct Problem {
  Sizes sizes;
  Part parts[kMostDecodeWeights];
  int part_count;

  /// The weight of a column of y.
  __device__ int part_of(int column) const {
    int part = 0;
    while (part + 1 < part_count && column >= parts[part + 1].first_column) {
      ++part;
    }
    return part;
  }
};

/// Whether the two warpgroups take turns: each has tiles of its own, and one multiplies while the other is in its
/// epilogue. Else they share each tile. Turns need tiles of at most 128 columns, and several for each block.
template <Epilogue kEpilogue>
inline constexpr bool kTurns = kEpilogue == Epilogue::swiglu;

template <class P>
struct Shared {
  unsigned char y[kConsumers][kBuffers][kChunkBytes];
  Stages<P> stages;
  std::uint64_t loaded[kConsumers];  // the tile of the residual
  std::uint64_t turn[kConsumers];    // the other warpgroup has issued all products of its tile
};

/// The columns of y that a tile has.
template <class P, Epilogue kEpilogue>
inline constexpr int kOutColumns = kEpilogue == Epilogue::swiglu ? P::kColumns / 2 : P::kColumns;

/// The columns of one copy of b: half a tile may belong to gate, the other half to up.
template <class P>
inline constexpr int kBoxColumns = P::kBShare < P::kColumns / 2 ? P::kBShare : P::kColumns / 2;

template <class T>
__device__ float2 floats_of(std::uint32_t pair) {
  if constexpr (std::is_same_v<T, Half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  } else {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u)};
  }
}

/// The biases of a column and the next.
template <class T>
__device__ float2 biases_at(const Part& part, int column, int columns) {
  if (part.bias == nullptr || column >= columns) {
    return {0, 0};
  }
  return floats_of<T>(
      *reinterpret_cast<const std::uint32_t*>(static_cast<const T*>(part.bias) + column - part.first_column));
}

__device__ inline float silu(float x) { return __fdividef(x, 1 + __expf(-x)); }

/// Loads the shares of b of all pieces, of the weight that the tile belongs to.
template <class P, Epilogue kEpilogue>
__device__ void load_weights(Stages<P>& stages, const Maps& maps, const Problem& problem) {
  constexpr int kBox = kBoxColumns<P>;
  produce<P, Lines::depth>(
      stages, &maps.a, problem.sizes,
      [&](unsigned char* to, int k, const Corner& corner, int share, std::uint64_t* full, std::uint16_t blocks) {
#pragma unroll
        for (int box = 0; box < P::kBShare / kBox; ++box) {
          const int column = share + box * kBox;  // of the tile
          if constexpr (kEpilogue == Epilogue::swiglu) {
            constexpr int kHalf = P::kColumns / 2;
            const int weight = column / kHalf;
            load_shared<P>(to + box * kBox * kLineBytes, &maps.b[weight], k, corner.column / 2 + column % kHalf, full,
                           blocks);
          } else {
            const int weight = problem.part_of(corner.column);
            load_shared<P>(to + box * kBox * kLineBytes, &maps.b[weight], k,
                           corner.column - problem.parts[weight].first_column + column, full, blocks);
          }
        }
      });
}

/// A warpgroup's buffers of y. The copy engine writes a buffer to y, or the residual into it, in whole swizzled lines.
struct Buffers {
  unsigned char (&memory)[kBuffers][kChunkBytes];
  int consumer;

  __device__ int thread() const { return threadIdx.x % kWarpgroup; }
  __device__ int lane() const { return threadIdx.x % 32; }
  __device__ void sync() const { cuda::barrier_sync(1 + consumer, kWarpgroup); }
  /// The address that this lane provides for columns 16 i to 16 i + 15.
  __device__ unsigned char* place(int buffer, int i) const {
    const int line = thread() / 32 * 16 + lane() % 16;
    return memory[buffer] + line * kLineBytes + ((2 * i + lane() / 16) ^ (line % 8)) * 16;
  }
};

/// Rounds a warpgroup's 64 rows of a tile and stores them, 64 columns at a time.
template <class T, class P, Epilogue kEpilogue>
__device__ void write_out(const float (&sums)[P::kColumns / 2], const Buffers& buffers, int& next_buffer,
                          const Maps& maps, const Problem& problem, int row, int column) {
  const int columns = problem.sizes.columns;
  const int weight = kEpilogue == Epilogue::swiglu ? 0 : problem.part_of(column);
#pragma unroll
  for (int chunk = 0; chunk < kOutColumns<P, kEpilogue> / kChunk; ++chunk) {
    const int first = column + chunk * kChunk;
    if (first >= columns) {
      return;
    }
    const int buffer = kEpilogue == Epilogue::residual ? chunk : next_buffer;
    if constexpr (kEpilogue != Epilogue::residual) {
      next_buffer ^= 1;
      if (buffers.thread() == 0) {
        cuda::wait_stores_read<kBuffers - 1>();  // of the previous contents
      }
      buffers.sync();
    }
#pragma unroll
    for (int i = 0; i < kChunk / 16; ++i) {
      std::uint32_t pairs[4];
      if constexpr (kEpilogue == Epilogue::residual) {
        cuda::load_matrices(pairs, buffers.place(buffer, i));
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = chunk * (kChunk / 2) + i * 8 + 2 * j;
        const int pair_column = first + i * 16 + j / 2 * 8 + buffers.lane() % 4 * 2;
        const float2 bias = biases_at<T>(problem.parts[weight], pair_column, columns);
        float2 value{sums[at] + bias.x, sums[at + 1] + bias.y};
        if constexpr (kEpilogue == Epilogue::swiglu) {
          constexpr int kUp = P::kColumns / 4;
          const float2 up_bias = biases_at<T>(problem.parts[1], pair_column, columns);
          value = {silu(value.x) * (sums[kUp + at] + up_bias.x), silu(value.y) * (sums[kUp + at + 1] + up_bias.y)};
        }
        if constexpr (kEpilogue == Epilogue::residual) {
          const float2 residual = floats_of<T>(pairs[j]);
          value = {value.x + residual.x, value.y + residual.y};
        }
        pairs[j] = cuda::pair_of<T>(value.x, value.y);
      }
      cuda::store_matrices(buffers.place(buffer, i), pairs);
    }
    cuda::fence_async_proxy();
    buffers.sync();
    if (buffers.thread() == 0) {
      cuda::store_tile(&maps.y, first, row, buffers.memory[buffer]);
      cuda::commit_stores();
    }
  }
}

/// Multiplies the pieces of all tiles of this block, or of this warpgroup. Runs in a warpgroup.
template <class T, class P, Epilogue kEpilogue>
__device__ void consume(Shared<P>& shared, const Maps& maps, const Problem& problem) {
  constexpr bool kHasTurns = kTurns<kEpilogue>;
  constexpr int kHalves = kHasTurns ? kTileRows / kConsumerRows : 1;
  const int consumer = threadIdx.x / kWarpgroup - 1;
  const Buffers buffers{.memory = shared.y[consumer], .consumer = consumer};
  const int step = gridDim.x / P::kCluster;
  Ring<P::kStages> ring;
  if (kHasTurns && consumer == 1) {
    ring.skip(problem.sizes.pieces);
  }
  int next_buffer = 0;
  unsigned parity = 0;  // of barriers that complete once per tile
  for (int number = blockIdx.x / P::kCluster + (kHasTurns ? consumer * step : 0); number < problem.sizes.order.size();
       number += kHasTurns ? kConsumers * step : step, parity ^= 1) {
    const Corner corner = corner_of<P>(problem.sizes, number);
    const int first_row = kHasTurns ? 0 : consumer * kConsumerRows;  // of the tile
    const int row = corner.row + first_row;
    const int column = kEpilogue == Epilogue::swiglu ? corner.column / 2 : corner.column;
    if constexpr (kEpilogue == Epilogue::residual) {
      static_assert(P::kColumns == kBuffers * kChunk);
      if (buffers.thread() == 0) {
        cuda::wait_stores_read<0>();  // of the previous tile
        cuda::arrive_expecting(&shared.loaded[consumer], kBuffers * kChunkBytes);
#pragma unroll
        for (int chunk = 0; chunk < kBuffers; ++chunk) {
          cuda::load_tile(buffers.memory[chunk], &maps.residual, column + chunk * kChunk, row,
                          &shared.loaded[consumer]);
        }
      }
    }
    if constexpr (kHasTurns) {
      cuda::wait(&shared.turn[consumer], parity ^ (consumer == 0 ? 1 : 0));  // the first warpgroup starts
    }
    float sums[kHalves][P::kColumns / 2];
    multiply_tile<T, P, Lines::depth, Lines::depth>(sums, shared.stages, ring, problem.sizes.pieces,
                                                    first_row * kLineBytes, [&] {
                                                      if (kHasTurns && buffers.thread() == 0) {
                                                        cuda::arrive(&shared.turn[1 - consumer]);
                                                      }
                                                    });
    if constexpr (kHasTurns) {
      ring.skip(problem.sizes.pieces);  // the other warpgroup's
    }
    if constexpr (kEpilogue == Epilogue::residual) {
      cuda::wait(&shared.loaded[consumer], parity);
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      write_out<T, P, kEpilogue>(sums[half], buffers, next_buffer, maps, problem, row + half * kConsumerRows, column);
    }
  }
  if (buffers.thread() == 0) {
    cuda::wait_stores_read<0>();  // shared memory must live until the stores have read it
  }
}

template <class T, class P, Epilogue kEpilogue>
__global__ void __launch_bounds__(kThreads, 1)
    decode_linear_many_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Problem problem) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<P>*>(memory);
  if (threadIdx.x == 0) {
    init_stages(shared.stages, kTurns<kEpilogue> ? 1 : kConsumers);
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      cuda::init_barrier(&shared.loaded[consumer], 1);
      cuda::init_barrier(&shared.turn[consumer], 1);
    }
    cuda::publish_barriers();
  }
  __syncthreads();
  cuda::arrive_in_cluster();
  cuda::wait_for_cluster();
  cuda::allow_dependents();
  cuda::wait_for_previous_kernel();
  if (threadIdx.x < kWarpgroup) {
    cuda::release_registers<40>();
    if (threadIdx.x == 0) {
      load_weights<P, kEpilogue>(shared.stages, maps, problem);
    }
    __syncwarp();
  } else {
    cuda::acquire_registers<232>();
    consume<T, P, kEpilogue>(shared, maps, problem);
  }
  // No block exits while others may still write to its memory.
  cuda::arrive_in_cluster();
  cuda::wait_for_cluster();
#endif
}

template <class P>
CUtensorMap map_of_weight(const Tensor& weight) {
  return map_of(weight, matrix_of(weight), kBoxColumns<P>);
}

template <class T, class P, Epilogue kEpilogue>
void launch(const DecodeLinearArgs& args) {
  constexpr bool kSwiglu = kEpilogue == Epilogue::swiglu;
  Maps maps{.a = map_of_a<P, Lines::depth>(args.x),
            .b = {},
            .residual = {},
            .y = map_of(args.y, matrix_of(args.y), kConsumerRows)};
  if constexpr (kEpilogue == Epilogue::residual) {
    maps.residual = map_of(args.options.residual, matrix_of(args.options.residual), kConsumerRows);
  }
  Problem problem{.sizes = {}, .parts = {}, .part_count = static_cast<int>(args.weights.size())};
  std::int64_t columns = 0;
  for (std::size_t i = 0; i < args.weights.size(); ++i) {
    const DecodeWeight& w = args.weights[i];
    maps.b[i] = map_of_weight<P>(w.matrix);
    problem.parts[i] = {.first_column = kSwiglu ? 0 : static_cast<int>(columns),
                        .bias = w.bias.defined() ? w.bias.raw_data() : nullptr};
    columns += w.out();
  }
  problem.sizes = sizes_of<P>(args.x.size(0), columns, args.x.size(1));
  problem.sizes.columns = static_cast<int>(args.y.size(1));
  cuda::Launch(blocks_for<P>(problem.sizes), kThreads, sizeof(Shared<P>))
      .cluster(P::kCluster)
      .dependent()
      .run(decode_linear_many_kernel<T, P, kEpilogue>, "decode_linear_many_kernel", maps, problem);
}

/// Calls f.operator()<P>() with tiles that fit the weights' parts of y, and as many as keep all multiprocessors busy.
template <class F>
void on_plan(const DecodeLinearArgs& args, const F& f) {
  using Wide = Plan<256, 4, 1>;
  using Narrow = Plan<128, 6, 1>;
  const auto fits = [&](std::int64_t columns) {
    return std::all_of(args.weights.begin(), args.weights.end() - 1,
                       [&](const DecodeWeight& w) { return w.out() % columns == 0; });
  };
  const std::int64_t tiles = std::int64_t{parts_of(args.x.size(0), kTileRows)} * parts_of(args.y.size(1), 256);
  if (fits(256) && tiles >= cuda::multiprocessor_count()) {
    f.template operator()<Wide>();
  } else {
    f.template operator()<Narrow>();
  }
}

}  // namespace

}  // namespace mica::kernels::tiles

namespace mica::kernels {

bool can_decode_linear_many(Cuda, const Tensor& x, const std::vector<DecodeWeight>& weights,
                            const DecodeLinearOptions& options) {
  const auto fits = [](const Tensor& t) {
    return !t.defined() || (tiles::matrix_of(t).lines_are_rows && tiles::fits_sm90(t));
  };
  const auto has_whole_tiles = [](const DecodeWeight& w) { return w.out() % 128 == 0; };
  return cuda::device_has_wgmma() && !(options.swiglu && options.residual.defined()) && fits(x) &&
         fits(options.residual) && weights.back().out() % 8 == 0 &&
         (options.swiglu || std::all_of(weights.begin(), weights.end() - 1, has_whole_tiles)) &&
         std::all_of(weights.begin(), weights.end(), [&](const DecodeWeight& w) { return fits(w.matrix); });
}

void decode_linear_many(Cuda, const DecodeLinearArgs& args) {
  using tiles::Epilogue;
  on_dtype(Types<Half, BFloat16>{}, args.y.dtype(), "decode_linear", [&]<class T>() {
    if (args.options.swiglu) {
      tiles::launch<T, tiles::Plan<128, 6, 1>, Epilogue::swiglu>(args);
    } else if (args.options.residual.defined()) {
      tiles::launch<T, tiles::Plan<128, 6, 1>, Epilogue::residual>(args);
    } else {
      tiles::on_plan(args, [&]<class P>() { tiles::launch<T, P, Epilogue::plain>(args); });
    }
  });
}

}  // namespace mica::kernels
