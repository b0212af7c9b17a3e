// The backward of attention with wgmma and TMA, for compute capability 9.0. One kernel computes the gradients of
// queries, another one those of keys and values:
//
//     q, dout (64 queries) ──────┐
//                                ├──> P = 2^(q · kᵀ − lse), dP = dout · vᵀ ──> dS = P ∘ (dP − mean) ──> dq += dS · k
//     k, v (ring of stages) ─────┘
//
//     k, v (64 keys) ────────────┐        ┌──────────> dv += Pᵀ · dout
//                                ├──> Pᵀ ─┴──> dSᵀ ──> dk += dSᵀ · q
//     q, dout (ring of stages) ──┘
//
// Both recompute the weights, so that each sum is computed within one thread block, without atomics. There are variants
// for head sizes up to 64 and up to 128, with and without dropout. See flash_attention.md.

#include <algorithm>
#include <type_traits>

#include <mica/ops/attention/detail/flash_attention_dropout.cuh>
#include <mica/ops/attention/detail/flash_attention_sm90.cuh>

namespace mica::kernels::flash {

namespace {

/// Sizes of both kernels. A consumer warpgroup owns 64 rows of two tensors in shared memory: of queries and dout, or of
/// keys and values. Tiles with kRows rows of the two other tensors stream through kStages stages.
template <int kDepth_, int kConsumers_, int kRows_, int kStages_>
struct BackwardPlan {
  static constexpr int kDepth = kDepth_;
  static constexpr int kChunks = kDepth / kChunk;
  static constexpr int kConsumers = kConsumers_;
  static constexpr int kRows = kRows_;
  static constexpr int kStages = kStages_;
  static constexpr int kOwnedRows = kConsumers * kConsumerRows;
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 232;
  static constexpr int kOwnedBytes = kChunks * kConsumerChunkBytes;
  static constexpr int kPassingBytes = kChunks * kRows * kLineBytes;

  struct BackwardMemory {
    unsigned char owned[kConsumers][2][kOwnedBytes];  // at the end, the gradients
    unsigned char passing[kStages][2][kPassingBytes];
    float stats[kStages][kRows / kStatsRows][2][kStatsRows];  // of queries that stream
    std::uint64_t owned_full[kConsumers];
    std::uint64_t owned_empty[kConsumers];
    std::uint64_t full[kStages];
    std::uint64_t empty[kStages];
  };

  __device__ static void init(BackwardMemory& shared) {
    for (int i = 0; i < kConsumers; ++i) {
      cuda::init_barrier(&shared.owned_full[i], 1);
      cuda::init_barrier(&shared.owned_empty[i], 1);
    }
    for (int i = 0; i < kStages; ++i) {
      cuda::init_barrier(&shared.full[i], 1);
      cuda::init_barrier(&shared.empty[i], kConsumers * kWarpgroup / kWarp);
    }
    cuda::publish_barriers();
  }
};

/// Sizes of the kernel for the gradients of keys and values. If kLean, the products with queries and those with dout
/// use the same registers.
template <int kDepth, int kConsumers, int kRows, int kStages, bool kLean_>
struct KeysPlan : BackwardPlan<kDepth, kConsumers, kRows, kStages> {
  static constexpr bool kLean = kLean_;
};

/// The tensor maps of the inputs and of the gradients.
struct BackwardMaps {
  CUtensorMap q, k, v, dout;
  CUtensorMap first, second;  // dq, or dk and dv
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Loads a consumer's rows of two tensors, when the previous ones are no longer needed.
template <class P>
__device__ void load_owned(typename P::BackwardMemory& shared, unsigned& parities, int consumer,
                           const CUtensorMap* first, const CUtensorMap* second, int row, int head, int batch) {
  std::uint64_t* const full = &shared.owned_full[consumer];
  cuda::wait(&shared.owned_empty[consumer], ~parities >> consumer & 1);
  parities ^= 1u << consumer;
  cuda::arrive_expecting(full, 2 * P::kOwnedBytes);
  load_chunks<P::kChunks, kConsumerRows>(shared.owned[consumer][0], first, row, head, batch, full);
  load_chunks<P::kChunks, kConsumerRows>(shared.owned[consumer][1], second, row, head, batch, full);
}

/// Multiplies the two elements of a 16-bit pair by two numbers and rounds the results: as bfloat16, since with float
/// the compiler would unpack all pairs at once and spill registers, but float16 as float, since its range is too small.
template <class T>
__device__ std::uint32_t multiply_pair(std::uint32_t pair, float first, float second) {
  if constexpr (std::is_same_v<T, Float16>) {
    const float2 two = __half22float2(*reinterpret_cast<const __half2*>(&pair));
    return cuda::pair_of<T>(two.x * first, two.y * second);
  } else {
    std::uint32_t result;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(pair), "r"(cuda::pair_of<T>(first, second)));
    return result;
  }
}

/// What a thread of a consumer warpgroup keeps from tile to tile.
template <class P, bool kDrops>
struct BackwardConsumer {
  typename P::BackwardMemory& shared;
  const Work& a;
  const int number = consumer_of_thread();
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const int lane = thread % kWarp;
  const int own_row = number * kConsumerRows + thread / kWarp * 16 + lane / 4;  // the lane's first row of a tile
  const PhiloxKey dropout_key = kDrops ? absolute_key(a.dropout_key) : PhiloxKey{};
  Ring<P::kStages> ring;
  unsigned parity = 0;

