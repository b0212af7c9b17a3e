#include <mica/ops/decode/detail/decode_kernels.h>
#include <mica/ops/decode/detail/silu.cuh>
#include <mica/ops/tiled_matmul/detail/tiled_matmul_sm90.cuh>
#include <mica/ops/view/view.h>

// Products of many rows with up to three weights side by side, for prompts. A block computes one tile of y after the
// other, as tiled_matmul's kernel does (its README explains the ring of stages, clusters and the swizzle). Here, b
// consists of several weights. For SwiGLU, half of a tile's columns belong to gate and half to up, so that a thread has
// both sums of an element.
//
//              q      k   v                    gate  up                     o
//           +------+----+----+               +----+----+                +--------+
//           | tile |    |    |               |  64|  64|                |  tile  |
//     x     +------+----+----+          x    +----+----+           x    +--------+  + residual
//     +---+ +------+----+----+        +---+  +---------+         +---+  +--------+
//     |   | |  y   |    |    |        |   |  |  y: 64  |         |   |  |   y    |
//     +---+ +------+----+----+        +---+  +---------+         +---+  +--------+
//
// The residual's tile is loaded into the buffers of y's tile while the product runs. SwiGLU's epilogue is long, so the
// block's two warpgroups have tiles of their own and alternate, as in matmul's kernel with epilogues. The epilogue can
// also append to the cache if heads have 64 columns: then a thread has both columns of a pair, and the epilogue rotates
// queries and keys and stores keys and values into the cache.

namespace mica::kernels::tiles {

namespace {

constexpr int kConsumerRows = kTileRows / kConsumers;
constexpr int kBuffers = 2;  // per warpgroup, of 64 rows and 64 columns of y each
constexpr int kHeadWidth = 64;

enum class Epilogue { plain, swiglu, residual, append };

/// How a block's two warpgroups share the tiles.
enum class Sharing {
  rows,   // each has half of the rows of a tile
  turns,  // each has tiles of its own, and one multiplies while the other is in its epilogue
};

struct Maps {
  CUtensorMap a;
  CUtensorMap b[kMostDecodeWeights];
  CUtensorMap residual;
  CUtensorMap y;
  CUtensorMap keys;  // the cache's new slots: (B, Hkv, T, D)
  CUtensorMap values;
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
  int rows;
  // For Epilogue::append: y consists of the heads' queries, keys and values. `rotations` has the cosine and sine of
  // each pair's angle, for each step.
  const float4* rotations;
  int heads;
  int key_heads;
  int steps;

  /// The index of the weight that a column of y belongs to.
  __device__ int part_of(int column) const {
    int part = 0;
    while (part + 1 < part_count && column >= parts[part + 1].first_column) {
      ++part;
    }
    return part;
  }
};

template <class P>
struct Shared {
  unsigned char y[kConsumers][kBuffers][kChunkBytes];
  Stages<P> stages;
  std::uint64_t loaded[kConsumers];  // barrier: the residual's tile has arrived
  std::uint64_t turn[kConsumers];    // barrier: the other warpgroup has issued all products of its tile
};

/// The columns of b that one copy loads. All of them must belong to the same weight. For SwiGLU, half of a tile belongs
/// to gate and half to up. Otherwise, each weight begins at a multiple of 128 columns; so tiles of 192 columns are
/// loaded 64 columns at a time.
template <class P>
inline constexpr int kBoxColumns = P::kColumns % 128 == 0 ? P::kColumns / 2 : 64;

template <class T>
__device__ float2 floats_of(std::uint32_t pair) {
  if constexpr (std::is_same_v<T, Float16>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  } else {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u)};
  }
}

/// The biases of `column` and of the next one; 0 if there are none.
template <class T>
__device__ float2 biases_at(const Part& part, int column, int columns) {
  if (part.bias == nullptr || column >= columns) {
    return {0, 0};
  }
  return floats_of<T>(
      *reinterpret_cast<const std::uint32_t*>(static_cast<const T*>(part.bias) + column - part.first_column));
}

