// The attention of one new position per sequence: queries and the key are normalized and rotated, key and value are
// appended to the cache, and all keys before are read once.
//
//     cluster of up to 8 blocks: one sequence, one key head and up to 4 of its query heads
//
//         keys      0 1 2 3 | 4 5 6 7 | ...       block 0's first keys, block 1's first keys, ...
//                     |
//         a team of lanes holds one key, 16 bytes a lane, and for each query head the largest score m, the sum l of
//         2^(score - m) and the weighted sum of values: an online softmax
//                     |
//         teams of a warp -> warps of a block -> blocks of the cluster, each in a fixed order -> y
//
// The new key is not read back from the cache: the first team of block 0 takes it from shared memory.

#include <algorithm>
#include <cmath>

#include <mica/core/cuda/launch.h>
#include <mica/core/cuda/pack.cuh>
#include <mica/core/cuda/ptx.cuh>
#include <mica/core/cuda/reduce.cuh>
#include <mica/ops/decode/detail/decode_kernels.h>
#include <mica/ops/decode/detail/running_softmax.cuh>

namespace mica::kernels {

namespace {

using cuda::kWarp;

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kClusterBlocks = 8;
constexpr int kMostBlocks = 264;  // of a grid, if one block a cluster is not more: 2 of each multiprocessor (measured)
constexpr int kKeysAtOnce = 4;    // of a team
constexpr int kKeysOfOne = 128;   // so many are left to one block: the others would cost more than they save
constexpr int kMostWidth = 256;

template <class T>
struct Arguments {
  const T* qkv;
  const T* q_norm;  // or null
  const T* k_norm;
  T* keys;
  T* values;
  const std::int64_t* length;
  const std::int64_t* padding;  // or null
  T* y;
  int heads;
  int key_heads;
  int parts;   // the query heads of a key head are split into so many
  int blocks;  // of a cluster
  std::int64_t capacity;
  float eps;
  float score_scale;  // times log2(e): scores are exponents of 2
  bool rotates;
  double rotary_scale;
  float frequencies[kMostWidth / 2];
};

// The cosines and sines of the position's angles, as ops/rotary computes them.
template <int kWidth>
struct Rotation {
  float cosines[kWidth / 2];
  float sines[kWidth / 2];

