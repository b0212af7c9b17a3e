// Products of up to 32 rows of x with weights, at the speed at which the weights can be read:
//
//     y (M, N) = f(norm(x) · Wᵀ + bias) + residual          f: none, or SwiGLU of two weights
//
//     block: one or two groups ("halves") of 8 or 16 outputs; with SwiGLU, the same outputs of gate and up
//
//         W, K terms of a row ------------------------------>
//         +-------+-------+-------+-------+-------+-------+--
//         | warp 0| warp 1|  ...  | warp 0| warp 1|  ...  |      a unit: 32 terms, or 64 of a quantized weight
//         +-------+-------+-------+-------+-------+-------+--
//             |       |
//             v       v       registers -> tensor cores, with the same terms of x
//          sums of each warp -> shared memory -> a warp adds them in order -> f, residual -> y
//
// The weight is operand A of the tensor cores, so x is padded to 8 rows instead of 16. The terms of a product may be
// added in any order, so lane t of four loads 8 adjacent terms of a row of W as 16 bytes, and the same 8 terms of x.
//
// Weights do not depend on the previous kernel, so each warp starts to load its first units before it waits for that
// kernel.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include <mica/core/cuda/detail/mma.cuh>
#include <mica/core/cuda/launch.h>
#include <mica/core/cuda/pack.cuh>
#include <mica/core/cuda/ptx.cuh>
#include <mica/core/cuda/reduce.cuh>
#include <mica/infer/kernels/detail/kernels.h>
#include <mica/infer/kernels/detail/packed_pair.cuh>
#include <mica/infer/kernels/detail/silu.cuh>

namespace mica::kernels {

namespace {

using cuda::kWarp;

constexpr int kOctet = 8;       // terms per lane in a chunk
constexpr int kChunk = 32;      // terms: an octet of each of four lanes
constexpr int kGroupRows = 8;   // rows of x per tensor-core instruction
constexpr int kMostWarps = 16;  // per block

template <class T>
struct Weight {
  const void* data;  // T (N, K), or words
  const T* scale;    // (groups, N), for a quantized weight
  const T* zero;
  const T* bias;  // or null
  int outputs;
  int first_block;
  int first_column;  // of y
};

template <class T>
struct Arguments {
  Weight<T> weights[kMostDecodeWeights];
  int count;
  bool swiglu;
  const T* x;         // (rows, depth)
  const T* norm;      // (depth) or null
  const T* residual;  // of y's shape, or null
  T* y;
  int rows;
  int depth;
  int columns;      // of y
  int group_shift;  // a group of a quantized weight has 2^group_shift units
  float eps;
};

// Eight adjacent terms as four pairs, which are operands of two tensor-core instructions.
struct Octet {
  std::uint32_t pairs[4];
};

template <class T>
__device__ Octet load_octet(const T* from) {
  const uint4 bits = *reinterpret_cast<const uint4*>(from);
  return {{bits.x, bits.y, bits.z, bits.w}};
}

// The outputs of a block: those of half h begin with output first[h] of weight[h].
template <class T>
struct BlockOutputs {
  const Weight<T>* weight[2];
  int first[2];  // the first output of each half

  __device__ BlockOutputs(const Arguments<T>& a, int outputs, bool both) {
    const int block = static_cast<int>(blockIdx.x);
    int i = 0;
    while (!a.swiglu && i + 1 < a.count && block >= a.weights[i + 1].first_block) {
      ++i;
    }
    weight[0] = &a.weights[i];
    weight[1] = a.swiglu ? &a.weights[1] : weight[0];
    const int of_weight = block - a.weights[i].first_block;
    first[0] = of_weight * outputs * (both && !a.swiglu ? 2 : 1);
    first[1] = a.swiglu ? first[0] : first[0] + outputs;
  }
};

// Reads a weight of type T. A unit has 32 terms of 8 outputs of each half.
template <class T>
struct FloatUnits {
  static constexpr int kTerms = 32;
  static constexpr int kOutputs = 8;  // per half
  static constexpr int kTiles = 1;
  // Units that are in flight at once: as many as fit in registers.
  static constexpr int depth(int halves, int groups, bool norm) {
    return groups > 1 ? 2 : halves == 2 ? 3 : norm ? 4 : 8;
  }

  struct Unit {
    cuda::Pack<T, kOctet> halves[2];
  };

  const T* rows[2];

  __device__ FloatUnits(const Arguments<T>& a, const BlockOutputs<T>& block_outputs, int g, int t) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      rows[h] = static_cast<const T*>(block_outputs.weight[h]->data) +
                static_cast<std::int64_t>(block_outputs.first[h] + g) * a.depth + kOctet * t;
    }
  }

