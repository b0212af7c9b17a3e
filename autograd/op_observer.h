#pragma once

#include <memory>
#include <string>

#include <mica/autograd/thread_state.h>

namespace mica::autograd {

/// Is told of every op on one thread, forward and backward, while ThreadState::op_observer points to it. An op that
/// calls others is told of first and ends last.
class OpObserver {
 public:
  enum class Phase { forward, backward, other };

  virtual ~OpObserver() = default;
  /// `op` may go after the call. `module` is where the op was called, in backward too; null outside of all modules.
  virtual void begin(const std::string& op, Phase phase, const std::shared_ptr<ModuleName>& module) = 0;
  /// Ends the op that began last and has not ended. Not to throw.
  virtual void end() = 0;
};

/// An op that runs until the end of scope. Costs a branch while nobody observes.
class ObservedOp {
 public:
  /// A forward of the current module.
  explicit ObservedOp(const std::string& op) : observer_(thread_state.op_observer) {
    if (observer_ != nullptr) [[unlikely]] {
      begin_forward(op);
    }
  }
  /// The backward of a recorded op.
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
