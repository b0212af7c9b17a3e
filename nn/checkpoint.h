#pragma once

#include <mica/autograd/checkpoint.h>
#include <mica/nn/module.h>

namespace mica::nn {

/// module(inputs…), whose inside is not kept but computed again when backward comes to it: see autograd::checkpoint.
/// The module may be moved until then; if it is gone, backward raises.
///
///     for (const TransformerBlock& block : h) {
///       x = nn::checkpoint(block, x);
///     }
template <std::derived_from<Module> M, class... In>
requires std::is_invocable_v<const M&, const In&...>
auto checkpoint(const M& module, const In&... inputs) {
  const Scope scope(module);  // pictures draw the checkpoint in its frame
  return autograd::checkpoint(
      [module = ModuleReference<M>(module)](const In&... again) { return module.get()(again...); }, inputs...);
}

}  // namespace mica::nn
