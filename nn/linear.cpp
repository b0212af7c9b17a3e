#include <cmath>
#include <utility>
#include <vector>

#include <mica/autograd/detail/inplace.h>
#include <mica/autograd/grad_mode.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/nn/init.h>
#include <mica/nn/linear.h>
#include <mica/ops/dropout/dropout.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

namespace mica::nn {

namespace {

double scale_of(const LoraOptions& options) { return options.alpha / static_cast<double>(options.rank); }

Tensor row_lengths(const Tensor& x) { return vector_norm(x, {1}); }

}  // namespace

Linear::Linear(std::int64_t in, std::int64_t out, LinearOptions options) {
  check(in >= 1 && out >= 1, "Linear: expected in >= 1 and out >= 1, got {} and {}", in, out);
  const double bound = 1 / std::sqrt(static_cast<double>(in));
  weight = param("weight", init::uniform_(empty({out, in}), -bound, bound));
  if (options.bias) {
    bias = param("bias", init::uniform_(empty({out}), -bound, bound));
  }
}

Linear::Linear(const Tensor& weight, const Tensor& bias) : weight(weight), bias(bias) {
  check(weight.dim() == 2, "Linear: expected a weight of shape (out, in), got {}", weight.shape());
  param("weight", weight);
  register_bias();
}

Linear::Linear(const QuantizedWeight& weight, const Tensor& bias) : bias(bias), quantized(weight) {
  check_weight("Linear", weight);
  register_quantized();
  register_bias();
}

// Registers all of the weight's tensors or, if memory runs out, none.
void Linear::register_quantized(bool fixed) {
  std::vector<const char*> done;
  done.reserve(5);
  try {
    for (const auto& [name, part] : quantized_parts()) {
      const Tensor& tensor = quantized.*part;
      if (tensor.defined()) {
        fixed ? fixed_buffer(name, tensor) : buffer(name, tensor);
        done.push_back(name);
      }
    }
  } catch (...) {
    for (const char* const name : done) {
      forget(name);
    }
    throw;
  }
}

void Linear::register_bias() {
  if (bias.defined()) {
    check(bias.shape() == Shape{out_features()}, "Linear: expected a bias of shape [{}], got {}", out_features(),
          bias.shape());
    param("bias", bias);
  }
}

Tensor Linear::operator()(const Tensor& x, Activation activation) const {
  return call(*this, x, [&](const Tensor& x) { return forward(x, activation); });
}

Tensor Linear::forward(const Tensor& x, Activation activation) const {
  if (!has_lora() && !is_quantized()) {
    return linear(x, weight, bias, activation);
  }
  const Tensor y = is_quantized() ? product_without_adapter(x) : linear(x, weight, bias);
  const Tensor with_bias = is_quantized() && bias.defined() ? y + bias : y;
  const Tensor z = has_lora() ? with_bias + update(x) : with_bias;
  switch (activation) {
    case Activation::none: return z;
    case Activation::relu: return relu(z);
    case Activation::leaky_relu: return leaky_relu(z);
    case Activation::gelu: return gelu(z);
    case Activation::gelu_tanh: return gelu(z, GeluApproximation::tanh);
  }
  fail("Linear: unknown activation {}", static_cast<int>(activation));
}

Tensor Linear::product(const Tensor& x) const {
  return call(*this, x, [&](const Tensor& x) {
    const Tensor y = product_without_adapter(x);
    return has_lora() ? y + update(x) : y;
  });
}

Tensor Linear::product_without_adapter(const Tensor& x) const {
  return is_quantized() ? quantized_matmul(x, quantized) : linear(x, weight);
}

Tensor Linear::update(const Tensor& x) const {
  const Tensor dropped = dropout(x, lora_options_.dropout, is_training());
  const Tensor low = linear(linear(dropped, lora_a), lora_b) * scale_of(lora_options_);
  if (!lora_options_.dora) {
    return low;
  }
  Tensor lengths;
  {
    const autograd::NoGrad no_grad;
    lengths = row_lengths(adapted_weight()).to(lora_magnitude.dtype());
  }
  const Tensor c = lora_magnitude / lengths;
  return product_without_adapter(dropped) * (c - 1) + low * c;
}

Tensor Linear::adapted_weight() const {
  // In float32 or wider, so that the sum is rounded only once.
  const DType wide = accumulate_dtype(lora_a.dtype());
  const Tensor own = is_quantized() ? transpose(dequantize(quantized, wide), 0, 1) : weight.detach().to(wide);
  return own + matmul(lora_b.to(wide), lora_a.to(wide)) * scale_of(lora_options_);
}

LoraParameters Linear::new_lora(const LoraOptions& options) const {
  check_lora_options(options);
  const std::int64_t in = in_features(), out = out_features();
  // The scales of a quantized weight have the dtype that the weight had: see quantize().
  const Device device = is_quantized() ? quantized.packed.device() : weight.device();
  const DType dtype = !is_quantized()             ? weight.dtype()
                      : activations_.has_value()  ? *activations_
                      : quantized.scale.defined() ? quantized.scale.dtype()
                                                  : float32;
  const double bound = 1 / std::sqrt(static_cast<double>(in));
  const Tensor a = init::uniform_(empty({options.rank, in}), -bound, bound).to(device, dtype);
  LoraParameters result{.a = a.detach(), .b = zeros({out, options.rank}, dtype, device)};
  if (options.dora) {
    const autograd::NoGrad no_grad;
    const DType wide = accumulate_dtype(dtype);
    const Tensor own = is_quantized() ? transpose(dequantize(quantized, wide), 0, 1) : weight.detach().to(wide);
    result.magnitude = row_lengths(own).to(dtype).detach();
  }
  return result;
}

void Linear::add_lora(const LoraOptions& options) {
  check(!has_lora(), "Linear: the layer already has an adapter");
  add_lora(options, new_lora(options));
}

void Linear::add_lora(const LoraOptions& options, const LoraParameters& parameters) {
  check_lora_options(options);
  check(!has_lora(), "Linear: the layer already has an adapter");
  const Shape a{options.rank, in_features()}, b{out_features(), options.rank};
  check(parameters.a.shape() == a && parameters.b.shape() == b,
        "Linear: expected an adapter of shapes {} and {}, got {} and {}", a, b, parameters.a.shape(),
        parameters.b.shape());
  check(options.dora ? parameters.magnitude.defined() && parameters.magnitude.shape() == Shape{out_features()}
                     : !parameters.magnitude.defined(),
        "Linear: expected {}",
        options.dora ? "an adapter with the magnitudes of the rows" : "no magnitudes without dora");
  std::vector<const char*> done;
  done.reserve(3);
  try {
    for (const auto& [name, tensor] : {std::pair<const char*, const Tensor&>{"lora_a", parameters.a},
                                       {"lora_b", parameters.b},
                                       {"lora_magnitude", parameters.magnitude}}) {
      if (tensor.defined()) {
        param(name, tensor);
        done.push_back(name);
      }
    }
  } catch (...) {
    for (const char* const name : done) {
      forget(name);
    }
    throw;
  }
  lora_a = parameters.a;
  lora_b = parameters.b;
  lora_magnitude = parameters.magnitude;
  lora_options_ = options;
}

void Linear::remove_lora() {
  check(has_lora(), "Linear: there is no adapter to remove");
  forget("lora_a");
  forget("lora_b");
  if (lora_magnitude.defined()) {
    forget("lora_magnitude");
  }
  lora_a = lora_b = lora_magnitude = {};
}

void Linear::merge_lora() {
  check(has_lora(), "Linear: there is no adapter to merge");
  check(!is_quantized(), "Linear: an adapter cannot be merged into a quantized weight");
  const autograd::NoGrad no_grad;
  Tensor sum = adapted_weight();
  if (lora_options_.dora) {
    const Tensor c = lora_magnitude.to(sum.dtype()) / row_lengths(sum);
    sum = sum * reshape(c, {out_features(), 1});
  }
  const Tensor merged = sum.to(weight.dtype());
  autograd::check_writable("merge_lora", weight);
  // Nothing below allocates memory, so it cannot fail halfway.
  copy_into(weight, merged);
  weight.bump_version("merge_lora");
  remove_lora();
}

void Linear::quantize(QuantizeOptions options) {
  check(!is_quantized(), "Linear: the weight is quantized already");
  const DType dtype = weight.dtype();
  options.dtype = dtype == float64 ? float32 : dtype;
  QuantizedWeight result = mica::quantize(transpose(weight.detach(), 0, 1), options);
  result.scale = result.scale.to(dtype);
  result.zero = result.zero.to(dtype);
  replace_weight(std::move(result), false);
}

void Linear::set_quantized(const QuantizedWeight& value, DType dtype) {
  check(!is_quantized(), "Linear: the weight is quantized already");
  check_weight("Linear", value);
  check(value.rows == in_features() && value.columns() == out_features(),
        "Linear: expected a quantized weight of shape [{}, {}], got [{}, {}]", in_features(), out_features(),
        value.rows, value.columns());
  replace_weight(value, true);
  activations_ = dtype;
}

void Linear::replace_weight(QuantizedWeight value, bool fixed) {
  quantized = std::move(value);
  try {
    register_quantized(fixed);
  } catch (...) {
    quantized = {};
    throw;
  }
  forget("weight");
  weight = {};
}

void check_lora_options(const LoraOptions& options) {
  check(options.rank >= 1, "lora: expected a rank of at least 1, got {}", options.rank);
  check(std::isfinite(options.alpha), "lora: expected a finite alpha, got {}", options.alpha);
  check(options.dropout >= 0 && options.dropout < 1, "lora: expected a dropout in [0, 1), got {}", options.dropout);
}

}  // namespace mica::nn
