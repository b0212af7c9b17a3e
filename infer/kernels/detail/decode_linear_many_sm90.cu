#include <mica/core/detail/ceil_div.h>
#include <mica/infer/kernels/detail/kernels.h>
#include <mica/infer/kernels/detail/silu.cuh>
#include <mica/ops/gemm/detail/kernel_sm90.cuh>
#include <mica/ops/view/view.h>

// Products of many rows with up to three weights side by side, for prompts: the kernel of ops/gemm, where b
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
// warpgroups alternate (Schedule::ping_pong). The epilogue can also append to the cache if heads have 64 columns: then
// a thread has both columns of a pair, and the epilogue rotates queries and keys and stores keys and values into the
// cache.

namespace mica::kernels {

namespace many_rows {

namespace {

using gemm::kChunk;
using gemm::kHalfRows;
using gemm::Nothing;

constexpr int kBuffers = 2;
constexpr int kGroups = kChunk / 16;  // groups of 16 columns
constexpr int kHeadWidth = 64;
using Buffers = gemm::TileBuffers<kBuffers>;

/// Weights side by side: which columns of y belong to which weight.
struct Weights {
  struct WeightColumns {
    int first_column;
    const void* bias;  // or null
  };
  WeightColumns parts[kMostDecodeWeights];
  int count;
  int columns;  // of y

  /// The index of the weight that a column of y belongs to.
  __device__ int at(int column) const {
    int part = 0;
    while (part + 1 < count && column >= parts[part + 1].first_column) {
      ++part;
    }
    return part;
  }

  /// The biases of `column` and of the next one, which belong to this part; 0 if it has none.
  template <class T>
  __device__ float2 biases(int part, int column) const {
    const WeightColumns& p = parts[part];
    if (p.bias == nullptr || column >= columns) {
      return {0, 0};
    }
    return gemm::floats_of<T>(
        *reinterpret_cast<const std::uint32_t*>(static_cast<const T*>(p.bias) + column - p.first_column));
  }
};

Weights weights_of(const DecodeLinearArgs& args) {
  Weights weights{.parts = {}, .count = static_cast<int>(args.weights.size()), .columns = 0};
  std::int64_t columns = 0;
  for (std::size_t i = 0; i < args.weights.size(); ++i) {
    const DecodeWeight& w = args.weights[i];
    weights.parts[i] = {.first_column = args.options.swiglu ? 0 : static_cast<int>(columns),
                        .bias = w.bias.defined() ? w.bias.raw_data() : nullptr};
    columns += w.out();
  }
  weights.columns = static_cast<int>(args.options.swiglu ? columns / 2 : columns);
  return weights;
}

/// x and the weights. The weights do not depend on the previous kernel.
template <class P, bool kSwiglu>
struct Operands {
  static constexpr gemm::Lines kA = gemm::Lines::depth;
  static constexpr gemm::Lines kB = gemm::Lines::depth;
  static constexpr bool kIsDependent = true;
  /// The columns that one copy loads, all of the same weight. For SwiGLU, half of a tile belongs to gate and half to
  /// up; otherwise each weight begins at a multiple of 128 columns, so tiles of 192 are loaded 64 columns at a time.
  static constexpr int kBoxColumns = P::kColumns % 128 == 0 ? P::kColumns / 2 : 64;

  CUtensorMap x;
  CUtensorMap weight_maps[kMostDecodeWeights];
  Weights weights;

  explicit Operands(const DecodeLinearArgs& args)
      : x(gemm::map_of(args.x, gemm::kTileRows)), weight_maps(), weights(weights_of(args)) {
    for (std::size_t i = 0; i < args.weights.size(); ++i) {
      weight_maps[i] = gemm::map_of(args.weights[i].matrix, kBoxColumns);
    }
  }

  __device__ void load_a(unsigned char* to, int k, int row, std::uint64_t* full, std::uint16_t) const {
    cuda::load_tile(to, &x, k, row, full);
  }
  __device__ void load_b(unsigned char* to, int k, int first, std::uint64_t* full, std::uint16_t) const {
#pragma unroll
    for (int column = 0; column < P::kColumns; column += kBoxColumns) {  // within the tile
      unsigned char* const box = to + column * gemm::kLineBytes;
      if constexpr (kSwiglu) {
        constexpr int kHalf = P::kColumns / 2;
        cuda::load_tile(box, &weight_maps[column / kHalf], k, first / 2 + column % kHalf, full);
      } else {
        const int part = weights.at(first + column);
        cuda::load_tile(box, &weight_maps[part], k, first - weights.parts[part].first_column + column, full);
      }
    }
  }
};

/// y = x · wᵀ + bias for each weight.
template <class T>
struct Plain {
  using Element = T;
  static constexpr int kBuffers = many_rows::kBuffers;
  using Memory = Nothing;
  CUtensorMap y;
  Weights weights;