  template <class T>
  __device__ void fill(const Arguments<T>& a, std::int64_t position) {
    constexpr double kOneOverPi = 0.31830988618379067;
    for (int j = static_cast<int>(threadIdx.x); j < kWidth / 2; j += kThreads) {
      const float angle = __fmul_rn(static_cast<float>(position), a.frequencies[j]);
      const double half_turns = angle * kOneOverPi;
      float sine;
      float cosine;
      sincospif(static_cast<float>(half_turns - 2 * rint(half_turns / 2)), &sine, &cosine);
      sines[j] = static_cast<float>(a.rotary_scale) * sine;
      cosines[j] = static_cast<float>(a.rotary_scale) * cosine;
    }
  }
};

// A head's row, normalized and rotated by a warp, each step rounded to T as the separate ops do: to(column, value).
template <class T, int kWidth, class F>
__device__ void prepare(const Arguments<T>& a, const Rotation<kWidth>& rotation, const T* row, const T* norm,
                        const F& to) {
  constexpr int kHalf = kWidth / 2;
  constexpr int kPairs = (kHalf + kWarp - 1) / kWarp;  // of a lane
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  float left[kPairs];
  float right[kPairs];
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int j = lane + i * kWarp;
    const bool has = kHalf % kWarp == 0 || j < kHalf;
    left[i] = has ? static_cast<float>(row[j]) : 0;
    right[i] = has ? static_cast<float>(row[j + kHalf]) : 0;
    squares += left[i] * left[i] + right[i] * right[i];
  }
  if (norm != nullptr) {
    const float inverse = rsqrtf(cuda::sum_lanes<kWarp>(squares) / kWidth + a.eps);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int j = lane + i * kWarp;
      if (kHalf % kWarp == 0 || j < kHalf) {
        left[i] = static_cast<float>(static_cast<T>(left[i] * inverse * static_cast<float>(norm[j])));
        right[i] = static_cast<float>(static_cast<T>(right[i] * inverse * static_cast<float>(norm[j + kHalf])));
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int j = lane + i * kWarp;
    if (kHalf % kWarp == 0 || j < kHalf) {
      if (a.rotates) {
        const float cosine = rotation.cosines[j];
        const float sine = rotation.sines[j];
        to(j, static_cast<T>(left[i] * cosine - right[i] * sine));
        to(j + kHalf, static_cast<T>(right[i] * cosine + left[i] * sine));
      } else {
        to(j, static_cast<T>(left[i]));
        to(j + kHalf, static_cast<T>(right[i]));
      }
    }
  }
}

template <class T, int kWidth, int kHeads>
struct Shared {
  Rotation<kWidth> rotation;
  float queries[kHeads][kWidth];  // times the scale of the scores
  T new_key[kWidth];
  T new_value[kWidth];
  // Softmaxes of warps, then of the block in the first entry.
  float most[kWarps][kHeads];
  float sum[kWarps][kHeads];
  float values[kWarps][kHeads][kWidth];
};

template <class T, int kWidth, int kHeads>
__global__ void __launch_bounds__(kThreads, 3) decode_attention_kernel(const __grid_constant__ Arguments<T> a) {
  constexpr int kPart = 16 / sizeof(T);  // columns of a lane
  constexpr int kTeam = kWidth / kPart;  // lanes
  constexpr int kTeams = kWarp / kTeam;  // of a warp
  static_assert(kTeam <= kWarp);
  using Pack = cuda::Pack<T, kPart>;
  __shared__ __align__(16) Shared<T, kWidth, kHeads> shared;

  const int rank = static_cast<int>(blockIdx.x);  // in the cluster
  const int key_head = static_cast<int>(blockIdx.y) / a.parts;
  const int part = static_cast<int>(blockIdx.y) % a.parts;
  const std::int64_t sequence = blockIdx.z;
  const int group = a.heads / a.key_heads;
  const int first_head = part * kHeads;               // of the group
  const int heads = min(kHeads, group - first_head);  // of this cluster
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int team = lane / kTeam;
  const int column = lane % kTeam * kPart;

  cuda::allow_dependents();
  cuda::wait_for_previous_kernel();

  const std::int64_t length = *a.length;
  const std::int64_t padding = a.padding == nullptr ? 0 : a.padding[sequence];
  const std::int64_t slot = length % a.capacity;
  // The cached positions [begin, length).
  const std::int64_t begin = max(max(length - a.capacity + 1, std::int64_t{0}), padding);
  const int blocks = length - begin <= kKeysOfOne ? 1 : a.blocks;
  if (rank >= blocks) {
    return;
  }
  T* const keys = a.keys + (sequence * a.key_heads + key_head) * a.capacity * kWidth;
  T* const values = a.values + (sequence * a.key_heads + key_head) * a.capacity * kWidth;
  if (a.rotates) {
    shared.rotation.fill(a, max(length - padding, std::int64_t{0}));
  }
  __syncthreads();

  // The new position: queries for all blocks, key and value for block 0.
  const T* const row = a.qkv + sequence * (a.heads + 2 * a.key_heads) * kWidth;
  for (int item = warp; item < heads + (rank == 0 ? 2 : 0); item += kWarps) {
    if (item < heads) {
      prepare<T, kWidth>(a, shared.rotation, row + (key_head * group + first_head + item) * kWidth, a.q_norm,
                         [&](int j, T value) { shared.queries[item][j] = static_cast<float>(value) * a.score_scale; });
    } else if (item == heads) {
      prepare<T, kWidth>(a, shared.rotation, row + (a.heads + key_head) * kWidth, a.k_norm, [&](int j, T value) {
        shared.new_key[j] = value;
        if (part == 0) {
          keys[slot * kWidth + j] = value;
        }
      });
    } else {
      for (int j = lane; j < kWidth; j += kWarp) {
        const T value = row[(a.heads + a.key_heads + key_head) * kWidth + j];
        shared.new_value[j] = value;
        if (part == 0) {
          values[slot * kWidth + j] = value;
        }
      }
    }
  }
  __syncthreads();

  float queries[kHeads][kPart];
  RunningSoftmax<kPart> softmax[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      queries[h][i] = h < heads ? shared.queries[h][column + i] : 0;
    }
  }