/// Loads all pieces of this block, each as soon as its stage is empty. Only the weights of the first pieces are loaded
/// before the previous kernel has ended. Runs in one thread.
template <class P, Epilogue kEpilogue>
__device__ void load_pieces(Stages<P>& stages, const Maps& maps, const Problem& problem) {
  static_assert(P::kCluster == 1);
  const int pieces = problem.sizes.pieces;
  const auto load_weights = [&](int stage, int piece, const Corner& corner) {
    constexpr int kBox = kBoxColumns<P>;
    const int k = piece * kDepth;
#pragma unroll
    for (int column = 0; column < P::kColumns; column += kBox) {  // within the tile
      unsigned char* const to = stages.b[stage] + column * kLineBytes;
      if constexpr (kEpilogue == Epilogue::swiglu) {
        constexpr int kHalf = P::kColumns / 2;
        cuda::load_tile(to, &maps.b[column / kHalf], k, corner.column / 2 + column % kHalf, &stages.full[stage]);
      } else {
        const int weight = problem.part_of(corner.column + column);
        cuda::load_tile(to, &maps.b[weight], k, corner.column - problem.parts[weight].first_column + column,
                        &stages.full[stage]);
      }
    }
  };
  const auto load_x = [&](int stage, int piece, const Corner& corner) {
    cuda::load_tile(stages.a[stage], &maps.a, piece * kDepth, corner.row, &stages.full[stage]);
  };
  const auto expect = [&](int stage) { cuda::arrive_expecting(&stages.full[stage], P::kABytes + P::kBBytes); };

  const int early = min(pieces, P::kStages);
  const Corner first = corner_of<P>(problem.sizes, static_cast<int>(blockIdx.x));
  for (int piece = 0; piece < early; ++piece) {
    expect(piece);
    load_weights(piece, piece, first);
  }
  cuda::wait_for_previous_kernel();
  for (int piece = 0; piece < early; ++piece) {
    load_x(piece, piece, first);
  }
  Ring<P::kStages> ring;
  ring.skip(early);
  int piece = early;
  for (int number = static_cast<int>(blockIdx.x); number < problem.sizes.order.size();
       number += static_cast<int>(gridDim.x), piece = 0) {
    const Corner corner = corner_of<P>(problem.sizes, number);
    for (; piece < pieces; ++piece, ring.advance()) {
      cuda::wait(&stages.empty[ring.stage], ring.parity ^ 1);  // returns immediately in the first round
      expect(ring.stage);
      load_x(ring.stage, piece, corner);
      load_weights(ring.stage, piece, corner);
    }
  }
}

/// Reports that this warpgroup has read a stage. There are no clusters, so only this block needs to know.
template <class P>
__device__ void release_in_block(Stages<P>& stages, int stage) {
  if (threadIdx.x % kWarpgroup == 0) {
    cuda::arrive(&stages.empty[stage]);
  }
}

/// A warpgroup's buffers of y. The copy engine copies a buffer to y, or the residual to a buffer, in whole swizzled
/// lines.
struct Buffers {
  unsigned char (&memory)[kBuffers][kChunkBytes];
  int consumer;

  __device__ int thread() const { return threadIdx.x % kWarpgroup; }
  __device__ int lane() const { return threadIdx.x % 32; }
  __device__ void sync() const { cuda::barrier_sync(1 + consumer, kWarpgroup); }
  /// The address that this lane passes to load_matrices() and store_matrices() for columns 16 i to 16 i + 15.
  __device__ unsigned char* place(int buffer, int i) const {
    const int line = thread() / 32 * 16 + lane() % 16;
    return memory[buffer] + line * kLineBytes + ((2 * i + lane() / 16) ^ (line % 8)) * 16;
  }
};