  template <class Tile, int kSums>
  __device__ void end(Buffers& buffers, const Tile& tile, const float (&sums)[1][kSums], Nothing) const {
    buffers.template write<T, kSums / (kChunk / 2)>(&y, tile.row, tile.column, weights.columns, sums[0], [&](int from) {
      return [&, part = weights.at(from)](const float* s, int column) {
        const float2 bias = weights.template biases<T>(part, column);
        return float2{s[0] + bias.x, s[1] + bias.y};
      };
    });
  }
};

/// y = silu(x · gateᵀ + bias) ⊙ (x · upᵀ + bias). A tile has 64 columns of each.
template <class T>
struct Swiglu {
  using Element = T;
  static constexpr int kBuffers = many_rows::kBuffers;
  using Memory = Nothing;
  CUtensorMap y;
  Weights weights;

  template <class Tile, int kHalves, int kSums>
  __device__ void end(Buffers& buffers, const Tile& tile, const float (&sums)[kHalves][kSums], Nothing) const {
    static_assert(kSums == kChunk);
    const auto value = [&](const float* gates, int column) {
      const float* const ups = gates + kSums / 2;
      const float2 gate_bias = weights.template biases<T>(0, column);
      const float2 up_bias = weights.template biases<T>(1, column);
      return float2{fast_silu(gates[0] + gate_bias.x) * (ups[0] + up_bias.x),
                    fast_silu(gates[1] + gate_bias.y) * (ups[1] + up_bias.y)};
    };
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      buffers.template write<T, 1>(&y, tile.row + half * kHalfRows, tile.column / 2, weights.columns, sums[half],
                                   [&](int) { return value; });
    }
  }
};

/// y = x · wᵀ + bias + residual.
template <class T>
struct Residual {
  using Element = T;
  static constexpr int kBuffers = many_rows::kBuffers;
  using Memory = Nothing;
  CUtensorMap residual;
  CUtensorMap y;
  Weights weights;

  /// Starts to load the residual into the buffers of y's tile.
  template <class Tile>
  __device__ Nothing begin(Buffers& buffers, const Tile& tile) const {
    buffers.template load<1>(&residual, tile);
    return {};
  }

  template <class Tile, int kSums>
  __device__ void end(Buffers& buffers, const Tile& tile, const float (&sums)[1][kSums], Nothing) const {
    static_assert(kSums == kBuffers * (kChunk / 2), "a buffer for each chunk");
    cuda::wait(tile.loaded, tile.parity);
#pragma unroll
    for (int chunk = 0; chunk < kBuffers; ++chunk) {
      const int column = tile.column + chunk * kChunk;
      if (column >= weights.columns) {
        break;
      }
      const int part = weights.at(column);
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        const float* const s = sums[0] + chunk * (kChunk / 2) + i * 8;
        std::uint32_t pairs[4];
        buffers.get(chunk, i, pairs);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 bias = weights.template biases<T>(part, column + buffers.column(i, j));
          const float2 other = gemm::floats_of<T>(pairs[j]);
          pairs[j] = cuda::pair_of<T>(s[2 * j] + bias.x + other.x, s[2 * j + 1] + bias.y + other.y);
        }
        buffers.put(chunk, i, pairs);
      }
      buffers.store([&] { cuda::store_tile(&y, column, tile.row, buffers.memory[chunk]); });
    }
  }
};

/// The epilogue of the product that gives the heads' queries, keys and values. It rotates queries and keys, and stores
/// queries to y, and keys and values into the cache.
template <class T>
struct Append {
  using Element = T;
  static constexpr int kBuffers = many_rows::kBuffers;
  using Memory = Nothing;
  static_assert(kHeadWidth == kChunk);
  CUtensorMap y;
  CUtensorMap keys;  // the cache's new positions: (B, Hkv, T, D)
  CUtensorMap values;
  Weights weights;
  const float4* rotations;  // the cosine and sine of each pair's angle, for each step
  int rows;
  int heads;
  int key_heads;
  int steps;

