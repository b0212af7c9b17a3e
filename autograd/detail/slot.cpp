#include <array>
#include <functional>

#include <mica/autograd/detail/slot.h>

namespace mica::autograd {

Slot& slot_of(const Tensor& x) {
  find_slot(x);
  std::shared_ptr<Slot>& slot = x.handle()->slot;
  if (!slot) {
    slot = std::make_shared<Slot>();
  }
  return *slot;
}

std::mutex& lock_of(const Slot& slot) {
  // A few mutexes for all leaves instead of one per slot; two leaves rarely share one.
  static std::array<std::mutex, 64> locks;
  return locks[std::hash<const Slot*>()(&slot) / sizeof(Slot) % locks.size()];
}

Tensor without_history(const Tensor& x) {
  const Shape& shape = x.shape();  // throws if x is undefined
  return as_strided(x, shape, x.strides(), x.handle()->offset);
}

Tensor snapshot(const Tensor& x) {
  find_slot(x);
  auto impl = std::make_shared<mica::detail::TensorImpl>(*x.handle());
  impl->base.reset();
  return Tensor(std::move(impl));
}

void set_history(const Tensor& x, std::shared_ptr<Node> node, int output) {
  auto slot = std::make_shared<Slot>();
  slot->node = std::move(node);
  slot->output = output;
  x.handle()->slot = std::move(slot);
}

}  // namespace mica::autograd
