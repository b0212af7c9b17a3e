// A decoder's whole step for one sequence, in one kernel with one block per multiprocessor:
//
//     for each layer    queries, keys, values -> attention -> o_proj + residual -> gate, up -> down_proj + residual
//     at the end        the head's product
//
//     a block
//
//         weights of its outputs, of all phases and layers in order
//              | 2 warps alternately, bulk copies (packed: both together, 16 bytes per thread), 2 stages in flight
//              v
//         ring of stages: 8 outputs, up to 1,024 terms of each (packed: 32 outputs)
//              | 8 warps, each with 128 of a stage's terms: tensor cores. They also compute attention
//              v
//         sums of the warps
//              | 2 warps add them in order and apply the norm's factor, bias, gate and residual
//              v
//         words in global memory, which all blocks read in the next phase
//
// There are variants for weights of 16-bit floats and for packed weights of 4 and 8 bits.
//
// Addresses of weights do not depend on results, so the copies continue across phases and layers, and keep memory busy
// while a phase waits for the previous one.
//
// There is no barrier between phases. A word of 32 bits holds two elements, or one float, and is 0 until it is written;
// a thread that needs an element polls its word until it is not 0. Each phase of each layer has its own words, one set
// for even and one for odd steps; each step clears the words of the next one. All blocks run at the same time (a
// cooperative launch), and a phase waits only for earlier phases, so every wait ends.

#include <algorithm>
#include <cmath>

#include <mica/core/cuda/detail/wgmma.cuh>
#include <mica/core/cuda/device.h>
#include <mica/core/cuda/launch.h>
#include <mica/infer/kernels/detail/decoder_step_attention.cuh>

namespace mica::kernels {

namespace decoder {

namespace {

/// The tables in shared memory.
template <class T>
struct Tables {
  Layer<T>* layers;
  Weight<T>* head;
  Job<T>* jobs;
  std::uint64_t* ready;  // barriers of the layers

