#pragma once

#include <memory>
#include <utility>

#include <mica/core/check.h>

namespace mica::detail {

/// A pointer to the state of a public object. Using it after the object was moved from throws an Error that names the
/// object's class.
template <class T>
class SharedState {
 public:
  SharedState(const char* owner, std::shared_ptr<T> state) : owner_(owner), state_(std::move(state)) {}

  const std::shared_ptr<T>& pointer() const {
    check(state_ != nullptr, "{}: used after it was moved from", owner_);
    return state_;
  }
  T& operator*() const { return *pointer(); }
  T* operator->() const { return pointer().get(); }

 private:
  const char* owner_;
  std::shared_ptr<T> state_;
};

}  // namespace mica::detail
