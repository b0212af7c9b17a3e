#include <cxxabi.h>
#include <fmt/core.h>

#include <cstdlib>

#include <mica/autograd/detail/module_name.h>

namespace mica::autograd {

namespace detail {

std::string short_name(const std::type_info& type) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> demangled(
      abi::__cxa_demangle(type.name(), nullptr, nullptr, &status), &std::free);
  std::string name = status == 0 ? demangled.get() : type.name();
  // Everything up to the last "::" that is not inside template arguments.
  const std::size_t arguments = name.find('<');
  const std::size_t colons = name.rfind("::", arguments);
  return colons == std::string::npos ? name : name.substr(colons + 2);
}

}  // namespace detail

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