  __device__ void wait_for_owned() {
    cuda::wait(&shared.owned_full[number], parity);
    parity ^= 1;
  }
  __device__ void release_owned() const {
    if (thread == 0) {
      cuda::arrive(&shared.owned_empty[number]);
    }
  }
  __device__ void release(int stage) const {
    __syncwarp();
    if (stage >= 0 && lane == 0) {
      cuda::arrive(&shared.empty[stage]);
    }
  }
  /// Waits for a stage that this consumer does not need, and releases it.
  __device__ void skip() {
    cuda::wait(&shared.full[ring.stage], ring.parity);
    release(ring.stage);
    ring.advance();
  }
};

// The kernel for the gradients of queries.

/// The number of key blocks that queries before `end` see; 0 if there are no queries from `begin` on.
template <class P>
__device__ int key_steps(const Work& a, int begin, int end) {
  return begin < a.queries ? (a.visible_keys(end) + P::kRows - 1) / P::kRows : 0;
}

template <class P>
__device__ void produce_for_queries(typename P::BackwardMemory& shared, const Work& a, const BackwardMaps& maps,
                                    const Order& order) {
  Ring<P::kStages> ring;
  unsigned parities = 0;
  order.each([&](Order::HeadTile item) {
    const int b = item.head / a.heads;
    const int h = item.head % a.heads;
    const int key_head = h / a.group;
    const int first = item.tile * P::kOwnedRows;
#pragma unroll 1
    for (int consumer = 0; consumer < P::kConsumers; ++consumer) {
      const int row = first + consumer * kConsumerRows;
      if (key_steps<P>(a, row, row + kConsumerRows) > 0) {
        load_owned<P>(shared, parities, consumer, &maps.q, &maps.dout, row, h, b);
      }
    }
#pragma unroll 1
    for (int step = key_steps<P>(a, first, first + P::kOwnedRows) - 1; step >= 0; --step, ring.advance()) {
      std::uint64_t* const full = &shared.full[ring.stage];
      cuda::wait(&shared.empty[ring.stage], ring.parity ^ 1);
      cuda::arrive_expecting(full, 2 * P::kPassingBytes);
      load_chunks<P::kChunks, P::kRows>(shared.passing[ring.stage][0], &maps.k, step * P::kRows, key_head, b, full);
      load_chunks<P::kChunks, P::kRows>(shared.passing[ring.stage][1], &maps.v, step * P::kRows, key_head, b, full);
    }
  });
}

/// A consumer warpgroup's 64 queries. The tensor cores add up dq for a block of keys while the next block's weights are
/// computed.
template <class T, class P, bool kDrops>
struct QueryTile {
  BackwardConsumer<P, kDrops>& c;
  typename P::BackwardMemory& shared = c.shared;
  const Work& a = c.a;
  Ring<P::kStages>& ring = c.ring;
  const int head;   // of all batches
  const int first;  // of the thread block's queries
  const int begin = first + c.number * kConsumerRows;
  const int steps = key_steps<P>(a, begin, begin + kConsumerRows);  // blocks of keys that the queries see

