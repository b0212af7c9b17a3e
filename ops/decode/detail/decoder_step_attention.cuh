#pragma once

// The decoder step's attention: a block takes one query head and a part of its keys. See decoder_step_cuda.cu.

#include <cstdint>

#include <mica/ops/decode/detail/decoder_step_products.cuh>
#include <mica/ops/decode/detail/running_softmax.cuh>

namespace mica::kernels::decoder {

/// The cosines and sines of the position's angles, as ops/rotary computes them.
struct Rotation {
  float cosines[kMostHeadWidth / 2];
  float sines[kMostHeadWidth / 2];

  template <class T>
  __device__ void fill(const Arguments<T>& a, std::int64_t position) {
    constexpr double kOneOverPi = 0.31830988618379067;
    const int j = static_cast<int>(threadIdx.x);
    if (a.rotates && j < a.head_width / 2) {
      const float angle = __fmul_rn(static_cast<float>(position), a.frequencies[j]);
      const double half_turns = angle * kOneOverPi;
      float sine;
      float cosine;
      sincospif(static_cast<float>(half_turns - 2 * rint(half_turns / 2)), &sine, &cosine);
      sines[j] = a.rotary_scale * sine;
      cosines[j] = a.rotary_scale * cosine;
    }
  }
};

struct AttentionSums {
  float most[kConsumerWarps];
  float sum[kConsumerWarps];
  float values[kConsumerWarps][kMostHeadWidth];
};

using Softmax = RunningSoftmax<kOctet>;

/// The cached positions that the new one sees, and how they are split. The order of sums depends on `count` alone.
struct Keys {
  int count;
  int first_slot;  // of the cache, a ring
  int new_slot;
  int splits;

  __device__ Keys(std::int64_t length, int capacity)
      : count(static_cast<int>(min(length, std::int64_t{capacity} - 1))),
        first_slot(static_cast<int>((length - count) % capacity)),
        new_slot(static_cast<int>(length % capacity)),
        splits(min(max((count + kKeysOfSplit - 1) / kKeysOfSplit, 1), kMostSplits)) {}
};

/// Attention of one query head to a part of the keys. A team of lanes holds a key, 8 columns a lane.
template <class T>
struct Attention {
  using Pack = cuda::Pack<T, kOctet>;

  const Consumer<T>& c;
  const Layer<T>& l;
  const Words words;
  const Rotation& rotation;
  AttentionSums& shared;
  const Keys& keys;
  const int width;
  const int team_lanes;

  __device__ int team() const { return c.lane() / team_lanes; }
  __device__ int column() const { return c.lane() % team_lanes * kOctet; }

  /// The sums over the lanes of a team, in all of them.
  template <int kCount>
  __device__ void sum_team(float (&values)[kCount]) const {
#pragma unroll
    for (int step = kMostHeadWidth / kOctet / 2; step > 0; step /= 2) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float other = __shfl_xor_sync(cuda::kAllLanes, values[i], step);
        values[i] += step < team_lanes ? other : 0;
      }
    }
  }

  /// A lane's columns of a row, normalized and rotated, each step rounded to T.
  __device__ void prepare(const std::uint32_t* pairs, const T* norm, float (&values)[kOctet]) const {
#pragma unroll
    for (int i = 0; i < kOctet / 2; ++i) {
      const float2 pair = unpack_pair<T>(pairs[i]);
      values[2 * i] = pair.x;
      values[2 * i + 1] = pair.y;
    }
    if (norm != nullptr) {
      float squares[1] = {};
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        squares[0] += values[i] * values[i];
      }
      sum_team(squares);
      const float inverse = rsqrtf(squares[0] / static_cast<float>(width) + c.a.eps);
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        values[i] = static_cast<float>(static_cast<T>(values[i] * inverse * static_cast<float>(norm[column() + i])));
      }
    }
    if (c.a.rotates) {
      const float sign = column() < width / 2 ? -1 : 1;
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        const float other = __shfl_xor_sync(cuda::kAllLanes, values[i], team_lanes / 2);
        const int j = column() % (width / 2) + i;
        const float turned = values[i] * rotation.cosines[j] + sign * other * rotation.sines[j];
        values[i] = static_cast<float>(static_cast<T>(turned));
      }
    }
  }

  /// A lane's columns of some keys, and of their values.
  struct KeysAndValues {
    Pack key[kKeysAtOnce];
    Pack value[kKeysAtOnce];
    bool present[kKeysAtOnce];
  };

  /// The score of one key.
  __device__ float sum_team_of(const float (&query)[kOctet], const Pack& key) const {
    float columns[kOctet];
    cuda::unpack(key, columns);
    float score[1] = {};
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      score[0] += query[i] * columns[i];
    }
    sum_team(score);
    return score[0];
  }

  /// Adds keys, some of them absent, to the softmax.
  __device__ void add(const float (&query)[kOctet], const KeysAndValues& from, Softmax& softmax) const {
    constexpr int kKeys = kKeysAtOnce;
    const auto& [key, value, present] = from;
    float scores[kKeys] = {};
#pragma unroll
    for (int u = 0; u < kKeys; ++u) {
      float columns[kOctet];
      cuda::unpack(key[u], columns);
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        scores[u] += query[i] * columns[i];
      }
    }
    sum_team(scores);
    float most = softmax.most;