  /// Copies a layer's description to shared memory, and prepares its jobs. Called by a warp.
  template <class W>
  __device__ void prepare(const Arguments<T>& a, int layer) const {
    constexpr int kWords = sizeof(Layer<T>) / sizeof(std::uint64_t);
    static_assert(kWords * sizeof(std::uint64_t) == sizeof(Layer<T>));
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    for (int i = lane; i < kWords; i += kWarp) {
      reinterpret_cast<std::uint64_t*>(layers + layer)[i] = reinterpret_cast<const std::uint64_t*>(a.layers + layer)[i];
    }
    // The last layer's warp also prepares the head.
    const bool is_last = layer + 1 == a.layer_count;
    if (is_last && lane == 0) {
      *head = a.head;
    }
    __syncwarp();
    const int number = layer * kLayerProducts + lane;
    if (lane < kLayerProducts + is_last) {
      jobs[number] = Job<T>(a, layers, head, number, W::kUnit);
    }
    __syncwarp();
    cuda::arrive(ready + layer);
  }
};

/// Clears a layer's words for the next step. Called by one warp of each block.
template <class T>
__device__ void clear_words(const Arguments<T>& a, std::uint32_t* of_next_step, int layer) {
  auto* const words = reinterpret_cast<uint4*>(of_next_step + layer * a.layer_words);
  const int threads = static_cast<int>(gridDim.x) * kWarp;
  for (int i = static_cast<int>(blockIdx.x) * kWarp + static_cast<int>(threadIdx.x) % kWarp; i < a.layer_words / 4;
       i += threads) {
    words[i] = uint4{};
  }
}

/// What a block finds out at the start of a step, from what the previous step has left. In shared memory.
template <class T>
struct Start {
  StepInput<T> input;
  Keys keys;
  Part part;            // this block's first part of attention
  int words;            // offset of this step's words from a.words
  std::uint64_t known;  // barrier: the other members are set
};

/// The distance from the words of even steps to those of odd steps.
template <class T>
__device__ int step_words(const Arguments<T>& a) {
  return a.layer_count * a.layer_words;
}

template <class T, class W>
__device__ void copy_weights(const Arguments<T>& a, const Tables<T>& tables, Start<T>& start, Ring ring, int copier) {
  const int products = a.layer_count * kLayerProducts + 1;
  int turn = copier / kWarp;  // 0 if it is the turn of this copying warp, else 1
  if (copier < kWarp) {
    tables.template prepare<W>(a, 0);
  }
  for (int number = 0; number < products; ++number) {
    const int layer = number / kLayerProducts;
    if (number % kLayerProducts == 0 && layer < a.layer_count) {
      if (copier < kWarp && layer + 1 < a.layer_count) {
        tables.template prepare<W>(a, layer + 1);
      }
      cuda::wait(tables.ready + layer, 0);
    }
    if (number % kLayerProducts == 2 && copier < kWarp) {
      cuda::wait(&start.known, 0);
      clear_words(a, a.words + (step_words(a) - start.words), layer);
    }
    const Job<T>& job = tables.jobs[number];
    const int at_once = job.segments == 1 ? W::kStageGroups : 1;
    const int in_flight = min(number + 1 == products ? kHeadStagesInFlight : kStagesInFlight, ring.stages);
    for (int group = 0; group < job.groups; group += at_once) {
      const int count = min(at_once, job.groups - group);
      for (int segment = 0; segment < job.segments; ++segment) {
        if (W::kIsPacked || turn == 0) {
          cuda::wait(ring.empty + ring.stage, ring.parity ^ 1);
          const int before = ring.stage - in_flight;  // waits until this stage, which the same warp fills, has arrived
          cuda::wait(ring.full + (before < 0 ? before + ring.stages : before),
                     before < 0 ? ring.parity ^ 1 : ring.parity);
          W::copy(a, job, group, count, segment, copier, ring);
        }
        turn ^= 1;
        ring.advance();
      }
    }
  }
}

/// The number of elements of x that receive() writes to shared memory, for products of `depth` terms.
__host__ __device__ inline int x_terms(int depth) {
  const int at_once = depth <= kSegment ? kSegment : kSegmentsAtOnce * kSegment;
  return (depth + at_once - 1) / at_once * at_once;
}

/// The bytes of the table of jobs, rounded up so that what follows the table is aligned.
template <class T>
__host__ __device__ int job_bytes(int products) {
  return (products * static_cast<int>(sizeof(Job<T>)) + 15) / 16 * 16;
}

/// Consumers and finishers synchronize. Afterwards, `start` is filled, and this block has read everything that the end
/// of a step changes.
__device__ inline void synchronize_start() { cuda::barrier_sync(4, kConsumers + kFinishers); }

/// What the warps of a block share, in shared memory.
template <class T, class W>
struct StepBlock {
  const Arguments<T>& a;
  Start<T>& start;
  Rotation& rotation;
  Sums& sums;
  AttentionSums& attention_sums;
  const Tables<T> tables;
  const Ring ring;
  T* const x;
  float* const x_sums;
  const int products;

  /// Zeros the stages if copies do not fill them, and initializes the barriers.
  __device__ void prepare() const {
    if (!W::kIsPacked && a.has_tails) {
      for (int i = static_cast<int>(threadIdx.x); i < a.stages * W::kStageBytes / 16; i += kThreads) {
        reinterpret_cast<uint4*>(ring.memory)[i] = uint4{};
      }
      cuda::fence_async_proxy();
    }
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < a.stages; ++stage) {
        cuda::init_barrier(ring.full + stage, W::kArrivals);
        cuda::init_barrier(ring.empty + stage, kConsumerWarps);
      }
      for (int layer = 0; layer < a.layer_count; ++layer) {
        cuda::init_barrier(tables.ready + layer, kWarp);
      }
      cuda::init_barrier(&start.known, 1);
      cuda::publish_barriers();
    }
    __syncthreads();
  }

