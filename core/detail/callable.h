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

}  // namespace mica
