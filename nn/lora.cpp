#include <algorithm>
#include <typeinfo>

#include <mica/core/progress.h>
#include <mica/nn/detail/adapters.h>
#include <mica/nn/detail/name_pattern.h>
#include <mica/nn/lora.h>
#include <mica/nn/quantized_linear.h>

namespace mica::nn {

LoRALinear::LoRALinear(std::int64_t in, std::int64_t out, const LoraOptions& lora, LinearOptions options)
    : LoRALinear(Linear(in, out, options), lora) {}

LoRALinear::LoRALinear(const Linear& linear, const LoraOptions& lora)
    : Linear(linear.is_quantized() ? Linear(linear.quantized, linear.bias) : Linear(linear.weight, linear.bias)) {
  check(!linear.has_lora(), "LoRALinear: the layer has an adapter already");
  detail::add_adapters(*this, {{this, lora, new_lora(lora)}});
}

std::vector<AdaptedLayer> linear_layers(Module& model) {
  std::vector<AdaptedLayer> layers;
  for (const NamedModule& module : model.named_modules()) {
    if (module.type != nullptr && (*module.type == typeid(Linear) || *module.type == typeid(QuantizedLinear) ||
                                   *module.type == typeid(LoRALinear))) {
      layers.push_back({module.name, static_cast<Linear*>(module.module)});
    }
  }
  return layers;
}

std::vector<AdaptedLayer> adapted_layers(Module& model) {
  std::vector<AdaptedLayer> layers = linear_layers(model);
  std::erase_if(layers, [](const AdaptedLayer& layer) { return !layer.layer->has_lora(); });
  return layers;
}

std::vector<std::string> add_lora(Module& model, const std::vector<std::string>& patterns, const LoraOptions& options) {
  check_lora_options(options);
  check(!patterns.empty(), "add_lora: expected at least one pattern of names");
  std::vector<AdaptedLayer> chosen = linear_layers(model);
  for (const std::string& pattern : patterns) {
    check(std::any_of(chosen.begin(), chosen.end(),
                      [&](const AdaptedLayer& layer) { return detail::matches(layer.name, pattern); }),
          "add_lora: no linear layer's name matches {}", pattern);
  }
  std::erase_if(chosen, [&](const AdaptedLayer& layer) {
    return std::none_of(patterns.begin(), patterns.end(),
                        [&](const std::string& pattern) { return detail::matches(layer.name, pattern); });
  });
  for (const AdaptedLayer& layer : chosen) {
    check(!layer.layer->has_lora(), "add_lora: {} already has an adapter", layer.name);
  }
  std::vector<std::string> names;
  std::vector<detail::NewAdapter> adapters;
  for (const AdaptedLayer& layer : chosen) {
    names.push_back(layer.name);
    adapters.push_back({layer.layer, options, layer.layer->new_lora(options)});
  }
  detail::add_adapters(model, adapters);
  return names;
}

void detail::add_adapters(Module& model, const std::vector<NewAdapter>& adapters) {
  const Tensors others = model.parameters();
  std::size_t added = 0;
  try {
    for (const NewAdapter& adapter : adapters) {
      adapter.layer->add_lora(adapter.options, adapter.parameters);
      ++added;
    }
  } catch (...) {
    while (added > 0) {
      adapters[--added].layer->remove_lora();
    }
    throw;
  }
  for (const Tensor& parameter : others) {
    parameter.requires_grad_(false);
  }
}

void merge_lora(Module& model) {
  const std::vector<AdaptedLayer> layers = adapted_layers(model);
  const StateDict state = model.state_dict();
  for (const AdaptedLayer& layer : layers) {
    check(!layer.layer->is_quantized(), "merge_lora: the weight of {} is quantized", layer.name);
    for (const auto& [name, tensor] : state) {
      check(tensor.raw_data() != layer.layer->weight.raw_data() || name == layer.name + ".weight" || name == "weight",
            "merge_lora: {} shares its weight with {}, which would change, too", layer.name, name);
    }
  }
  std::int64_t elements = 0;
  for (const AdaptedLayer& layer : layers) {
    elements += layer.layer->weight.numel();
  }
  ProgressTask progress("merging the adapters", elements);
  for (const AdaptedLayer& layer : layers) {
    layer.layer->merge_lora();
    progress.advance(layer.layer->weight.numel());
  }
}

Tensors trainable_parameters(const Module& model) {
  Tensors parameters = model.parameters();
  std::erase_if(parameters, [](const Tensor& parameter) { return !parameter.requires_grad(); });
  return parameters;
}

}  // namespace mica::nn
