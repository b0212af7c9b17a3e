#include <algorithm>
#include <type_traits>

#include <mica/autograd/grad_mode.h>
#include <mica/core/creation.h>
#include <mica/core/cuda/device.h>
#include <mica/infer/kernels/detail/kernels.h>
#include <mica/ops/decode_attention/detail/decode_attention_kernels.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/gated/gated.h>
#include <mica/ops/join/join.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/norm/rms_norm.h>
#include <mica/ops/view/view.h>

namespace mica::kernels {

bool is_aligned(const Tensor& x) {
  return !x.defined() || (x.is_contiguous() && reinterpret_cast<std::uintptr_t>(x.raw_data()) % 16 == 0);
}

bool kernel_takes(const DecodeWeight& w, const DecodeWeight& first, DType dtype) {
  if (w.out() % kMultiple != 0 || !is_aligned(w.bias) || w.is_quantized() != first.is_quantized()) {
    return false;
  }
  if (!w.is_quantized()) {
    return is_aligned(w.matrix);
  }
  const QuantizedWeight& q = w.quantized;
  const bool groups = q.group_size == kWholeColumn || q.group_size % kMultiple == 0;
  return (q.bits == 4 || q.bits == 8) && q.bits == first.quantized.bits && groups &&
         q.group_size == first.quantized.group_size && q.mode == QuantizationMode::scale_and_shift &&
         q.scale.dtype() == dtype && q.zero.dim() == 2 && q.zero.dtype() == dtype && is_aligned(q.packed) &&
         is_aligned(q.scale) && is_aligned(q.zero);
}

}  // namespace mica::kernels