/// Rounds a warpgroup's 64 rows of kColumns columns of a tile and stores them, 64 columns at a time.
template <class T, int kColumns, Epilogue kEpilogue>
__device__ void write_out(const float (&sums)[kColumns / 2], const Buffers& buffers, int& next_buffer, const Maps& maps,
                          const Problem& problem, int row, int column) {
  constexpr int kOutColumns = kEpilogue == Epilogue::swiglu ? kColumns / 2 : kColumns;
  const int columns = problem.sizes.columns;
#pragma unroll
  for (int chunk = 0; chunk < kOutColumns / kChunk; ++chunk) {
    const int first = column + chunk * kChunk;
    if (first >= columns) {
      break;
    }
    const int weight = kEpilogue == Epilogue::swiglu ? 0 : problem.part_of(first);
    const int buffer = kEpilogue == Epilogue::residual ? chunk : next_buffer;
    if constexpr (kEpilogue != Epilogue::residual) {
      next_buffer ^= 1;
      if (buffers.thread() == 0) {
        cuda::wait_stores_read<kBuffers - 1>();  // until the previous contents have been read
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
          constexpr int kUp = kColumns / 4;
          const float2 up_bias = biases_at<T>(problem.parts[1], pair_column, columns);
          value = {fast_silu(value.x) * (sums[kUp + at] + up_bias.x),
                   fast_silu(value.y) * (sums[kUp + at + 1] + up_bias.y)};
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

/// The cosines and sines that a lane needs for its two rows, which are 8 apart: those of its columns in the left half
/// of a head, two columns per float4.
struct Rotations {
  float4 pairs[2][4];

  __device__ void load(const Problem& problem, const Buffers& buffers, int row) {
    const int line = row % problem.steps + buffers.thread() / 32 * 16 + buffers.lane() / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4* const p =
          problem.rotations + std::int64_t{min(line + half * 8, problem.steps - 1)} * (kHeadWidth / 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        pairs[half][i] = p[i * 4 + buffers.lane() % 4];
      }
    }
  }
};

struct Nothing {
  __device__ void load(const Problem&, const Buffers&, int) {}
};

/// Rounds a warpgroup's 64 rows of kColumns columns, which are heads of 64 columns. Rotates queries and keys. Stores
/// queries to y, and keys and values into the cache.
template <class T, int kColumns>
__device__ void write_heads(const float (&sums)[kColumns / 2], const Rotations& rotations, const Buffers& buffers,
                            int& next_buffer, const Maps& maps, const Problem& problem, int row, int column) {
  static_assert(kHeadWidth == kChunk);
#pragma unroll
  for (int chunk = 0; chunk < kColumns / kChunk; ++chunk) {
    const int first = column + chunk * kChunk;
    if (first >= problem.sizes.columns) {
      break;
    }
    const Part& part = problem.parts[problem.part_of(first)];
    const int head = first / kHeadWidth;
    const int key_head = head - problem.heads;  // from key_heads on, the heads of the values
    const int buffer = next_buffer;
    next_buffer ^= 1;
    if (buffers.thread() == 0) {
      cuda::wait_stores_read<kBuffers - 1>();  // until the previous contents have been read
    }
    buffers.sync();
    std::uint32_t pairs[kChunk / 16][4];
#pragma unroll
    for (int i = 0; i < kChunk / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = chunk * (kChunk / 2) + i * 8 + 2 * j;
        const float2 bias =
            biases_at<T>(part, first + i * 16 + j / 2 * 8 + buffers.lane() % 4 * 2, problem.sizes.columns);
        pairs[i][j] = cuda::pair_of<T>(sums[at] + bias.x, sums[at + 1] + bias.y);
      }
    }
    if (key_head < problem.key_heads) {
#pragma unroll
      for (int i = 0; i < kChunk / 32; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float4 r = rotations.pairs[j % 2][2 * i + j / 2];
          const float2 left = floats_of<T>(pairs[i][j]);
          const float2 right = floats_of<T>(pairs[i + 2][j]);
          pairs[i][j] = cuda::pair_of<T>(left.x * r.x - right.x * r.y, left.y * r.z - right.y * r.w);
          pairs[i + 2][j] = cuda::pair_of<T>(right.x * r.x + left.x * r.y, right.y * r.z + left.y * r.w);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kChunk / 16; ++i) {
      cuda::store_matrices(buffers.place(buffer, i), pairs[i]);
    }
    cuda::fence_async_proxy();
    buffers.sync();
    if (buffers.thread() == 0) {
      if (key_head < 0) {
        cuda::store_tile(&maps.y, first, row, buffers.memory[buffer]);
      } else {
        const bool is_key = key_head < problem.key_heads;
        cuda::store_tile(is_key ? &maps.keys : &maps.values, 0, row % problem.steps,
                         is_key ? key_head : key_head - problem.key_heads, row / problem.steps, buffers.memory[buffer]);
      }
      cuda::commit_stores();
    }
  }
}

/// Starts to load the residual's tile into the buffers of y's tile. Runs in one thread.
__device__ inline void load_residual(const Buffers& buffers, const Maps& maps, int row, int column,
                                     std::uint64_t* loaded) {
  cuda::wait_stores_read<0>();  // until the previous tile has been read
  cuda::arrive_expecting(loaded, kBuffers * kChunkBytes);
#pragma unroll
  for (int chunk = 0; chunk < kBuffers; ++chunk) {
    cuda::load_tile(buffers.memory[chunk], &maps.residual, column + chunk * kChunk, row, loaded);
  }
}

/// Multiplies the pieces of all tiles of this block, or of this warpgroup. Runs in a warpgroup.
template <class T, class P, Epilogue kEpilogue, Sharing kSharing>
__device__ void consume(Shared<P>& shared, const Maps& maps, const Problem& problem) {
  constexpr bool kTurns = kSharing == Sharing::turns;
  constexpr int kHalves = kTurns ? kTileRows / kConsumerRows : 1;
  static_assert(kHalves * P::kColumns <= 256);
  const int consumer = threadIdx.x / kWarpgroup - 1;
  const Buffers buffers{.memory = shared.y[consumer], .consumer = consumer};
  const int step = static_cast<int>(gridDim.x);
  const int pieces = problem.sizes.pieces;
  Ring<P::kStages> ring;
  if (kTurns && consumer == 1) {
    ring.skip(pieces);
  }
  int next_buffer = 0;
  unsigned parity = 0;  // for barriers that complete once per tile
  for (int number = static_cast<int>(blockIdx.x) + (kTurns ? consumer * step : 0); number < problem.sizes.order.size();
       number += kTurns ? kConsumers * step : step, parity ^= 1) {
    const Corner corner = corner_of<P>(problem.sizes, number);
    const int first_row = kTurns ? 0 : consumer * kConsumerRows;  // within the tile
    const int row = corner.row + first_row;
    const int column = kEpilogue == Epilogue::swiglu ? corner.column / 2 : corner.column;
    if constexpr (kEpilogue == Epilogue::residual) {
      static_assert(P::kColumns == kBuffers * kChunk);
      if (buffers.thread() == 0) {
        load_residual(buffers, maps, row, column, &shared.loaded[consumer]);
      }
    }
    std::conditional_t<kEpilogue == Epilogue::append, Rotations, Nothing> rotations;
    rotations.load(problem, buffers, row);
    if constexpr (kTurns) {
      // Returns immediately for the first tile of the first warpgroup.
      cuda::wait(&shared.turn[consumer], parity ^ (consumer == 0 ? 1 : 0));
    }
    float sums[kHalves][P::kColumns / 2];
    const auto issued = [&] {
      if (kTurns && buffers.thread() == 0) {
        cuda::arrive(&shared.turn[1 - consumer]);
      }
    };
    multiply_tile<T, P, Lines::depth, Lines::depth>(sums, shared.stages, ring, pieces, first_row * kLineBytes, issued,
                                                    release_in_block<P>);
    if constexpr (kTurns) {
      ring.skip(pieces);  // the other warpgroup's pieces
    }
    if constexpr (kEpilogue == Epilogue::residual) {
      cuda::wait(&shared.loaded[consumer], parity);
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      if constexpr (kEpilogue == Epilogue::append) {
        if (row < problem.rows) {
          write_heads<T, P::kColumns>(sums[half], rotations, buffers, next_buffer, maps, problem, row, column);
        }
      } else {
        write_out<T, P::kColumns, kEpilogue>(sums[half], buffers, next_buffer, maps, problem,
                                             row + half * kConsumerRows, column);
      }
    }
  }
  if (buffers.thread() == 0) {
    cuda::wait_stores_read<0>();  // shared memory must live until the stores have read it
  }
}

template <class T, class P, Epilogue kEpilogue, Sharing kSharing>
__global__ void __launch_bounds__(kThreads, 1)
    decode_linear_many_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Problem problem) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<P>*>(memory);
  if (threadIdx.x == 0) {
    init_stages(shared.stages, kSharing == Sharing::turns ? 1 : kConsumers);
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      cuda::init_barrier(&shared.loaded[consumer], 1);
      cuda::init_barrier(&shared.turn[consumer], 1);
    }
    cuda::publish_barriers();
  }
  __syncthreads();
  cuda::allow_dependents();
  if (threadIdx.x < kWarpgroup) {
    cuda::release_registers<40>();
    if (threadIdx.x == 0) {
      load_pieces<P, kEpilogue>(shared.stages, maps, problem);
    }
    __syncwarp();
  } else {
    cuda::acquire_registers<232>();
    cuda::wait_for_previous_kernel();  // which may write the residual, or read the old contents of y's memory
    consume<T, P, kEpilogue, kSharing>(shared, maps, problem);
  }
#endif
}

