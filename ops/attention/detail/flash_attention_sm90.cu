// The forward of attention with wgmma and TMA, for compute capability 9.0, after FlashAttention-3 (Shah et al., 2024).
//
//     q (64 queries) ───────┐
//                           ├──> scores ──> mask ──> softmax ──> dropout ──> out = out · shrink + weights · v ──> out
//     k, v (ring of stages) ┘    (wgmma)           (registers)                        (wgmma)                      lse
//
// A thread block has a producer, which copies the tiles, and two or four consumer warpgroups (ForwardTile). There are
// variants for head sizes up to 64 and up to 128, with and without dropout, and one in which two consumers split the
// keys of the same queries (kParts). See flash_attention.md.

#include <algorithm>
#include <cmath>

#include <mica/ops/attention/detail/flash_attention_dropout.cuh>
#include <mica/ops/attention/detail/flash_attention_sm90.cuh>

namespace mica::kernels::flash {

namespace {

/// Sizes of the kernel. Tiles of kKeys keys and values stream through kStages stages of shared memory. kParts consumer
/// warpgroups have the same queries and every kParts-th tile of keys each; the first one adds up their results.
template <int kDepth_, int kConsumers_, int kKeys_, int kStages_, int kParts_ = 1>
struct ForwardPlan {
  static constexpr int kDepth = kDepth_;
  static constexpr int kChunks = kDepth / kChunk;
  static constexpr int kConsumers = kConsumers_;
  static constexpr int kKeys = kKeys_;
  static constexpr int kStages = kStages_;
  static constexpr int kParts = kParts_;
  static constexpr int kGroups = kConsumers / kParts;  // groups of consumers that share queries
  static constexpr int kQueries = kGroups * kConsumerRows;
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
  static constexpr int kProducerRegisters = kConsumers >= 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 4 ? 112 : kConsumers == 3 ? 160 : 232;
  static constexpr int kQueryBytes = kChunks * kConsumerChunkBytes;
  static constexpr int kKeyBytes = kChunks * kKeys * kLineBytes;

  static constexpr int kSent = kDepth / 2 + 4;  // floats per thread: its sums, and the softmax state of its two rows

