#include <mica/autograd/anomaly.h>
#include <mica/autograd/detail/diagnostics.h>
#include <mica/autograd/detail/gradient_check.h>
#include <mica/autograd/detail/slot.h>
#include <mica/autograd/grad_mode.h>
#include <mica/core/detail/finite.h>

namespace mica::autograd {

namespace {

// "NaN" or "Inf" if x has one, else null.
const char* fault_of(const Tensor& x) { return x.defined() ? first_fault(x) : nullptr; }

// Description of a tensor that the node produced or leads to.
std::string output_of(const Node& node) {
  const std::shared_ptr<Slot> leaf = node.leaf();
  if (!leaf) {
    return "made by " + node.name();
  }
  const std::string name = leaf_name(*leaf);
  return name.empty() ? "a leaf" : "the parameter " + name;
}

std::string forward_of(const Node& node) {
  const Tensors saved = node.saved_tensors();
  std::string faulty;
  for (std::size_t i = 0; i < saved.size(); ++i) {
    if (saved[i].defined() && is_floating(saved[i].dtype())) {
      if (const char* const fault = fault_of(saved[i])) {
        faulty += fmt::format("{}{} in tensor {} of shape {}", faulty.empty() ? "" : ", ", fault, i, saved[i].shape());
      }
    }
  }
  if (faulty.empty()) {
    return saved.empty() ? "" : "; all tensors that it saved in forward are finite";
  }
  return "; in forward it had already saved " + faulty;
}

}  // namespace

GradientCheck::GradientCheck() : on_(anomaly_enabled()) {}

void GradientCheck::given(const Tensor& gradient) const {
  if (!on_) {
    return;
  }
  if (const char* const fault = fault_of(gradient)) {
    fail("backward: the gradient of shape {} to start from has {}", gradient.shape(), fault);
  }
}

void GradientCheck::arrived(const Node& node, const Tensors& gradients) {
  if (!on_) {
    return;
  }
  for (std::size_t k = 0; k < gradients.size(); ++k) {
    if (const char* const fault = fault_of(gradients[k])) {
      fail("backward: the gradients of the tensor of shape {} that is {} are finite, but their sum has {}{}",
           gradients[k].shape(), output_of(node), fault, where(node));
    }
  }
  before_hooks_ = gradients;
}

void GradientCheck::hooked(const Node& node, const Tensors& gradients) {
  if (!on_) {
    return;
  }
  check_replaced(node, gradients, [&](std::size_t k) {
    return fmt::format("a hook of the tensor of shape {} that is {}", gradients[k].shape(), output_of(node));
  });
}

void GradientCheck::prehooked(const Node& node, const Tensors& gradients) {
  if (!on_) {
    return;
  }
  check_replaced(node, gradients, [&](std::size_t k) {
    return fmt::format("a prehook of {}, for its output {} of shape {},", node.name(), k, gradients[k].shape());
  });
  before_hooks_.clear();
}

void GradientCheck::posthooked(const Node& node, const Tensors& results) {
  if (!on_) {
    return;
  }
  check_replaced(node, results, [&](std::size_t i) {
    return fmt::format("a hook of {}, for its input {} of shape {},", node.name(), i, results[i].shape());
  });
  before_hooks_.clear();
}

// what(i): the hook that replaced gradient i.
void GradientCheck::check_replaced(const Node& node, const Tensors& gradients,
                                   const std::function<std::string(std::size_t)>& what) {
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].is_same(before_hooks_[i])) {
      if (const char* const fault = fault_of(gradients[i])) {
        fail("backward: {} was given a finite gradient and returned {}{}", what(i), fault, where(node));
      }
    }
  }
  before_hooks_ = gradients;
}

void GradientCheck::made(Node& node, const Tensors& results) {
  if (!on_) {
    return;
  }
  if (node.trace) {
    node.trace->undefined.clear();
  }
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (node.edges[i].node == nullptr) {
      continue;
    }
    if (!results[i].defined()) {
      if (node.trace) {
        node.trace->undefined.push_back(static_cast<int>(i));
      }
      continue;
    }
    if (const char* const fault = fault_of(results[i])) {
      fail("{}: its backward made {} in the gradient of input {} ({}), {} of shape {}, from finite gradients{}{}",
           node.name(), fault, i, output_of(*node.edges[i].node), results[i].dtype(), results[i].shape(),
           forward_of(node), where(node));
    }
  }
  before_hooks_ = node.has_hooks() ? results : Tensors{};
}

}  // namespace mica::autograd
