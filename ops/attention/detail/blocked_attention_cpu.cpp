// GCC 12 warns about uninitialized variables in its own AVX-512 intrinsics, and about packets as template
// arguments.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wignored-attributes"
#endif
#define EIGEN_DONT_PARALLELIZE
#include <cmath>
#include <limits>
#include <numeric>

#include <mica/core/half_cpu.h>
#include <mica/core/parallel.h>
#include <mica/ops/attention/detail/attention_dropout_cpu.h>
#include <mica/ops/attention/detail/attention_rows_cpu.h>
#include <mica/ops/attention/detail/fused_attention_kernels.h>
#include <mica/ops/matmul/detail/few_rows.h>
#include <mica/ops/matmul/detail/gemm_cpu.h>

namespace mica::kernels {

namespace {

// Sizes of a block, chosen so that its scores fit into the L2 cache.
constexpr std::int64_t kQueries = 64;
constexpr std::int64_t kKeys = 256;

// One head of a (B, H, rows, width) tensor whose last axis is contiguous.
template <class T>
struct HeadRows {
  T* data;
  std::int64_t stride;  // elements from one row to the next

  HeadRows(const Tensor& x, std::int64_t batch, std::int64_t head)
      : data(x.data<T>() + batch * x.strides()[0] + head * x.strides()[1]), stride(x.strides()[2]) {}

  T* row(std::int64_t i) const { return data + i * stride; }
  gemm::Matrix<T> rows(std::int64_t from) const { return {row(from), stride, 1}; }
  gemm::Matrix<T> columns(std::int64_t from) const { return {row(from), 1, stride}; }  // transposed
};

template <class S>
gemm::Matrix<S> transposed(const S* x, std::int64_t columns) {
  return {x, 1, columns};
}

// A thread's scratch memory, which later calls reuse.
template <class S>
struct Workspace {
  gemm::Scratch<S> gemm;
  gemm::Buffer<S> zeros, converted, scores, dscores, product, sums, dk, dv;
  gemm::Buffer<BFloat16> high, low;
  Row<S> row = Row<S>(kKeys), other = Row<S>(kKeys);
  std::vector<std::uint8_t> kept = std::vector<std::uint8_t>(kQueries * kKeys);  // which weights dropout keeps
};

// The dropout mask for `rows` queries from `first` on and `keys` keys from `key` on; rows have kKeys entries.
template <class S>
void draw(const WeightDropout& dropout, std::int64_t head, std::int64_t queries, std::int64_t first, std::int64_t rows,
          std::int64_t key, std::int64_t keys, Workspace<S>& space) {
  constexpr std::int64_t kBlock = detail::kDropoutBlock;
  static_assert(kQueries % kBlock == 0 && kKeys % kBlock == 0);
  const std::int64_t blocks = (queries + kBlock - 1) / kBlock;
  for (std::int64_t row = 0; row < rows; row += kBlock) {
    draw_kept_rows(dropout, head * blocks + (first + row) / kBlock, key, keys, space.kept.data() + row * kKeys, kKeys);
  }
}

// Multiplies kept weights by the dropout's scale, and sets the others to 0.
template <class S>
void drop(S* values, const std::uint8_t* kept, std::int64_t n, S scale) {
  std::transform(values, values + n, kept, values,
                 [scale](S value, std::uint8_t keep) { return keep != 0 ? value * scale : S{0}; });
}

template <class S>
const S* zeros(std::int64_t n, Workspace<S>& space) {
  space.zeros.assign(gemm::tiles(n, gemm::Tile<S>::kColumns) * gemm::Tile<S>::kColumns, S{0});
  return space.zeros.data();
}

// out (m, n) = a (m, depth) · b (depth, n).
template <class S, class T>
void multiply(std::int64_t m, std::int64_t n, std::int64_t depth, gemm::Matrix<T> a, gemm::Matrix<T> b, S* out,
              Workspace<S>& space) {
  if (m <= gemm::kFewRows) {
    gemm::multiply_few_rows(m, n, depth, a, b, static_cast<const T*>(nullptr), out);
    return;
  }
  gemm::multiply<S, T, S>(m, n, depth, a, b, zeros(n, space), out, space.gemm);
}

// The same if a holds weights or their gradients (contiguous or transposed) and b is 16-bit.
template <class T>
requires(sizeof(T) == 2) void multiply(std::int64_t m, std::int64_t n, std::int64_t depth, gemm::Matrix<float> a,
                                       gemm::Matrix<T> b, float* out, Workspace<float>& space) {
  if (m <= gemm::kFewRows) {
    gemm::multiply_few_rows(m, n, depth, a, b, static_cast<const T*>(nullptr), out);
    return;
  }
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (gemm::bfloat16_unit() != gemm::Bfloat16Unit::none) {
      // Weights are split into a sum of two bfloat16, so that they keep 16 significant bits.
      BFloat16* const high = gemm::grown(space.high, m * depth);
      BFloat16* const low = gemm::grown(space.low, m * depth);
      MICA_INDEPENDENT
      for (std::int64_t i = 0; i < m * depth; ++i) {
        high[i] = BFloat16(a.data[i]);
        low[i] = BFloat16(a.data[i] - static_cast<float>(high[i]));
      }
      gemm::multiply_bfloat16(m, n, depth, {high, a.row, a.column}, b, zeros(n, space), out);
      gemm::add_product_bfloat16(m, n, depth, {low, a.row, a.column}, b, out);
      return;
    }
  }
  float* const converted = gemm::grown(space.converted, depth * n);
  for (std::int64_t k = 0; k < depth; ++k) {
    widen(b.data + k * b.row, n, converted + k * n);
  }
  multiply(m, n, depth, a, gemm::Matrix<float>{converted, n, 1}, out, space);
}

template <class S>
void add(S* sum, const S* term, std::int64_t n) {
  std::transform(sum, sum + n, term, sum, std::plus<S>());
}

// How many keys each query sees; these are always the first ones.
struct Visible {
  std::int64_t keys;
  bool causal;
  std::int64_t offset;