/// The map of the cache's slots for the new positions.
cuda::HeadsMapArgs map_of_slots(const DecodeAppendTo& to, const Tensor& list) {
  return {.dtype = list.dtype(),
          .data = slice(list, 2, to.first, to.first + to.steps).raw_data(),
          .sizes = {list.size(0), list.size(1), to.steps, list.size(3)},
          .strides = {list.strides()[0], list.strides()[1], list.strides()[2]},
          .box_lines = kConsumerRows};
}

template <class T, class P, Epilogue kEpilogue, Sharing kSharing>
void launch(const DecodeLinearArgs& args) {
  constexpr bool kSwiglu = kEpilogue == Epilogue::swiglu;
  Maps maps{.a = map_of_a<P, Lines::depth>(args.x),
            .b = {},
            .residual = {},
            .y = map_of(args.y, matrix_of(args.y), kConsumerRows),
            .keys = {},
            .values = {}};
  if constexpr (kEpilogue == Epilogue::residual) {
    maps.residual = map_of(args.options.residual, matrix_of(args.options.residual), kConsumerRows);
  }
  Problem problem{.sizes = {},
                  .parts = {},
                  .part_count = static_cast<int>(args.weights.size()),
                  .rows = static_cast<int>(args.x.size(0)),
                  .rotations = nullptr,
                  .heads = 0,
                  .key_heads = 0,
                  .steps = 0};
  if constexpr (kEpilogue == Epilogue::append) {
    const DecodeAppendTo& to = args.append;
    maps.keys = cuda::swizzled_heads_map(map_of_slots(to, to.keys));
    maps.values = cuda::swizzled_heads_map(map_of_slots(to, to.values));
    problem.rotations = reinterpret_cast<const float4*>(to.rotations.template data<float>());
    problem.key_heads = static_cast<int>(to.keys.size(1));
    problem.heads = static_cast<int>(args.y.size(1) / kHeadWidth);
    problem.steps = static_cast<int>(to.steps);
  }
  std::int64_t columns = 0;
  for (std::size_t i = 0; i < args.weights.size(); ++i) {
    const DecodeWeight& w = args.weights[i];
    maps.b[i] = map_of(w.matrix, matrix_of(w.matrix), kBoxColumns<P>);
    problem.parts[i] = {.first_column = kSwiglu ? 0 : static_cast<int>(columns),
                        .bias = w.bias.defined() ? w.bias.raw_data() : nullptr};
    columns += w.out();
  }
  problem.sizes = sizes_of<P>(args.x.size(0), columns, args.x.size(1));
  problem.sizes.columns = static_cast<int>(kSwiglu ? columns / 2 : columns);
  cuda::Launch(blocks_for<P>(problem.sizes), kThreads, sizeof(Shared<P>))
      .dependent()
      .run(decode_linear_many_kernel<T, P, kEpilogue, kSharing>, "decode_linear_many_kernel", maps, problem);
}

