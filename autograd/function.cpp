#include <algorithm>

#include <mica/autograd/anomaly.h>
#include <mica/autograd/detail/accumulate.h>
#include <mica/autograd/detail/diagnostics.h>
#include <mica/autograd/detail/inplace.h>
#include <mica/autograd/detail/segment.h>
#include <mica/autograd/function.h>
#include <mica/core/creation.h>

namespace mica::autograd {

namespace {

// Node in place of a missing second derivative: its backward throws.
class UnknownDerivative final : public Node {
 public:
  explicit UnknownDerivative(std::string op) : op_(std::move(op)) {}

  std::string name() const override { return op_ + "'s gradient"; }
  Tensors backward(Tensors) override {
    throw Error(
        fmt::format("{}: its gradient cannot be differentiated again: its backward is not made of recorded ops", op_));
  }

 private:
  std::string op_;
};

// After an output got its history: marks it as a custom view if it shares storage with an input. View ops register
// their result with link_view() afterwards, which clears the mark.
void link_to_inputs(const Tensor& output, const Tensor* const* inputs, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    if (inputs[i]->defined() && inputs[i]->handle()->storage == output.handle()->storage &&
        inputs[i]->requires_grad()) {
      link_custom_view(output, *inputs[i]);
    }
  }
}

}  // namespace

Context::Context() = default;
Context::~Context() = default;
Context::Context(Context&&) noexcept = default;

void Context::save(const Tensor& tensor) {
  if (!needs_any_grad_) {
    return;  // needs_grad() is never called
  }
  Saved& saved = saved_.emplace_back();
  if (!tensor.defined()) {
    return;
  }
  check(!tensor.is_inference(),
        "{}: a tensor of shape {} that was created in inference mode cannot be saved for backward; compute with a "
        "clone of it",
        *name_, tensor.shape());
  saved.of = tensor.handle().get();
  saved.record = *saved.of;
  saved.record.base.reset();
  saved.version = tensor.version();
}

void Context::save(const Tensor* const* tensors, std::size_t count) {
  saved_.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    save(*tensors[i]);
  }
}

void Context::save_for_backward(const Tensors& tensors) {
  for (const Tensor& tensor : tensors) {
    save(tensor);
  }
}

void Context::mark_non_differentiable(const Tensor& output) { non_differentiable_.push_back(output); }

void Context::expect_saved(std::size_t count) const {
  check(saved_.size() == count, "{}: backward asks for {} saved tensors, forward saved {}", *name_, count,
        saved_.size());
}

Tensor Context::unpack(std::size_t i) const {
  const Saved& saved = saved_[i];
  if (saved.of == nullptr) {
    return {};
  }
  const Storage& storage = *saved.record.storage;
  check(storage.version() == saved.version,
        "{}: a tensor of shape {} that it saved for backward was modified in place since, last by {}", *name_,
        saved.record.shape, storage.last_writer());
  const Tensor tensor = saved.tensor();
  if (saved.output >= 0) {
    set_history(tensor, node_.lock(), saved.output);
  }
  return tensor;
}

Tensors Context::saved_all() const {
  Tensors result;
  result.reserve(saved_.size());
  for (std::size_t i = 0; i < saved_.size(); ++i) {
    result.push_back(unpack(i));
  }
  return result;
}

bool Context::is_differentiable(const Tensor& output) const {
  return is_floating(output.dtype()) && std::none_of(non_differentiable_.begin(), non_differentiable_.end(),
                                                     [&](const Tensor& x) { return x.is_same(output); });
}

FunctionBase::FunctionBase(Context&& ctx) : ctx_(std::move(ctx)) {}
FunctionBase::~FunctionBase() = default;

void FunctionBase::run(const Call& call, const std::string& name, const Tensor* const* inputs, std::size_t count) {
  Context ctx;
  prepare(ctx, name, inputs, count);
  {
    const InsideOp guard;
    const ObservedOp observed(name);
    call.forward(call.self, ctx);
  }
  if (ctx.needs_any_grad()) {
    const std::shared_ptr<FunctionBase> node(call.new_node(call.self, std::move(ctx)), &detail::destroy);
    record(node, inputs, count, call.outputs(call.self));
  } else if (ctx.is_traced_ || ctx.is_in_segment_) [[unlikely]] {
    watch(ctx, inputs, count, call.outputs(call.self));
  }
}

void FunctionBase::expect_outputs(std::size_t asked, const Tensors& gradients) const {
  check(asked <= gradients.size(), "{}: backward takes the gradients of {} outputs, forward returned {}", *ctx_.name_,
        asked, gradients.size());
}

void FunctionBase::prepare(Context& ctx, const std::string& name, const Tensor* const* inputs, std::size_t count) {
  ctx.name_ = &name;
  if (!grad_enabled()) {
    ctx.is_traced_ = anomaly_enabled() && grad_disabled_by_user();
    return;
  }
  for (std::size_t i = 0; i < count; ++i) {
    // This also updates views whose base was written in place, while the nodes that this creates are still older than
    // the node that will use them.
    if (inputs[i]->defined() && inputs[i]->requires_grad()) {
      ctx.needs_grad_.resize(count);
      ctx.needs_grad_[i] = true;
      ctx.needs_any_grad_ = true;
    }
  }
  ctx.is_traced_ = anomaly_enabled();
  if (ctx.needs_any_grad_ && SegmentWatch::current() != nullptr) {
    ctx.needs_grad_.clear();
    ctx.needs_any_grad_ = false;
    ctx.is_in_segment_ = true;
  }
}

