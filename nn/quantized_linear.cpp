#include <algorithm>

#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/progress.h>
#include <mica/nn/lora.h>
#include <mica/nn/quantized_linear.h>
#include <mica/ops/quantized/quantize_two_levels.h>
#include <mica/ops/view/view.h>

namespace mica::nn {

namespace {

QuantizedWeight weight_of_zeros(std::int64_t in, std::int64_t out, const QuantizeOptions& options) {
  check(in >= 1 && out >= 1, "QuantizedLinear: expected in >= 1 and out >= 1, got {} and {}", in, out);
  return quantize(zeros({in, out}), options);
}

Tensor copy_of(const Tensor& x) {
  const Tensor result = empty_like(x);
  copy_into(result, x);
  return result;
}

// Calls f(layer, whether it is the head) for all linear layers, and returns their names.
template <class F>
std::vector<std::string> quantize_layers(Module& model, const F& f) {
  const std::vector<AdaptedLayer> layers = linear_layers(model);
  std::int64_t elements = 0;
  for (const AdaptedLayer& layer : layers) {
    check(!layer.layer->is_quantized(), "quantize: {} is quantized already", layer.name);
    elements += layer.layer->weight.numel();
  }
  ProgressTask progress("quantizing the model", elements);
  std::vector<std::string> names;
  for (const AdaptedLayer& layer : layers) {
    const std::int64_t done = layer.layer->weight.numel();
    f(*layer.layer, layer.name == "lm_head");
    progress.advance(done);
    names.push_back(layer.name);
  }
  return names;
}

}  // namespace

QuantizedLinear::QuantizedLinear(std::int64_t in, std::int64_t out, QuantizedLinearOptions options)
    : QuantizedLinear(weight_of_zeros(in, out, options.quantize), options.bias ? zeros({out}) : Tensor{}) {}

QuantizedLinear::QuantizedLinear(const QuantizedWeight& weight, const Tensor& bias) : Linear(weight, bias) {}

QuantizedLinear QuantizedLinear::from(const Linear& linear, QuantizeOptions options) {
  return QuantizedLinear(mica::quantize(transpose(linear.weight.detach(), 0, 1), options),
                         linear.bias.defined() ? copy_of(linear.bias) : Tensor{});
}

Tensor QuantizedLinear::operator()(const Tensor& x, Activation activation) const {
  return call(*this, x, [&](const Tensor& x) { return forward(x, activation); });
}

std::vector<std::string> quantize(Module& model, const QuantizeOptions& options, int head_bits) {
  QuantizeOptions of_head = options;
  of_head.bits = std::max(options.bits, head_bits);
  for (const QuantizeOptions& each : {options, of_head}) {
    mica::quantize(zeros({1, 1}), each);  // checks the options
  }
  return quantize_layers(model, [&](Linear& layer, bool is_head) { layer.quantize(is_head ? of_head : options); });
}

std::vector<std::string> quantize(Module& model, int bits) {
  const std::vector<AdaptedLayer> layers = linear_layers(model);
  const bool on_cpu = !layers.empty() && layers[0].layer->weight.defined() && layers[0].layer->weight.device().is_cpu();
  if (!on_cpu || (bits != 4 && bits != 2)) {
    return quantize(model, {.bits = bits});
  }
  return quantize_layers(model, [bits](Linear& layer, bool is_head) {
    const Tensor weight = transpose(layer.weight.detach(), 0, 1);
    const bool widens = layer.out_features() > layer.in_features();
    layer.set_quantized(is_head ? mica::quantize(weight, {.bits = 8, .group_size = 128, .dtype = float16})
                                : quantize_two_levels(weight, {.bits = bits, .group_size = widens ? 64 : 32}),
                        layer.weight.dtype());
  });
}

}  // namespace mica::nn
