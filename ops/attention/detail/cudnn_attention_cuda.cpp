#include <algorithm>
#include <limits>
#include <map>
#include <mutex>

#include <mica/core/cuda/detail/cudnn_graph.h>
#include <mica/core/cuda/detail/launch_record.h>
#include <mica/core/cuda/error.h>
#include <mica/ops/attention/detail/fused_attention_kernels.h>

namespace mica::kernels {

namespace {

using Graph = cuda::CudnnGraph;
using Axes = Graph::Axes;
using Node = Graph::Node;

constexpr std::size_t kOldestVersion = 90800;  // supports plans for device properties and masks with inf

// What cuDNN's execution plan depends on: the key of the cache of plans.
struct Problem {
  DType dtype = bfloat16;
  Axes q{}, k{};  // sizes
  Axes q_strides{}, k_strides{}, v_strides{}, out_strides{};
  bool is_backward = false;
  Axes dout_strides{}, dq_strides{}, dk_strides{}, dv_strides{};  // for backward only
  double scale = 1;
  bool causal = false;
  std::int64_t causal_offset = 0;
  std::int64_t window = 0;
  bool has_lse = false;
  bool deterministic = true;

  auto operator<=>(const Problem&) const = default;
};

cudnnDataType_t type_of(DType dtype) { return dtype == float16 ? CUDNN_DATA_HALF : CUDNN_DATA_BFLOAT16; }

Axes swapped(Axes axes) {
  std::swap(axes[2], axes[3]);
  return axes;
}

Axes sizes_of(const Tensor& x) { return {x.size(0), x.size(1), x.size(2), x.size(3)}; }

// x's strides, with a fixed value for axes of length 1, whose stride has no effect, so that equal problems have one
// plan.
Axes strides_of(const Tensor& x) {
  Axes strides{};
  std::int64_t inside = 1;
  for (int axis = 3; axis >= 0; --axis) {
    const auto at = static_cast<std::size_t>(axis);
    strides[at] = x.size(axis) == 1 ? inside : x.strides()[axis];
    inside = std::max(inside, strides[at] * x.size(axis));
  }
  return strides;
}

bool is_aligned(const Tensor& x) {
  const Axes strides = strides_of(x);
  return strides[3] == 1 && reinterpret_cast<std::uintptr_t>(x.raw_data()) % 16 == 0 &&
         std::all_of(strides.begin(), strides.end() - 1, [](std::int64_t s) { return s > 0 && s % 8 == 0; });
}

// Builds cuDNN's operation graphs of forward and backward. Its fused engines recognize this sequence of operations,
// which is the one that cudnn-frontend's composite SDPA nodes expand to.
class Builder {
 public:
  explicit Builder(const Problem& problem)
      : p_(problem),
        type_(type_of(problem.dtype)),
        scores_{p_.q[0], p_.q[1], p_.q[2], p_.k[2]},
        rows_{p_.q[0], p_.q[1], p_.q[2], 1} {}

  Graph forward() {
    const Node q = g_.tensor(type_, p_.q, p_.q_strides);
    const Node kt = g_.tensor(type_, swapped(p_.k), swapped(p_.k_strides));
    const Node v = g_.tensor(type_, p_.k, p_.v_strides);
    const Node out = g_.tensor(type_, p_.q, p_.out_strides);
    const Node scores = masked(scaled(g_.matmul(q, kt, inner(scores_))));
    const Node most = g_.reduce(CUDNN_REDUCE_TENSOR_MAX, scores, inner(rows_));
    const Node exponential = exp(pointwise(CUDNN_POINTWISE_SUB, scores, most));
    const Node sum = g_.reduce(CUDNN_REDUCE_TENSOR_ADD, exponential, inner(rows_));
    if (p_.has_lse) {
      const Node lse = g_.tensor(CUDNN_DATA_FLOAT, rows_, {rows_[1] * rows_[2], rows_[2], 1, 1});
      g_.pointwise(CUDNN_POINTWISE_ADD, most, g_.pointwise(CUDNN_POINTWISE_LOG, sum, inner(rows_)), lse);
    }
    const Node weights = g_.pointwise(CUDNN_POINTWISE_DIV, exponential, sum, g_.inner(type_, scores_));
    g_.matmul(weights, v, out);
    return std::move(g_);
  }

