#include <algorithm>

#include <mica/nn/detail/name_pattern.h>
#include <mica/nn/features.h>

namespace mica::nn {

Features::Features(Module& model, const std::vector<std::string>& patterns)
    : outputs_(std::make_shared<std::map<std::string, Tensors>>()) {
  check(!patterns.empty(), "Features: expected at least one pattern of names");
  const std::vector<NamedModule> modules = model.named_modules();
  for (const std::string& pattern : patterns) {
    check(std::any_of(modules.begin(), modules.end(),
                      [&](const NamedModule& module) { return detail::matches(module.name, pattern); }),
          "Features: no module's name matches {}", pattern);
  }
  for (const NamedModule& module : modules) {
    if (std::any_of(patterns.begin(), patterns.end(),
                    [&](const std::string& pattern) { return detail::matches(module.name, pattern); })) {
      names_.push_back(module.name);
      hooks_.push_back(module.module->register_forward_hook(
          [name = module.name, outputs = outputs_](const Tensors&, const Tensors& results) {
            (*outputs)[name] = results;
          }));
    }
  }
}

Features::~Features() {
  for (autograd::HookHandle& hook : hooks_) {
    hook.remove();
  }
}

const Tensors& Features::all(const std::string& name) const {
  const auto at = outputs_->find(name);
  if (at == outputs_->end()) {
    check(std::find(names_.begin(), names_.end(), name) != names_.end(), "Features: {} is not watched", name);
    fail("Features: {} was not called", name);
  }
  return at->second;
}

Tensor Features::operator[](const std::string& name) const { return all(name).at(0); }

void Features::clear() { outputs_->clear(); }

}  // namespace mica::nn
