// GCC 12 warns about uninitialized variables in its own AVX-512 intrinsics.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#define EIGEN_DONT_PARALLELIZE
#include <Eigen/Core>

#include <algorithm>
#include <limits>
#include <vector>

#include <mica/core/parallel.h>
#include <mica/ops/attention/detail/attention_dropout_cpu.h>
#include <mica/ops/attention/detail/attention_kernels.h>
#include <mica/ops/attention/detail/attention_rows_cpu.h>

namespace mica::kernels {

namespace {

constexpr std::int64_t kGrain = 8192;  // elements per thread, at least

// Calls body(offset, seen) for every row, with the index of its first element and the number of its visible columns.
template <class S, class Body>
void for_rows(const Tensor& x, bool causal, std::int64_t offset, Body body) {
  const std::int64_t queries = x.size(-2);
  const std::int64_t keys = x.size(-1);
  parallel_for(x.numel() / keys, kGrain / keys + 1, [&](std::int64_t begin, std::int64_t end) {
    Row<S> first(padded<S>(keys));
    Row<S> second(padded<S>(keys));
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int64_t seen = causal ? std::clamp<std::int64_t>(row % queries + 1 + offset, 0, keys) : keys;
      body(row * keys, seen, first, second);
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
  for_rows<S>(args.scores, args.causal, args.causal_offset,
              [&](std::int64_t at, std::int64_t seen, Row<S>& row, Row<S>&) {
                constexpr S kNever = -std::numeric_limits<S>::infinity();
                const auto sees_nothing = [&] { std::fill(weights + at, weights + at + keys, static_cast<T>(S{0})); };
                if (seen == 0) {
                  return sees_nothing();
                }
                Head<S> x = load(scores + at, seen, scale, kNever, row);
                const S most = x.maxCoeff();
                if (most == kNever && !x.isNaN().any()) {
                  return sees_nothing();
                }
                x = (x - most).exp();
                const S factor = 1 / x.sum();
                // The test is needed because Eigen's exp(-inf) is the smallest positive number, not 0.
                std::transform(row.data(), row.data() + seen, scores + at, weights + at, [factor](S value, T score) {
                  return static_cast<T>(static_cast<S>(score) == kNever ? S{0} : value * factor);
                });
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
  for_rows<S>(args.weights, args.causal, args.causal_offset,
              [&](std::int64_t at, std::int64_t seen, Row<S>& first, Row<S>& second) {
                if (seen == 0) {
                  std::fill(dscores + at, dscores + at + keys, static_cast<T>(S{0}));
                  return;
                }
                const Head<S> p = load(weights + at, seen, S{1}, S{0}, first);
                Head<S> dp = load(dweights + at, seen, S{1}, S{0}, second);
                const S mean = (p * dp).sum();
                dp = scale * p * (dp - mean);
                std::transform(second.data(), second.data() + seen, dscores + at,
                               [](S value) { return static_cast<T>(value); });
                std::fill(dscores + at + seen, dscores + at + keys, static_cast<T>(S{0}));
              });
}

template <class T>
void drop(const AttentionDropout& args) {
  using S = Accumulate<T>;
  constexpr std::int64_t kBlock = detail::kDropoutBlock;
  const std::int64_t queries = args.x.size(-2), keys = args.x.size(-1);
  const std::int64_t row_blocks = (queries + kBlock - 1) / kBlock, stride = (keys + kBlock - 1) / kBlock * kBlock;
  const T* const x = args.x.data<T>();
  T* const y = args.y.data<T>();
  const S scale = static_cast<S>(args.dropout.scale());
  check_host_key(args.dropout.key);
  parallel_for(args.x.numel() / (queries * keys) * row_blocks, 1, [&](std::int64_t begin, std::int64_t end) {
    std::vector<std::uint8_t> kept(static_cast<std::size_t>(kBlock * stride));
    for (std::int64_t i = begin; i < end; ++i) {
      draw_kept_rows(args.dropout, i, 0, keys, kept.data(), stride);
      const std::int64_t first = i % row_blocks * kBlock;
      for (std::int64_t row = 0; row < std::min(kBlock, queries - first); ++row) {
        const std::int64_t at = (i / row_blocks * queries + first + row) * keys;
        for (std::int64_t key = 0; key < keys; ++key) {
          const S value = static_cast<S>(x[at + key]) * scale;
          y[at + key] = static_cast<T>(kept[static_cast<std::size_t>(row * stride + key)] != 0 ? value : S{0});
        }
      }
    }
  });
}

}  // namespace

void attention_weights_forward(Cpu, const AttentionWeightsForward& args) {
  on_dtype(FloatTypes{}, args.scores.dtype(), "attention_weights", [&]<class T>() { forward<T>(args); });
}

void attention_weights_backward(Cpu, const AttentionWeightsBackward& args) {
  on_dtype(FloatTypes{}, args.weights.dtype(), "attention_weights", [&]<class T>() { backward<T>(args); });
}

void attention_dropout(Cpu, const AttentionDropout& args) {
  on_dtype(FloatTypes{}, args.x.dtype(), "attention_dropout", [&]<class T>() { drop<T>(args); });
}

}  // namespace mica::kernels