namespace mica::infer {

namespace {

using kernels::is_aligned;
using kernels::kernel_takes;
using kernels::kMultiple;

bool is_16_bit(DType dtype) { return dtype == float16 || dtype == bfloat16; }

void check_linear(const Tensor& x, const std::vector<DecodeWeight>& weights, const DecodeLinearOptions& options) {
  check(!autograd::grad_enabled(), "decode_linear: works without gradients only: use autograd::NoGrad");
  check(x.dim() == 2 && is_floating(x.dtype()), "decode_linear: expected floating x of shape (M, in), got {} {}",
        x.dtype(), x.shape());
  check(!weights.empty() && weights.size() <= kernels::kMostDecodeWeights,
        "decode_linear: expected from 1 to {} weights, got {}", kernels::kMostDecodeWeights, weights.size());
  for (const DecodeWeight& w : weights) {
    check(w.matrix.defined() != w.is_quantized(), "decode_linear: expected a floating or a quantized weight");
    if (w.is_quantized()) {
      check_weight("decode_linear", w.quantized);
    } else {
      check(w.matrix.dim() == 2 && w.matrix.dtype() == x.dtype(),
            "decode_linear: expected a weight of {} and shape (out, in), got {} {}", x.dtype(), w.matrix.dtype(),
            w.matrix.shape());
    }
    check(w.in() == x.size(1), "decode_linear: expected a weight for {} columns, got one for {}", x.size(1), w.in());
    const Tensor& data = w.is_quantized() ? w.quantized.packed : w.matrix;
    check(data.device() == x.device(), "decode_linear: expected a weight on {}, got it on {}", x.device(),
          data.device());
    check(!w.bias.defined() ||
              (w.bias.shape() == Shape{w.out()} && w.bias.dtype() == x.dtype() && w.bias.device() == x.device()),
          "decode_linear: expected a bias of {} and shape [{}] on {}", x.dtype(), w.out(), x.device());
  }
  check(!options.swiglu || (weights.size() == 2 && weights[0].out() == weights[1].out()),
        "decode_linear: swiglu takes two weights of one shape");
}

template <class F>
void on_cuda(Device device, const F& f) {
  on_device(device, [&](auto kind) {
    if constexpr (std::is_same_v<decltype(kind), Cuda>) {
      f(kind);
    }
  });
}

// The most rows for which each block repeats the norm; more rows are normalized once, before the product.
constexpr std::int64_t kFewRows = 8;

// Whether a product is as large as that of the head.
bool is_large_product(const std::vector<DecodeWeight>& weights) {
  constexpr std::int64_t kLarge = std::int64_t{1} << 25;
  return weights.size() == 1 && weights[0].in() * weights[0].out() >= kLarge;
}

// With fewer outputs, it is faster to split the terms of an output among blocks.
bool has_many_outputs(const std::vector<DecodeWeight>& weights) {
  constexpr std::int64_t kManyTiles = 96;
  std::int64_t outputs = 0;
  for (const DecodeWeight& w : weights) {
    outputs += w.out();
  }
  return outputs / kMultiple > kManyTiles;
}

bool has_wgmma(Device device) {
  bool has = false;
  on_cuda(device, [&](auto) { has = cuda::device_has_wgmma(); });
  return has;
}

// The kernels for few rows: decode_linear(), decode_linear_batch() and decode_linear_wide().
enum class FewRowsKernel { none, any_chip, batch, wide };

// The fastest of these kernels for a product; none if no kernel supports it, or if other ops are faster.
FewRowsKernel few_rows_kernel(const Tensor& x, const std::vector<DecodeWeight>& weights,
                              const DecodeLinearOptions& options) {
  const bool takes = x.device().is_cuda() && is_16_bit(x.dtype()) && x.size(0) >= 1 &&
                     x.size(0) <= kernels::kMostDecodeRows && x.size(1) >= kMultiple && x.size(1) % kMultiple == 0 &&
                     is_aligned(x) && (!options.norm_weight.defined() || options.norm_weight.dtype() == x.dtype()) &&
                     is_aligned(options.norm_weight) && is_aligned(options.residual) &&
                     std::all_of(weights.begin(), weights.end(),
                                 [&](const DecodeWeight& w) { return kernel_takes(w, weights[0], x.dtype()); });
  if (!takes) {
    return FewRowsKernel::none;
  }
  const bool has_faster = !weights[0].is_quantized() && has_wgmma(x.device());
  const bool few = x.size(0) <= (has_faster ? 1 : kFewRows);
  if (weights[0].is_quantized() && weights[0].quantized.bits == 4 && x.size(0) <= kernels::kFewRowsOfFourBits) {
    return FewRowsKernel::any_chip;  // as fast as the others
  }
  bool wide = few ? is_large_product(weights) : has_many_outputs(weights);
  if (wide) {
    on_cuda(x.device(), [&](auto device) { wide = kernels::can_decode_linear_wide(device, x); });
  }
  if (wide) {
    return FewRowsKernel::wide;
  }
  if (!few && !weights[0].is_quantized() && is_large_product(weights)) {
    return FewRowsKernel::none;  // cuBLAS is faster
  }
  return !few && has_wgmma(x.device()) ? FewRowsKernel::batch : FewRowsKernel::any_chip;
}

// Whether decode_linear_many() computes a product. With fewer tiles of y, most multiprocessors would be idle.
bool many_rows_kernel_takes(const Tensor& x, const std::vector<DecodeWeight>& weights,
                            const DecodeLinearOptions& options, std::int64_t columns) {
  constexpr std::int64_t kTile = 128;
  constexpr std::int64_t kManyTiles = 64;
  const bool floating = std::none_of(weights.begin(), weights.end(), [](const auto& w) { return w.is_quantized(); });
  const bool aligned = is_aligned(x) && is_aligned(options.residual) && is_aligned(options.norm_weight) &&
                       (!options.norm_weight.defined() || options.norm_weight.dtype() == x.dtype()) &&
                       std::all_of(weights.begin(), weights.end(), [](const auto& w) { return is_aligned(w.bias); });
  bool takes = false;
  if (floating && aligned && is_16_bit(x.dtype()) && (x.size(0) / kTile) * (columns / kTile) >= kManyTiles) {
    on_cuda(x.device(), [&](auto device) { takes = kernels::can_decode_linear_many(device, x, weights, options); });
  }
  return takes;
}

Tensor product(const Tensor& x, const DecodeWeight& w) {
  if (!w.is_quantized()) {
    return linear(x, w.matrix, w.bias);
  }
  const Tensor y = quantized_matmul(x, w.quantized);
  return w.bias.defined() ? y + w.bias : y;
}

Tensor by_other_ops(const Tensor& x, const std::vector<DecodeWeight>& weights, const DecodeLinearOptions& options) {
  Tensors parts;
  for (const DecodeWeight& w : weights) {
    parts.push_back(product(x, w));
  }
  const Tensor y = options.swiglu ? swiglu(parts[0], parts[1]) : parts.size() == 1 ? parts[0] : cat(parts, 1);
  return options.residual.defined() ? y + options.residual : y;
}

// The shape of y, after the checks.
Shape checked_shape(const Tensor& x, const std::vector<DecodeWeight>& weights, const DecodeLinearOptions& options) {
  check_linear(x, weights, options);
  std::int64_t out = 0;
  for (const DecodeWeight& w : weights) {
    out += w.out();
  }
  const Shape shape{x.size(0), options.swiglu ? weights[0].out() : out};
  check(!options.residual.defined() || (options.residual.shape() == shape && options.residual.dtype() == x.dtype() &&
                                        options.residual.device() == x.device()),
        "decode_linear: expected a residual of {} and shape {} on {}", x.dtype(), shape, x.device());
  check(!options.norm_weight.defined() ||
            (options.norm_weight.shape() == Shape{x.size(1)} && options.norm_weight.device() == x.device()),
        "decode_linear: expected norm_weight of shape [{}] on {}", x.size(1), x.device());
  return shape;
}

Tensor normed(const Tensor& x, const DecodeLinearOptions& options) {
  return options.norm_weight.defined() ? rms_norm(x, {x.size(1)}, options.norm_weight, options.eps) : x;
}

Tensor by_few_rows_kernel(FewRowsKernel kernel, const Tensor& x, const std::vector<DecodeWeight>& weights,
                          const DecodeLinearOptions& options, const Shape& shape) {
  DecodeLinearOptions fused = options;
  Tensor input = x;
  if (x.size(0) > kFewRows && kernel == FewRowsKernel::any_chip) {
    input = normed(x, options);
    fused.norm_weight = {};
  }
  const Tensor y = empty(shape, x.dtype(), x.device());
  const kernels::DecodeLinearArgs args{.x = input, .weights = weights, .options = fused, .y = y};
  on_cuda(x.device(), [&](auto device) {
    switch (kernel) {
      case FewRowsKernel::wide: return kernels::decode_linear_wide(device, args);
      case FewRowsKernel::batch: return kernels::decode_linear_batch(device, args);
      default: return kernels::decode_linear(device, args);
    }
  });
  return y;
}

// Returns y, or the queries of decode_linear_append().
Tensor by_many_rows_kernel(const Tensor& x, const std::vector<DecodeWeight>& weights,
                           const DecodeLinearOptions& options, const Shape& shape,
                           const kernels::DecodeAppendTo& to = {}) {
  const Tensor y = empty(shape, x.dtype(), x.device());
  const Tensor input = normed(x, options);
  on_cuda(x.device(), [&](auto device) {
    kernels::decode_linear_many(device, {.x = input, .weights = weights, .options = options, .y = y, .append = to});
  });
  return y;
}

}  // namespace

Tensor decode_linear(const Tensor& x, const std::vector<DecodeWeight>& weights, const DecodeLinearOptions& options) {
  const Shape shape = checked_shape(x, weights, options);
  const FewRowsKernel kernel = few_rows_kernel(x, weights, options);
  if (kernel != FewRowsKernel::none) {
    return by_few_rows_kernel(kernel, x, weights, options, shape);
  }
  if (many_rows_kernel_takes(x, weights, options, shape[1])) {
    return by_many_rows_kernel(x, weights, options, shape);
  }
  return by_other_ops(normed(x, options), weights, options);
}

bool has_prompt_kernels(Device device) { return device.is_cuda() && has_wgmma(device); }

Tensor decode_append(const Tensor& qkv, const DecodeAttention& a, std::int64_t first) {
  constexpr const char* kName = "decode_append";
  detail::check_cache(kName, a);
  const DType dtype = a.keys.dtype();
  const Device device = a.keys.device();
  check(is_16_bit(dtype) && has_prompt_kernels(device), "{}: there is no kernel for keys of {} on this GPU", kName,
        dtype);
  const std::int64_t batch = a.keys.size(0), columns = (a.heads + 2 * a.key_heads()) * a.width();
  check(qkv.defined() && qkv.dim() == 2 && batch >= 1 && qkv.size(0) % batch == 0 && qkv.size(1) == columns &&
            qkv.dtype() == dtype && qkv.device() == device && qkv.is_contiguous(),
        "{}: expected contiguous qkv of {} with {} columns, and rows of {} sequences, got {} {}", kName, dtype, columns,
        batch, qkv.dtype(), qkv.shape());
  const std::int64_t steps = qkv.size(0) / batch;
  check(steps >= 1 && first >= 0 && first <= a.keys.size(2) - steps,
        "{}: expected slots for the positions from {} to {}, got {}", kName, first, first + steps, a.keys.size(2));
  check(a.q_norm.defined() == a.k_norm.defined(), "{}: expected both norms or none", kName);
  const Tensor queries = empty({batch, steps, a.heads, a.width()}, dtype, device);
  const kernels::DecodeAppendArgs args{.problem = a, .qkv = qkv, .first = first, .queries = queries};
  on_cuda(device, [&](auto kind) { kernels::decode_append(kind, args); });
  return queries;
}

Tensor decode_rotations(const std::vector<float>& frequencies, double scale, std::int64_t first, std::int64_t count,
                        Device device) {
  constexpr std::int64_t kMostPairs = 128;
  const auto pairs = static_cast<std::int64_t>(frequencies.size());
  check(device.is_cuda() && first >= 0 && count >= 1 && pairs >= 1 && pairs <= kMostPairs,
        "decode_rotations: expected CUDA, at least one position and from 1 to {} frequencies", kMostPairs);
  const Tensor rotations = empty({count, pairs, 2}, float32, device);
  on_cuda(device, [&](auto kind) {
    kernels::decode_rotations(kind,
                              {.frequencies = frequencies, .scale = scale, .first = first, .rotations = rotations});
  });
  return rotations;
}

Tensor decode_linear_append(const Tensor& x, const std::vector<DecodeWeight>& weights,
                            const DecodeLinearOptions& options, const DecodeAttention& a, std::int64_t first,
                            const Tensor& rotations) {
  const Shape shape = checked_shape(x, weights, options);
  check(
      a.keys.defined() && a.keys.dim() == 4 && a.keys.size(0) >= 1 && a.values.shape() == a.keys.shape() &&
          a.keys.is_contiguous() && a.values.is_contiguous() && shape[0] % a.keys.size(0) == 0,
      "decode_linear_append: expected contiguous keys and values of one shape (B, Hkv, C, D), and rows of B sequences");
  const std::int64_t batch = a.keys.size(0), steps = shape[0] / batch, width = a.width();
  const kernels::DecodeAppendTo to{
      .keys = a.keys, .values = a.values, .rotations = rotations, .first = first, .steps = steps};
  const bool fits =
      !options.swiglu && !options.residual.defined() && weights.size() == 3 && weights[0].out() == a.heads * width &&
      weights[1].out() == a.key_heads() * width && weights[2].out() == weights[1].out() &&
      a.keys.dtype() == x.dtype() && first >= 0 && first <= a.keys.size(2) - steps && rotations.defined() &&
      rotations.shape() == Shape{steps, width / 2, 2} && rotations.dtype() == float32 && rotations.is_contiguous() &&
      rotations.device() == x.device() && a.keys.device() == x.device() && a.values.device() == x.device() &&
      a.values.dtype() == a.keys.dtype() && few_rows_kernel(x, weights, options) == FewRowsKernel::none &&
      many_rows_kernel_takes(x, weights, options, shape[1]);
  bool takes = false;
  if (fits) {
    on_cuda(x.device(), [&](auto device) { takes = kernels::can_decode_linear_append(device, to, a); });
  }
  if (!takes) {
    return decode_append(decode_linear(x, weights, options), a, first);
  }
  const Tensor queries = by_many_rows_kernel(x, weights, options, {shape[0], a.heads * width}, to);
  return reshape(queries, {batch, steps, a.heads, width});
}

}  // namespace mica::infer