  /// The cosines and sines that a lane needs for its two rows: those of its columns in the left half of a head, two
  /// columns per float4.
  struct Rotations {
    float4 pairs[2][4];
  };

  template <class Tile>
  __device__ Rotations begin(Buffers& buffers, const Tile& tile) const {
    Rotations loaded;
    const int line = tile.row % steps + buffers.warp() * 16 + buffers.lane() / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4* const p = rotations + std::int64_t{min(line + half * 8, steps - 1)} * (kHeadWidth / 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        loaded.pairs[half][i] = p[i * 4 + buffers.lane() % 4];
      }
    }
    return loaded;
  }

  template <class Tile, int kSums>
  __device__ void end(Buffers& buffers, const Tile& tile, const float (&sums)[1][kSums],
                      const Rotations& loaded) const {
    if (tile.row >= rows) {
      return;
    }
#pragma unroll
    for (int chunk = 0; chunk < kSums / (kChunk / 2); ++chunk) {
      const int column = tile.column + chunk * kChunk;
      if (column >= weights.columns) {
        break;
      }
      const int key_head = column / kHeadWidth - heads;  // from key_heads on, the heads of the values
      const int buffer = buffers.take();
      std::uint32_t pairs[kGroups][4];
      round(pairs, buffers, sums[0] + chunk * (kChunk / 2), column);
      if (key_head < key_heads) {
        rotate(pairs, loaded);
      }
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        buffers.put(buffer, i, pairs[i]);
      }
      buffers.store([&] { store_head(key_head, column, tile.row, buffers.memory[buffer]); });
    }
  }

 private:
  __device__ void round(std::uint32_t (&pairs)[kGroups][4], const Buffers& buffers, const float* sums,
                        int column) const {
    const int part = weights.at(column);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* const s = sums + i * 8 + 2 * j;
        const float2 bias = weights.template biases<T>(part, column + buffers.column(i, j));
        pairs[i][j] = cuda::pair_of<T>(s[0] + bias.x, s[1] + bias.y);
      }
    }
  }

  __device__ static void rotate(std::uint32_t (&pairs)[kGroups][4], const Rotations& loaded) {
#pragma unroll
    for (int i = 0; i < kGroups / 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float4 r = loaded.pairs[j % 2][2 * i + j / 2];
        const float2 left = gemm::floats_of<T>(pairs[i][j]);
        const float2 right = gemm::floats_of<T>(pairs[i + 2][j]);
        pairs[i][j] = cuda::pair_of<T>(left.x * r.x - right.x * r.y, left.y * r.z - right.y * r.w);
        pairs[i + 2][j] = cuda::pair_of<T>(right.x * r.x + left.x * r.y, right.y * r.z + left.y * r.w);
      }
    }
  }

  __device__ void store_head(int key_head, int column, int row, const unsigned char* from) const {
    if (key_head < 0) {
      cuda::store_tile(&y, column, row, from);
    } else if (key_head < key_heads) {
      cuda::store_tile(&keys, 0, row % steps, key_head, row / steps, from);
    } else {
      cuda::store_tile(&values, 0, row % steps, key_head - key_heads, row / steps, from);
    }
  }
};

CUtensorMap map_of_half_tiles(const Tensor& x) { return gemm::map_of(x, kHalfRows); }

/// The map of the cache's positions for the new keys or values.
cuda::HeadsMapArgs map_of_positions(const DecodeAppendTo& to, const Tensor& list) {
  return {.dtype = list.dtype(),
          .data = slice(list, 2, to.first, to.first + to.steps).raw_data(),
          .sizes = {list.size(0), list.size(1), to.steps, list.size(3)},
          .strides = {list.strides()[0], list.strides()[1], list.strides()[2]},
          .box_lines = kHalfRows};
}

template <class P, bool kSwiglu, class Epilogue>
void launch(const DecodeLinearArgs& args, const Epilogue& epilogue) {
  constexpr auto kSchedule = kSwiglu ? gemm::Schedule::ping_pong : gemm::Schedule::split_rows;
  const Operands<P, kSwiglu> operands(args);
  gemm::launch<P, kSchedule>("decode_linear_many_kernel", args.x.size(0), operands.weights.columns * (kSwiglu ? 2 : 1),
                             args.x.size(1), operands, epilogue);
}

