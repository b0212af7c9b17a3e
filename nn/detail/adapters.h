#pragma once

#include <vector>

#include <mica/nn/linear.h>

namespace mica::nn::detail {

/// An adapter that is to be added to a layer.
struct NewAdapter {
  Linear* layer;
  LoraOptions options;
  LoraParameters parameters;
};

/// Adds adapters to layers of a model, all of them or, if memory runs out, none. Then freezes the model's other
/// parameters.
void add_adapters(Module& model, const std::vector<NewAdapter>& adapters);

}  // namespace mica::nn::detail