  const auto add = [&](const Pack(&key)[kKeysAtOnce], const Pack(&value)[kKeysAtOnce],
                       const bool(&present)[kKeysAtOnce]) {
    float scores[kHeads][kKeysAtOnce];
#pragma unroll
    for (int u = 0; u < kKeysAtOnce; ++u) {
      float of_key[kPart];
      cuda::unpack(key[u], of_key);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        float dot = 0;
#pragma unroll
        for (int i = 0; i < kPart; ++i) {
          dot += queries[h][i] * of_key[i];
        }
        dot = cuda::sum_lanes<kTeam>(dot);
        scores[h][u] = present[u] ? dot : kLowest;
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float most = softmax[h].most;
#pragma unroll
      for (int u = 0; u < kKeysAtOnce; ++u) {
        most = fmaxf(most, scores[h][u]);
      }
      softmax[h].rescale(most);
#pragma unroll
      for (int u = 0; u < kKeysAtOnce; ++u) {
        scores[h][u] = present[u] ? cuda::approximate_exp2(scores[h][u] - most) : 0;
        softmax[h].sum += scores[h][u];
      }
    }
#pragma unroll
    for (int u = 0; u < kKeysAtOnce; ++u) {
      float of_value[kPart];
      cuda::unpack(value[u], of_value);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
#pragma unroll
        for (int i = 0; i < kPart; ++i) {
          softmax[h].values[i] += scores[h][u] * of_value[i];
        }
      }
    }
  };

  // Teams take neighboring keys, so that a warp reads whole lines.
  const std::int64_t lap = begin - begin % a.capacity;  // a position in slot 0
  const int teams = blocks * kWarps * kTeams;
  const std::int64_t first = begin + (rank * kWarps + warp) * kTeams;  // of the warp
  for (std::int64_t at = first; at < length; at += teams * kKeysAtOnce) {
    Pack key[kKeysAtOnce];
    Pack value[kKeysAtOnce];
    bool present[kKeysAtOnce];
#pragma unroll
    for (int u = 0; u < kKeysAtOnce; ++u) {
      const std::int64_t position = at + team + u * teams;
      present[u] = position < length;
      key[u] = {};
      value[u] = {};
      if (present[u]) {
        const std::int64_t ahead = position - lap;
        const std::int64_t from = (ahead < a.capacity ? ahead : ahead - a.capacity) * kWidth + column;
        key[u] = cuda::load<kPart>(keys + from);
        value[u] = cuda::load<kPart>(values + from);
      }
    }
    add(key, value, present);
  }
  if (rank == 0 && warp == 0) {
    const Pack key[kKeysAtOnce] = {cuda::load<kPart>(shared.new_key + column)};
    const Pack value[kKeysAtOnce] = {cuda::load<kPart>(shared.new_value + column)};
    const bool present[kKeysAtOnce] = {team == 0};
    add(key, value, present);
  }

  // Teams of a warp.
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    RunningSoftmax<kPart>& mine = softmax[h];
#pragma unroll
    for (int step = kTeam; step < kWarp; step *= 2) {
      const float other_most = __shfl_xor_sync(cuda::kAllLanes, mine.most, step);
      const float most = fmaxf(mine.most, other_most);
      const float factor = cuda::approximate_exp2(other_most - most);
      const float other_sum = __shfl_xor_sync(cuda::kAllLanes, mine.sum, step);
      float others[kPart];
#pragma unroll
      for (int i = 0; i < kPart; ++i) {
        others[i] = __shfl_xor_sync(cuda::kAllLanes, mine.values[i], step);
      }
      mine.rescale(most);
      mine.sum += factor * other_sum;
#pragma unroll
      for (int i = 0; i < kPart; ++i) {
        mine.values[i] += factor * others[i];
      }
    }
    if (team == 0) {
      shared.most[warp][h] = mine.most;
      shared.sum[warp][h] = mine.sum;
#pragma unroll
      for (int i = 0; i < kPart; ++i) {
        shared.values[warp][h][column + i] = mine.values[i];
      }
    }
  }
  __syncthreads();

  // Warps of the block: a thread has some columns of all heads, and the first warp keeps the block's result.
  float block_most[kHeads];
  float block_sum[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    block_most[h] = shared.most[0][h];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) {
      block_most[h] = fmaxf(block_most[h], shared.most[w][h]);
    }
    block_sum[h] = 0;
    float factors[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      factors[w] = cuda::approximate_exp2(shared.most[w][h] - block_most[h]);
      block_sum[h] += factors[w] * shared.sum[w][h];
    }
    for (int j = static_cast<int>(threadIdx.x); j < kWidth; j += kThreads) {
      float total = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        total += factors[w] * shared.values[w][h][j];
      }
      shared.values[0][h][j] = total;  // read by this thread only
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      shared.most[0][h] = block_most[h];
      shared.sum[0][h] = block_sum[h];
    }
  }

  // Blocks of the cluster: each writes some columns.
  T* const y = a.y + sequence * a.heads * kWidth + static_cast<std::int64_t>(key_head * group + first_head) * kWidth;
  const bool clustered = blocks > 1;
  if (clustered) {
    cuda::arrive_in_cluster();
    cuda::wait_for_cluster();
  } else {
    __syncthreads();
  }
  for (int i = rank * kThreads + static_cast<int>(threadIdx.x); i < heads * kWidth; i += blocks * kThreads) {
    const int h = i / kWidth;
    const int j = i % kWidth;
    if (!clustered) {
      y[i] = static_cast<T>(shared.values[0][h][j] / shared.sum[0][h]);
      continue;
    }
    float most = kLowest;
    float mosts[kClusterBlocks];
#pragma unroll
    for (int block = 0; block < kClusterBlocks; ++block) {
      mosts[block] = block < blocks ? cuda::load_from_block(&shared.most[0][h], block) : kLowest;
      most = fmaxf(most, mosts[block]);
    }
    float sum = 0;
    float total = 0;
#pragma unroll
    for (int block = 0; block < kClusterBlocks; ++block) {
      if (block >= blocks) {
        break;
      }
      const float factor = cuda::approximate_exp2(mosts[block] - most);
      sum += factor * cuda::load_from_block(&shared.sum[0][h], block);
      total += factor * cuda::load_from_block(&shared.values[0][h][j], block);
    }
    y[i] = static_cast<T>(total / sum);
  }
  if (clustered) {
    // The others may still read this block's shared memory.
    cuda::arrive_in_cluster_relaxed();
    cuda::wait_for_cluster();
  }
}