  template <int kHalves>
  __device__ void load(int unit, Unit& to) const {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      to.halves[h] = cuda::load_streaming<kOctet>(rows[h] + unit * kTerms);
    }
  }

  // sums += unit · x; x has kGroups octets.
  template <int kHalves, int kGroups>
  __device__ static void multiply(const Unit& unit, const Octet (&x)[1][kGroups], float (&sums)[kTiles][kGroups][4]) {
    const auto pair = [&](int h, int i) {
      return h < kHalves ? reinterpret_cast<const std::uint32_t*>(unit.halves[h].at)[i] : 0u;
    };
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const std::uint32_t a[4] = {pair(0, 2 * step), pair(1, 2 * step), pair(0, 2 * step + 1), pair(1, 2 * step + 1)};
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        cuda::multiply_add_16_8_16<T>(sums[0][group], a, x[0][group].pairs[2 * step], x[0][group].pairs[2 * step + 1]);
      }
    }
  }

  __device__ static int output(int tile, int g) { return g + 0 * tile; }
};

// Reads a weight of 4 or 8 bits. A word holds adjacent terms of one output. A unit has 64 terms of 16 outputs of each
// half; lane (g, t) has outputs 2g and 2g + 1, one in each of two tiles. With the scale s and the zero z of a group:
//
//     sum += s · (Σ x·(q + b) − (z + b) · Σ x)          b: what the conversion to T adds to an integer
template <class T, int kBits>
struct PackedUnits {
  static constexpr int kTerms = 64;
  static constexpr int kChunks = kTerms / kChunk;
  static constexpr int kOutputs = 16;
  static constexpr int kTiles = 2;
  static constexpr int kWords = kBits / 4;  // per octet
  static constexpr int depth(int halves, int groups, bool norm) {
    return groups > 1 ? 1 : kBits == 4 && !norm && halves == 1 ? 4 : 2;
  }
  static constexpr bool kIsHalf = std::is_same_v<T, Float16>;
  static constexpr float kAdded = kPackedAdded<T, kBits>;

  struct Unit {
    uint2 words[2][kChunks][kWords];
    std::uint32_t scales[2], zeros[2];  // of two outputs each
  };

  const std::uint32_t* words[2];
  const T* scales[2];
  const T* zeros[2];
  int outputs[2];
  int group_shift;

  __device__ PackedUnits(const Arguments<T>& a, const BlockOutputs<T>& block_outputs, int g, int t)
      : group_shift(a.group_shift) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Weight<T>& w = *block_outputs.weight[h];
      const int output = block_outputs.first[h] + 2 * g;
      outputs[h] = w.outputs;
      words[h] = static_cast<const std::uint32_t*>(w.data) + static_cast<std::int64_t>(t * kWords) * w.outputs + output;
      scales[h] = w.scale + output;
      zeros[h] = w.zero + output;
    }
  }

  template <int kHalves>
  __device__ void load(int unit, Unit& to) const {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          const int row = (unit * kChunks + c) * 4 * kWords + w;
          to.words[h][c][w] =
              __ldcs(reinterpret_cast<const uint2*>(words[h] + static_cast<std::int64_t>(row) * outputs[h]));
        }
      }
      const std::int64_t at = static_cast<std::int64_t>(unit >> group_shift) * outputs[h];
      to.scales[h] = __ldg(reinterpret_cast<const std::uint32_t*>(scales[h] + at));
      to.zeros[h] = __ldg(reinterpret_cast<const std::uint32_t*>(zeros[h] + at));
    }
  }

  // Rearranges x into the pairs in which packed_pair() returns integers: (0, 4), (1, 5), (2, 6), (3, 7).
  __device__ static Octet spread(const Octet& x) {
    return {{__byte_perm(x.pairs[0], x.pairs[2], 0x5410), __byte_perm(x.pairs[0], x.pairs[2], 0x7632),
             __byte_perm(x.pairs[1], x.pairs[3], 0x5410), __byte_perm(x.pairs[1], x.pairs[3], 0x7632)}};
  }

  __device__ static float member(std::uint32_t pair, int i) {
    return static_cast<float>(reinterpret_cast<const T*>(&pair)[i]);
  }

  template <int kHalves, int kGroups>
  __device__ static void multiply(const Unit& unit, const Octet (&x)[kChunks][kGroups],
                                  float (&sums)[kTiles][kGroups][4]) {
    float of_unit[kTiles][kGroups][4] = {};
    float of_x[kGroups][4] = {};
    constexpr std::uint32_t kOne = kIsHalf ? 0x3c003c00 : 0x3f803f80;
    const std::uint32_t ones[4] = {kOne, kOne, kOne, kOne};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      Octet b[kGroups];
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        b[group] = spread(x[c][group]);
      }
