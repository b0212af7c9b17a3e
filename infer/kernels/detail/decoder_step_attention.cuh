#pragma once

// The decoder step's attention: a block takes one query head and a part of its keys. See decoder_step_sm90.cu.

#include <cstdint>

#include <mica/infer/kernels/detail/decoder_step_products.cuh>
#include <mica/ops/rotary/detail/rotation_cuda.cuh>

namespace mica::kernels::decoder {

/// The cosines and sines of the position's angles.
struct Rotation {
  alignas(16) float cosines[kMostHeadWidth / 2];
  alignas(16) float sines[kMostHeadWidth / 2];

  template <class T>
  __device__ void fill(const Arguments<T>& a, std::int64_t position) {
    const int j = static_cast<int>(threadIdx.x);
    if (a.rotates && j < a.head_width / 2) {
      const auto [cosine, sine] =
          cosine_and_sine<float>(static_cast<float>(position), a.frequencies[j], a.rotary_scale);
      sines[j] = sine;
      cosines[j] = cosine;
    }
  }
};

struct AttentionSums {
  alignas(16) float most[kConsumerWarps];
  alignas(16) float sum[kConsumerWarps];
  alignas(16) float values[kConsumerWarps][kMostHeadWidth];
};

/// The cached positions that the new one attends to, and how they are split. The order of sums depends on `count`
/// alone.
struct Keys {
  int count;
  int first_index;  // cache index of the first of them; indices wrap around at the capacity
  int new_index;
  int splits;

  Keys() = default;
  __device__ Keys(std::int64_t length, int capacity)
      : count(static_cast<int>(min(length, std::int64_t{capacity} - 1))),
        first_index(static_cast<int>((length - count) % capacity)),
        new_index(static_cast<int>(length % capacity)),
        splits(splits_of(count)) {}

  /// With more parts, a block has fewer keys and reads them faster, but merging more than kSplitsAtOnce parts takes
  /// longer.
  __device__ static int splits_of(int count) {
    const int few = min(max((count + kKeysOfSplit - 1) / kKeysOfSplit, 1), kSplitsAtOnce);
    return max(few, min((count + kMostKeysOfSplit - 1) / kMostKeysOfSplit, kMostSplits));
  }
};

/// A part of a head's keys.
struct Part {
  int number;
  int head;
  int split;
  int key_head;
  bool has_new_key;  // the part also has the new position's key
  bool appends;      // the block also stores that key and its value in the cache (once for each key head)

  Part() = default;
  template <class T>
  __device__ Part(const Arguments<T>& a, const Keys& keys, int number)
      : number(number), head(number / keys.splits), split(number % keys.splits) {
    const int group = a.heads / a.key_heads;
    key_head = head / group;
    has_new_key = split == 0;
    appends = has_new_key && head % group == 0;
  }
};

/// Attention of one query head to a part of the keys. A row group of lanes has a key, with 8 columns per lane.
template <class T, int kWidth>
struct Attention {
  static constexpr int kRowGroupLanes = kWidth / kOctet;
  static constexpr int kRowGroups = kWarp / kRowGroupLanes;
  static constexpr int kColumns = kOctet / kRowGroups;  // columns of a warp's result per lane
  using Pack = cuda::Pack<T, kOctet>;

  const Consumer<T>& c;
  const Layer<T>& l;
  const Words words;
  const Rotation& rotation;
  AttentionSums& shared;
  const Keys& keys;

  __device__ int row_group() const { return c.lane() / kRowGroupLanes; }
  __device__ int column() const { return c.lane() % kRowGroupLanes * kOctet; }