  float dq[P::kDepth / 2] = {};
  float log2_sums[2];
  float means[2];
  float weights[P::kRows / 2];
  float dweights[P::kRows / 2];
  std::uint32_t dscores[P::kRows / 16][4];
  std::uint32_t kept = 0;  // the weights that dropout keeps
  int last = -1;           // the stage whose keys dq is being summed up with

  __device__ QueryTile(BackwardConsumer<P, kDrops>& c, Order::HeadTile item)
      : c(c), head(item.head), first(item.tile * P::kOwnedRows) {}

  /// Releases the stages of keys that only other queries of the thread block see.
  __device__ void skip_unseen() {
    for (int step = key_steps<P>(a, first, first + P::kOwnedRows); step > steps; --step) {
      c.skip();
    }
  }

  __device__ void read_stats() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* const stats = a.stats_of(head, min(first + c.own_row + half * 8, a.queries - 1));
      log2_sums[half] = stats[0];
      means[half] = stats[kStatsRows];
    }
  }

  /// The sums over the blocks of keys, from the last one to the first. Those that need a mask come first.
  __device__ void add_gradients() {
    const int unmasked = max(0, min(a.keys, begin + a.offset + 1)) / P::kRows;  // blocks that all queries see
    int step = steps - 1;
#pragma unroll 1
    for (; step >= unmasked; --step) {
      do_step<true>(step);
    }
#pragma unroll 1
    for (; step >= 0; --step) {
      do_step<false>(step);
    }
    cuda::wait_products<0>();
    cuda::pin(dq);
    pin_all(dscores);
    c.release(last);
  }

  template <bool kMasked>
  __device__ void do_step(int step) {
    const unsigned char* const k = shared.passing[ring.stage][0];
    const unsigned char* const v = shared.passing[ring.stage][1];
    cuda::wait(&shared.full[ring.stage], ring.parity);
    cuda::begin_products();
    multiply_transposed<T, P::kChunks, P::kRows>(weights, shared.owned[c.number][0], k);
    cuda::commit_products();
    multiply_transposed<T, P::kChunks, P::kRows>(dweights, shared.owned[c.number][1], v);
    cuda::commit_products();
    draw(step);
    cuda::wait_products<1>();
    cuda::pin(weights);
    pin_all(dscores);
    c.release(last);
    last = ring.stage;
    exponentiate();
    if constexpr (kMasked) {
      mask(step);
    }
    cuda::wait_products<0>();
    cuda::pin(dweights);
    differentiate();
    pin_all(dscores);
    cuda::pin(dq);
    cuda::begin_products();
    add_product<T, P::kChunks, P::kRows>(dq, dscores, k);
    cuda::commit_products();
    ring.advance();
  }

  __device__ void draw(int step) {
    if constexpr (kDrops) {
      static_assert(P::kRows == 64);
      kept = draw_kept<true, 64>(a, c.dropout_key, head, begin + c.thread / kWarp * 16, step * P::kRows);
    }
  }

  /// Scores become weights.
  __device__ void exponentiate() {
#pragma unroll
    for (int i = 0; i < P::kRows / 2; ++i) {
      weights[i] = cuda::approximate_exp2(weights[i] * a.scale_log2 - log2_sums[i / 2 % 2]);
    }
  }