  struct ForwardMemory {
    unsigned char q[kGroups][kQueryBytes];  // at the end, the output
    unsigned char k[kStages][kKeyBytes];
    unsigned char v[kStages][kKeyBytes];
    std::uint64_t q_full[kGroups];
    std::uint64_t q_empty[kGroups];
    std::uint64_t k_full[kStages];
    std::uint64_t k_empty[kStages];
    std::uint64_t v_full[kStages];
    std::uint64_t v_empty[kStages];
    float sent[kParts == 1 ? 1 : kGroups][kParts == 1 ? 1 : kSent][kWarpgroup];
  };
};

struct ForwardMaps {
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap out;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// The number of key blocks that queries before `end` see; 0 if there are no queries from `begin` on.
template <class P>
__device__ int steps_of(const Work& a, int begin, int end) {
  return begin < a.queries ? (a.visible_keys(end) + P::kKeys - 1) / P::kKeys : 0;
}

/// The producer's loop, which runs in one thread. It loads key blocks in descending order, so that those with causal
/// masking come first.
template <class P>
__device__ void produce(typename P::ForwardMemory& shared, const Work& a, const ForwardMaps& maps, const Order& order) {
  Ring<P::kStages> ring;
  unsigned q_parities = 0;  // one bit per group
  order.each([&](Order::HeadTile item) {
    const int b = item.head / a.heads;
    const int h = item.head % a.heads;
    const int key_head = h / a.group;
    const int first = item.tile * P::kQueries;
    const int steps = steps_of<P>(a, first, first + P::kQueries);
    for (int step = steps - 1; step >= 0; --step, ring.advance()) {
      cuda::wait(&shared.k_empty[ring.stage], ring.parity ^ 1);
      cuda::arrive_expecting(&shared.k_full[ring.stage], P::kKeyBytes);
      load_chunks<P::kChunks, P::kKeys>(shared.k[ring.stage], &maps.k, step * P::kKeys, key_head, b,
                                        &shared.k_full[ring.stage]);
      if (step == steps - 1) {
#pragma unroll 1  // since the producer has few registers
        for (int group = 0; group < P::kGroups; ++group) {
          const int row = first + group * kConsumerRows;
          if (steps_of<P>(a, row, row + kConsumerRows) > 0) {
            cuda::wait(&shared.q_empty[group], ~q_parities >> group & 1);
            q_parities ^= 1u << group;
            cuda::arrive_expecting(&shared.q_full[group], P::kQueryBytes);
            load_chunks<P::kChunks, kConsumerRows>(shared.q[group], &maps.q, row, h, b, &shared.q_full[group]);
          }
        }
      }
      cuda::wait(&shared.v_empty[ring.stage], ring.parity ^ 1);
      cuda::arrive_expecting(&shared.v_full[ring.stage], P::kKeyBytes);
      load_chunks<P::kChunks, P::kKeys>(shared.v[ring.stage], &maps.v, step * P::kKeys, key_head, b,
                                        &shared.v_full[ring.stage]);
    }
  });
}

/// The maximum over the four lanes that share a row.
__device__ float maximum_of_row(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ float sum_of_row(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

/// The softmax state of lane l's two rows, l / 4 and l / 4 + 8 of the warp's 16 rows.
struct SoftmaxState {
  float most[2] = {-INFINITY, -INFINITY};  // the largest unscaled scores so far
  float total[2] = {};                     // this lane's part of the sums of weights
};

/// Sets the scores of keys that a row does not see to −inf. The row sees keys before `visible`, counted from the
/// block's first key.
template <int kKeys>
__device__ void mask(float (&scores)[kKeys / 2], const int (&visible)[2]) {
  const int column = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int i = 0; i < kKeys / 2; ++i) {
    if (i / 4 * 8 + i % 2 + column >= visible[i / 2 % 2]) {
      scores[i] = -INFINITY;
    }
  }
}

/// Converts scores to unnormalized weights. Since the maximum may have grown, the caller must multiply earlier sums by
/// `shrink`.
template <int kKeys>
__device__ void soften(float (&scores)[kKeys / 2], SoftmaxState& state, float (&shrink)[2], float scale_log2) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float most = state.most[half];
#pragma unroll
    for (int i = 2 * half; i < kKeys / 2; i += 4) {
      most = fmaxf(most, fmaxf(scores[i], scores[i + 1]));
    }
    most = maximum_of_row(most);
    const float shift = most == -INFINITY ? 0 : most * scale_log2;
    shrink[half] = cuda::approximate_exp2(state.most[half] * scale_log2 - shift);
    state.most[half] = most;
    float sums[2] = {};
#pragma unroll
    for (int i = 2 * half; i < kKeys / 2; i += 4) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        scores[i + j] = cuda::approximate_exp2(scores[i + j] * scale_log2 - shift);
        sums[j] += scores[i + j];
      }
    }
    state.total[half] = state.total[half] * shrink[half] + (sums[0] + sums[1]);
  }
}

/// Combines the results of two consumers with the same queries: the second sends its sums through shared memory, and
/// the first rescales both to the larger maximum and adds them up.
template <class P>
__device__ void add_other_part(float (&out)[P::kDepth / 2], SoftmaxState& state, float (&sent)[P::kSent][kWarpgroup],
                               int part, int barrier, float scale_log2) {
  static_assert(P::kParts == 2);
  constexpr int kSums = P::kDepth / 2;
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  if (part == 1) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      sent[i][thread] = out[i];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sent[kSums + half][thread] = state.most[half];
      sent[kSums + 2 + half][thread] = state.total[half];
    }
  }
  cuda::barrier_sync(barrier, 2 * kWarpgroup);
  if (part == 0) {
    float factors[2][2];  // what the own and the other consumer's sums are multiplied by
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float other = sent[kSums + half][thread];
      const float most = fmaxf(state.most[half], other);
      const float shift = most == -INFINITY ? 0 : most * scale_log2;
      factors[0][half] = cuda::approximate_exp2(state.most[half] * scale_log2 - shift);
      factors[1][half] = cuda::approximate_exp2(other * scale_log2 - shift);
      state.most[half] = most;
      state.total[half] = state.total[half] * factors[0][half] + sent[kSums + 2 + half][thread] * factors[1][half];
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      out[i] = out[i] * factors[0][i / 2 % 2] + sent[i][thread] * factors[1][i / 2 % 2];
    }
  }
  cuda::barrier_sync(barrier, 2 * kWarpgroup);  // `sent` has been read and may be overwritten
}

