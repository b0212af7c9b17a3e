#pragma once

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <mica/autograd/hooks.h>
#include <mica/nn/module.h>

namespace mica::nn::detail {

struct ModuleState {
  Module* module = nullptr;  // its current address; null if it was destroyed while its parent still has the state
  bool training = true;
  std::shared_ptr<autograd::ModuleName> name = std::make_shared<autograd::ModuleName>();
  NamedTensors parameters;
  NamedTensors buffers;
  std::set<std::string> fixed;  // names of buffers that keep their dtype
  std::vector<std::pair<std::string, std::shared_ptr<ModuleState>>> children;
  autograd::HookList<std::function<Tensors(const Tensors& inputs)>> before;
  autograd::HookList<std::function<Tensors(const Tensors& inputs, const Tensors& outputs)>> after;
  autograd::HookList<std::function<Tensors(const Tensors& grad_inputs, const Tensors& grad_outputs)>> backward;
};

}  // namespace mica::nn::detail
