#include <algorithm>

#include <mica/autograd/autocast.h>
#include <mica/autograd/function.h>
#include <mica/autograd/grad.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/cross_entropy/detail/cross_entropy_steps.h>
#include <mica/ops/cross_entropy/linear_cross_entropy.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/matmul/detail/matmul_kernels.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

// The number of rows per chunk. Chunks have about the same size and, if there are many rows, whole tiles of the
// product.
std::int64_t chunk_rows(std::int64_t rows, std::int64_t row_bytes, std::int64_t chunk_bytes) {
  constexpr std::int64_t kTile = 128;
  const std::int64_t most = std::max<std::int64_t>(chunk_bytes / row_bytes, 1);
  if (rows <= most) {
    return rows;
  }
  const std::int64_t whole = most < kTile ? most : most / kTile * kTile;
  const std::int64_t chunks = (rows + whole - 1) / whole;
  const std::int64_t even = (rows + chunks - 1) / chunks;
  return most < kTile ? even : (even + kTile - 1) / kTile * kTile;
}

Tensor rows_of(const Tensor& x, std::int64_t begin, std::int64_t end) { return slice(x, 0, begin, end); }

// Computes a linear layer and the losses of its rows, chunk by chunk. Nothing is recorded.
struct Chunks {
  Tensor x;        // (M, K), readable
  Tensor weight;   // (V, K), readable
  Tensor targets;  // from packed_targets()
  Tensor class_weight;
  CrossEntropyOptions options;
  std::int64_t bytes;

  std::int64_t rows() const { return x.size(0); }
  std::int64_t classes() const { return weight.size(0); }

  Tensor empty_losses() const { return empty({rows()}, accumulate_dtype(x.dtype()), x.device()); }

  Tensor losses() const {
    const Tensor result = empty_losses();
    each([&](const Tensor& logits, std::int64_t begin, std::int64_t end) {
      const Tensor part = rows_of(targets, begin, end);
      const Tensor losses = rows_of(result, begin, end);
      const Tensor logsumexp = empty_like(losses);
      const Tensor mass = empty_like(losses);
      const kernels::CrossEntropyForward args{.terms = detail::terms_of(options, logits, part, class_weight),
                                              .logsumexp = logsumexp,
                                              .mass = mass,
                                              .losses = losses};
      on_device(x.device(), [&](auto device) { kernels::cross_entropy_forward(device, args); });
    });
    return result;
  }

  struct Gradients {
    Tensor losses;
    Tensor dx;
    Tensor dweight;
  };
  // The gradients of Σ losses · dloss / denominator. dloss and denominator may be undefined, for 1. Computes only those
  // of dx and dweight that are wanted; dweight has the accumulation dtype.
  Gradients gradients(const Tensor& dloss, const Tensor& denominator, bool want_dx, bool want_dweight) const {
    Gradients result{
        .losses = empty_losses(),
        .dx = want_dx ? empty(x.shape(), x.dtype(), x.device()) : Tensor{},
        .dweight = want_dweight ? zeros(weight.shape(), accumulate_dtype(x.dtype()), x.device()) : Tensor{}};
    each([&](const Tensor& logits, std::int64_t begin, std::int64_t end) {
      const Tensor part = rows_of(targets, begin, end);
      const Tensor scale = dloss.defined() ? rows_of(dloss, begin, end) : dloss;
      const Tensor losses = rows_of(result.losses, begin, end);
      const kernels::CrossEntropyInPlace args{.terms = detail::terms_of(options, logits, part, class_weight),
                                              .dloss = scale,
                                              .denominator = denominator,
                                              .losses = losses};
      on_device(x.device(), [&](auto device) {
        kernels::cross_entropy_in_place(device, args);
        if (want_dx && x.numel() > 0) {
          kernels::matmul(device, {.a = logits, .b = weight, .bias = {}, .out = rows_of(result.dx, begin, end)});
        }
        if (want_dweight && x.numel() > 0) {
          kernels::matmul_add(device,
                              {.a = transpose(logits, 0, 1), .b = rows_of(x, begin, end), .sum = result.dweight});
        }
      });
    });
    return result;
  }

 private:
  // Calls f(logits, begin, end) for each chunk. All chunks share one buffer for their logits.
  template <class F>
  void each(const F& f) const {
    if (rows() == 0 || classes() == 0) {
      return;
    }
    const std::int64_t row_bytes = classes() * static_cast<std::int64_t>(size_of(x.dtype()));
    const std::int64_t count = chunk_rows(rows(), row_bytes, bytes);
    const Tensor buffer = empty({count, classes()}, x.dtype(), x.device());
    for (std::int64_t begin = 0; begin < rows(); begin += count) {
      const std::int64_t end = std::min(begin + count, rows());
      const Tensor logits = rows_of(buffer, 0, end - begin);
      if (x.size(1) == 0) {
        fill_data(logits, 0);
      } else {
        const kernels::MatmulArgs product{
            .a = rows_of(x, begin, end), .b = transpose(weight, 0, 1), .bias = {}, .out = logits};
        on_device(x.device(), [&](auto device) { kernels::matmul(device, product); });
      }
      f(logits, begin, end);
    }
  }
};

struct LinearCrossEntropy {
  static constexpr bool composed = true;
  CrossEntropyOptions options;
  std::int64_t chunk_bytes;