  /// The finishers' work: from the sums of the warps to words that all blocks read.
  __device__ void finish(int thread) const {
    synchronize_start();
    Finisher<T> finisher{a, sums, thread, start.words};
#pragma unroll 1
    for (int number = 0; number < products; ++number) {
      if (number % kLayerProducts == 0 && number + 1 < products) {
        cuda::wait(tables.ready + number / kLayerProducts, 0);
      }
      const Job<T>& job = tables.jobs[number];
      if (number == 1) {
        finisher.read_residual(start.input, job.split);
      }
      finisher.finish(job);
    }
    end_step(a, finisher.largest);
  }

  __device__ void find_start() const {
    const std::int64_t length = *a.length;
    rotation.fill(a, length);
    if (threadIdx.x == 0) {
      start.input.find(a);
      start.keys = Keys(length, a.capacity);
      start.part = Part(a, start.keys, static_cast<int>(blockIdx.x));
      start.words = a.state->ended == 0 ? 0 : step_words(a);
      cuda::arrive(&start.known);
    }
    synchronize_start();
  }

  /// The consumers' work: products, and attention after the first product of each layer.
  __device__ void consume() const {
    find_start();
    Consumer<T> consumer{a, ring, start.input, x, x_sums, sums, start.words, start.keys.splits};
#pragma unroll 1
    for (int number = 0; number < products; ++number) {
      const int layer = number / kLayerProducts;
      if (number % kLayerProducts == 0 && layer < a.layer_count) {
        cuda::wait(tables.ready + layer, 0);
      }
      consumer.template multiply<W>(tables.jobs[number]);
      if (number % kLayerProducts == 0 && layer < a.layer_count) {
        const Words words(a, a.words + start.words, layer);
        const Layer<T>& of_layer = tables.layers[layer];
        if (a.head_width == 64) {
          Attention<T, 64>{consumer, of_layer, words, rotation, attention_sums, start.keys}.run(start.part);
        } else {
          Attention<T, 128>{consumer, of_layer, words, rotation, attention_sums, start.keys}.run(start.part);
        }
      }
    }
  }
};

template <class T, class W>
__global__ void __launch_bounds__(kThreads, 1) decoder_step_kernel(const __grid_constant__ Arguments<T> a) {
  extern __shared__ __align__(128) char dynamic[];
  __shared__ Sums sums;
  __shared__ AttentionSums attention_sums;
  __shared__ Rotation rotation;
  __shared__ Start<T> start;
  __shared__ std::uint64_t ready[kMostLayers];
  __shared__ Weight<T> head;
  auto* const layers = reinterpret_cast<Layer<T>*>(dynamic);
  const int products = a.layer_count * kLayerProducts + 1;
  auto* const jobs = reinterpret_cast<Job<T>*>(layers + a.layer_count);
  T* const x = reinterpret_cast<T*>(reinterpret_cast<char*>(jobs) + job_bytes<T>(products));
  float* const x_sums = reinterpret_cast<float*>(x + a.x_terms);
  char* const stages = reinterpret_cast<char*>(x_sums + a.x_terms / kGroupTerms);
  auto* const full = reinterpret_cast<std::uint64_t*>(stages + a.stages * W::kStageBytes);
  const Ring ring{{.stages = in_register(a.stages)}, stages, full, full + a.stages, W::kStageBytes};
  const StepBlock<T, W> block{a,    start, rotation, sums,    attention_sums, {layers, &head, jobs, ready},
                              ring, x,     x_sums,   products};
  block.prepare();
  if (threadIdx.x >= kConsumers) {
    cuda::release_registers<kOtherRegisters>();
    const int thread = static_cast<int>(threadIdx.x) - kConsumers;
    if (thread >= kFinishers) {
      copy_weights<T, W>(a, block.tables, start, ring, thread - kFinishers);
    } else {
      block.finish(thread);
    }
  } else {
    cuda::acquire_registers<kConsumerRegisters>();
    block.consume();
  }
}

}  // namespace

}  // namespace decoder