  // If `deterministic`, dS (B · H · T · S elements) is stored in memory, for dq. Otherwise dq is accumulated by
  // atomics.
  Graph backward() {
    const Axes rows_strides{rows_[1] * rows_[2], rows_[2], 1, 1};
    const Node q = g_.tensor(type_, p_.q, p_.q_strides);
    const Node kt = g_.tensor(type_, swapped(p_.k), swapped(p_.k_strides));
    const Node vt = g_.tensor(type_, swapped(p_.k), swapped(p_.v_strides));
    const Node out = g_.tensor(type_, p_.q, p_.out_strides);
    const Node lse = g_.tensor(CUDNN_DATA_FLOAT, rows_, rows_strides);
    const Node dout = g_.tensor(type_, p_.q, p_.dout_strides);
    const Node dq = g_.tensor(type_, p_.q, p_.dq_strides);
    const Node dk = g_.tensor(type_, p_.k, p_.dk_strides);
    const Node dv = g_.tensor(type_, p_.k, p_.dv_strides);
    const Node mean = g_.tensor(CUDNN_DATA_FLOAT, rows_, rows_strides);  // Σ dout · out

    const Axes token_major{p_.q[1] * p_.q[2] * p_.q[3], p_.q[2] * p_.q[3], p_.q[1] * p_.q[3], 1};
    const Node product = g_.pointwise(CUDNN_POINTWISE_MUL, dout, out, g_.inner(CUDNN_DATA_FLOAT, p_.q, token_major));
    const Node sum = g_.reduce(CUDNN_REDUCE_TENSOR_ADD, product, inner(rows_));
    g_.pointwise(CUDNN_POINTWISE_MUL, sum, g_.scalar(1.0F), mean);

    const Node scores = masked(pointwise(CUDNN_POINTWISE_SUB, scaled(g_.matmul(q, kt, inner(scores_))), lse));
    const Node weights = exp(scores);
    by_key_head(g_.matmul(transposed(weights), dout, per_query_head(dv)), dv);

    const Node dweights = g_.matmul(dout, vt, inner(scores_));
    const Node centered = pointwise(CUDNN_POINTWISE_SUB, dweights, mean);
    const Node dscores = scaled(pointwise(CUDNN_POINTWISE_MUL, centered, weights));
    by_key_head(g_.matmul(transposed(dscores), q, per_query_head(dk)), dk);

    const Node k = g_.reshape(kt, g_.inner(type_, p_.k, p_.k_strides));
    if (p_.deterministic) {
      g_.matmul(dscores, k, dq);
    } else {
      const Node sums = g_.tensor(CUDNN_DATA_FLOAT, p_.q, {p_.q[1] * p_.q[2] * p_.q[3], p_.q[2] * p_.q[3], p_.q[3], 1});
      g_.pointwise(CUDNN_POINTWISE_IDENTITY, g_.matmul(dscores, k, sums), dq);
    }
    return std::move(g_);
  }

 private:
  Node inner(const Axes& sizes) { return g_.inner(CUDNN_DATA_FLOAT, sizes); }
  Node pointwise(cudnnPointwiseMode_t mode, Node x, Node b) { return g_.pointwise(mode, x, b, inner(scores_)); }
  Node exp(Node x) { return g_.pointwise(CUDNN_POINTWISE_EXP, x, inner(scores_)); }
  Node scaled(Node x) { return pointwise(CUDNN_POINTWISE_MUL, x, g_.scalar(static_cast<float>(p_.scale))); }

  // Sets the scores of keys after the query to −inf for causal attention, and those of keys before the window.
  Node masked(Node scores) {
    if (!p_.causal) {
      return scores;
    }
    const auto keep_where = [&](cudnnPointwiseMode_t compare, Node a, Node b) {
      const Node seen = g_.pointwise(compare, a, b, g_.inner(CUDNN_DATA_BOOLEAN, scores_), CUDNN_DATA_BOOLEAN);
      const Node never = g_.scalar(-std::numeric_limits<float>::infinity());
      scores = g_.select(scores, never, seen, inner(scores_));
    };
    const auto index = [&](std::int64_t axis) { return g_.index(scores, axis, g_.inner(CUDNN_DATA_INT32, scores_)); };
    const auto sum = [&](Node x, std::int64_t number, cudnnPointwiseMode_t mode = CUDNN_POINTWISE_ADD) {
      return g_.pointwise(mode, x, g_.scalar(static_cast<std::int32_t>(number)), g_.inner(CUDNN_DATA_INT32, scores_),
                          CUDNN_DATA_INT32);
    };
    Node row = index(2);
    const Node column = index(3);
    if (p_.causal_offset != 0) {
      row = sum(sum(row, p_.k[2]), p_.q[2], CUDNN_POINTWISE_SUB);
    }
    keep_where(CUDNN_POINTWISE_CMP_GE, row, column);
    if (p_.window > 0) {
      const Node last_row = index(2);
      Node end = sum(index(3), p_.window);
      if (p_.causal_offset != 0) {
        end = sum(sum(end, p_.k[2], CUDNN_POINTWISE_SUB), p_.q[2]);
      }
      keep_where(CUDNN_POINTWISE_CMP_GT, end, last_row);
    }
    return scores;
  }

  // Transposes (B, H, T, S) to (B, H, S, T) and rounds to 16 bits for the tensor cores.
  Node transposed(Node x) {
    const Axes strides{scores_[1] * scores_[2] * scores_[3], scores_[2] * scores_[3], 1, scores_[3]};
    return g_.reshape(x, g_.inner(type_, swapped(scores_), strides));
  }

