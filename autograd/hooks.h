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

/// What a handle knows of the list that its hook is in.
class RemovesHooks {
 public:
  virtual ~RemovesHooks() = default;
  virtual void remove(std::uint64_t id) = 0;
};

}  // namespace detail

/// What registering a hook returns, to take the hook away again. Letting go of a handle does nothing: the hook stays.
/// A handle may outlive the tensor and the graph, and be copied; a default-constructed one stands for no hook.
class HookHandle {
 public:
  HookHandle() = default;
  HookHandle(std::weak_ptr<detail::RemovesHooks> list, std::uint64_t id) : list_(std::move(list)), id_(id) {}

  /// From now on the hook is not called, and what it captured is freed. Does nothing if it was removed before or if the
  /// tensor is gone. Safe within a hook, also in the one that is removed, and on any thread.
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

/// Hooks in the order of registration. Costs two pointers until there is one.
template <class F>
class HookList {
 public:
  HookHandle add(F hook) {
    if (!state_) {
      state_ = std::make_shared<State>();
    }
    return {state_, state_->add(std::move(hook))};
  }

  /// Calls visit(hook) for each hook that was there when this began and has not been removed when its turn comes. So a
  /// hook registered by a hook is first called the next time.
  template <class Visit>
  void each(Visit&& visit) const {
    if (const std::shared_ptr<State> state = state_) {  // stays while a hook drops the tensor
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

  // Locked, as threads may share a leaf; never while a hook runs or what it captured is destroyed.
  class State final : public detail::RemovesHooks {
   public:
    std::uint64_t add(F hook) {
      const std::lock_guard lock(mutex_);
      entries_.push_back(std::make_shared<Entry>(next_, std::move(hook)));
      return next_++;
    }

    void remove(std::uint64_t id) override {
      std::shared_ptr<Entry> gone;  // outlives the lock
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