namespace {

using namespace decoder;

// Calls f.operator()<T, W>() with the step's kinds of elements and of weights.
template <class F>
void with_kernel(const DecoderStep& s, const F& f) {
  on_dtype(Types<Float16, BFloat16>{}, s.norm.dtype(), "decoder_step", [&]<class T>() {
    const DecodeWeight& first = s.layers[0].q;
    if (first.matrix.defined()) {
      f.template operator()<T, FloatWeights<T>>();
    } else if (first.quantized.bits == 4) {
      f.template operator()<T, PackedWeights<T, 4>>();
    } else {
      f.template operator()<T, PackedWeights<T, 8>>();
    }
  });
}

// The sizes of a block's dynamic shared memory. It holds the tables of layers and jobs, x, the sums of x's groups, and
// as many stages as fit, with two barriers each. If two warps copy alternately, each has stages of its own (see Ring).
struct SharedMemory {
  int x_terms;
  int stages;
  int bytes;

  SharedMemory(const DecoderStep& s, int table_bytes, int element, int stage_bytes, int copiers, int kernel_bytes) {
    const std::int64_t queries = s.heads * s.layers[0].keys.size(3);
    const std::int64_t depth = std::max({s.norm.numel(), s.layers[0].gate.out(), queries});
    constexpr std::int64_t kMostDepth = 16384;
    x_terms = decoder::x_terms(static_cast<int>(std::min(depth, kMostDepth)));
    const int before = table_bytes + x_terms * element + x_terms / kGroupTerms * static_cast<int>(sizeof(float));
    const int stage = stage_bytes + 2 * static_cast<int>(sizeof(std::uint64_t));
    stages = depth > kMostDepth ? 0 : std::max(0, most_bytes() - kernel_bytes - before) / stage;
    stages -= stages % copiers;
    bytes = before + stages * stage;
  }

  static int most_bytes() {
    int device = 0;
    int bytes = 0;
    cuda::check(cudaGetDevice(&device), "cudaGetDevice");
    cuda::check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
                "cudaDeviceGetAttribute");
    return bytes;
  }
};

template <class T, class W>
SharedMemory shared_memory(const DecoderStep& s) {
  cudaFuncAttributes attributes;
  cuda::check(cudaFuncGetAttributes(&attributes, decoder_step_kernel<T, W>), "cudaFuncGetAttributes");
  const int layers = static_cast<int>(s.layers.size());
  const int table_bytes = layers * static_cast<int>(sizeof(Layer<T>)) + job_bytes<T>(layers * kLayerProducts + 1);
  return {s,
          table_bytes,
          static_cast<int>(sizeof(T)),
          W::kStageBytes,
          W::kCopiersInTurn,
          static_cast<int>(attributes.sharedSizeBytes)};
}

template <class T>
Weight<T> weight(const DecodeWeight& w) {
  const bool packed = !w.matrix.defined();
  return {.data = packed ? w.quantized.packed.raw_data() : w.matrix.raw_data(),
          .scale = packed ? w.quantized.scale.data<T>() : nullptr,
          .zero = packed ? w.quantized.zero.data<T>() : nullptr,
          .bias = w.bias.data_or_null<T>(),
          .outputs = static_cast<int>(w.out())};
}

template <class T>
Layer<T> layer(const DecoderLayer& l) {
  return {.qkv = {weight<T>(l.q), weight<T>(l.k), weight<T>(l.v)},
          .o = weight<T>(l.o),
          .gate_up = {weight<T>(l.gate), weight<T>(l.up)},
          .down = weight<T>(l.down),
          .input_norm = l.input_norm.data<T>(),
          .post_norm = l.post_norm.data<T>(),
          .q_norm = l.q_norm.data_or_null<T>(),
          .k_norm = l.k_norm.data_or_null<T>(),
          .keys = l.keys.data<T>(),
          .values = l.values.data<T>()};
}

