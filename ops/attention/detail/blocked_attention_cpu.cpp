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

#include <mica/core/detail/ceil_div.h>
#include <mica/core/detail/half_cpu.h>
#include <mica/core/parallel.h>
#include <mica/ops/attention/detail/attention_dropout_cpu.h>
#include <mica/ops/attention/detail/attention_rows_cpu.h>
#include <mica/ops/attention/detail/fused_attention_kernels.h>
#include <mica/ops/gemm/detail/few_rows.h>
#include <mica/ops/gemm/detail/gemm_cpu.h>

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
  space.zeros.assign(ceil_div(n, gemm::Tile<S>::kColumns) * gemm::Tile<S>::kColumns, S{0});
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
    const S factor = total[i] == 0 ? S{0} : 1 / total[i];
    std::transform(sums + i * values, sums + (i + 1) * values, sums + i * values,
                   [factor](S sum) { return sum * factor; });
    narrow(sums + i * values, values, out.row(first + i));
    lse[i] = total[i] == 0 ? kNever : most[i] + std::log(total[i]);
  }
}

// The gradients of one key head and of the query heads that read it.
template <class T, class S>
class BackwardHead {
 public:
  BackwardHead(const FusedAttentionBackward& args, std::int64_t batch, std::int64_t key_head, Workspace<S>& space)
      : args_(args),
        batch_(batch),
        key_head_(key_head),
        space_(space),
        k_(args.k, batch, key_head),
        v_(args.v, batch, key_head),
        visible_{args.k.size(2), args.causal, args.causal_offset},
        dk_(gemm::grown(space.dk, visible_.keys * width_)),
        dv_(gemm::grown(space.dv, visible_.keys * values_)),
        weights_(gemm::grown(space.scores, kQueries * kKeys)),
        dscores_(gemm::grown(space.dscores, kQueries * kKeys)),
        product_(gemm::grown(space.product, std::max(kQueries, kKeys) * std::max(width_, values_))),
        dq_sums_(gemm::grown(space.sums, kQueries * width_)) {}

  void run() {
    std::fill(dk_, dk_ + visible_.keys * width_, S{0});
    std::fill(dv_, dv_ + visible_.keys * values_, S{0});
    const std::int64_t group = args_.q.size(1) / args_.k.size(1);
    for (std::int64_t head = key_head_ * group; head < (key_head_ + 1) * group; ++head) {
      for (std::int64_t first = 0; first < args_.q.size(2); first += kQueries) {
        add_queries(Queries(*this, head, first));
      }
    }
    const HeadRows<T> dk_out(args_.dk, batch_, key_head_), dv_out(args_.dv, batch_, key_head_);
    for (std::int64_t j = 0; j < visible_.keys; ++j) {
      narrow(dk_ + j * width_, width_, dk_out.row(j));
      narrow(dv_ + j * values_, values_, dv_out.row(j));
    }
  }

 private:
  // A block of queries of one head.
  struct Queries {
    std::int64_t head, first, rows, last_key;
    HeadRows<T> q, out, dout, dq;
    const S* lse;

    Queries(const BackwardHead& of, std::int64_t head, std::int64_t first)
        : head(head),
          first(first),
          rows(std::min(kQueries, of.args_.q.size(2) - first)),
          last_key(of.visible_(first + rows - 1)),
          q(of.args_.q, of.batch_, head),
          out(of.args_.out, of.batch_, head),
          dout(of.args_.dout, of.batch_, head),
          dq(of.args_.dq, of.batch_, head),
          lse(of.args_.lse.template data<S>() + (of.batch_ * of.args_.q.size(1) + head) * of.args_.q.size(2) + first) {}
  };

