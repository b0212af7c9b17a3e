#pragma once

#include <concepts>
#include <memory>
#include <type_traits>

#include <mica/nn/module.h>

namespace mica::nn {

namespace detail {

/// Allows the copy of a module, while it exists.
class Cloning {
 public:
  explicit Cloning(const Module& module);
  ~Cloning();
  Cloning(const Cloning&) = delete;
  Cloning& operator=(const Cloning&) = delete;

  /// The state for the copy of a module. Throws if this thread is not cloning.
  static std::shared_ptr<ModuleState> state_for_copy_of(const Module& module);

 private:
  struct Copies;
  static thread_local constinit Copies* current_;  // of this thread's innermost clone()
  std::unique_ptr<Copies> copies_;
};

}  // namespace detail

/// An independent copy of a module and all modules below it: on the same device, with the same dtypes, modes and frozen
/// parameters, without gradients and hooks.
///
///     Net best = nn::clone(net);
///
/// Parameters and buffers are copied; one that is registered under several names (a tied head) is one tensor in the
/// copy, too. Everything else is copied as C++ copies it, so a tensor that a module holds without having registered it
/// is shared with the original. Works for every class whose members can be copied; write no copy constructor, or one
/// that calls Module's. Throws if a layer of a Sequential cannot be copied, or if memory runs out.
template <std::derived_from<Module> M>
requires(!std::same_as<M, Module>) M clone(const M& module) {
  static_assert(std::is_copy_constructible_v<M>, "clone: a member of this module cannot be copied");
  const detail::Cloning cloning(module);
  return M(module);
}

}  // namespace mica::nn