// With many sequences, few blocks share one: those of a grid run at once, and none waits for others to end.
int blocks_of_cluster(std::int64_t clusters) {
  int blocks = cuda::device_has_clusters() ? kClusterBlocks : 1;
  while (blocks > 1 && clusters * blocks > kMostBlocks) {
    blocks /= 2;
  }
  return blocks;
}

template <class T>
Arguments<T> arguments(const DecodeAttentionArgs& args, int heads_at_once) {
  const DecodeAttention& p = args.problem;
  const auto group = static_cast<int>(p.heads / p.key_heads());
  Arguments<T> a{.qkv = p.qkv.data<T>(),
                 .q_norm = p.q_norm.data_or_null<T>(),
                 .k_norm = p.k_norm.data_or_null<T>(),
                 .keys = p.keys.data<T>(),
                 .values = p.values.data<T>(),
                 .length = p.length.data<std::int64_t>(),
                 .padding = p.padding.data_or_null<std::int64_t>(),
                 .y = args.y.data<T>(),
                 .heads = static_cast<int>(p.heads),
                 .key_heads = static_cast<int>(p.key_heads()),
                 .parts = (group + heads_at_once - 1) / heads_at_once,
                 .blocks = 1,
                 .capacity = p.keys.size(2),
                 .eps = static_cast<float>(p.eps),
                 .score_scale = static_cast<float>(1.4426950408889634 / std::sqrt(static_cast<double>(p.width()))),
                 .rotates = !p.frequencies.empty(),
                 .rotary_scale = p.rotary_scale,
                 .frequencies = {}};
  a.blocks = blocks_of_cluster(p.keys.size(0) * a.key_heads * a.parts);
  std::copy(p.frequencies.begin(), p.frequencies.end(), a.frequencies);
  return a;
}

template <class T, int kWidth, int kHeads>
void launch(const DecodeAttentionArgs& args) {
  const Arguments<T> a = arguments<T>(args, kHeads);
  const dim3 grid(static_cast<unsigned>(a.blocks), static_cast<unsigned>(a.key_heads * a.parts),
                  static_cast<unsigned>(args.problem.keys.size(0)));
  cuda::Launch(grid, kThreads)
      .cluster(dim3(static_cast<unsigned>(a.blocks)))
      .dependent()
      .run(decode_attention_kernel<T, kWidth, kHeads>, "decode_attention_kernel", a);
}

template <class T, int kWidth>
void with_heads(const DecodeAttentionArgs& args) {
  const std::int64_t group = args.problem.heads / args.problem.key_heads();
  if (group == 1) {
    launch<T, kWidth, 1>(args);
  } else if (group == 2) {
    launch<T, kWidth, 2>(args);
  } else {
    launch<T, kWidth, 4>(args);
  }
}

}  // namespace

void decode_attention(Cuda, const DecodeAttentionArgs& args) {
  on_dtype(Types<float, Half, BFloat16>{}, args.y.dtype(), "decode_attention", [&]<class T>() {
    switch (args.problem.width()) {
      case 32: return with_heads<T, 32>(args);
      case 64: return with_heads<T, 64>(args);
      case 128: return with_heads<T, 128>(args);
      default:
        if constexpr (sizeof(T) == 2) {
          return with_heads<T, 256>(args);
        }
    }
  });
}

}  // namespace mica::kernels
