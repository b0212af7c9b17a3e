#pragma once

#include <string>
#include <vector>

#include <mica/nn/linear.h>
#include <mica/nn/module.h>

namespace mica::nn {

// Low-rank adaptation of a model's linear layers (Hu et al., 2021, arXiv:2106.09685): see Linear::add_lora().
// io/adapter.h saves and loads adapters as Hugging Face's PEFT does.

/// A linear layer that is constructed with an adapter, and whose weight and bias are frozen. To adapt the layers of an
/// existing model, use add_lora() below, which does not replace them. Both call Linear::add_lora().
class LoRALinear : public Linear {
 public:
  /// The weight and the bias are initialized as in Linear; load_state_dict() replaces them.
  LoRALinear(std::int64_t in, std::int64_t out, const LoraOptions& lora = {}, LinearOptions options = {});
  /// Uses the weight, quantized or not, and the bias of `linear`, and freezes them.
  explicit LoRALinear(const Linear& linear, const LoraOptions& lora = {});
};

/// Adds adapters to the linear layers whose names match a pattern (* stands for any characters, ? for one), and freezes
/// all of the model's other parameters: they no longer require a gradient. Returns the names of the layers.
///
///     nn::add_lora(llama, {"*q_proj", "*v_proj"}, {.rank = 8, .alpha = 16});
///     optim::AdamW optimizer{nn::trainable_parameters(llama), {.lr = 2e-4}};
///
/// Throws, changing nothing, if there is no pattern, a pattern matches no linear layer, a layer already has an adapter,
/// an option is out of range, or memory runs out.
std::vector<std::string> add_lora(Module& model, const std::vector<std::string>& patterns,
                                  const LoraOptions& options = {});

/// Adds the adapters' products to the weights and removes the adapters: the model computes the same function, without
/// their cost. The parameters stay frozen. Throws, changing nothing, if an adapted layer's weight is quantized or
/// shared with another module (such as the weight of a head that is tied to an embedding). If memory runs out, the
/// layers before are merged already, and the model still computes the same function.
void merge_lora(Module& model);

/// A linear layer with an adapter, and its name in the model.
struct AdaptedLayer {
  std::string name;
  Linear* layer;  ///< valid until the model is moved
};
std::vector<AdaptedLayer> adapted_layers(Module& model);

/// The linear layers of a model, quantized or not, with their names.
std::vector<AdaptedLayer> linear_layers(Module& model);

/// The parameters that require a gradient.
Tensors trainable_parameters(const Module& model);

}  // namespace mica::nn