std::int64_t tiles_of(const DecodeLinearArgs& args, std::int64_t columns) {
  std::int64_t out = 0;
  for (const DecodeWeight& w : args.weights) {
    out += w.out();
  }
  return std::int64_t{parts_of(args.x.size(0), kTileRows)} * parts_of(out, columns);
}

/// Calls f.operator()<P>() with the tile size that takes the least time, if the time of a tile is proportional to its
/// columns. Sizes differ because the last round of tiles may use only few of the multiprocessors.
template <class F>
void on_plan(const DecodeLinearArgs& args, const F& f) {
  const auto time = [&](std::int64_t columns) {
    return parts_of(tiles_of(args, columns), cuda::multiprocessor_count()) * columns;
  };
  const std::int64_t least = std::min({time(128), time(192), time(256)});
  if (time(256) == least) {
    f.template operator()<Plan<256, 4, 1>>();
  } else if (time(192) == least) {
    f.template operator()<Plan<192, 4, 1>>();
  } else {
    f.template operator()<Plan<128, 6, 1>>();
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

bool can_decode_linear_append(Cuda, const DecodeAppendTo& to, const DecodeAttention& a) {
  const auto fits = [&](const Tensor& list) { return cuda::fits_heads_map(tiles::map_of_slots(to, list)); };
  return a.width() == tiles::kHeadWidth && !a.q_norm.defined() && !a.k_norm.defined() && !a.padding.defined() &&
         (a.keys.size(0) == 1 || to.steps % tiles::kConsumerRows == 0) && fits(a.keys) && fits(a.values);
}

void decode_linear_many(Cuda, const DecodeLinearArgs& args) {
  using tiles::Epilogue;
  using tiles::Sharing;
  on_dtype(Types<Float16, BFloat16>{}, args.y.dtype(), "decode_linear", [&]<class T>() {
    if (args.options.swiglu) {
      tiles::launch<T, tiles::Plan<128, 6, 1>, Epilogue::swiglu, Sharing::turns>(args);
    } else if (args.append.keys.defined()) {
      tiles::on_plan(args, [&]<class P>() { tiles::launch<T, P, Epilogue::append, Sharing::rows>(args); });
    } else if (args.options.residual.defined()) {
      tiles::launch<T, tiles::Plan<128, 6, 1>, Epilogue::residual, Sharing::rows>(args);
    } else {
      tiles::on_plan(args, [&]<class P>() { tiles::launch<T, P, Epilogue::plain, Sharing::rows>(args); });
    }
  });
}

}  // namespace mica::kernels