#pragma unroll
      for (int step = 0; step < 2; ++step) {
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          cuda::multiply_add_16_8_16<T>(of_x[group], ones, b[group].pairs[2 * step], b[group].pairs[2 * step + 1]);
        }
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const auto pair = [&](int h, int i) {
            if (h >= kHalves) {
              return 0u;
            }
            std::uint32_t octet[kWords];
#pragma unroll
            for (int w = 0; w < kWords; ++w) {
              octet[w] = tile == 0 ? unit.words[h][c][w].x : unit.words[h][c][w].y;
            }
            return packed_pair<T, kBits>(octet, i);
          };
          const std::uint32_t a[4] = {pair(0, 2 * step), pair(1, 2 * step), pair(0, 2 * step + 1),
                                      pair(1, 2 * step + 1)};
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            cuda::multiply_add_16_8_16<T>(of_unit[tile][group], a, b[group].pairs[2 * step],
                                          b[group].pairs[2 * step + 1]);
          }
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 2 * kHalves; ++i) {
        const float scale = member(unit.scales[i / 2], tile);
        const float zero = member(unit.zeros[i / 2], tile) + kAdded;
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          sums[tile][group][i] += scale * (of_unit[tile][group][i] - zero * of_x[group][i % 2]);
        }
      }
    }
  }

  __device__ static int output(int tile, int g) { return 2 * g + tile; }
};

// Loads x in the layout of the tensor cores' operand B: lane (g, t) has an octet of row g of each group of 8 rows.
template <class T, int kChunks, int kGroups>
struct Input {
  const T* row;  // this lane's first row, from its octet on
  int rows;      // rows of x, from this lane's first one on
  int depth;

  __device__ Input(const Arguments<T>& a, int g, int t)
      : row(a.x + static_cast<std::int64_t>(g) * a.depth + kOctet * t), rows(a.rows - g), depth(a.depth) {}

  __device__ void load(int term, Octet (&to)[kChunks][kGroups]) const {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        to[c][group] = {};
        if (group * kGroupRows < rows) {
          to[c][group] = load_octet(row + static_cast<std::int64_t>(group) * kGroupRows * depth + term + c * kChunk);
        }
      }
    }
  }
};

// Returns x times the norm's weight, and adds the squares of x to `squares`.
template <class T>
__device__ Octet weighted(const Octet& x, const Octet& weight, float& squares) {
  float values[kOctet];
  float factors[kOctet];
  cuda::unpack(reinterpret_cast<const cuda::Pack<T, kOctet>&>(x), values);
  cuda::unpack(reinterpret_cast<const cuda::Pack<T, kOctet>&>(weight), factors);
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    squares += values[i] * values[i];
    values[i] *= factors[i];
  }
  const cuda::Pack<T, kOctet> result = cuda::pack_of<T>(values);
  return reinterpret_cast<const Octet&>(result);
}

// Writes a lane's four sums of a tile: those of one output of each half, for rows 2t and 2t + 1 of the group.
template <class T, int kHalves>
struct Writer {
  const Arguments<T>& a;
  const BlockOutputs<T>& block_outputs;

  __device__ float bias(int h, int output) const {
    const T* const b = block_outputs.weight[h]->bias;
    return b == nullptr ? 0.0f : static_cast<float>(b[output]);
  }

  __device__ void write(const float (&sums)[4], int group, int output, int t) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = group * kGroupRows + 2 * t + i;
      if (row >= a.rows) {
        return;
      }
      if (kHalves == 2 && a.swiglu) {
        const int n = block_outputs.first[0] + output;
        const float gate = sums[i] + bias(0, n);
        const float up = sums[2 + i] + bias(1, n);
        store(row, n, silu(gate) * up);
      } else {
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
          const int n = block_outputs.first[h] + output;
          store(row, block_outputs.weight[h]->first_column + n, sums[2 * h + i] + bias(h, n));
        }
      }
    }
  }

  __device__ void store(int row, int column, float value) const {
    const std::int64_t at = static_cast<std::int64_t>(row) * a.columns + column;
    a.y[at] = static_cast<T>(a.residual == nullptr ? value : value + static_cast<float>(a.residual[at]));
  }
};

// The index of this lane's sums in a block's shared memory: [warp][tile][group][lane].
template <class Units, int kGroups>
__device__ int index_of_sums(int warp, int tile, int group) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  return ((warp * Units::kTiles + tile) * kGroups + group) * kWarp + lane;
}

