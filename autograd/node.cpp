#include <atomic>

#include <mica/autograd/node.h>
#include <mica/core/detail/callable.h>

namespace mica::autograd {

namespace {

void check_hook_result(const Tensor& result, const OutputInfo& expected) {
  check(result.shape() == expected.shape && result.dtype() == expected.dtype && result.device() == expected.device,
        "register_hook: the hook of a gradient of {} {} on {} returned {} {} on {}", expected.dtype, expected.shape,
        expected.device, result.dtype(), result.shape(), result.device());
}

// Replaces gradients by what a hook returned, unless it returned an empty list. info(i): the expected properties of
// gradient i, or null if it is not needed.
template <class Info>
void replace_gradients(const Node& node, const char* kind, Tensors replaced, Tensors& gradients, Info&& info) {
  if (replaced.empty()) {
    return;
  }
  check(replaced.size() == gradients.size(), "{}: expected {} gradients from the {}, got {}", node.name(),
        gradients.size(), kind, replaced.size());
  for (std::size_t i = 0; i < replaced.size(); ++i) {
    const OutputInfo* const expected = info(i);
    if (expected == nullptr) {
      replaced[i] = {};
    } else if (replaced[i].defined()) {
      check_hook_result(replaced[i], *expected);
    }
  }
  gradients = std::move(replaced);
}

}  // namespace

void call_hook(const Hook& hook, Tensor& gradient, const OutputInfo& expected) {
  if (gradient.defined()) {
    if (Tensor replaced = hook(gradient); replaced.defined()) {
      check_hook_result(replaced, expected);
      gradient = std::move(replaced);
    }
  }
}

Node::~Node() = default;

std::uint64_t Node::next_sequence() {
  static std::atomic<std::uint64_t> next{kOldest + 1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

Node::Hooks& Node::hooks() {
  if (!hooks_) {
    hooks_ = std::make_unique<Hooks>();
  }
  return *hooks_;
}

HookHandle Node::register_prehook(PreHook hook) {
  check_callable(hook, "register_prehook");
  return hooks().before.add(std::move(hook));
}

HookHandle Node::register_hook(PostHook hook) {
  check_callable(hook, "register_hook");
  check(as_segment() == nullptr,
        "{}: register_hook is for ops that return the gradients of their inputs; those of a checkpoint come from the "
        "ops that it recomputes, so register the hook on its inputs",
        name());
  return hooks().after.add(std::move(hook));
}

HookHandle Node::register_output_hook(int output, Hook hook) {
  check_callable(hook, "register_output_hook");
  check(output >= 0 && output < static_cast<int>(outputs.size()), "{}: register_output_hook: there is no output {}",
        name(), output);
  return hooks().of_outputs.add({output, std::move(hook)});
}

void Node::run_output_hooks(Tensors& gradients) const {
  if (hooks_) {
    hooks_->of_outputs.each([&](const std::pair<int, Hook>& entry) {
      call_hook(entry.second, gradients[entry.first], outputs[entry.first]);
    });
  }
}

void Node::run_prehooks(Tensors& gradients) const {
  if (hooks_) {
    hooks_->before.each([&](const PreHook& hook) {
      replace_gradients(*this, "prehook", hook(gradients), gradients, [&](std::size_t i) { return &outputs[i]; });
    });
  }
}

void Node::run_hooks(Tensors& results, const Tensors& gradients) const {
  if (hooks_) {
    hooks_->after.each([&](const PostHook& hook) {
      replace_gradients(*this, "hook", hook(results, gradients), results, [&](std::size_t i) -> const OutputInfo* {
        return edges[i].node == nullptr ? nullptr : &edges[i].node->outputs[edges[i].output];
      });
    });
  }
}

namespace detail {

void destroy(Node* node) {
  // Destroying a node releases its predecessors, which re-enters this function. They are queued in `pending` for the
  // outermost call.
  thread_local std::vector<Node*> pending;
  thread_local bool busy = false;
  pending.push_back(node);
  if (busy) {
    return;
  }
  busy = true;
  while (!pending.empty()) {
    Node* const next = pending.back();
    pending.pop_back();
    delete next;
  }
  busy = false;
}

}  // namespace detail

}  // namespace mica::autograd
