#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <mica/nn/module.h>

namespace mica::nn {

/// The outputs of modules inside a model, by name: features for another task, or for a look at what a model computes.
///
///     nn::Features features(model, {"h.5", "h.*.mlp"});  // * stands for any characters, ? for one
///     model(tokens);
///     const Tensor x = features["h.5.mlp"];
///
/// Each call of such a module replaces what its last call returned. Features hold the outputs, with their history,
/// until the next call, clear() or their destruction, which also removes the hooks.
class Features {
 public:
  /// Throws if there is no pattern or one matches no module.
  Features(Module& model, const std::vector<std::string>& patterns);
  ~Features();
  Features(Features&&) noexcept = default;
  Features& operator=(Features&&) = delete;

  /// The modules watched, in the order of Module::named_modules().
  const std::vector<std::string>& names() const { return names_; }
  /// The output of the last call of a module, the first one if it has several. Throws if the module is not watched, or
  /// was not called since the construction or clear().
  Tensor operator[](const std::string& name) const;
  /// All outputs of that call.
  const Tensors& all(const std::string& name) const;
  void clear();

 private:
  std::vector<std::string> names_;
  std::shared_ptr<std::map<std::string, Tensors>> outputs_;
  std::vector<autograd::HookHandle> hooks_;
};

}  // namespace mica::nn