template <class Units, int kGroups>
__device__ void store_sums(float4* sums_of_warps, const float (&sums)[Units::kTiles][kGroups][4]) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
#pragma unroll
  for (int tile = 0; tile < Units::kTiles; ++tile) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const float(&s)[4] = sums[tile][group];
      sums_of_warps[index_of_sums<Units, kGroups>(warp, tile, group)] = make_float4(s[0], s[1], s[2], s[3]);
    }
  }
}

// This warp adds up the sums of all warps for one tile and one group of rows, in order, and writes the results.
template <class Units, int kHalves, int kGroups, bool kNorm, class T>
__device__ void finish(const Arguments<T>& a, const BlockOutputs<T>& block_outputs, const float4* sums_of_warps,
                       const float (&squares_of_warps)[kMostWarps][kGroupRows]) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int g = lane / 4;
  const int t = lane % 4;
  const int tile = warp / kGroups;
  const int group = warp % kGroups;
  float total[4] = {};
  for (int w = 0; w < warps; ++w) {
    const float4 part = sums_of_warps[index_of_sums<Units, kGroups>(w, tile, group)];
    total[0] += part.x;
    total[1] += part.y;
    total[2] += part.z;
    total[3] += part.w;
  }
  if constexpr (kNorm) {
    float row_squares[2] = {};
    for (int w = 0; w < warps; ++w) {
      row_squares[0] += squares_of_warps[w][2 * t];
      row_squares[1] += squares_of_warps[w][2 * t + 1];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      total[i] *= rsqrtf(row_squares[i % 2] / static_cast<float>(a.depth) + a.eps);
    }
  }
  Writer<T, kHalves>{a, block_outputs}.write(total, group, Units::output(tile, g), t);
}

template <class T, class Units, int kHalves, int kGroups, bool kNorm>
__global__ void __launch_bounds__((kHalves == 2 || kGroups == 4 ? kMostWarps / 2 : kMostWarps) * kWarp,
                                  kHalves == 2 && kGroups < 4 ? (Units::kTiles == 1 ? 3 : 2) : 1)
    decode_linear_kernel(const __grid_constant__ Arguments<T> a) {
  constexpr int kTiles = Units::kTiles;
  constexpr int kChunks = Units::kTerms / kChunk;
  constexpr int kDepth = Units::depth(kHalves, kGroups, kNorm);
  extern __shared__ float4 sums_of_warps[];
  __shared__ float squares_of_warps[kMostWarps][kGroupRows];

  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int g = lane / 4;
  const int t = lane % 4;
  const int units = a.depth / Units::kTerms;
  const BlockOutputs<T> block_outputs(a, Units::kOutputs, kHalves == 2);
  const Units source(a, block_outputs, g, t);
  const Input<T, kChunks, kGroups> input(a, g, t);

  typename Units::Unit ring[kDepth];
  Octet x[kDepth][kChunks][kGroups];
  Octet norm[kDepth][kChunks];
  const auto load_weights = [&](int unit, int stage) {
    source.template load<kHalves>(unit, ring[stage]);
    if constexpr (kNorm) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        norm[stage][c] = load_octet(a.norm + unit * Units::kTerms + c * kChunk + kOctet * t);
      }
    }
  };
#pragma unroll
  for (int stage = 0; stage < kDepth; ++stage) {
    if (warp + stage * warps < units) {
      load_weights(warp + stage * warps, stage);
    }
  }
  cuda::allow_dependents();
  cuda::wait_for_previous_kernel();
#pragma unroll
  for (int stage = 0; stage < kDepth; ++stage) {
    if (warp + stage * warps < units) {
      input.load((warp + stage * warps) * Units::kTerms, x[stage]);
    }
  }

  float sums[kTiles][kGroups][4] = {};
  float squares = 0;
  for (int first = warp; first < units; first += kDepth * warps) {
#pragma unroll
    for (int stage = 0; stage < kDepth; ++stage) {
      const int unit = first + stage * warps;
      if (unit < units) {
        if constexpr (kNorm) {
#pragma unroll
          for (int c = 0; c < kChunks; ++c) {
            x[stage][c][0] = weighted<T>(x[stage][c][0], norm[stage][c], squares);
          }
        }
        Units::template multiply<kHalves>(ring[stage], x[stage], sums);
        const int next = unit + kDepth * warps;
        if (next < units) {
          load_weights(next, stage);
          input.load(next * Units::kTerms, x[stage]);
        }
      }
    }
  }

  store_sums<Units, kGroups>(sums_of_warps, sums);
  if constexpr (kNorm) {
    const float of_row = cuda::sum_lanes<4>(squares);
    if (t == 0) {
      squares_of_warps[warp][g] = of_row;
    }
  }
  __syncthreads();
  if (warp < kTiles * kGroups) {
    finish<Units, kHalves, kGroups, kNorm>(a, block_outputs, sums_of_warps, squares_of_warps);
  }
}