  __device__ void mask(int step) {
#pragma unroll
    for (int i = 0; i < P::kRows / 2; ++i) {
      const int visible = min(a.keys, first + c.own_row + i / 2 % 2 * 8 + a.offset + 1) - step * P::kRows;
      if (i / 4 * 8 + i % 2 + c.lane % 4 * 2 >= visible) {
        weights[i] = 0;
      }
    }
  }

  /// dscores = weights · (dweights - mean), rounded.
  __device__ void differentiate() {
#pragma unroll
    for (int i = 0; i < P::kRows / 2; ++i) {
      if constexpr (kDrops) {
        dweights[i] = keep<true>(dweights[i], kept, i);
      }
      weights[i] *= dweights[i] - means[i / 2 % 2];
    }
    round_to<T, P::kRows>(dscores, weights);
  }
};

template <class T, class P, bool kDrops>
__device__ void consume_for_queries(typename P::BackwardMemory& shared, const Work& a, const BackwardMaps& maps,
                                    const Order& order) {
  BackwardConsumer<P, kDrops> c{shared, a};
  order.each([&](Order::HeadTile item) {
    QueryTile<T, P, kDrops> tile(c, item);
    tile.skip_unseen();
    if (tile.steps > 0) {
      tile.read_stats();
      c.wait_for_owned();
      tile.add_gradients();
    }
    if (tile.begin < a.queries) {
      write_rows<T, P::kChunks>(tile.dq, a.gradient_scale, a.gradient_scale, shared.owned[c.number][0], &maps.first,
                                tile.begin, item.head % a.heads, item.head / a.heads, 1 + c.number);
    }
    if (tile.steps > 0) {
      c.release_owned();
    }
  });
}

// The kernel for the gradients of keys and values. It computes weights transposed: rows are keys, columns queries.

template <bool kFirst, int kSize, int kOtherSize>
__device__ auto& either(float (&first)[kSize], float (&second)[kOtherSize]) {
  if constexpr (kFirst) {
    return first;
  } else {
    return second;
  }
}

/// The first block with queries that see the keys from `begin` on, if there are such keys.
template <class P>
__device__ int first_query_step(const Work& a, int begin) {
  const int all = (a.queries + P::kRows - 1) / P::kRows;
  return begin < a.keys ? min(all, a.first_query(begin) / P::kRows) : all;
}

template <class P>
__device__ void produce_for_keys(typename P::BackwardMemory& shared, const Work& a, const BackwardMaps& maps,
                                 const Order& order) {
  const int key_heads = a.heads / a.group;
  const int steps = (a.queries + P::kRows - 1) / P::kRows;
  Ring<P::kStages> ring;
  unsigned parities = 0;
  order.each([&](Order::HeadTile item) {
    const int b = item.head / key_heads;
    const int key_head = item.head % key_heads;
    const int first = item.tile * P::kOwnedRows;
#pragma unroll 1
    for (int consumer = 0; consumer < P::kConsumers; ++consumer) {
      const int row = first + consumer * kConsumerRows;
      if (first_query_step<P>(a, row) < steps) {
        load_owned<P>(shared, parities, consumer, &maps.k, &maps.v, row, key_head, b);
      }
    }
    const int first_step = first_query_step<P>(a, first);
#pragma unroll 1
    for (int h = key_head * a.group; h < (key_head + 1) * a.group; ++h) {
#pragma unroll 1
      for (int step = first_step; step < steps; ++step, ring.advance()) {
        std::uint64_t* const full = &shared.full[ring.stage];
        const int row = step * P::kRows;
        cuda::wait(&shared.empty[ring.stage], ring.parity ^ 1);
        cuda::arrive_expecting(full, 2 * P::kPassingBytes + static_cast<int>(sizeof(shared.stats[0])));
        cuda::load_bytes(shared.stats[ring.stage], a.stats_of(b * a.heads + h, row), sizeof(shared.stats[0]), full);
        load_chunks<P::kChunks, P::kRows>(shared.passing[ring.stage][0], &maps.q, row, h, b, full);
        load_chunks<P::kChunks, P::kRows>(shared.passing[ring.stage][1], &maps.dout, row, h, b, full);
      }
    }
  });
}