/// What a thread of a consumer warpgroup keeps from tile to tile.
template <class P, bool kDrops>
struct ForwardConsumer {
  typename P::ForwardMemory& shared;
  const Work& a;
  const int number = consumer_of_thread();
  const int group = number / P::kParts;
  const int part = number % P::kParts;
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const int lane = thread % kWarp;
  const int own_row = group * kConsumerRows + thread / kWarp * 16 + lane / 4;  // the lane's first row of a tile
  const PhiloxKey dropout_key = kDrops ? absolute_key(a.dropout_key) : PhiloxKey{};
  Ring<P::kStages> ring;
  unsigned q_parity = 0;

  __device__ void release(std::uint64_t* barrier) const {
    __syncwarp();
    if (lane == 0) {
      cuda::arrive(barrier);
    }
  }
};

/// A consumer warpgroup's 64 queries of a tile. While it computes the softmax of a block of keys, the tensor cores
/// multiply the previous block's weights by its values, and the queries by the next block's keys.
template <class T, class P, bool kDrops>
struct ForwardTile {
  ForwardConsumer<P, kDrops>& c;
  typename P::ForwardMemory& shared = c.shared;
  const Work& a = c.a;
  Ring<P::kStages>& ring = c.ring;
  const int head;   // of all batches
  const int first;  // of the thread block's queries
  const int begin = first + c.group * kConsumerRows;
  const int steps = steps_of<P>(a, begin, begin + kConsumerRows);  // blocks of keys that the queries see

  SoftmaxState state;
  float out[P::kDepth / 2] = {};
  float scores[P::kKeys / 2];
  std::uint32_t weights[P::kKeys / 16][4];
  float shrink[2];                                 // factors of all earlier sums
  std::uint32_t kept[kDrops ? P::kKeys / 64 : 1];  // the weights that dropout keeps, 64 keys per register

  __device__ ForwardTile(ForwardConsumer<P, kDrops>& c, Order::HeadTile item)
      : c(c), head(item.head), first(item.tile * P::kQueries) {}

  __device__ bool is_own(int step) const { return P::kParts == 1 || step % P::kParts == c.part; }

  /// Releases the stages of keys that only other queries of the thread block see.
  __device__ void skip_unseen() {
    for (int step = steps_of<P>(a, first, first + P::kQueries); step > steps; --step, ring.advance()) {
      if (is_own(step - 1)) {
        cuda::wait(&shared.k_full[ring.stage], ring.parity);
        c.release(&shared.k_empty[ring.stage]);
        cuda::wait(&shared.v_full[ring.stage], ring.parity);
        c.release(&shared.v_empty[ring.stage]);
      }
    }
  }

  /// Attention over the blocks of keys, from the last one to the first. Those that need a mask come first.
  __device__ void attend() {
    const int unmasked = max(0, min(a.keys, begin + a.offset + 1)) / P::kKeys;  // blocks that all queries see
    int step = steps - 1;
    if (!is_own(step)) {
      --step;
      ring.advance();
    }
    if (P::kParts > 1 && step < 0) {
      return;  // the only block belongs to another consumer
    }
    begin_attention(step, step >= unmasked);
#pragma unroll 1
    for (step -= P::kParts; step >= unmasked; step -= P::kParts) {
      do_step<true>(step);
    }
#pragma unroll 1
    for (; step >= 0; step -= P::kParts) {
      do_step<false>(step);
    }
    end_attention();
  }

  /// The weights of this consumer's first block of keys.
  __device__ void begin_attention(int step, bool masked) {
    cuda::wait(&shared.k_full[ring.stage], ring.parity);
    cuda::begin_products();
    multiply_keys(ring.stage);
    draw(step);
    cuda::wait_products<0>();
    cuda::pin(scores);
    c.release(&shared.k_empty[ring.stage]);
    if (masked) {
      mask_step(step);
    }
    soften<P::kKeys>(scores, state, shrink, a.scale_log2);
    round_weights();
  }

  /// The weights of a block of keys, meanwhile the sums of values with the weights of the block before it.
  template <bool kMasked>
  __device__ void do_step(int step) {
    Ring<P::kStages> next = ring;
#pragma unroll
    for (int i = 0; i < P::kParts; ++i) {
      next.advance();
    }
    cuda::wait(&shared.k_full[next.stage], next.parity);
    begin_products();
    multiply_keys(next.stage);
    cuda::wait(&shared.v_full[ring.stage], ring.parity);
    add_values();
    draw(step);
    cuda::wait_products<1>();
    cuda::pin(scores);
    c.release(&shared.k_empty[next.stage]);
    if constexpr (kMasked) {
      mask_step(step);
    }
    soften<P::kKeys>(scores, state, shrink, a.scale_log2);
    cuda::wait_products<0>();
    cuda::pin(out);
    pin_all(weights);
    c.release(&shared.v_empty[ring.stage]);
    rescale_sums();
    round_weights();
    ring = next;
  }