#pragma unroll
    for (int u = 0; u < kKeys; ++u) {
      most = present[u] ? fmaxf(most, scores[u]) : most;
    }
    softmax.rescale(most);
#pragma unroll
    for (int u = 0; u < kKeys; ++u) {
      const float weight = present[u] ? cuda::approximate_exp2(scores[u] - most) : 0;
      float columns[kOctet];
      cuda::unpack(value[u], columns);
      softmax.sum += weight;
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        softmax.values[i] += weight * columns[i];
      }
    }
  }

  /// A lane's softmax of its part of a head's keys.
  __device__ Softmax attend(int head, int split) const {
    const int group = c.a.heads / c.a.key_heads;
    const int key_head = head / group;
    const std::int64_t row = static_cast<std::int64_t>(key_head) * c.a.capacity * width + column();
    const int warp_teams = kWarp / team_lanes;
    const int stride = keys.splits * kConsumerWarps * warp_teams;
    int at = (split * kConsumerWarps + c.warp()) * warp_teams + team();
    KeysAndValues ahead[2];
    const auto load = [&](KeysAndValues& to) {
#pragma unroll
      for (int u = 0; u < kKeysAtOnce; ++u) {
        to.present[u] = at < keys.count;
        to.key[u] = {};
        to.value[u] = {};
        if (to.present[u]) {
          const int slot = keys.first_slot + at;
          const std::int64_t from =
              row + static_cast<std::int64_t>(slot < c.a.capacity ? slot : slot - c.a.capacity) * width;
          to.key[u] = cuda::load<kOctet>(l.keys + from);
          to.value[u] = cuda::load<kOctet>(l.values + from);
        }
        at += stride;
      }
    };
    load(ahead[0]);  // these do not depend on this step
    load(ahead[1]);

    // The new query for all warps, the new key and value for the first one.
    const bool is_first = split == 0 && c.warp() == 0;
    constexpr int kWords = kOctet / 2;
    const int rows[3] = {head, c.a.heads + key_head, c.a.heads + c.a.key_heads + key_head};
    std::uint32_t pairs[3 * kWords];
    bool has[3 * kWords];
#pragma unroll
    for (int i = 0; i < 3 * kWords; ++i) {
      has[i] = i < kWords || is_first;
    }
    await([&](int i) { return words.qkv + (rows[i / kWords] * width + column()) / 2 + i % kWords; }, has, c.tag, pairs);
    float query[kOctet];
    float new_key[kOctet];
    prepare(pairs, l.q_norm, query);
    prepare(pairs + kWords, l.k_norm, new_key);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      query[i] *= c.a.score_scale;
    }
    Softmax softmax;
    const Pack last_key = cuda::pack_of<T>(new_key);
    const Pack last_value = reinterpret_cast<const Pack&>(pairs[2 * kWords]);
    if (is_first) {
      softmax.most = sum_team_of(query, last_key);
      softmax.sum = 1;
      cuda::unpack(last_value, softmax.values);
      if (team() != 0) {
        softmax = Softmax{};
      } else if (head % group == 0) {
        const std::int64_t to = row + static_cast<std::int64_t>(keys.new_slot) * width;
        cuda::store(l.keys + to, last_key);
        cuda::store(l.values + to, last_value);
      }
    }
    const int rounds = (keys.count + stride * kKeysAtOnce - 1) / (stride * kKeysAtOnce);
