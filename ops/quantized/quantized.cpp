#include <string_view>

#include <mica/autograd/function.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/index/index.h>
#include <mica/ops/quantized/detail/quantized_functions.h>
#include <mica/ops/quantized/detail/quantized_kernels.h>
#include <mica/ops/quantized/quantized.h>
#include <mica/ops/quantized/round_activations.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

std::string_view name_of(QuantizationMode mode) {
  switch (mode) {
    case QuantizationMode::packed: return "packed";
    case QuantizationMode::shift: return "shift";
    case QuantizationMode::scale: return "scale";
    case QuantizationMode::scale_and_shift: return "scale_and_shift";
    case QuantizationMode::fused_multiply_add: return "fused_multiply_add";
  }
  return "unknown";
}

// The tensors of a product except x, in the order in which they are inputs of the op.
struct Operands {
  Tensor packed, scale, zero, scale_factor, zero_factor, columns, rows;
};

// What describes a weight, apart from its tensors.
struct Format {
  std::int64_t rows;
  int bits;
  std::int64_t group_size;
  QuantizationMode mode;

  explicit Format(const QuantizedWeight& q) : rows(q.rows), bits(q.bits), group_size(q.group_size), mode(q.mode) {}

  QuantizedWeight with(const Operands& t) const {
    return {.packed = t.packed,
            .scale = t.scale,
            .zero = t.zero,
            .scale_factor = t.scale_factor,
            .zero_factor = t.zero_factor,
            .rows = rows,
            .bits = bits,
            .group_size = group_size,
            .mode = mode};
  }
};

Tensor contiguous_or_undefined(const Tensor& x) { return x.defined() ? contiguous_data(x) : x; }

Operands operands_of(const QuantizedWeight& q) {
  return {.packed = contiguous_data(q.packed),
          .scale = contiguous_or_undefined(q.scale),
          .zero = contiguous_or_undefined(q.zero),
          .scale_factor = contiguous_or_undefined(q.scale_factor),
          .zero_factor = contiguous_or_undefined(q.zero_factor),
          .columns = {},
          .rows = {}};
}

// Channel scales as a contiguous vector of the accumulation dtype.
Tensor factors(const Tensor& x, DType dtype) {
  if (!x.defined() || x.dtype() == accumulate_dtype(dtype)) {
    return contiguous_or_undefined(x);
  }
  const Tensor result = empty({x.numel()}, accumulate_dtype(dtype), x.device());
  copy_into(as_strided(result, x.shape(), contiguous_strides(x.shape()), 0), x);
  return result;
}

Shape with_last(Shape shape, std::int64_t last) {
  shape.back() = last;
  return shape;
}

Tensor flat_rows(const Tensor& x) {
  const Tensor packed = contiguous_data(x);
  const std::int64_t columns = x.size(-1);
  return as_strided(packed, {x.numel() / columns, columns}, {columns, 1}, packed.handle()->offset);
}

Tensor gradient_of_x(const Tensor& dy, const Operands& operands, const Format& format);
Tensor product(const Tensor& x, const Operands& operands, const Format& format);

// Computes dx from dy. It is linear in dy, and its gradient is the product again.
struct QuantizedMatmulGradient {
  static constexpr bool composed = true;
  Format format;

  Tensor forward(autograd::Context& ctx, const Tensor& dy, const Tensor& packed, const Tensor& scale,
                 const Tensor& zero, const Tensor& scale_factor, const Tensor& zero_factor, const Tensor& columns,
                 const Tensor& rows) const {
    ctx.save_for_backward(packed, scale, zero, scale_factor, zero_factor, columns, rows);
    const Tensor dx = empty(with_last(dy.shape(), format.rows), dy.dtype(), dy.device());
    if (dx.numel() > 0 && dy.numel() > 0) {
      const kernels::QuantizedMatmulBackward args{
          .weight = format.with({packed, scale, zero, scale_factor, zero_factor, {}, {}}),
          .dy = flat_rows(dy),
          .columns = factors(columns, dy.dtype()),
          .rows = factors(rows, dy.dtype()),
          .dx = dx};
      on_device(dx.device(), [&](auto device) { kernels::quantized_matmul_backward(device, args); });
    } else {
      fill_data(dx, 0);
    }
    return dx;
  }