void FunctionBase::record(const std::shared_ptr<FunctionBase>& node, const Tensor* const* inputs, std::size_t count,
                          const Tensors& outputs) {
  Context& ctx = node->ctx_;
  ctx.node_ = node;
  for (Context::Saved& saved : ctx.saved_) {
    for (std::size_t k = 0; k < outputs.size(); ++k) {
      // The address may have been reused for another record, but not for one with the same storage.
      if (saved.of != nullptr && saved.of == outputs[k].handle().get() &&
          saved.record.storage == outputs[k].handle()->storage) {
        saved.output = ctx.is_differentiable(outputs[k]) ? static_cast<int>(k) : -1;
        break;
      }
    }
  }
  node->edges.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    node->edges.push_back(ctx.needs_grad_[i] ? gradient_edge(*inputs[i]) : Edge{});
  }
  node->outputs.reserve(outputs.size());
  for (std::size_t k = 0; k < outputs.size(); ++k) {
    const Tensor& output = outputs[k];
    if (!output.defined()) {
      node->outputs.push_back({});
      continue;
    }
    node->outputs.push_back({output.shape(), output.dtype(), output.device()});
    for (std::size_t i = 0; i < count; ++i) {
      check(!inputs[i]->is_same(output), "{}: forward returned its input {}; it must return a new tensor or a view",
            *ctx.name_, i);
    }
    if (ctx.is_differentiable(output)) {
      set_history(output, node, static_cast<int>(k));
      link_to_inputs(output, inputs, count);
    }
  }
  ctx.non_differentiable_.clear();
  node->module = current_module();
  if (ctx.is_traced_) {
    trace_recorded(*node, inputs, count, outputs);
  }
}

void FunctionBase::watch(const Context& ctx, const Tensor* const* inputs, std::size_t count, const Tensors& outputs) {
  if (ctx.is_in_segment_) {
    SegmentWatch& segment = *SegmentWatch::current();
    segment.note_uses(inputs, count);
    for (const Tensor& output : outputs) {
      if (output.defined() && ctx.is_differentiable(output)) {
        segment.add_output(output);
        link_to_inputs(output, inputs, count);
      }
    }
  } else if (ctx.is_traced_) {
    trace_unrecorded(*ctx.name_, inputs, count, outputs);
  }
}

Tensors FunctionBase::backward(Tensors gradients) {
  check(
      !released_,
      "{}: backward has already run through this op and its saved tensors were freed; pass {{.retain_graph = true}} to "
      "the first backward to run it again",
      name());
  if (ctx_.materialize_grads_) {
    for (std::size_t k = 0; k < gradients.size(); ++k) {
      if (!gradients[k].defined()) {
        gradients[k] = zeros(outputs[k].shape, outputs[k].dtype, outputs[k].device);
      }
    }
  }
  Tensors results = grad_enabled() && !composed() ? call_opaque_backward(std::move(gradients))
                                                  : call_backward(ctx_, std::move(gradients));
  check(results.size() == edges.size(), "{}: backward returned {} gradients for {} inputs", name(), results.size(),
        edges.size());
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (edges[i].node == nullptr) {
      results[i] = {};
      continue;
    }
    const OutputInfo& input = edges[i].node->outputs[edges[i].output];
    if (!results[i].defined()) {
      check(!ctx_.materialize_grads_, "{}: backward returned no gradient for input {}, which needs one", name(), i);
      continue;
    }
    const Tensor& g = results[i];
    check(g.shape() == input.shape && g.dtype() == input.dtype && g.device() == input.device,
          "{}: the gradient of input {} should be {} {} on {}, but backward returned {} {} on {}", name(), i,
          input.dtype, input.shape, input.device, g.dtype(), g.shape(), g.device());
  }
  return results;
}

// The derivative of these gradients is unknown: differentiating them is an error.
Tensors FunctionBase::call_opaque_backward(Tensors gradients) {
  const auto unknown = make_node<UnknownDerivative>(name());
  unknown->edges = edges;
  unknown->module = module;
  for (const Tensor& gradient : gradients) {
    unknown->edges.push_back(gradient_edge(gradient));
  }
  const InsideOp guard;
  Tensors results = call_backward(ctx_, std::move(gradients));
  for (Tensor& result : results) {
    unknown->outputs.push_back(result.defined() ? OutputInfo{result.shape(), result.dtype(), result.device()}
                                                : OutputInfo{});
    if (result.defined()) {
      result = without_history(result);  // may be dy, which has its own history
      set_history(result, unknown, static_cast<int>(unknown->outputs.size()) - 1);
    }
  }
  return results;
}

Tensors FunctionBase::saved_tensors() const {
  Tensors result;
  for (const Context::Saved& saved : ctx_.saved_) {
    result.push_back(saved.tensor());
  }
  return result;
}

void FunctionBase::release() {
  ctx_.saved_.clear();
  released_ = true;
}

}  // namespace mica::autograd
