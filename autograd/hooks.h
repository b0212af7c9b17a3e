#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace mica::autograd {

namespace detail {

/// A HookHandle's view of the list that holds its hook.
class RemovesHooks {
 public:
  virtual ~RemovesHooks() = default;
  virtual void remove(std::uint64_t id) = 0;
};

}  // namespace detail

/// Returned by the registration of a hook; removes the hook on request. Destroying a handle does not remove the hook. A
/// handle can be copied and may outlive the tensor and the graph; a default-constructed one refers to no hook.
class HookHandle {
 public:
  HookHandle() = default;
  HookHandle(std::weak_ptr<detail::RemovesHooks> list, std::uint64_t id) : list_(std::move(list)), id_(id) {}

  /// Removes the hook and frees what it captured. Does nothing if it was already removed or if the tensor no longer
  /// exists. Safe on any thread and inside a hook, including the one being removed.
  void remove() {
    if (const auto list = list_.lock()) {
      list->remove(id_);
    }
    list_.reset();
  }

 private:
  std::weak_ptr<detail::RemovesHooks> list_;
  std::uint64_t id_ = 0;
};

/// Hooks in the order of registration. Takes two pointers while empty.
template <class F>
class HookList {
 public:
  HookHandle add(F hook) {
    if (!state_) {
      state_ = std::make_shared<State>();
    }
    return {state_, state_->add(std::move(hook))};
  }

  /// Calls visit(hook) for each hook registered before this call and not removed by its turn. A hook that another hook
  /// registers is called from the next time on.
  template <class Visit>
  void each(Visit&& visit) const {
    if (const std::shared_ptr<State> state = state_) {  // keeps the list alive if a hook destroys the tensor
      for (const auto& entry : state->entries()) {
        if (!entry->removed.load(std::memory_order_relaxed)) {
          visit(entry->hook);
        }
      }
    }
  }

  bool empty() const { return !state_ || state_->entries().empty(); }

 private:
  struct Entry {
    Entry(std::uint64_t number, F f) : id(number), hook(std::move(f)) {}

    std::uint64_t id;
    F hook;
    std::atomic<bool> removed{false};
  };

  // Guarded by a mutex, since threads may share a leaf. The mutex is not held while a hook runs or is destroyed.
  class State final : public detail::RemovesHooks {
   public:
    std::uint64_t add(F hook) {
      const std::lock_guard lock(mutex_);
      entries_.push_back(std::make_shared<Entry>(next_, std::move(hook)));
      return next_++;
    }

    void remove(std::uint64_t id) override {
      std::shared_ptr<Entry> gone;  // destroyed after the lock is released
      const std::lock_guard lock(mutex_);
      for (auto at = entries_.begin(); at != entries_.end(); ++at) {
        if ((*at)->id == id) {
          gone = std::move(*at);
          gone->removed.store(true, std::memory_order_relaxed);
          entries_.erase(at);
          return;
        }
      }
    }

    std::vector<std::shared_ptr<Entry>> entries() const {
      const std::lock_guard lock(mutex_);
      return entries_;
    }

   private:
    mutable std::mutex mutex_;
    std::vector<std::shared_ptr<Entry>> entries_;
    std::uint64_t next_ = 0;
  };

  std::shared_ptr<State> state_;
};

}  // namespace mica::autograd