  Tensors backward(autograd::Context& ctx, const Tensor& ddx) const {
    const auto [packed, scale, zero, scale_factor, zero_factor, columns, rows] = ctx.saved<7>();
    return {product(ddx, {packed, scale, zero, scale_factor, zero_factor, columns, rows}, format),
            {},
            {},
            {},
            {},
            {},
            {},
            {}};
  }
};

struct QuantizedMatmul {
  static constexpr bool composed = true;
  Format format;

  Tensor forward(autograd::Context& ctx, const Tensor& x, const Tensor& packed, const Tensor& scale, const Tensor& zero,
                 const Tensor& scale_factor, const Tensor& zero_factor, const Tensor& columns,
                 const Tensor& rows) const {
    ctx.save_for_backward(packed, scale, zero, scale_factor, zero_factor, columns, rows);
    const Tensor y = empty(with_last(x.shape(), packed.size(1)), x.dtype(), x.device());
    if (y.numel() > 0 && x.numel() > 0) {
      const kernels::QuantizedMatmulForward args{
          .weight = format.with({packed, scale, zero, scale_factor, zero_factor, {}, {}}),
          .x = flat_rows(x),
          .columns = factors(columns, x.dtype()),
          .rows = factors(rows, x.dtype()),
          .y = y,
          .rounds_x = RoundActivations::is_on()};
      on_device(y.device(), [&](auto device) { kernels::quantized_matmul_forward(device, args); });
    } else {
      fill_data(y, 0);
    }
    return y;
  }

  Tensors backward(autograd::Context& ctx, const Tensor& dy) const {
    const auto [packed, scale, zero, scale_factor, zero_factor, columns, rows] = ctx.saved<7>();
    return {gradient_of_x(dy, {packed, scale, zero, scale_factor, zero_factor, columns, rows}, format),
            {},
            {},
            {},
            {},
            {},
            {},
            {}};
  }
};

Tensor product(const Tensor& x, const Operands& t, const Format& format) {
  return autograd::apply(QuantizedMatmul{format}, x, t.packed, t.scale, t.zero, t.scale_factor, t.zero_factor,
                         t.columns, t.rows);
}
Tensor gradient_of_x(const Tensor& dy, const Operands& t, const Format& format) {
  return autograd::apply(QuantizedMatmulGradient{format}, dy, t.packed, t.scale, t.zero, t.scale_factor, t.zero_factor,
                         t.columns, t.rows);
}

// Throws if x requires a gradient, since it would silently get none.
void check_constant(const char* op, const char* name, const Tensor& x) {
  check(!autograd::grad_enabled() || !x.requires_grad(), "{}: expected a constant {}, got one that requires a gradient",
        op, name);
}

// Checks the second level of scales or zeros: present if and only if the first one is uint8.
void check_factor(const char* op, const QuantizedWeight& q, const char* name, const Tensor& x, const Tensor& factor) {
  if (!x.defined() || x.dtype() != uint8) {
    check(!factor.defined(), "{}: expected no {}_factor unless {} is uint8", op, name, name);
    return;
  }
  check(q.group_size != kWholeColumn, "{}: expected a floating {} for whole columns, got uint8", op, name);
  const Shape shape{quantized::groups_of(q.rows, quantized::kFactorRows), q.columns()};
  check(factor.defined() && factor.shape() == shape && is_floating(factor.dtype()) &&
            factor.device() == q.packed.device(),
        "{}: expected a floating {}_factor of shape {} on {} for a {} of uint8, got {}", op, name, shape,
        q.packed.device(), name, quantized::described(factor));
  check_constant(op, name, factor);
}

// Checks one of q's tensors: present if and only if its mode uses it, with an allowed shape.
void check_part(const char* op, const QuantizedWeight& q, const char* name, const Tensor& x, const Tensor& factor,
                bool expected, bool may_be_scalar) {
  check_factor(op, q, name, x, factor);
  if (!expected) {
    check(!x.defined(), "{}: expected no {} in mode {}", op, name, name_of(q.mode));
    return;
  }
  check(x.defined(), "{}: expected a {} in mode {}", op, name, name_of(q.mode));
  const Shape shape{q.groups(), q.columns()};
  check(x.shape() == shape || (may_be_scalar && x.dim() == 0), "{}: expected {} of shape {}{}, got {}", op, name, shape,
        may_be_scalar ? " or []" : "", x.shape());
  check((is_floating(x.dtype()) || (x.dtype() == uint8 && x.dim() == 2)) && x.device() == q.packed.device(),
        "{}: expected {} of a floating dtype or uint8 on {}, got {} on {}", op, name, q.packed.device(), x.dtype(),
        x.device());
  check_constant(op, name, x);
}

