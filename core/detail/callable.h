#pragma once

#include <cstddef>
#include <string_view>
#include <type_traits>

#include <mica/core/check.h>

namespace mica {

/// Throws Error if `f` is an empty std::function or a null pointer, which would otherwise go unnoticed until the call.
/// `op` starts the message.
template <class F>
void check_callable(const F& f, std::string_view op) {
  if constexpr (std::is_assignable_v<F&, std::nullptr_t>) {
    check(f != nullptr, "{}: expected a function to call, got an empty one", op);
  }
}

/// Refers to a function object that outlives it. Unlike a std::function, it instantiates almost nothing.
template <class Signature>
class FunctionRef;

template <class R, class... In>
class FunctionRef<R(In...)> {
 public:
  template <class F>
  FunctionRef(const F& f)
      : object_(&f), call_([](const void* object, In... in) -> R { return (*static_cast<const F*>(object))(in...); }) {}

  R operator()(In... in) const { return call_(object_, in...); }

 private:
  const void* object_;
  R (*call_)(const void*, In...);
};

}  // namespace mica