/// A consumer warpgroup's 64 keys. The tensor cores add up dk for a block of queries while the next block's weights are
/// computed.
template <class T, class P, bool kDrops>
struct KeyTile {
  // Between two heads, a consumer uses the last stage of the first while it skips stages that only other consumers
  // need.
  static_assert(P::kStages > P::kConsumers);

  BackwardConsumer<P, kDrops>& c;
  typename P::BackwardMemory& shared = c.shared;
  const Work& a = c.a;
  Ring<P::kStages>& ring = c.ring;
  const int first_head;  // of all batches, of the query heads that share the key head
  const int first;       // of the thread block's keys
  const int begin = first + c.number * kConsumerRows;
  const int steps = (a.queries + P::kRows - 1) / P::kRows;
  const int first_of_block = first_query_step<P>(a, first);
  const int first_step = first_query_step<P>(a, begin);

  float dk[P::kDepth / 2] = {};
  float dv[P::kDepth / 2] = {};
  float weights[P::kRows / 2];
  float more[P::kLean ? 1 : P::kRows / 2];
  std::uint32_t rounded[P::kRows / 16][4];  // the weights
  std::uint32_t dscores[P::kRows / 16][4];
  std::uint32_t kept = 0;  // the weights that dropout keeps
  int last = -1;           // the stage whose queries dk is being summed up with

  __device__ KeyTile(BackwardConsumer<P, kDrops>& c, int first_head, int first)
      : c(c), first_head(first_head), first(first) {}

  __device__ bool is_seen() const { return first_step < steps; }
  __device__ auto& dweights() { return either<P::kLean>(weights, more); }

  __device__ void skip_all() {
    for (int i = 0; i < a.group * (steps - first_of_block); ++i) {
      c.skip();
    }
  }

  /// The sums over the blocks of queries of all heads that share the key head.
  __device__ void add_gradients() {
    // From this step on, all queries see all keys of the block.
    const int first_unmasked = min(steps, (a.first_query(begin + kConsumerRows - 1) + P::kRows - 1) / P::kRows);
#pragma unroll 1
    for (int head = first_head; head < first_head + a.group; ++head) {
      int step = first_of_block;
      for (; step < first_step; ++step) {
        c.skip();
      }
#pragma unroll 1
      for (; step < first_unmasked; ++step) {
        do_step<true>(head, step);
      }
#pragma unroll 1
      for (; step < steps; ++step) {
        do_step<false>(head, step);
      }
    }
    cuda::wait_products<0>();
    cuda::pin(dk);
    cuda::pin(dv);
    pin_all(rounded);
    pin_all(dscores);
    c.release(last);
  }

  template <bool kMasked>
  __device__ void do_step(int head, int step) {
    cuda::wait(&shared.full[ring.stage], ring.parity);
    cuda::begin_products();
    multiply_queries();
    if constexpr (!P::kLean) {
      multiply_dout();
    }
    draw(head, step);
    cuda::wait_products<P::kLean ? 0 : 1>();
    cuda::pin(weights);
    pin_all(rounded);
    pin_all(dscores);
    c.release(last);
    last = ring.stage;
    exponentiate<kMasked>(step);
    round_weights();
    pin_all(rounded);
    cuda::pin(dv);
    if constexpr (P::kLean) {
      cuda::pin(weights);
    }
    cuda::begin_products();
    if constexpr (P::kLean) {
      multiply_dout();
    }
    add_product<T, P::kChunks, P::kRows>(dv, rounded, shared.passing[ring.stage][1]);
    cuda::commit_products();
    cuda::wait_products<1>();
    cuda::pin(dweights());
    differentiate();
    pin_all(dscores);
    cuda::pin(dk);
    cuda::begin_products();
    add_product<T, P::kChunks, P::kRows>(dk, dscores, shared.passing[ring.stage][0]);
    cuda::commit_products();
    ring.advance();
  }