void check_channels(const Tensor& x, const QuantizedWeight& q, const ChannelScales& channels) {
  const auto check_one = [&](const char* name, const Tensor& scales, const Shape& shape) {
    if (!scales.defined()) {
      return;
    }
    check(scales.shape() == shape, "quantized_matmul: expected {} of shape {}, got {}", name, shape, scales.shape());
    check(is_floating(scales.dtype()) && scales.device() == x.device(),
          "quantized_matmul: expected {} of a floating dtype on {}, got {} on {}", name, x.device(), scales.dtype(),
          scales.device());
    check_constant("quantized_matmul", name, scales);
  };
  check_one("channels.columns", channels.columns, {q.columns()});
  check_one("channels.rows", channels.rows, x.shape().slice(0, x.dim() - 1));
}

}  // namespace

void check_weight(const char* op, const QuantizedWeight& q) {
  quantized::check_bits(op, q.bits);
  quantized::check_group_size(op, q.group_size, q.bits);
  quantized::check_mode(op, q.mode);
  check(q.packed.defined() && q.packed.dtype() == int32 && q.packed.dim() == 2,
        "{}: expected packed to be an int32 matrix, got {}", op, quantized::described(q.packed));
  check(q.rows >= 0, "{}: expected rows >= 0, got {}", op, q.rows);
  check(q.packed.size(0) == quantized::words_of(q.rows, q.bits),
        "{}: expected packed of shape [{}, N] for {} rows of {} bits, got {}", op, quantized::words_of(q.rows, q.bits),
        q.rows, q.bits, q.packed.shape());
  check_part(op, q, "scale", q.scale, q.scale_factor, quantized::has_scale(q.mode), false);
  check_part(op, q, "zero", q.zero, q.zero_factor, quantized::has_zero(q.mode), true);
}

std::int64_t QuantizedWeight::groups() const {
  quantized::check_group_size("QuantizedWeight", group_size, bits);
  check(rows >= 0, "QuantizedWeight: expected rows >= 0, got {}", rows);
  return quantized::groups_of(rows, group_size);
}

Tensor dequantize(const QuantizedWeight& q, DType dtype) {
  check_weight("dequantize", q);
  check(is_floating(dtype), "dequantize: expected a floating dtype, got {}", dtype);
  const Tensor out = empty({q.rows, q.columns()}, dtype, q.packed.device());
  if (out.numel() > 0) {
    const kernels::Dequantize args{.weight = Format(q).with(operands_of(q)), .out = out};
    on_device(out.device(), [&](auto device) { kernels::dequantize(device, args); });
  }
  return out;
}

Tensor quantized_embedding(const QuantizedWeight& q, const Tensor& indices, DType dtype) {
  check_weight("quantized_embedding", q);
  check(indices.defined() && (indices.dtype() == int64 || indices.dtype() == int32) &&
            indices.device() == q.packed.device(),
        "quantized_embedding: expected indices of int64 or int32 on {}, got {}", q.packed.device(),
        quantized::described(indices));
  const Tensor flat = reshape(indices, {indices.numel()});
  QuantizedWeight some = q;
  for (const auto& [name, part] : quantized_parts()) {
    const Tensor& tensor = q.*part;
    some.*part = tensor.defined() && tensor.dim() == 2 ? index_select(tensor, 1, flat) : tensor;
  }
  Shape shape = indices.shape();
  shape.push_back(q.rows);
  return reshape(contiguous_data(transpose(dequantize(some, dtype), 0, 1)), shape);
}

Tensor quantized_matmul(const Tensor& x, const QuantizedWeight& q, const ChannelScales& channels) {
  check_weight("quantized_matmul", q);
  check(x.defined() && is_floating(x.dtype()), "quantized_matmul: expected x of a floating dtype, got {}",
        x.defined() ? mica::name_of(x.dtype()) : "an undefined tensor");
  check(x.dim() > 0 && x.size(-1) == q.rows, "quantized_matmul: expected x of shape (…, {}), got {}", q.rows,
        x.shape());
  check(q.packed.device() == x.device(), "quantized_matmul: expected a weight on {}, got one on {}", x.device(),
        q.packed.device());
  check_channels(x, q, channels);
  Operands operands = operands_of(q);
  operands.columns = channels.columns;
  operands.rows = channels.rows;
  return product(x, operands, Format(q));
}

}  // namespace mica
