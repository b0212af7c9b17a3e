#include <mica/autograd/node.h>

namespace mica::autograd {

std::uint64_t Node::next_sequence() {
  static std::atomic<std::uint64_t> next{kOldest + 1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

void Node::run_hooks(Tensors& gradients) const {
  for (const auto& [output, hook] : hooks) {
    call_hook(hook, gradients[output]);
  }
}

namespace detail {

void destroy(Node* node) {
  // Destroying a node lets go of the nodes before it, which comes back here: those wait in `doomed` for the outermost
  // call to reach them.
  thread_local std::vector<Node*> doomed;
  thread_local bool busy = false;
  doomed.push_back(node);
  if (busy) {
    return;
  }
  busy = true;
  while (!doomed.empty()) {
    Node* const next = doomed.back();
    doomed.pop_back();
    delete next;
  }
  busy = false;
}

}  // namespace detail

}  // namespace mica::autograd