  __device__ void multiply_queries() {
    multiply_transposed<T, P::kChunks, P::kRows>(weights, shared.owned[c.number][0], shared.passing[ring.stage][0]);
    cuda::commit_products();
  }
  __device__ void multiply_dout() {
    multiply_transposed<T, P::kChunks, P::kRows>(dweights(), shared.owned[c.number][1], shared.passing[ring.stage][1]);
    cuda::commit_products();
  }

  __device__ void draw(int head, int step) {
    if constexpr (kDrops) {
      static_assert(P::kRows == 64);
      kept = draw_kept<false, 64>(a, c.dropout_key, head, begin + c.thread / kWarp * 16, step * P::kRows);
    }
  }

  /// The logarithms (which = 0) or means (1) of queries 8 j + 2 (l % 4) and the next one, for lane l.
  __device__ float2 stats(int which, int j) const {
    return *reinterpret_cast<const float2*>(
        &shared.stats[ring.stage][j * 8 / kStatsRows][which][j * 8 % kStatsRows + c.lane % 4 * 2]);
  }

  /// Scores become weights, 0 where a query does not see a key.
  template <bool kMasked>
  __device__ void exponentiate(int step) {
#pragma unroll
    for (int j = 0; j < P::kRows / 8; ++j) {
      const float2 both = stats(0, j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& weight = weights[j * 4 + i];
        weight = cuda::approximate_exp2(weight * a.scale_log2 - (i % 2 == 0 ? both.x : both.y));
        if constexpr (kMasked) {
          const int begin_of_row = first + c.own_row + i / 2 * 8 - a.offset - step * P::kRows;
          if (j * 8 + i % 2 + c.lane % 4 * 2 < begin_of_row) {
            weight = 0;
          }
        }
      }
    }
  }

  __device__ void round_weights() {
    round_to<T, P::kRows>(rounded, weights);
    if constexpr (kDrops) {
      if constexpr (P::kLean) {  // keeps all weights, since dS also needs those that are dropped
        copy_fragments(dscores, rounded);
      }
      drop_rounded<false, P::kRows>(rounded, &kept);
    }
  }

  /// dscores = weights · (dweights - mean), rounded.
  __device__ void differentiate() {
    auto& dweights = this->dweights();
#pragma unroll
    for (int j = 0; j < P::kRows / 8; ++j) {
      const float2 both = stats(1, j);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = j * 4 + half * 2;
        if constexpr (kDrops) {
          dweights[i] = keep<false>(dweights[i], kept, i);
          dweights[i + 1] = keep<false>(dweights[i + 1], kept, i + 1);
        }
        const float first_difference = dweights[i] - both.x;
        const float second_difference = dweights[i + 1] - both.y;
        const int register_index = j % 2 * 2 + half;
        if constexpr (P::kLean) {  // only the rounded weights are left
          dscores[j / 2][register_index] = multiply_pair<T>((kDrops ? dscores : rounded)[j / 2][register_index],
                                                            first_difference, second_difference);
        } else {
          dscores[j / 2][register_index] =
              cuda::pair_of<T>(weights[i] * first_difference, weights[i + 1] * second_difference);
        }
      }
    }
  }
};