// How many outputs and how many warps a block has. The plan depends on the shape alone, and so does the order of sums.
struct Plan {
  int halves;
  int warps;
  int blocks;

  Plan(const DecodeLinearArgs& args, int outputs, int terms) {
    constexpr int kEnoughBlocks = 96;
    std::int64_t all = 0;
    for (const DecodeWeight& w : args.weights) {
      all += w.out();
    }
    const bool both = args.options.swiglu || all / (2 * outputs) >= kEnoughBlocks;
    halves = both ? 2 : 1;
    blocks = static_cast<int>(all / (halves * outputs));
    warps = !both && args.x.size(0) <= 2 * kGroupRows && args.x.size(1) / terms >= kMostWarps ? kMostWarps : 8;
  }
};

template <class T>
Arguments<T> arguments(const DecodeLinearArgs& args, const Plan& plan, int outputs) {
  const DecodeLinearOptions& options = args.options;
  Arguments<T> a{.weights = {},
                 .count = static_cast<int>(args.weights.size()),
                 .swiglu = options.swiglu,
                 .x = args.x.data<T>(),
                 .norm = options.norm_weight.data_or_null<T>(),
                 .residual = options.residual.data_or_null<T>(),
                 .y = args.y.data<T>(),
                 .rows = static_cast<int>(args.x.size(0)),
                 .depth = static_cast<int>(args.x.size(1)),
                 .columns = static_cast<int>(args.y.size(1)),
                 .group_shift = 0,
                 .eps = static_cast<float>(options.eps)};
  std::int64_t block = 0;
  std::int64_t column = 0;
  for (int i = 0; i < a.count; ++i) {
    const DecodeWeight& w = args.weights[static_cast<std::size_t>(i)];
    const bool packed = !w.matrix.defined();
    a.weights[i] = {.data = packed ? w.quantized.packed.raw_data() : w.matrix.raw_data(),
                    .scale = packed ? w.quantized.scale.data<T>() : nullptr,
                    .zero = packed ? w.quantized.zero.data<T>() : nullptr,
                    .bias = w.bias.data_or_null<T>(),
                    .outputs = static_cast<int>(w.out()),
                    .first_block = static_cast<int>(block),
                    .first_column = static_cast<int>(column)};
    block += w.out() / (plan.halves * outputs);
    column += w.out();
    a.group_shift = packed ? group_shift(w.quantized) : 0;
  }
  return a;
}

template <class T, class Units>
void launch(const DecodeLinearArgs& args) {
  const Plan plan(args, Units::kOutputs, Units::kTerms);
  const Arguments<T> a = arguments<T>(args, plan, Units::kOutputs);
  const auto run = [&]<int kHalves, int kGroups, bool kNorm>() {
    const std::size_t shared = sizeof(float4) * plan.warps * Units::kTiles * kGroups * kWarp;
    cuda::Launch(static_cast<unsigned>(plan.blocks), static_cast<unsigned>(plan.warps * kWarp), shared)
        .dependent()
        .run(decode_linear_kernel<T, Units, kHalves, kGroups, kNorm>, "decode_linear_kernel", a);
  };
  const auto with_rows = [&]<int kHalves>() {
    if (a.norm != nullptr) {
      run.template operator()<kHalves, 1, true>();
    } else if (a.rows <= kGroupRows) {
      run.template operator()<kHalves, 1, false>();
    } else if (a.rows <= 2 * kGroupRows) {
      run.template operator()<kHalves, 2, false>();
    } else {
      run.template operator()<kHalves, 4, false>();
    }
  };
  if (plan.halves == 2) {
    with_rows.template operator()<2>();
  } else {
    with_rows.template operator()<1>();
  }
}

}  // namespace

void decode_linear(Cuda, const DecodeLinearArgs& args) {
  on_dtype(Types<Float16, BFloat16>{}, args.x.dtype(), "decode_linear", [&]<class T>() {
    const DecodeWeight& first = args.weights[0];
    if (first.matrix.defined()) {
      launch<T, FloatUnits<T>>(args);
    } else if (first.quantized.bits == 4) {
      launch<T, PackedUnits<T, 4>>(args);
    } else {
      launch<T, PackedUnits<T, 8>>(args);
    }
  });
}

}  // namespace mica::kernels
