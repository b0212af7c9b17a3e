// GCC 12 takes its own AVX-512 intrinsics for uses of uninitialized variables.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#define EIGEN_DONT_PARALLELIZE
#include <Eigen/Core>

#include <algorithm>
#include <limits>

#include <mica/core/parallel.h>
#include <mica/ops/attention/attention_kernels.h>

namespace mica::kernels {

namespace {

constexpr std::int64_t kGrain = 8192;  // elements

// A row in the accumulator's type. Aligned and a whole number of packets long, so that an element is computed in the
// same way wherever its row lies.
template <class S>
using Row = Eigen::Array<S, Eigen::Dynamic, 1>;
template <class S>
using Head = Eigen::Map<Row<S>, Eigen::AlignedMax>;

template <class S>
std::int64_t padded(std::int64_t n) {
  constexpr std::int64_t kPacket = Eigen::internal::packet_traits<S>::size;
  return (n + kPacket - 1) / kPacket * kPacket;
}

// The first n elements, times scale, then `rest`.
template <class S, class T>
Head<S> load(const T* from, std::int64_t n, S scale, S rest, Row<S>& row) {
  std::transform(from, from + n, row.data(), [scale](T value) { return static_cast<S>(value) * scale; });
  std::fill(row.data() + n, row.data() + padded<S>(n), rest);
  return {row.data(), padded<S>(n)};
}

// body(offset, seen) for every row: where it starts and how many of its columns count.
template <class S, class Body>
void for_rows(const Tensor& x, bool causal, Body body) {
  const std::int64_t queries = x.size(-2);
  const std::int64_t keys = x.size(-1);
  parallel_for(x.numel() / keys, kGrain / keys + 1, [&](std::int64_t begin, std::int64_t end) {
    Row<S> first(padded<S>(keys));
    Row<S> second(padded<S>(keys));
    for (std::int64_t row = begin; row < end; ++row) {
      body(row * keys, causal ? std::min(row % queries + 1, keys) : keys, first, second);
    }
  });
}

template <class T>
void forward(const AttentionWeightsForward& args) {
  using S = Accumulate<T>;
  const std::int64_t keys = args.scores.size(-1);
  const T* const scores = args.scores.data<T>();
  T* const weights = args.weights.data<T>();
  const S scale = static_cast<S>(args.scale);
  for_rows<S>(args.scores, args.causal, [&](std::int64_t at, std::int64_t seen, Row<S>& row, Row<S>&) {
    Head<S> x = load(scores + at, seen, scale, -std::numeric_limits<S>::infinity(), row);
    const S most = x.maxCoeff();
    x = (x - most).exp();
    const S share = 1 / x.sum();
    std::transform(row.data(), row.data() + seen, weights + at,
                   [share](S value) { return static_cast<T>(value * share); });
    std::fill(weights + at + seen, weights + at + keys, static_cast<T>(S{0}));
  });
}

template <class T>
void backward(const AttentionWeightsBackward& args) {
  using S = Accumulate<T>;
  const std::int64_t keys = args.weights.size(-1);
  const T* const weights = args.weights.data<T>();
  const T* const dweights = args.dweights.data<T>();
  T* const dscores = args.dscores.data<T>();
  const S scale = static_cast<S>(args.scale);
  for_rows<S>(args.weights, args.causal, [&](std::int64_t at, std::int64_t seen, Row<S>& first, Row<S>& second) {
    const Head<S> p = load(weights + at, seen, S{1}, S{0}, first);
    Head<S> dp = load(dweights + at, seen, S{1}, S{0}, second);
    const S mean = (p * dp).sum();
    dp = scale * p * (dp - mean);
    std::transform(second.data(), second.data() + seen, dscores + at, [](S value) { return static_cast<T>(value); });
    std::fill(dscores + at + seen, dscores + at + keys, static_cast<T>(S{0}));
  });
}

}  // namespace

void attention_weights_forward(Cpu, const AttentionWeightsForward& args) {
  on_dtype(FloatTypes{}, args.scores.dtype(), "attention_weights", [&]<class T>() { forward<T>(args); });
}

void attention_weights_backward(Cpu, const AttentionWeightsBackward& args) {
  on_dtype(FloatTypes{}, args.weights.dtype(), "attention_weights", [&]<class T>() { backward<T>(args); });
}

}  // namespace mica::kernels