/// Calls f.operator()<P>() with the fastest tile size, assuming that the time of a tile is proportional to its columns.
/// The sizes differ in the number of multiprocessors that the last wave of tiles leaves idle.
template <class F>
void with_fastest_tile(std::int64_t rows, std::int64_t columns, const F& f) {
  const auto time = [&](int tile) {
    return ceil_div(ceil_div(rows, gemm::kTileRows) * ceil_div(columns, tile), cuda::multiprocessor_count()) * tile;
  };
  const int least = std::min({time(128), time(192), time(256)});
  if (time(256) == least) {
    f.template operator()<gemm::TilePlan<256, 4, 1>>();
  } else if (time(192) == least) {
    f.template operator()<gemm::TilePlan<192, 4, 1>>();
  } else {
    f.template operator()<gemm::TilePlan<128, 6, 1>>();
  }
}

template <class T>
Append<T> append_to(const DecodeLinearArgs& args, const Weights& weights) {
  const DecodeAppendTo& to = args.append;
  return {.y = map_of_half_tiles(args.y),
          .keys = cuda::swizzled_heads_map(map_of_positions(to, to.keys)),
          .values = cuda::swizzled_heads_map(map_of_positions(to, to.values)),
          .weights = weights,
          .rotations = reinterpret_cast<const float4*>(to.rotations.data<float>()),
          .rows = static_cast<int>(args.x.size(0)),
          .heads = static_cast<int>(args.y.size(1) / kHeadWidth),
          .key_heads = static_cast<int>(to.keys.size(1)),
          .steps = static_cast<int>(to.steps)};
}

template <class T>
void multiply(const DecodeLinearArgs& args) {
  using Narrow = gemm::TilePlan<128, 6, 1>;
  const Weights weights = weights_of(args);
  const CUtensorMap y = map_of_half_tiles(args.y);
  if (args.options.swiglu) {
    launch<Narrow, true>(args, Swiglu<T>{.y = y, .weights = weights});
  } else if (args.options.residual.defined()) {
    launch<Narrow, false>(
        args, Residual<T>{.residual = map_of_half_tiles(args.options.residual), .y = y, .weights = weights});
  } else {
    with_fastest_tile(args.x.size(0), weights.columns, [&]<class P>() {
      args.append.keys.defined() ? launch<P, false>(args, append_to<T>(args, weights))
                                 : launch<P, false>(args, Plain<T>{.y = y, .weights = weights});
    });
  }
}

}  // namespace

}  // namespace many_rows

bool can_decode_linear_many(Cuda, const Tensor& x, const std::vector<DecodeWeight>& weights,
                            const DecodeLinearOptions& options) {
  const auto fits = [](const Tensor& t) {
    return !t.defined() || (gemm::layout_of(t).lines_are_rows && gemm::fits_tensor_map(t));
  };
  const auto has_whole_tiles = [](const DecodeWeight& w) { return w.out() % 128 == 0; };
  return cuda::device_has_wgmma() && !(options.swiglu && options.residual.defined()) && fits(x) &&
         fits(options.residual) && weights.back().out() % 8 == 0 &&
         (options.swiglu || std::all_of(weights.begin(), weights.end() - 1, has_whole_tiles)) &&
         std::all_of(weights.begin(), weights.end(), [&](const DecodeWeight& w) { return fits(w.matrix); });
}

bool can_decode_linear_append(Cuda, const DecodeAppendTo& to, const DecodeAttention& a) {
  const auto fits = [&](const Tensor& list) { return cuda::fits_heads_map(many_rows::map_of_positions(to, list)); };
  return a.width() == many_rows::kHeadWidth && !a.q_norm.defined() && !a.k_norm.defined() && !a.padding.defined() &&
         (a.keys.size(0) == 1 || to.steps % gemm::kHalfRows == 0) && fits(a.keys) && fits(a.values);
}

void decode_linear_many(Cuda, const DecodeLinearArgs& args) {
  on_dtype(Types<Float16, BFloat16>{}, args.y.dtype(), "decode_linear",
           [&]<class T>() { many_rows::multiply<T>(args); });
}

}  // namespace mica::kernels
