// Samples a token for each row of logits. A row belongs to a cluster of 8 blocks, each of which has a slab of it. For
// top-k and top-p, the keys of the slab, integers in the order of its scores, are in shared memory.
//
//     largest score --> temperature 0: its token
//          |
//     weights exp((score - largest) / temperature)
//          |
//          +--> all tokens:      sums in the order of the tokens, up to uniform * total
//          |
//          +--> top-k, top-p:    sums in the order of the scores, up to a part of the total:
//
//     bin 0    bin 1    bin 2 ...       of scores, the largest first; each has the number and the sum of its weights
//     |      |        |  *     |        the bin where the sum is reached
//                     | .. * . |        the scores of this bin, sorted and summed one by one
//
// If all scores up to that bin fit into a batch of kBatch scores, the batch starts with the largest score and usually
// serves all sums of a row. If the bin itself is too large, it is divided into smaller bins, if necessary down to equal
// scores. These have the same weight, and need no order but that of the tokens.
//
// Counts are integers, and so are the weights of bins, in units of 2^-45. So their sums do not depend on the order of
// additions. Other sums have an order that depends on the row alone.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include <mica/core/cuda/launch.h>
#include <mica/core/cuda/pack.cuh>
#include <mica/infer/kernels/detail/sample_kernels.h>
#include <mica/infer/kernels/detail/sample_ranked.cuh>

namespace mica::kernels {

namespace sampling {

namespace {

template <class T>
__global__ void __launch_bounds__(kThreads) sample_tokens_kernel(const __grid_constant__ Arguments<T> a) {
  extern __shared__ std::uint32_t slab_keys[];
  __shared__ SharedMemory shared;
  cuda::allow_dependents();
  cuda::wait_for_previous_kernel();
  const int rank = static_cast<int>(blockIdx.x);
  const int begin = min(rank * a.slab, a.columns);
  RankedRow<T> row{{{.a = a,
                     .s = shared,
                     .keys = a.ordered ? slab_keys : nullptr,
                     .row = static_cast<int>(blockIdx.y),
                     .rank = rank,
                     .begin = begin,
                     .size = min(begin + a.slab, a.columns) - begin,
                     .largest = 0}}};
  const bool finite = row.find_largest();
  if (!finite || a.uniforms == nullptr) {
    if (rank == 0 && threadIdx.x == 0) {
      a.tokens[row.row] = finite ? shared.best.token : -1;
    }
  } else if (a.ordered) {
    row.sample_from_largest(a.uniforms[row.row]);
  } else {
    row.sample_from_all(a.uniforms[row.row]);
  }
  cuda::meet_in_cluster();  // other blocks may still read this block's shared memory
}

constexpr int kPackBytes = 16;
constexpr int kPacksAtOnce = 4;  // per thread

/// Finds the first token of the largest score of each row; -1 if a score is NaN or +inf, or all are -inf. Rows are
/// aligned to 16 bytes.
template <class T>
__global__ void __launch_bounds__(kThreads) sample_largest_kernel(const T* logits, int columns, std::int64_t* tokens) {
  constexpr int kPack = kPackBytes / sizeof(T);
  struct Best {
    float score;
    int token;
  };
  struct Block {
    Best best;
    int invalid;
  };
  __shared__ Best of_warps[kWarps];
  __shared__ Block of_block;
  const auto reduce = [](Best mine) {
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) {
      const Best other{__shfl_xor_sync(cuda::kAllLanes, mine.score, step),
                       __shfl_xor_sync(cuda::kAllLanes, mine.token, step)};
      if (other.score > mine.score || (other.score == mine.score && other.token < mine.token)) {
        mine = other;
      }
    }
    return mine;
  };
  cuda::allow_dependents();
  cuda::wait_for_previous_kernel();
  const int rank = static_cast<int>(blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  const T* const row = logits + static_cast<std::int64_t>(blockIdx.y) * columns;
  const int packs = columns / kPack;
  constexpr int kStep = kBlocks * kThreads;
  Best best{-INFINITY, std::numeric_limits<int>::max()};
  bool valid = true;
  for (int first = rank * kThreads + thread; first < packs; first += kPacksAtOnce * kStep) {
    cuda::Pack<T, kPack> scores[kPacksAtOnce];
#pragma unroll
    for (int i = 0; i < kPacksAtOnce; ++i) {
      scores[i] = cuda::load<kPack>(row + static_cast<std::int64_t>(min(first + i * kStep, packs - 1)) * kPack);
    }
#pragma unroll
    for (int i = 0; i < kPacksAtOnce; ++i) {
      float values[kPack];
      cuda::unpack(scores[i], values);
      const int token = min(first + i * kStep, packs - 1) * kPack;  // reading the last pack more than once does no harm
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        valid = valid && values[j] < INFINITY;  // false for NaN
        if (values[j] > best.score) {
          best = {values[j], token + j};
        }
      }
    }
  }
  best = reduce(best);
  if (thread % kWarp == 0) {
    of_warps[thread / kWarp] = best;
  }
  const bool invalid = __syncthreads_or(valid ? 0 : 1) != 0;
  if (thread < kWarp) {
    best = reduce(of_warps[thread % kWarps]);
    if (thread == 0) {
      of_block = {best, invalid ? 1 : 0};
    }
  }
  cuda::meet_in_cluster();
  if (rank == 0 && thread < kWarp) {
    const int block = thread % kBlocks;
    best = reduce(
        {cuda::load_from_block(&of_block.best.score, block), cuda::load_from_block(&of_block.best.token, block)});
    const bool any_invalid = __any_sync(cuda::kAllLanes, cuda::load_from_block(&of_block.invalid, block) != 0);
    if (thread == 0) {
      tokens[blockIdx.y] = any_invalid || best.score == -INFINITY ? -1 : best.token;
    }
  }
  cuda::arrive_in_cluster_relaxed();  // other blocks may still read this block's shared memory
  cuda::wait_for_cluster();
}

}  // namespace

}  // namespace sampling

