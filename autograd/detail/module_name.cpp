#include <fmt/core.h>

#include <mica/autograd/detail/module_name.h>
#include <mica/autograd/function.h>

namespace mica::autograd {

std::string path_of(const ModuleName& module) {
  if (module.parent == nullptr) {
    return module.name;
  }
  const std::string above = path_of(*module.parent);
  return above.empty() ? module.name : above + "." + module.name;
}

std::string type_of(const ModuleName& module) {
  const std::type_info* const type = module.type.load(std::memory_order_relaxed);
  if (type == nullptr) {
    return "";
  }
  const std::string name = detail::short_name(*type);
  return name.substr(0, name.find('<'));
}

std::string describe(const ModuleName& module) {
  const std::string path = path_of(module), type = type_of(module);
  return path.empty() ? (type.empty() ? "the outermost module" : type)
                      : (type.empty() ? path : fmt::format("{} ({})", path, type));
}

}  // namespace mica::autograd