  Tensor forward(autograd::Context& ctx, const Tensor& x, const Tensor& weight, const Tensor& targets,
                 const Tensor& class_weight) const {
    const Chunks chunks = chunks_of(x, weight, targets, class_weight);
    const Tensor denominator = detail::mean_denominator(options, chunks.targets, class_weight, x.dtype());
    Chunks::Gradients known;
    // In float16, gradients of a mean could underflow before backward multiplies them by a loss scale. So the gradients
    // of the sum are stored, and backward divides by the denominator.
    const bool divide_later = x.dtype() == float16;
    if (options.reduction == Reduction::none || !ctx.needs_any_grad()) {
      known.losses = chunks.losses();
    } else {
      known = chunks.gradients({}, divide_later ? Tensor{} : denominator, ctx.needs_grad(0), ctx.needs_grad(1));
      if (known.dweight.defined() && !divide_later) {
        known.dweight = known.dweight.to(weight.dtype());
      }
    }
    ctx.save_for_backward(x, weight, targets, class_weight, known.dx, known.dweight,
                          divide_later ? denominator : Tensor{});
    return detail::reduced(options, known.losses, denominator, x.shape().slice(0, x.dim() - 1));
  }

  Tensors backward(autograd::Context& ctx, const Tensor& dloss) const {
    const auto [x, weight, targets, class_weight, dx, dweight, denominator] = ctx.saved<7>();
    if (autograd::grad_enabled()) {
      return by_recorded_ops(ctx, dloss, x, weight, targets, class_weight);
    }
    Tensors gradients(4);
    if (options.reduction == Reduction::none) {
      const Chunks chunks = chunks_of(x, weight, targets, class_weight);
      const Tensor scale = detail::packed(dloss, {chunks.rows()});
      const auto now = chunks.gradients(scale, {}, ctx.needs_grad(0), ctx.needs_grad(1));
      gradients[0] = now.dx;
      gradients[1] = now.dweight.defined() ? now.dweight.to(weight.dtype()) : Tensor{};
    } else {
      const Tensor factor = denominator.defined() ? dloss / reshape(denominator, {}) : dloss;
      gradients[0] = scaled(dx, factor, x.dtype());
      gradients[1] = scaled(dweight, factor, x.dtype());
    }
    if (gradients[0].defined()) {
      gradients[0] = reshape(gradients[0], x.shape());
    }
    return gradients;
  }

 private:
  // Does not modify the stored gradients, since backward may run again.
  static Tensor scaled(const Tensor& gradient, const Tensor& factor, DType dtype) {
    if (!gradient.defined()) {
      return {};
    }
    const Tensor result = empty(gradient.shape(), gradient.dtype(), gradient.device());
    copy_into(result, gradient);
    detail::scale_gradient(result, factor);
    return result.to(dtype);
  }

  Chunks chunks_of(const Tensor& x, const Tensor& weight, const Tensor& targets, const Tensor& class_weight) const {
    const std::int64_t rows = numel_of(x.shape().slice(0, x.dim() - 1));
    const Tensor matrix = x.dim() == 2 ? x.detach() : detail::packed(x, {rows, weight.size(1)});
    return {
        .x = kernels::readable(matrix),
        .weight = kernels::readable(weight.detach()),
        .targets = detail::packed_targets("linear_cross_entropy", targets, rows, weight.size(0), options.ignore_index),
        .class_weight = class_weight,
        .options = options,
        .bytes = chunk_bytes};
  }

  Tensors by_recorded_ops(autograd::Context& ctx, const Tensor& dloss, const Tensor& x, const Tensor& weight,
                          const Tensor& targets, const Tensor& class_weight) const {
    CrossEntropyOptions same = options;
    same.weight = class_weight;
    Tensors inputs;
    for (const int i : {0, 1}) {
      if (ctx.needs_grad(i)) {
        inputs.push_back(i == 0 ? x : weight);
      }
    }
    const Tensor loss = cross_entropy(linear(x, weight), targets, same);
    const Tensors known = autograd::grad({loss}, inputs, {dloss}, {.create_graph = true});
    Tensors gradients(4);
    gradients[0] = ctx.needs_grad(0) ? known.front() : Tensor{};
    gradients[1] = ctx.needs_grad(1) ? known.back() : Tensor{};
    return gradients;
  }
};

}  // namespace

Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& targets,
                            const CrossEntropyOptions& options, std::int64_t chunk_bytes) {
  constexpr const char* kOp = "linear_cross_entropy";
  if (autograd::autocast_narrows(x, weight)) {
    return linear_cross_entropy(autograd::narrowed(x), autograd::narrowed(weight), targets, options, chunk_bytes);
  }
  check(weight.dim() == 2, "{}: expected weight of shape (V, K), got {}", kOp, weight.shape());
  check(x.dim() > 0 && x.size(-1) == weight.size(1), "{}: expected x of shape (…, {}), got {}", kOp, weight.size(1),
        x.shape());
  check(is_floating(x.dtype()) && weight.dtype() == x.dtype(),
        "{}: expected x and weight of one floating dtype, got {} and {}", kOp, x.dtype(), weight.dtype());
  check(weight.device() == x.device(), "{}: expected weight on {}, got {}", kOp, x.device(), weight.device());
  Shape logits = x.shape();
  logits.back() = weight.size(0);
  detail::check_cross_entropy(kOp, logits, x.dtype(), x.device(), targets, options);
  check(!options.in_place, "{}: expected in_place to be off: there are no logits to write over", kOp);
  check(!targets.requires_grad(), "{}: expected probabilities that require no gradient, as they would get none", kOp);
  check(chunk_bytes > 0, "{}: expected chunk_bytes of at least 1, got {}", kOp, chunk_bytes);

  const Tensor class_weight = detail::class_weights(options, x.dtype());
  CrossEntropyOptions rest = options;
  rest.weight = {};  // passed as an input of the op instead
  return autograd::apply(LinearCrossEntropy{.options = rest, .chunk_bytes = chunk_bytes}, x, weight, targets,
                         class_weight);
}

}  // namespace mica