  /// Adds the values with the last weights.
  __device__ void end_attention() {
    cuda::wait(&shared.v_full[ring.stage], ring.parity);
    begin_products();
    add_values();
    cuda::wait_products<0>();
    cuda::pin(out);
    c.release(&shared.v_empty[ring.stage]);
    ring.advance();
    if (P::kParts > 1 && c.part > 0) {
      ring.skip(c.part);  // the remaining blocks, which belong to other consumers
    }
  }

  /// Begins products that read `weights` and add to `out`.
  __device__ void begin_products() {
    pin_all(weights);
    cuda::pin(out);
    cuda::begin_products();
  }

  __device__ void multiply_keys(int stage) {
    multiply_transposed<T, P::kChunks, P::kKeys>(scores, shared.q[c.group], shared.k[stage]);
    cuda::commit_products();
  }

  __device__ void add_values() {
    add_product<T, P::kChunks, P::kKeys>(out, weights, shared.v[ring.stage]);
    cuda::commit_products();
  }

  /// Draws the dropout of a block, while products run.
  __device__ void draw(int step) {
    if constexpr (kDrops) {
#pragma unroll
      for (int i = 0; i < P::kKeys / 64; ++i) {
        kept[i] = draw_kept<true, 64>(a, c.dropout_key, head, begin + c.thread / kWarp * 16, step * P::kKeys + i * 64);
      }
    }
  }

  __device__ void mask_step(int step) {
    int visible[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      visible[half] = min(a.keys, first + c.own_row + half * 8 + a.offset + 1) - step * P::kKeys;
    }
    mask<P::kKeys>(scores, visible);
  }

  __device__ void rescale_sums() {
#pragma unroll
    for (int i = 0; i < P::kDepth / 2; ++i) {
      out[i] *= shrink[i / 2 % 2];
    }
  }

  __device__ void round_weights() {
    round_to<T, P::kKeys>(weights, scores);
    if constexpr (kDrops) {
      drop_rounded<true, P::kKeys>(weights, kept);
    }
  }

  /// Divides the sums by the total weights, and writes them and lse.
  __device__ void write(const CUtensorMap& map) {
    float factors[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = sum_of_row(state.total[half]);
      factors[half] = total == 0 ? 0 : a.weight_factor / total;  // 0 if the query sees no key
      const int row = first + c.own_row + half * 8;
      if (a.lse != nullptr && c.lane % 4 == 0 && row < a.queries) {
        a.lse[std::int64_t{head} * a.queries + row] =
            total == 0 ? -INFINITY : (state.most[half] * a.scale_log2 + log2f(total)) * kLn2;
      }
    }
    if (begin < a.queries) {
      write_rows<T, P::kChunks>(out, factors[0], factors[1], shared.q[c.group], &map, begin, head % a.heads,
                                head / a.heads, 1 + c.number);
    }
  }
};

template <class T, class P, bool kDrops>
__device__ void consume(typename P::ForwardMemory& shared, const Work& a, const ForwardMaps& maps, const Order& order) {
  constexpr int kMergeBarrier = 8;  // after the barriers of the consumers, which write_rows() uses
  ForwardConsumer<P, kDrops> c{shared, a};
  order.each([&](Order::HeadTile item) {
    ForwardTile<T, P, kDrops> tile(c, item);
    tile.skip_unseen();
    if (tile.steps > 0) {
      cuda::wait(&shared.q_full[c.group], c.q_parity);
      c.q_parity ^= 1;
      tile.attend();
    }
    if constexpr (P::kParts > 1) {
      if (tile.steps > 0) {
        add_other_part<P>(tile.out, tile.state, shared.sent[c.group], c.part, kMergeBarrier + c.group, a.scale_log2);
      }
      if (c.part > 0) {
        return;  // only the first part writes
      }
    }
    tile.write(maps.out);
    if (tile.steps > 0 && c.thread == 0) {
      cuda::arrive(&shared.q_empty[c.group]);
    }
  });
}

#endif