void sample_tokens(Cuda, const SampleTokens& args) {
  using namespace sampling;
  on_dtype(Types<float, Float16, BFloat16>{}, args.logits.dtype(), "sample_tokens", [&]<class T>() {
    const infer::SamplingOptions& o = args.options;
    const auto columns = static_cast<int>(args.logits.size(1));
    const bool samples = args.uniforms.defined();
    const dim3 grid(kBlocks, static_cast<unsigned>(args.logits.size(0)));
    const bool aligned = columns * sizeof(T) % kPackBytes == 0 &&
                         reinterpret_cast<std::uintptr_t>(args.logits.raw_data()) % kPackBytes == 0;
    if (!samples && aligned && !args.seen.defined()) {
      cuda::Launch(grid, kThreads)
          .cluster(dim3(kBlocks))
          .dependent()
          .run(sample_largest_kernel<T>, "sample_largest_kernel", args.logits.data<T>(), columns,
               args.tokens.data<std::int64_t>());
      return;
    }
    const Arguments<T> a{.logits = args.logits.data<T>(),
                         .seen = args.seen.data_or_null<bool>(),
                         .uniforms = args.uniforms.data_or_null<double>(),
                         .tokens = args.tokens.data<std::int64_t>(),
                         .columns = columns,
                         .slab = (columns + kBlocks - 1) / kBlocks,
                         .temperature = o.temperature,
                         .penalty = o.repetition_penalty,
                         .top_p = o.top_p,
                         .limit = o.top_k == 0 ? columns : static_cast<int>(std::min<std::int64_t>(o.top_k, columns)),
                         .ordered = samples && ((o.top_k > 0 && o.top_k < columns) || o.top_p < 1)};
    const std::size_t shared = a.ordered ? sizeof(std::uint32_t) * static_cast<std::size_t>(a.slab) : 0;
    cuda::Launch(grid, kThreads, shared)
        .cluster(dim3(kBlocks))
        .dependent()
        .run(sample_tokens_kernel<T>, "sample_tokens_kernel", a);
  });
}

}  // namespace mica::kernels