  std::int64_t operator()(std::int64_t query) const {
    return causal ? std::clamp<std::int64_t>(query + 1 + offset, 0, keys) : keys;
  }
};

// Computes one block of queries of one head: the softmax and the weighted sum of values, one block of keys at a time
// (Milakov and Gimelshein, Online normalizer calculation for softmax, 2018).
template <class T, class S>
void forward_block(const FusedAttention& args, std::int64_t batch, std::int64_t head, std::int64_t first,
                   Workspace<S>& space) {
  constexpr S kNever = -std::numeric_limits<S>::infinity();
  const std::int64_t width = args.q.size(3), values = args.v.size(3), group = args.q.size(1) / args.k.size(1);
  const std::int64_t rows = std::min(kQueries, args.q.size(2) - first);
  const HeadRows<T> q(args.q, batch, head), k(args.k, batch, head / group), v(args.v, batch, head / group);
  const HeadRows<T> out(args.out, batch, head);
  const Visible visible{args.k.size(2), args.causal, args.causal_offset};
  const S scale = static_cast<S>(args.scale);
  const bool drops = args.dropout.drops();
  const S drop_scale = static_cast<S>(args.dropout.scale());
  S* const scores = gemm::grown(space.scores, rows * kKeys);
  S* const product = gemm::grown(space.product, rows * values);
  S* const sums = gemm::grown(space.sums, rows * values);
  std::fill(sums, sums + rows * values, S{0});
  std::array<S, kQueries> most, total;
  most.fill(kNever);
  total.fill(S{0});
  const std::int64_t last_key = visible(first + rows - 1);
  for (std::int64_t key = 0; key < last_key; key += kKeys) {
    const std::int64_t keys = std::min(kKeys, last_key - key);
    multiply(rows, keys, width, q.rows(first), k.columns(key), scores, space);
    if (drops) {
      draw(args.dropout, batch * args.q.size(1) + head, args.q.size(2), first, rows, key, keys, space);
    }
    for (std::int64_t i = 0; i < rows; ++i) {
      S* const weights = scores + i * keys;
      const std::int64_t seen = std::clamp<std::int64_t>(visible(first + i) - key, 0, keys);
      std::fill(weights + seen, weights + keys, S{0});
      if (seen == 0) {
        continue;
      }
      Head<S> x = load(weights, seen, scale, kNever, space.row);
      const S larger = std::max(most[i], x.maxCoeff());
      if (larger == kNever && !x.isNaN().any()) {
        std::fill(weights, weights + seen, S{0});
        continue;
      }
      x = (x - larger).exp();
      const S shrink = std::exp(most[i] - larger);
      total[i] = total[i] * shrink + x.sum();
      most[i] = larger;
      std::copy_n(space.row.data(), seen, weights);
      if (drops) {
        drop(weights, space.kept.data() + i * kKeys, seen, drop_scale);
      }
      if (key > 0) {
        std::transform(sums + i * values, sums + (i + 1) * values, sums + i * values,
                       [shrink](S sum) { return sum * shrink; });
      }
    }
    multiply(rows, values, keys, gemm::Matrix<S>{scores, keys, 1}, v.rows(key), product, space);
    add(sums, product, rows * values);
  }
  S* const lse = args.lse.data<S>() + (batch * args.q.size(1) + head) * args.q.size(2) + first;
  for (std::int64_t i = 0; i < rows; ++i) {
    const S share = total[i] == 0 ? S{0} : 1 / total[i];
    std::transform(sums + i * values, sums + (i + 1) * values, sums + i * values,
                   [share](S sum) { return sum * share; });
    narrow(sums + i * values, values, out.row(first + i));
    lse[i] = total[i] == 0 ? kNever : most[i] + std::log(total[i]);
  }
}

// Computes the gradients of one key head and of the query heads that read it.
template <class T, class S>
void backward_head(const FusedAttentionBackward& args, std::int64_t batch, std::int64_t key_head, Workspace<S>& space) {
  const std::int64_t width = args.q.size(3), values = args.v.size(3), group = args.q.size(1) / args.k.size(1);
  const std::int64_t queries = args.q.size(2);
  const HeadRows<T> k(args.k, batch, key_head), v(args.v, batch, key_head);
  const Visible visible{args.k.size(2), args.causal, args.causal_offset};
  const S scale = static_cast<S>(args.scale);
  const bool drops = args.dropout.drops();
  const S drop_scale = static_cast<S>(args.dropout.scale());
  S* const dk = gemm::grown(space.dk, visible.keys * width);
  S* const dv = gemm::grown(space.dv, visible.keys * values);
  std::fill(dk, dk + visible.keys * width, S{0});
  std::fill(dv, dv + visible.keys * values, S{0});
  S* const weights = gemm::grown(space.scores, kQueries * kKeys);
  S* const dscores = gemm::grown(space.dscores, kQueries * kKeys);
  S* const product = gemm::grown(space.product, std::max(kQueries, kKeys) * std::max(width, values));
  S* const dq_sums = gemm::grown(space.sums, kQueries * width);
  for (std::int64_t head = key_head * group; head < (key_head + 1) * group; ++head) {
    const HeadRows<T> q(args.q, batch, head), out(args.out, batch, head), dout(args.dout, batch, head);
    const HeadRows<T> dq(args.dq, batch, head);
    const S* const lse = args.lse.data<S>() + (batch * args.q.size(1) + head) * queries;
    for (std::int64_t first = 0; first < queries; first += kQueries) {
      const std::int64_t rows = std::min(kQueries, queries - first);
      const std::int64_t last_key = visible(first + rows - 1);
      // Computes weights and their gradients for a block of keys. Calls `each` with every row of them; it may overwrite
      // the row.
      const auto for_rows = [&](std::int64_t key, std::int64_t keys, auto each) {
        multiply(rows, keys, width, q.rows(first), k.columns(key), weights, space);
        multiply(rows, keys, values, dout.rows(first), v.columns(key), dscores, space);
        if (drops) {
          draw(args.dropout, batch * args.q.size(1) + head, queries, first, rows, key, keys, space);
        }
        for (std::int64_t i = 0; i < rows; ++i) {
          S* const p = weights + i * keys;
          S* const dp = dscores + i * keys;
          const bool sees = lse[first + i] != -std::numeric_limits<S>::infinity();
          const std::int64_t seen = sees ? std::clamp<std::int64_t>(visible(first + i) - key, 0, keys) : 0;
          const std::uint8_t* const kept = space.kept.data() + i * kKeys;
          if (seen > 0) {
            if (drops) {
              drop(dp, kept, seen, drop_scale);
            }
            Head<S> x = load(p, seen, scale, S{0}, space.row);
            Head<S> dx = load(dp, seen, S{1}, S{0}, space.other);
            x = (x - lse[first + i]).exp();
            std::fill(space.row.data() + seen, space.row.data() + padded<S>(seen), S{0});
            each(i, x, dx);
            std::copy_n(space.row.data(), seen, p);
            std::copy_n(space.other.data(), seen, dp);
            if (drops) {
              drop(p, kept, seen, drop_scale);
            }
          }
          std::fill(p + seen, p + keys, S{0});
          std::fill(dp + seen, dp + keys, S{0});
        }
      };
      // If there is a single block of keys, the loop below sees whole rows and computes the mean itself.
      const bool one_block = last_key <= kKeys;
      const bool sum_here = one_block && !std::is_same_v<S, T>;
      // Σ dweights · weights of each row. It equals Σ dout · out, except that `out` may have been rounded to 16 bits.
      std::array<S, kQueries> mean{};
      if constexpr (std::is_same_v<S, T>) {
        for (std::int64_t i = 0; i < rows; ++i) {
          mean[i] = std::inner_product(out.row(first + i), out.row(first + i) + values, dout.row(first + i), S{0});
        }
      } else {
        for (std::int64_t key = 0; !one_block && key < last_key; key += kKeys) {
          for_rows(key, std::min(kKeys, last_key - key),
                   [&](std::int64_t i, Head<S> x, Head<S> dx) { mean[i] += (x * dx).sum(); });
        }
      }
      std::fill(dq_sums, dq_sums + rows * width, S{0});
      for (std::int64_t key = 0; key < last_key; key += kKeys) {
        const std::int64_t keys = std::min(kKeys, last_key - key);
        for_rows(key, keys, [&](std::int64_t i, Head<S> x, Head<S> dx) {
          const S row_mean = sum_here ? (x * dx).sum() : mean[i];
          dx = scale * x * (dx - row_mean);
        });
        multiply(keys, values, rows, transposed(weights, keys), dout.rows(first), product, space);
        add(dv + key * values, product, keys * values);
        multiply(keys, width, rows, transposed(dscores, keys), q.rows(first), product, space);
        add(dk + key * width, product, keys * width);
        multiply(rows, width, keys, gemm::Matrix<S>{dscores, keys, 1}, k.rows(key), product, space);
        add(dq_sums, product, rows * width);
      }
      for (std::int64_t i = 0; i < rows; ++i) {
        narrow(dq_sums + i * width, width, dq.row(first + i));
      }
    }
  }
  const HeadRows<T> dk_out(args.dk, batch, key_head), dv_out(args.dv, batch, key_head);
  for (std::int64_t j = 0; j < visible.keys; ++j) {
    narrow(dk + j * width, width, dk_out.row(j));
    narrow(dv + j * values, values, dv_out.row(j));
  }
}

}  // namespace

