#pragma once

#include <memory>
#include <string>

#include <mica/autograd/detail/thread_state.h>

namespace mica::autograd {

/// Notified of every op on one thread, forward and backward, while ThreadState::op_observer points to it. Nested ops
/// begin after and end before the op that calls them.
class OpObserver {
 public:
  enum class Phase { forward, backward, other };

  virtual ~OpObserver() = default;
  /// `op` is valid during the call only. `module` is the module that called the op in forward; null outside all
  /// modules.
  virtual void begin(const std::string& op, Phase phase, const std::shared_ptr<ModuleName>& module) = 0;
  /// Ends the innermost open op. Must not throw.
  virtual void end() = 0;
};

/// Reports an op from construction to the end of scope. Without an observer, it costs one branch.
class ObservedOp {
 public:
  /// Forward of an op in the current module.
  explicit ObservedOp(const std::string& op) : observer_(thread_state.op_observer) {
    if (observer_ != nullptr) [[unlikely]] {
      begin_forward(op);
    }
  }
  /// Backward of a recorded op.
  template <class Node>
  requires requires(const Node& node) { node.module; }
  explicit ObservedOp(const Node& node) : observer_(thread_state.op_observer) {
    if (observer_ != nullptr) [[unlikely]] {
      observer_->begin(node.name(), OpObserver::Phase::backward, node.module);
    }
  }
  ~ObservedOp() {
    if (observer_ != nullptr) [[unlikely]] {
      observer_->end();
    }
  }
  ObservedOp(const ObservedOp&) = delete;
  ObservedOp& operator=(const ObservedOp&) = delete;

 private:
  void begin_forward(const std::string& op);

  OpObserver* observer_;
};

}  // namespace mica::autograd