  /// Sums each value over the lanes of a row group. All of these lanes get the sums.
  template <int kCount>
  __device__ void sum_row_group(float (&values)[kCount]) const {
#pragma unroll
    for (int step = kRowGroupLanes / 2; step > 0; step /= 2) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        values[i] += __shfl_xor_sync(cuda::kAllLanes, values[i], step);
      }
    }
  }

  /// The factors for a lane's columns of a row: cosines, sines and the norm's weight.
  struct Factors {
    float4 cosines[2];
    float4 sines[2];
    bool has_norm;
    Pack norm;

    __device__ Factors(const Rotation& rotation, const T* norms, int column) : has_norm(norms != nullptr), norm{} {
      const int j = column % (kWidth / 2);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        cosines[i] = reinterpret_cast<const float4*>(rotation.cosines + j)[i];
        sines[i] = reinterpret_cast<const float4*>(rotation.sines + j)[i];
      }
      if (norms != nullptr) {
        norm = cuda::load<kOctet>(norms + column);
      }
    }
  };

  /// Normalizes and rotates a lane's columns of a row. Each step rounds to T.
  __device__ void prepare(const std::uint32_t* pairs, const Factors& f, float (&values)[kOctet]) const {
#pragma unroll
    for (int i = 0; i < kOctet / 2; ++i) {
      const float2 pair = unpack_pair<T>(pairs[i]);
      values[2 * i] = pair.x;
      values[2 * i + 1] = pair.y;
    }
    if (f.has_norm) {
      float squares[1] = {};
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        squares[0] += values[i] * values[i];
      }
      sum_row_group(squares);
      const float inverse = rsqrtf(squares[0] / static_cast<float>(kWidth) + c.a.eps);
      float factors[kOctet];
      cuda::unpack(f.norm, factors);
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        values[i] = static_cast<float>(static_cast<T>(values[i] * inverse * factors[i]));
      }
    }
    if (c.a.rotates) {
      const float sign = column() < kWidth / 2 ? -1 : 1;
      const float cosines[kOctet] = {f.cosines[0].x, f.cosines[0].y, f.cosines[0].z, f.cosines[0].w,
                                     f.cosines[1].x, f.cosines[1].y, f.cosines[1].z, f.cosines[1].w};
      const float sines[kOctet] = {f.sines[0].x, f.sines[0].y, f.sines[0].z, f.sines[0].w,
                                   f.sines[1].x, f.sines[1].y, f.sines[1].z, f.sines[1].w};
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        const float other = __shfl_xor_sync(cuda::kAllLanes, values[i], kRowGroupLanes / 2);
        const float turned = values[i] * cosines[i] + sign * other * sines[i];
        values[i] = static_cast<float>(static_cast<T>(turned));
      }
    }
  }

  /// A lane's columns of some keys, and of their values.
  struct KeysAndValues {
    Pack key[kKeysAtOnce];
    Pack value[kKeysAtOnce];
  };

  __device__ static float dot(const float (&query)[kOctet], const Pack& key) {
    float columns[kOctet];
    cuda::unpack(key, columns);
    float sums[2] = {};
#pragma unroll
    for (int i = 0; i < kOctet; i += 2) {
      sums[0] += query[i] * columns[i];
      sums[1] += query[i + 1] * columns[i + 1];
    }
    return sums[0] + sums[1];
  }

  using Softmax = RunningSoftmax<kOctet>;

  /// Adds the first `count` keys and their values to the softmax.
  __device__ static void add_weighted(const KeysAndValues& from, int count, const float (&scores)[kKeysAtOnce],
                                      Softmax& softmax) {
    float most = softmax.most;
#pragma unroll
    for (int u = 0; u < kKeysAtOnce; ++u) {
      most = u < count ? fmaxf(most, scores[u]) : most;
    }
    softmax.rescale(most);
#pragma unroll
    for (int u = 0; u < kKeysAtOnce; ++u) {
      const float weight = u < count ? cuda::approximate_exp2(scores[u] - most) : 0;
      float columns[kOctet];
      cuda::unpack(from.value[u], columns);
      softmax.sum += weight;
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        softmax.values[i] += weight * columns[i];
      }
    }
  }

  __device__ void add(const float (&query)[kOctet], const KeysAndValues& from, int count, Softmax& softmax) const {
    float scores[kKeysAtOnce];
#pragma unroll
    for (int u = 0; u < kKeysAtOnce; ++u) {
      scores[u] = dot(query, from.key[u]);
    }
    sum_row_group(scores);
    add_weighted(from, count, scores, softmax);
  }

  /// Begins the softmax of the first warp with the new key, which row group 1 (`has_key`) has prepared in `query`, and
  /// appends it and the new value to the cache. Afterwards, all row groups have the query.
  __device__ void add_new_key(const Part& part, bool has_key, std::int64_t row, const WordsOf<kOctet / 2>& value,
                              float (&query)[kOctet], Softmax& softmax) const {
    const Pack last_key = cuda::pack_of<T>(query);
    const Pack last_value = reinterpret_cast<const Pack&>(value);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      query[i] = __shfl_sync(cuda::kAllLanes, query[i], c.lane() % kRowGroupLanes);
    }
    float score[1] = {dot(query, last_key) * c.a.score_scale};
    sum_row_group(score);
    if (has_key) {
      softmax.most = score[0];
      softmax.sum = 1;
      cuda::unpack(last_value, softmax.values);
      if (part.appends) {
        const std::int64_t to = row + static_cast<std::int64_t>(keys.new_index) * kWidth;
        cuda::store(l.keys + to, last_key);
        cuda::store(l.values + to, last_value);
      }
    }
  }

  /// Computes the softmax of the row group's keys, with the lane's columns of the values.
  __device__ Softmax attend(const Part& part) const {
    const std::int64_t row = static_cast<std::int64_t>(part.key_head) * c.a.capacity * kWidth + column();
    const int stride = keys.splits * kConsumerWarps * kRowGroups;
    // The row group has every stride-th key.
    int at = (part.split * kConsumerWarps + c.warp()) * kRowGroups + row_group();
    int to_add = at < keys.count ? (keys.count - at + stride - 1) / stride : 0;
    const auto load = [&](KeysAndValues& to) {
#pragma unroll
      for (int u = 0; u < kKeysAtOnce; ++u) {
        to.key[u] = {};
        to.value[u] = {};
        if (at < keys.count) {
          const int index = keys.first_index + at;
          const std::int64_t from =
              row + static_cast<std::int64_t>(index < c.a.capacity ? index : index - c.a.capacity) * kWidth;
          to.key[u] = cuda::load<kOctet>(l.keys + from);
          to.value[u] = cuda::load<kOctet>(l.values + from);
        }
        at += stride;
      }
    };
    KeysAndValues ahead[kRoundsAhead];
#pragma unroll
    for (int i = 0; i < kRoundsAhead; ++i) {
      load(ahead[i]);  // cached keys and values do not depend on this step
    }
    // in_register() makes this division run before the query arrives.
    const int rounds = in_register((keys.count + stride * kKeysAtOnce - 1) / (stride * kKeysAtOnce));

    // Each row group prepares the new query. But if the part has the new key, row group 1 of the first warp prepares
    // that key instead, and reads the new value.
    const bool is_first = part.has_new_key && c.warp() == 0;
    const bool has_key = is_first && row_group() == 1;
    const Factors factors(rotation, has_key ? l.k_norm : l.q_norm, column());
    const int key_row = c.a.heads + part.key_head;
    const int rows[2] = {has_key ? key_row : part.head, key_row + c.a.key_heads};
    WordsOf<kOctet / 2> of_rows[2];
    const bool has[2] = {true, has_key};
    await([&](int i) { return words.qkv + word_offset((rows[i] * kWidth + column()) / 2); }, has, of_rows);
    float query[kOctet];
    prepare(of_rows[0].at, factors, query);
    Softmax softmax;
    if (is_first) {
      add_new_key(part, has_key, row, of_rows[1], query, softmax);
    }
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      query[i] *= c.a.score_scale;
    }
