#include <mica/autograd/detail/module_name.h>
#include <mica/autograd/detail/op_observer.h>

namespace mica::autograd {

void ObservedOp::begin_forward(const std::string& op) {
  observer_->begin(op, OpObserver::Phase::forward, current_module());
}

}  // namespace mica::autograd