  // Computes weights and their gradients for a block of keys. Calls `each` with every row of them, which it may
  // overwrite.
  template <class Each>
  void for_rows(const Queries& block, std::int64_t key, std::int64_t keys, const Each& each) {
    const bool drops = args_.dropout.drops();
    const S drop_scale = static_cast<S>(args_.dropout.scale());
    multiply(block.rows, keys, width_, block.q.rows(block.first), k_.columns(key), weights_, space_);
    multiply(block.rows, keys, values_, block.dout.rows(block.first), v_.columns(key), dscores_, space_);
    if (drops) {
      draw(args_.dropout, batch_ * args_.q.size(1) + block.head, args_.q.size(2), block.first, block.rows, key, keys,
           space_);
    }
    for (std::int64_t i = 0; i < block.rows; ++i) {
      S* const p = weights_ + i * keys;
      S* const dp = dscores_ + i * keys;
      const bool sees = block.lse[i] != -std::numeric_limits<S>::infinity();
      const std::int64_t seen = sees ? std::clamp<std::int64_t>(visible_(block.first + i) - key, 0, keys) : 0;
      const std::uint8_t* const kept = space_.kept.data() + i * kKeys;
      if (seen > 0) {
        if (drops) {
          drop(dp, kept, seen, drop_scale);
        }
        Head<S> x = load(p, seen, scale_, S{0}, space_.row);
        Head<S> dx = load(dp, seen, S{1}, S{0}, space_.other);
        x = (x - block.lse[i]).exp();
        std::fill(space_.row.data() + seen, space_.row.data() + padded<S>(seen), S{0});
        each(i, x, dx);
        std::copy_n(space_.row.data(), seen, p);
        std::copy_n(space_.other.data(), seen, dp);
        if (drops) {
          drop(p, kept, seen, drop_scale);
        }
      }
      std::fill(p + seen, p + keys, S{0});
      std::fill(dp + seen, dp + keys, S{0});
    }
  }

  // Whether add_queries() computes the means: with a single block of keys, it has whole rows of weights.
  static bool sums_here(const Queries& block) { return block.last_key <= kKeys && !std::is_same_v<S, T>; }

  // Σ dweights · weights of each row. It equals Σ dout · out, unless `out` has been rounded to 16 bits.
  std::array<S, kQueries> means_of(const Queries& block) {
    std::array<S, kQueries> means{};
    if constexpr (std::is_same_v<S, T>) {
      for (std::int64_t i = 0; i < block.rows; ++i) {
        const T* const out = block.out.row(block.first + i);
        means[i] = std::inner_product(out, out + values_, block.dout.row(block.first + i), S{0});
      }
    } else {
      for (std::int64_t key = 0; !sums_here(block) && key < block.last_key; key += kKeys) {
        for_rows(block, key, std::min(kKeys, block.last_key - key),
                 [&](std::int64_t i, Head<S> x, Head<S> dx) { means[i] += (x * dx).sum(); });
      }
    }
    return means;
  }

  // Adds the block's terms to dk and dv, and writes its dq.
  void add_queries(const Queries& block) {
    const std::array<S, kQueries> means = means_of(block);
    const bool sums = sums_here(block);
    const std::int64_t rows = block.rows;
    std::fill(dq_sums_, dq_sums_ + rows * width_, S{0});
    for (std::int64_t key = 0; key < block.last_key; key += kKeys) {
      const std::int64_t keys = std::min(kKeys, block.last_key - key);
      for_rows(block, key, keys, [&](std::int64_t i, Head<S> x, Head<S> dx) {
        const S mean = sums ? (x * dx).sum() : means[i];
        dx = scale_ * x * (dx - mean);
      });
      multiply(keys, values_, rows, transposed(weights_, keys), block.dout.rows(block.first), product_, space_);
      add(dv_ + key * values_, product_, keys * values_);
      multiply(keys, width_, rows, transposed(dscores_, keys), block.q.rows(block.first), product_, space_);
      add(dk_ + key * width_, product_, keys * width_);
      multiply(rows, width_, keys, gemm::Matrix<S>{dscores_, keys, 1}, k_.rows(key), product_, space_);
      add(dq_sums_, product_, rows * width_);
    }
    for (std::int64_t i = 0; i < rows; ++i) {
      narrow(dq_sums_ + i * width_, width_, block.dq.row(block.first + i));
    }
  }

  const FusedAttentionBackward& args_;
  const std::int64_t batch_, key_head_;
  Workspace<S>& space_;
  const std::int64_t width_ = args_.q.size(3), values_ = args_.v.size(3);
  const HeadRows<T> k_, v_;
  const Visible visible_;
  const S scale_ = static_cast<S>(args_.scale);
  S *const dk_, *const dv_, *const weights_, *const dscores_, *const product_, *const dq_sums_;
};

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
        BackwardHead<T, S>(args, item / key_heads, item % key_heads, space).run();
      }
    });
  });
}

}  // namespace mica::kernels
