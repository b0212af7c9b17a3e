#include <mica/autograd/node.h>

namespace mica::autograd {

std::uint64_t Node::next_sequence() {
  static std::atomic<std::uint64_t> next{0};
  return next.fetch_add(1, std::memory_order_relaxed);
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
