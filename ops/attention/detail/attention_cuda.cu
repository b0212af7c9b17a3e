// The steps of composed attention that are not products:
//
//     q · kᵀ ──> scores ──> scale, mask, softmax ──> weights ──> dropout_kernel ──> · v ──> out
//
// The softmax is the one of ops/softmax, with a rule for the causal mask. dropout_kernel drops the same weights as the
// kernels of flash_attention.md.

#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/ops/attention/detail/attention_kernels.h>
#include <mica/ops/softmax/detail/softmax_rows_cuda.cuh>

namespace mica::kernels {

namespace {

constexpr int kThreads = 128;  // per block of dropout_kernel

// One thread per dropout group; 16 groups form a block of 16 queries and 16 keys.
template <class T>
__global__ void __launch_bounds__(kThreads)
    dropout_kernel(T* y, const T* __restrict__ x, std::int64_t queries, std::int64_t keys, std::int64_t groups,
                   WeightDropout dropout, Accumulate<T> scale) {
  constexpr int kBlock = detail::kDropoutBlock;
  const std::int64_t group = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (group >= groups) {
    return;
  }
  const std::int64_t row_blocks = (queries + kBlock - 1) / kBlock, key_blocks = (keys + kBlock - 1) / kBlock;
  const int u = group / 4 % 4, v = group % 4;
  const std::int64_t key_block = group / 16 % key_blocks;
  const std::int64_t row_of_blocks = group / 16 / key_blocks;
  const std::uint32_t kept = detail::kept_of_dropout_group(
      detail::draw_dropout_group(absolute_key(dropout.key), row_of_blocks, key_block, u, v), dropout.threshold);
  const std::int64_t matrix = row_of_blocks / row_blocks * queries * keys;
  for (int element = 0; element < 16; ++element) {
    const std::int64_t query = row_of_blocks % row_blocks * kBlock + detail::query_of_dropout_group(u, element);
    const std::int64_t key = key_block * kBlock + detail::key_of_dropout_group(v, element);
    if (query < queries && key < keys) {
      const std::int64_t at = matrix + query * keys + key;
      y[at] = static_cast<T>((kept >> element & 1) != 0 ? static_cast<Accumulate<T>>(x[at]) * scale : Accumulate<T>{0});
    }
  }
}

template <class T, class Args>
auto rule_of(const Tensor& x, const Args& args) {
  return softmax_rows::SoftmaxRule<T, softmax_rows::Kind::masked>{.scale = static_cast<Accumulate<T>>(args.scale),
                                                                  .causal = args.causal,
                                                                  .queries = x.size(-2),
                                                                  .offset = args.causal_offset};
}

}  // namespace

void attention_weights_forward(Cuda, const AttentionWeightsForward& args) {
  const std::int64_t keys = args.scores.size(-1);
  on_dtype(FloatTypes{}, args.scores.dtype(), "attention_weights", [&]<class T>() {
    softmax_rows::run({{args.scores.data<T>()}, args.weights.data<T>()}, args.scores.numel() / keys, keys,
                      softmax_rows::Forward<T, softmax_rows::Kind::masked>{rule_of<T>(args.scores, args)});
  });
}

void attention_weights_backward(Cuda, const AttentionWeightsBackward& args) {
  const std::int64_t keys = args.weights.size(-1);
  on_dtype(FloatTypes{}, args.weights.dtype(), "attention_weights", [&]<class T>() {
    softmax_rows::run({{args.weights.data<T>(), args.dweights.data<T>()}, args.dscores.data<T>()},
                      args.weights.numel() / keys, keys,
                      softmax_rows::Backward<T, softmax_rows::Kind::masked>{rule_of<T>(args.weights, args)});
  });
}

void attention_dropout(Cuda, const AttentionDropout& args) {
  constexpr std::int64_t kBlock = detail::kDropoutBlock;
  const std::int64_t queries = args.x.size(-2), keys = args.x.size(-1);
  const std::int64_t groups =
      args.x.numel() / (queries * keys) * ((queries + kBlock - 1) / kBlock) * ((keys + kBlock - 1) / kBlock) * 16;
  on_dtype(FloatTypes{}, args.x.dtype(), "attention_dropout", [&]<class T>() {
    const auto blocks = static_cast<unsigned>((groups + kThreads - 1) / kThreads);
    dropout_kernel<T><<<blocks, kThreads, 0, cuda::current_stream()>>>(
        args.y.data<T>(), args.x.data<T>(), queries, keys, groups, args.dropout,
        static_cast<Accumulate<T>>(args.dropout.scale()));
    cuda::check_launch("attention_dropout");
  });
}

}  // namespace mica::kernels
