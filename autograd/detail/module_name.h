#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <typeinfo>

#include <mica/autograd/detail/thread_state.h>
#include <mica/core/detail/nesting.h>

namespace mica::autograd {

namespace detail {
/// A type's name without namespaces: "LayerNorm".
std::string short_name(const std::type_info& type);
}  // namespace detail

/// A module's position in the module tree, for errors and graph pictures. It lives as long as a recorded op refers to
/// it, even after the module's destruction. Paths are derived from the parents on demand, so they stay right if the
/// module gets a parent later.
struct ModuleName {
  std::string name;                                  // unique among its siblings; empty for the outermost
  std::shared_ptr<const ModuleName> parent;          // null for the outermost
  std::atomic<const std::type_info*> type{nullptr};  // of the module's class; null if unknown
};

/// The names from the outermost module down, joined by dots: "h.0.mlp". Empty for the outermost module.
std::string path_of(const ModuleName& module);
/// The class without namespaces and template arguments: "Mlp"; empty if unknown.
std::string type_of(const ModuleName& module);
/// Both, for a message: "h.0.mlp (Mlp)".
std::string describe(const ModuleName& module);

/// The module whose ops this thread is running; null outside all modules.
inline const std::shared_ptr<ModuleName>& current_module() {
  static constinit const std::shared_ptr<ModuleName> none;
  return thread_state.module == nullptr ? none : *thread_state.module;
}

/// Attributes the ops of this thread to `module` until the end of scope. `module` must outlive the guard.
class CurrentModule {
 public:
  explicit CurrentModule(const std::shared_ptr<ModuleName>& module) : previous_(thread_state.module) {
    thread_state.module = &module;
  }
  ~CurrentModule() { thread_state.module = previous_; }
  CurrentModule(const CurrentModule&) = delete;
  CurrentModule& operator=(const CurrentModule&) = delete;

 private:
  mica::detail::Nested<CurrentModule> nested_{"nn::Scope"};
  const std::shared_ptr<ModuleName>* previous_;
};

}  // namespace mica::autograd