template <class T, class P, bool kDrops>
__global__ void __launch_bounds__(P::kThreads, 1)
    forward_sm90_kernel([[maybe_unused]] const __grid_constant__ Work a,
                        [[maybe_unused]] const __grid_constant__ ForwardMaps maps,
                        [[maybe_unused]] const __grid_constant__ Order order) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename P::ForwardMemory*>(memory);
  if (threadIdx.x == 0) {
    constexpr int kConsumerWarps = P::kGroups * kWarpgroup / kWarp;  // the number of warps that read a stage
    for (int i = 0; i < P::kGroups; ++i) {
      cuda::init_barrier(&shared.q_full[i], 1);
      cuda::init_barrier(&shared.q_empty[i], 1);
    }
    for (int i = 0; i < P::kStages; ++i) {
      cuda::init_barrier(&shared.k_full[i], 1);
      cuda::init_barrier(&shared.k_empty[i], kConsumerWarps);
      cuda::init_barrier(&shared.v_full[i], 1);
      cuda::init_barrier(&shared.v_empty[i], kConsumerWarps);
    }
    cuda::publish_barriers();
  }
  __syncthreads();
  cuda::allow_dependents();
  cuda::wait_for_previous_kernel();
  if (threadIdx.x < kWarpgroup) {
    cuda::release_registers<P::kProducerRegisters>();
    if (threadIdx.x == 0) {
      produce<P>(shared, a, maps, order);
    }
    __syncwarp();
  } else {
    cuda::acquire_registers<P::kConsumerRegisters>();
    consume<T, P, kDrops>(shared, a, maps, order);
  }
#endif
}

// On the host.

/// Launches the kernel. kMayDrop: whether to compile a variant with dropout.
template <class T, class P, bool kMayDrop = true>
void launch_forward(const Work& work) {
  const ForwardMaps maps{.q = map_of_queries(work, work.q, kConsumerRows),
                         .k = map_of_keys(work, work.k, P::kKeys),
                         .v = map_of_keys(work, work.v, P::kKeys),
                         .out = map_of_queries(work, work.out, kConsumerRows)};
  auto kernel = forward_sm90_kernel<T, P, false>;
  if constexpr (kMayDrop) {
    kernel = work.drops ? forward_sm90_kernel<T, P, true> : kernel;
  }
  launch_persistent(kernel, "flash_forward_sm90_kernel", P::kThreads, sizeof(typename P::ForwardMemory),
                    work.batches * work.heads, (work.queries + P::kQueries - 1) / P::kQueries, /*last_is_heavy=*/true,
                    4.0 * work.keys * work.depth / work.group, work, maps, /*dependent=*/true);
}

}  // namespace

bool fits_sm90(const Work& work, bool backward) {
  const auto fits = [&](const Operand& x, int heads, int rows) {
    return cuda::fits_heads_map(heads_map_args(work, x, heads, rows, 1));
  };
  const auto queries = [&](const Operand& x) { return fits(x, work.heads, work.queries); };
  const auto keys = [&](const Operand& x) { return fits(x, work.heads / work.group, work.keys); };
  return cuda::device_has_wgmma() && queries(work.q) && keys(work.k) && keys(work.v) &&
         (backward ? queries(work.dout) && queries(work.dq) && keys(work.dk) && keys(work.dv) : queries(work.out));
}

namespace {

/// Whether to halve the tiles and let two consumers split the keys of each: with causal masking and at most one large
/// tile per multiprocessor, where the largest tile would take twice as long as the mean. It does not pay for few
/// queries.
template <class P>
bool is_one_wave(const Work& work) {
  constexpr int kManyQueries = 1024;
  const std::int64_t tiles = (work.queries + P::kQueries - 1) / P::kQueries;
  return work.queries >= kManyQueries && work.offset < work.keys &&
         tiles * work.batches * work.heads <= cuda::multiprocessor_count();
}

}  // namespace

void forward_sm90(const Work& work) {
  using Large = ForwardPlan<64, 4, 64, 4>;
  using Small = ForwardPlan<64, 4, 64, 8, 2>;
  on_dtype(Types<Float16, BFloat16>{}, work.dtype, "attention", [&]<class T>() {
    if (work.depth <= 64 && !work.drops && is_one_wave<Large>(work)) {
      launch_forward<T, Small, false>(work);
    } else if (work.depth <= 64) {
      launch_forward<T, Large>(work);
    } else {
      launch_forward<T, ForwardPlan<128, 2, 128, 2>>(work);
    }
  });
}

}  // namespace mica::kernels::flash