#pragma unroll 1
    for (int first = 0; first < rounds; first += kRoundsAhead) {
#pragma unroll
      for (int i = 0; i < kRoundsAhead; ++i) {
        if (first + i < rounds) {
          add(query, ahead[i], to_add, softmax);
          to_add -= kKeysAtOnce;
          if (first + i + kRoundsAhead < rounds) {
            load(ahead[i]);
          }
        }
      }
    }
    return softmax;
  }

  /// Merges the softmaxes of a warp's row groups. Afterwards, a lane has kColumns columns of the result, from the
  /// returned column on.
  __device__ int merge_row_groups(Softmax& mine) const {
    float most = mine.most;
#pragma unroll
    for (int step = kRowGroupLanes; step < kWarp; step *= 2) {
      most = fmaxf(most, __shfl_xor_sync(cuda::kAllLanes, most, step));
    }
    mine.rescale(most);
    int first = column();
#pragma unroll
    for (int step = kWarp / 2, count = kOctet / 2; step >= kRowGroupLanes; step /= 2, count /= 2) {
      const bool is_upper = (c.lane() & step) != 0;
      mine.sum += __shfl_xor_sync(cuda::kAllLanes, mine.sum, step);
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const float kept = is_upper ? mine.values[count + i] : mine.values[i];
        const float given = is_upper ? mine.values[i] : mine.values[count + i];
        mine.values[i] = kept + __shfl_xor_sync(cuda::kAllLanes, given, step);
      }
      first += is_upper ? count : 0;
    }
    return first;
  }

  /// Processes a part of a head's keys. If it is the only part, the block writes the head's result; otherwise it writes
  /// the part's result, and the blocks that read attention's result merge the parts.
  __device__ void attend_in_block(const Part& part) const {
    const int splits = keys.splits;
    Softmax softmax = attend(part);
    const int first = merge_row_groups(softmax);
    if (c.lane() == 0) {
      shared.most[c.warp()] = softmax.most;
      shared.sum[c.warp()] = softmax.sum;
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      shared.values[c.warp()][first + i] = softmax.values[i];
    }
    c.synchronize();
    if (c.thread() >= kWidth / 2) {
      return;
    }
    float most = kLowest;
#pragma unroll
    for (int w = 0; w < kConsumerWarps; ++w) {
      most = fmaxf(most, shared.most[w]);
    }
    float sum = 0;
    float2 total{};
#pragma unroll
    for (int w = 0; w < kConsumerWarps; ++w) {
      const float factor = cuda::approximate_exp2(shared.most[w] - most);
      const float2 value = *reinterpret_cast<const float2*>(&shared.values[w][2 * c.thread()]);
      sum += factor * shared.sum[w];
      total.x += factor * value.x;
      total.y += factor * value.y;
    }
    if (splits == 1) {
      publish(words.attention + word_offset(part.head * (kWidth / 2) + c.thread()),
              pack_pair<T>(__fdividef(total.x, sum), __fdividef(total.y, sum)));
      return;
    }
    const int index = part.head * kMostSplits + part.split;
    publish(words.parts + index * kWidth + 2 * c.thread(), total.x, total.y);
    if (c.thread() == 0) {
      publish(words.stats + index * 2, most, sum);
    }
  }

  /// The attention phase: processes all parts of the block; `part` is the first one.
  __device__ void run(Part part) const {
    while (part.head < c.a.heads) {
      attend_in_block(part);
      c.synchronize();  // all threads have read `shared` before it is overwritten
      const int next = part.number + static_cast<int>(gridDim.x);
      if (next >= c.a.heads * keys.splits) {
        break;
      }
      part = Part(c.a, keys, next);
    }
  }
};

}  // namespace mica::kernels::decoder