  // If query heads share a key head, a virtual tensor with the gradient for each query head, whose sum is `to` (dk or
  // dv). Otherwise `to` itself.
  Node per_query_head(Node to) {
    return p_.q[1] == p_.k[1] ? to : g_.inner(type_, {p_.k[0], p_.q[1], p_.k[2], p_.k[3]});
  }
  void by_key_head(Node from, Node to) {
    if (from.id != to.id) {
      g_.reduce(CUDNN_REDUCE_TENSOR_ADD, from, to);
    }
  }

  Graph g_;
  const Problem& p_;
  cudnnDataType_t type_;
  Axes scores_;  // B, H, T, S
  Axes rows_;    // B, H, T, 1
};

Problem problem_of(const FusedAttention& args) {
  return {.dtype = args.q.dtype(),
          .q = sizes_of(args.q),
          .k = sizes_of(args.k),
          .q_strides = strides_of(args.q),
          .k_strides = strides_of(args.k),
          .v_strides = strides_of(args.v),
          .out_strides = strides_of(args.out),
          .scale = args.scale,
          .causal = args.causal,
          .causal_offset = args.causal ? args.causal_offset : 0,
          .window = args.window,
          .has_lse = args.lse.defined()};
}

Problem problem_of(const FusedAttentionBackward& args) {
  return {.dtype = args.q.dtype(),
          .q = sizes_of(args.q),
          .k = sizes_of(args.k),
          .q_strides = strides_of(args.q),
          .k_strides = strides_of(args.k),
          .v_strides = strides_of(args.v),
          .out_strides = strides_of(args.out),
          .is_backward = true,
          .dout_strides = strides_of(args.dout),
          .dq_strides = strides_of(args.dq),
          .dk_strides = strides_of(args.dk),
          .dv_strides = strides_of(args.dv),
          .scale = args.scale,
          .causal = args.causal,
          .causal_offset = args.causal ? args.causal_offset : 0,
          .window = args.window,
          .has_lse = true};
}

struct Compiled {
  std::unique_ptr<cuda::CudnnPlan> plan;  // null if cuDNN does not support the problem, for this reason:
  std::string reason;
};

// The plan for a problem. It is compiled on first use, which takes some 100 ms, and then cached.
const Compiled& compiled(const Problem& problem) {
  static std::mutex mutex;
  static std::map<std::pair<int, Problem>, Compiled> plans;
  int device = 0;
  cuda::check(cudaGetDevice(&device), "cudaGetDevice");
  const std::scoped_lock lock(mutex);
  const auto [found, is_new] = plans.try_emplace({device, problem});
  if (is_new) {
    try {
      Graph graph = problem.is_backward ? Builder(problem).backward() : Builder(problem).forward();
      found->second.plan = graph.compile(cuda::cudnn_device(), &found->second.reason);
    } catch (const cuda::CudaError& error) {
      found->second.reason = error.what();
    }
  }
  return found->second;
}

void run(const char* name, const Tensor& q, const Tensor& k, const Problem& problem, const std::vector<void*>& data) {
  const Compiled& made = compiled(problem);
  check(made.plan != nullptr, "{}: cuDNN has no kernel for q {} and k {}: {}", name, q.shape(), k.shape(), made.reason);
  const Tensor workspace = empty({made.plan->workspace_bytes()}, uint8, q.device());
  made.plan->run(data, workspace.raw_data());
  cuda::LaunchObserver::notify(name);
}

}  // namespace

bool cudnn_attention_supports(Cuda, const FusedAttention& args) {
  const std::int64_t queries = args.q.size(2), keys = args.k.size(2), width = args.q.size(3);
  const bool is_16_bit = args.q.dtype() == float16 || args.q.dtype() == bfloat16;
  // cuDNN supports an offset only if it aligns the last query with the last key.
  const bool offset =
      !args.causal || args.causal_offset == 0 || (args.causal_offset == keys - queries && keys > queries);
  if (!is_16_bit || args.dropout.drops() || args.mask.defined() || width % 8 != 0 || width > 128 || !offset ||
      args.v.size(3) != width || !is_aligned(args.q) || !is_aligned(args.k) || !is_aligned(args.v) ||
      !is_aligned(args.out) || cudnnGetVersion() < kOldestVersion) {
    return false;
  }
  return compiled(problem_of(args)).plan != nullptr;
}

void cudnn_attention_forward(Cuda, const FusedAttention& args) {
  std::vector<void*> data{args.q.raw_data(), args.k.raw_data(), args.v.raw_data(), args.out.raw_data()};
  if (args.lse.defined()) {
    data.push_back(args.lse.raw_data());
  }
  run("cudnn_attention_forward", args.q, args.k, problem_of(args), data);
}

void cudnn_attention_backward(Cuda, const FusedAttentionBackward& args) {
  const Tensor mean = empty(args.lse.shape(), float32, args.lse.device());
  run("cudnn_attention_backward", args.q, args.k, problem_of(args),
      {args.q.raw_data(), args.k.raw_data(), args.v.raw_data(), args.out.raw_data(), args.lse.raw_data(),
       args.dout.raw_data(), args.dq.raw_data(), args.dk.raw_data(), args.dv.raw_data(), mean.raw_data()});
}

}  // namespace mica::kernels
