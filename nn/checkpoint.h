#pragma once

#include <mica/autograd/checkpoint.h>
#include <mica/nn/module.h>

namespace mica::nn {

/// Computes module(inputs…) without saving intermediate tensors; backward recomputes them. See autograd::checkpoint.
/// The module may be moved before backward; if it was destroyed, backward throws.
///
///     for (const TransformerBlock& block : h) {
///       x = nn::checkpoint(block, x);
///     }
template <std::derived_from<Module> M, class... In>
requires std::is_invocable_v<const M&, const In&...>
auto checkpoint(const M& module, const In&... inputs) {
  const Scope scope(module);  // so that graph pictures draw the checkpoint in the module's frame
  return autograd::checkpoint(
      [module = ModuleReference<M>(module)](const In&... again) { return module.get()(again...); }, inputs...);
}

}  // namespace mica::nn