#pragma unroll 1
    for (int round = 0; round < rounds; round += 2) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        add(query, ahead[i], softmax);
        load(ahead[i]);
      }
    }
    return softmax;
  }

  /// Merges the teams' softmaxes of a warp.
  __device__ void merge_teams(Softmax& mine) const {
#pragma unroll 1
    for (int step = team_lanes; step < kWarp; step *= 2) {
      const float other_most = __shfl_xor_sync(cuda::kAllLanes, mine.most, step);
      const float other_sum = __shfl_xor_sync(cuda::kAllLanes, mine.sum, step);
      const float most = fmaxf(mine.most, other_most);
      const float factor = cuda::approximate_exp2(other_most - most);
      float others[kOctet];
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        others[i] = __shfl_xor_sync(cuda::kAllLanes, mine.values[i], step);
      }
      mine.rescale(most);
      mine.sum += factor * other_sum;
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        mine.values[i] += factor * others[i];
      }
    }
  }

  /// A part of a head's keys, by the block: the result, or the part's softmax for the block that merges.
  __device__ void attend_in_block(int head, int split) const {
    Softmax softmax = attend(head, split);
    merge_teams(softmax);
    if (team() == 0) {
      shared.most[c.warp()] = softmax.most;
      shared.sum[c.warp()] = softmax.sum;
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        shared.values[c.warp()][column() + i] = softmax.values[i];
      }
    }
    c.synchronize();
    if (c.thread() >= width) {
      return;
    }
    float most = kLowest;
#pragma unroll
    for (int w = 0; w < kConsumerWarps; ++w) {
      most = fmaxf(most, shared.most[w]);
    }
    float sum = 0;
    float total = 0;
#pragma unroll
    for (int w = 0; w < kConsumerWarps; ++w) {
      const float factor = cuda::approximate_exp2(shared.most[w] - most);
      sum += factor * shared.sum[w];
      total += factor * shared.values[w][c.thread()];
    }
    if (keys.splits == 1) {
      publish_result(head, __fdividef(total, sum));
      return;
    }
    std::uint64_t* const to = part(head, split);
    publish(to + c.thread(), __float_as_uint(total), c.tag);
    if (c.thread() == 0) {
      publish(to + width, __float_as_uint(most), c.tag);
      publish(to + width + 1, __float_as_uint(sum), c.tag);
    }
  }

  __device__ std::uint64_t* part(int head, int split) const {
    return words.parts + (head * kMostSplits + split) * (width + 2);
  }

  /// A head's result, by its first `width` threads.
  __device__ void publish_result(int head, float value) const {
    const float next = __shfl_down_sync(cuda::kAllLanes, value, 1);
    if (c.thread() % 2 == 0) {
      publish(words.attention + (head * width + c.thread()) / 2, pack_pair<T>(value, next), c.tag);
    }
  }

  __device__ void merge_splits(int head) const {
    float most = kLowest;
    float sum = 0;
    float total = 0;
#pragma unroll 1
    for (int split = 0; split < keys.splits; ++split) {
      const std::uint64_t* const from = part(head, split);
      std::uint32_t value[1];
      std::uint32_t of_split[2];  // its most and its sum
      await(from + c.thread(), c.tag, value);
      await(from + width, c.tag, of_split);
      const float new_most = fmaxf(most, __uint_as_float(of_split[0]));
      const float before = cuda::approximate_exp2(most - new_most);
      const float factor = cuda::approximate_exp2(__uint_as_float(of_split[0]) - new_most);
      sum = sum * before + factor * __uint_as_float(of_split[1]);
      total = total * before + factor * __uint_as_float(value[0]);
      most = new_most;
    }
    publish_result(head, __fdividef(total, sum));
  }

  /// The phase: heads and parts of their keys, split among the blocks.
  __device__ void run() const {
    const int items = c.a.heads * keys.splits;
    const int blocks = static_cast<int>(gridDim.x);
#pragma unroll 1
    for (int item = static_cast<int>(blockIdx.x); item < items; item += blocks) {
      attend_in_block(item / keys.splits, item % keys.splits);
      c.synchronize();  // before `shared` is written again
    }
    if (keys.splits == 1 || c.thread() >= width) {
      return;
    }
#pragma unroll 1
    for (int item = static_cast<int>(blockIdx.x); item < items; item += blocks) {
      if (item % keys.splits == 0) {
        merge_splits(item / keys.splits);
      }
    }
  }
};

}  // namespace mica::kernels::decoder
