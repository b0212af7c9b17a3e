#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <typeinfo>

#include <mica/autograd/thread_state.h>

namespace mica::autograd {

/// A module's place in the tree of modules, for errors and pictures. It outlives its module as long as a recorded op
/// refers to it, and is found by going up, so that it stays true when a module gets a parent after it was made.
struct ModuleName {
  std::string name;                                  // among its siblings; empty for the outermost
  std::shared_ptr<const ModuleName> parent;          // null for the outermost
  std::atomic<const std::type_info*> type{nullptr};  // of the module's class; null until somebody said it
};

/// The names from the outermost module down, joined by dots: "h.0.mlp". Empty for the outermost itself.
std::string path_of(const ModuleName& module);
/// The class without namespaces and template arguments: "Mlp"; empty if nobody said it.
std::string type_of(const ModuleName& module);
/// Both, for a message: "h.0.mlp (Mlp)".
std::string describe(const ModuleName& module);

/// The module whose ops run on this thread now; null outside of all.
inline const std::shared_ptr<ModuleName>& current_module() {
  static constinit const std::shared_ptr<ModuleName> none;
  return thread_state.module == nullptr ? none : *thread_state.module;
}

/// Ops on this thread belong to `module`, which must outlive the guard, until the end of scope.
class CurrentModule {
 public:
  explicit CurrentModule(const std::shared_ptr<ModuleName>& module) : previous_(thread_state.module) {
    thread_state.module = &module;
  }
  ~CurrentModule() { thread_state.module = previous_; }
  CurrentModule(const CurrentModule&) = delete;
  CurrentModule& operator=(const CurrentModule&) = delete;

 private:
  const std::shared_ptr<ModuleName>* previous_;
};

}  // namespace mica::autograd