template <class T, class W>
Arguments<T> arguments(const DecoderStepArgs& args, const SharedMemory& shared) {
  const DecoderStep& s = args.problem;
  const Tensor& keys = s.layers[0].keys;
  Arguments<T> a{.layers = {},
                 .layer_count = static_cast<int>(s.layers.size()),
                 .head = weight<T>(s.head),
                 .norm = s.norm.data<T>(),
                 .x = s.x.data_or_null<T>(),
                 .token = s.token.data_or_null<std::int64_t>(),
                 .embedding = s.embedding.data_or_null<T>(),
                 .vocab = s.embedding.defined() ? s.embedding.size(0) : 0,
                 .logits = args.logits.data<T>(),
                 .next_token = s.next_token.data_or_null<std::int64_t>(),
                 .tokens_on_host = s.tokens_on_host,
                 .length = s.length.data<std::int64_t>(),
                 .adds_to_length = s.adds_to_length,
                 .capacity = static_cast<int>(keys.size(2)),
                 .state = reinterpret_cast<StepState*>(s.scratch.data<std::int64_t>()),
                 .words = reinterpret_cast<std::uint32_t*>(s.scratch.data<std::int64_t>() + kDecoderStepState),
                 .layer_words = static_cast<int>(
                     decoder_step_words(s.norm.numel(), s.layers[0].gate.out(), s.heads, keys.size(1), keys.size(3))),
                 .width = static_cast<int>(s.norm.numel()),
                 .hidden = static_cast<int>(s.layers[0].gate.out()),
                 .heads = static_cast<int>(s.heads),
                 .key_heads = static_cast<int>(keys.size(1)),
                 .head_width = static_cast<int>(keys.size(3)),
                 .stages = shared.stages,
                 .has_tails = (s.norm.numel() | s.layers[0].gate.out() | (s.heads * keys.size(3))) % kSegment != 0,
                 .x_terms = shared.x_terms,
                 .group_shift = W::kIsPacked ? group_shift(s.head.quantized) : 0,
                 .eps = static_cast<float>(s.eps),
                 .score_scale = static_cast<float>(1.4426950408889634 / std::sqrt(static_cast<double>(keys.size(3)))),
                 .rotates = !s.frequencies.empty(),
                 .rotary_scale = static_cast<float>(s.rotary_scale),
                 .frequencies = {}};
  std::transform(s.layers.begin(), s.layers.end(), a.layers, layer<T>);
  std::copy(s.frequencies.begin(), s.frequencies.end(), a.frequencies);
  return a;
}

template <class T, class W>
void launch(const DecoderStepArgs& args) {
  const SharedMemory shared = shared_memory<T, W>(args.problem);
  cuda::Launch(static_cast<unsigned>(cuda::multiprocessor_count()), kThreads, static_cast<std::size_t>(shared.bytes))
      .cooperative()
      .run(decoder_step_kernel<T, W>, "decoder_step_kernel", arguments<T, W>(args, shared));
}

}  // namespace

bool fits_decoder_step(Cuda, const DecoderStep& s) {
  constexpr int kLeastStages = kAhead;
  bool fits = false;
  with_kernel(s, [&]<class T, class W>() {
    // A block's outputs of o_proj and down_proj must fit into one batch, since a finisher thread keeps the residual of
    // one row.
    const std::int64_t units = s.norm.numel() / W::kUnit;
    const std::int64_t blocks = cuda::multiprocessor_count();
    fits = cuda::device_has_wgmma() && s.layers.size() <= kMostLayers &&
           (units + blocks - 1) / blocks * W::kUnit <= kBatchRows && shared_memory<T, W>(s).stages >= kLeastStages;
  });
  return fits;
}

void decoder_step(Cuda, const DecoderStepArgs& args) {
  with_kernel(args.problem, [&]<class T, class W>() { launch<T, W>(args); });
}

}  // namespace mica::kernels