void blocked_attention_forward(Cpu, const FusedAttention& args) {
  check_host_key(args.dropout.key);
  const std::int64_t heads = args.q.size(1);
  const std::int64_t blocks = (args.q.size(2) + kQueries - 1) / kQueries;
  on_dtype(FloatTypes{}, args.q.dtype(), "attention", [&]<class T>() {
    using S = Accumulate<T>;
    parallel_for(args.q.size(0) * heads * blocks, 1, [&](std::int64_t begin, std::int64_t end) {
      static thread_local Workspace<S> space;
      for (std::int64_t item = begin; item < end; ++item) {
        forward_block<T>(args, item / blocks / heads, item / blocks % heads, item % blocks * kQueries, space);
      }
    });
  });
}

void blocked_attention_backward(Cpu, const FusedAttentionBackward& args) {
  const std::int64_t key_heads = args.k.size(1);
  on_dtype(FloatTypes{}, args.q.dtype(), "attention", [&]<class T>() {
    using S = Accumulate<T>;
    parallel_for(args.q.size(0) * key_heads, 1, [&](std::int64_t begin, std::int64_t end) {
      static thread_local Workspace<S> space;
      for (std::int64_t item = begin; item < end; ++item) {
        backward_head<T>(args, item / key_heads, item % key_heads, space);
      }
    });
  });
}

}  // namespace mica::kernels