template <class T, class P, bool kDrops>
__device__ void consume_for_keys(typename P::BackwardMemory& shared, const Work& a, const BackwardMaps& maps,
                                 const Order& order) {
  const int key_heads = a.heads / a.group;
  BackwardConsumer<P, kDrops> c{shared, a};
  order.each([&](Order::HeadTile item) {
    const int b = item.head / key_heads;
    const int key_head = item.head % key_heads;
    KeyTile<T, P, kDrops> tile(c, b * a.heads + key_head * a.group, item.tile * P::kOwnedRows);
    if (tile.is_seen()) {
      c.wait_for_owned();
      tile.add_gradients();
    } else {
      tile.skip_all();
    }
    if (tile.begin < a.keys) {
      write_rows<T, P::kChunks>(tile.dk, a.gradient_scale, a.gradient_scale, shared.owned[c.number][0], &maps.first,
                                tile.begin, key_head, b, 1 + c.number);
      write_rows<T, P::kChunks>(tile.dv, a.weight_factor, a.weight_factor, shared.owned[c.number][1], &maps.second,
                                tile.begin, key_head, b, 1 + c.number);
    }
    if (tile.is_seen()) {
      c.release_owned();
    }
  });
}

#endif

template <class T, class P, bool kForKeys, bool kDrops>
__global__ void __launch_bounds__(P::kThreads, 1)
    backward_sm90_kernel([[maybe_unused]] const __grid_constant__ Work a,
                         [[maybe_unused]] const __grid_constant__ BackwardMaps maps,
                         [[maybe_unused]] const __grid_constant__ Order order) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename P::BackwardMemory*>(memory);
  if (threadIdx.x == 0) {
    P::init(shared);
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    cuda::release_registers<P::kProducerRegisters>();
    if (threadIdx.x == 0) {
      if constexpr (kForKeys) {
        produce_for_keys<P>(shared, a, maps, order);
      } else {
        produce_for_queries<P>(shared, a, maps, order);
      }
    }
    __syncwarp();
  } else {
    cuda::acquire_registers<P::kConsumerRegisters>();
    if constexpr (kForKeys) {
      consume_for_keys<T, P, kDrops>(shared, a, maps, order);
    } else {
      consume_for_queries<T, P, kDrops>(shared, a, maps, order);
    }
  }
#endif
}

// On the host.

template <class T, class P, bool kForKeys>
void launch_backward(const Work& work) {
  const int query_lines = kForKeys ? P::kRows : kConsumerRows;
  const int key_lines = kForKeys ? kConsumerRows : P::kRows;
  const BackwardMaps maps{
      .q = map_of_queries(work, work.q, query_lines),
      .k = map_of_keys(work, work.k, key_lines),
      .v = map_of_keys(work, work.v, key_lines),
      .dout = map_of_queries(work, work.dout, query_lines),
      .first = kForKeys ? map_of_keys(work, work.dk, kConsumerRows) : map_of_queries(work, work.dq, kConsumerRows),
      .second = kForKeys ? map_of_keys(work, work.dv, kConsumerRows) : CUtensorMap{}};
  const int heads = work.batches * (kForKeys ? work.heads / work.group : work.heads);
  const int rows = kForKeys ? work.keys : work.queries;
  const int tiles = (rows + P::kOwnedRows - 1) / P::kOwnedRows;
  const double read = kForKeys ? 4.0 * work.queries * work.group : 4.0 * work.keys / work.group;
  const char* const name = kForKeys ? "flash_key_gradient_sm90_kernel" : "flash_query_gradient_sm90_kernel";
  launch_persistent(
      work.drops ? backward_sm90_kernel<T, P, kForKeys, true> : backward_sm90_kernel<T, P, kForKeys, false>, name,
      P::kThreads, sizeof(typename P::BackwardMemory), heads, tiles,
      /*last_is_heavy=*/!kForKeys, read * work.depth, work, maps);
}

}  // namespace

void backward_sm90(const Work& work) {
  on_dtype(Types<Float16, BFloat16>{}, work.dtype, "attention", [&]<class T>() {
    if (work.depth <= 64) {
      launch_backward<T, BackwardPlan<64, 3, 64, 4>, false>(work);
      launch_backward<T, KeysPlan<64, 2, 64, 4, false>, true>(work);
    } else {
      launch_backward<T, BackwardPlan<128, 2, 64, 3>, false>(work);
      launch_backward<T, KeysPlan<128, 2, 64, 3, true>, true>(work);
    }
  });
}

}  // namespace mica::kernels::flash
