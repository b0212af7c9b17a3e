#include <algorithm>

#include <mica/autograd/autocast.h>
#include <mica/autograd/checkpoint.h>
#include <mica/autograd/detail/accumulate.h>
#include <mica/autograd/detail/inplace.h>
#include <mica/autograd/detail/segment.h>
#include <mica/core/rng.h>

namespace mica::autograd {

namespace {

using detail::CheckpointedCall;
using Used = std::vector<SegmentWatch::Used>;

// Placeholder for the ops of a segment while a SegmentWatch observes them.
class InsideSegment final : public Node {
 public:
  std::string name() const override { return "an op inside a checkpoint"; }
  Tensors backward(Tensors) override {
    throw Error(
        "checkpoint: a gradient was requested for a tensor that was created in a checkpointed function but is not one "
        "of its results; return it from the function");
  }
};

// Marks this thread as recomputing: backward is calling the checkpointed function again.
class Replaying {
 public:
  Replaying() : previous_(thread_state.segment) { thread_state.segment = nullptr; }
  ~Replaying() { thread_state.segment = previous_; }
  Replaying(const Replaying&) = delete;
  Replaying& operator=(const Replaying&) = delete;

 private:
  InsideOp not_inside_{false};
  SegmentWatch* previous_;
};

void note(Used& used, const Tensors& tensors) {
  for (const Tensor& x : tensors) {
    if (x.defined()) {
      used.push_back({x.handle(), x.version()});
    }
  }
}

// `when`, for the error message, describes when the modification happened.
void check_unchanged(const Used& used, const char* when) {
  for (const auto& [tensor, version] : used) {
    if (const auto impl = tensor.lock()) {
      check(impl->storage->version() == version,
            "checkpoint: a tensor of shape {} that the function used was modified in place {}, last by {}, so that it "
            "cannot be recomputed",
            impl->shape, when, impl->storage->last_writer());
    }
  }
}

class Checkpoint final : public Segment {
 public:
  Checkpoint(std::unique_ptr<CheckpointedCall> call, Used used, std::vector<PhiloxKey> keys)
      : call_(std::move(call)), used_(std::move(used)), keys_(std::move(keys)) {
    call_->snapshot_inputs();
    note(used_, call_->inputs());  // the handles that f used may be destroyed before backward
  }

  std::string name() const override { return "Checkpoint"; }
  Tensors saved_tensors() const override { return call_ ? call_->inputs() : Tensors{}; }
  void release() override { call_.reset(); }

 protected:
  std::vector<std::pair<Edge, Tensor>> replay(const Tensors& gradients) override;

 private:
  Tensors call_again() const;
  Edge check_output(std::size_t k, const Tensor& result) const;

  std::unique_ptr<CheckpointedCall> call_;  // null once released
  Used used_;
  std::vector<PhiloxKey> keys_;
  std::optional<DType> autocast_ = autocast_dtype();
};

Tensors Checkpoint::call_again() const {
  const Replaying guard;
  const Autocast autocast(autocast_);
  const CurrentModule module_guard(module);
  const ReplayPhiloxKeys keys(keys_);
  Tensors results = (*call_)();
  check(keys.left() == 0, "checkpoint: the function drew {} random tensors, and {} fewer when called again",
        keys_.size(), keys.left());
  check(results.size() == outputs.size(), "checkpoint: the function returned {} tensors, and {} when called again",
        outputs.size(), results.size());
  return results;
}

// The edge for the gradient of output k. Throws unless the function returned the same shape and dtype as the first
// time.
Edge Checkpoint::check_output(std::size_t k, const Tensor& result) const {
  const OutputInfo& first = outputs[k];
  check(result.defined() && result.shape() == first.shape && result.dtype() == first.dtype,
        "checkpoint: the function returned {} {} as output {}, and {} when called again", first.dtype, first.shape, k,
        result.defined() ? fmt::format("{} {}", result.dtype(), result.shape()) : "an undefined tensor");
  Edge edge = gradient_edge(result);
  check(edge.node != nullptr,
        "checkpoint: output {} of the function depended on something that requires a gradient, but did not when called "
        "again",
        k);
  return edge;
}

std::vector<std::pair<Edge, Tensor>> Checkpoint::replay(const Tensors& gradients) {
  check(call_ != nullptr,
        "Checkpoint: backward has already run through this op and its inputs were freed; pass {{.retain_graph = true}} "
        "to the first backward to run it again");
  check_unchanged(used_, "since");
  const Tensors results = call_again();
  std::vector<std::pair<Edge, Tensor>> ends;
  for (std::size_t k = 0; k < results.size(); ++k) {
    if (gradients[k].defined()) {
      ends.emplace_back(check_output(k, results[k]), gradients[k]);
    }
  }
  return ends;
}

// If two results, or a result and an input, share elements, only the function knows how a write to one affects the
// other.
void link_views(const Tensor& result, const Tensors& others) {
  for (const Tensor& other : others) {
    if (other.defined() && other.handle()->storage == result.handle()->storage) {
      link_custom_view(result, other);
      return;
    }
  }
}

// The results of the function as outputs of `node`; an input that it returned keeps its own history.
Tensors as_outputs(const Tensors& inner, const Tensors& inputs, const std::shared_ptr<Node>& node,
                   const SegmentWatch& segment) {
  Tensors results = inner;
  Tensors seen = inputs;
  for (std::size_t k = 0; k < inner.size(); ++k) {
    node->outputs.push_back(inner[k].defined() ? OutputInfo{inner[k].shape(), inner[k].dtype(), inner[k].device()}
                                               : OutputInfo{});
    if (!segment.made(gradient_edge(inner[k]))) {
      continue;
    }
    const auto same = std::find_if(inner.begin(), inner.end(), [&](const Tensor& x) { return x.is_same(inner[k]); });
    if (const auto first = static_cast<std::size_t>(same - inner.begin()); first < k) {
      results[k] = results[first];
      continue;
    }
    results[k] = without_history(inner[k]);  // the function may have kept its handle
    set_history(results[k], node, static_cast<int>(k));
    link_views(results[k], seen);
    seen.push_back(results[k]);
  }
  return results;
}

}  // namespace

Tensors Segment::backward(Tensors) { throw Error(name() + ": it is replayed and has no backward of its own"); }

SegmentWatch::SegmentWatch() : inside_(make_node<InsideSegment>()), previous_(thread_state.segment) {
  thread_state.segment = this;
}

void SegmentWatch::note_uses(const Tensor* const* inputs, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    Edge edge = gradient_edge(*inputs[i]);
    if (edge.node == nullptr || made(edge) || !seen_.insert(inputs[i]->handle().get()).second) {
      continue;
    }
    note(used, {*inputs[i]});
    edges.push_back(std::move(edge));
  }
}

void SegmentWatch::add_output(const Tensor& x) {
  inside_->outputs.push_back({x.shape(), x.dtype(), x.device()});
  set_history(x, inside_, static_cast<int>(inside_->outputs.size()) - 1);
}

namespace detail {

Tensors run_checkpoint(std::unique_ptr<CheckpointedCall> call) {
  if (SegmentWatch::current() != nullptr) {
    return (*call)();  // the outer checkpoint's replay calls this again
  }
  const Tensors inputs = call->inputs();
  SegmentWatch segment;
  Used used;
  note(used, inputs);
  std::vector<PhiloxKey> keys;
  const Tensors results = [&] {
    const RecordPhiloxKeys guard(keys);
    return (*call)();
  }();
  if (segment.edges.empty()) {
    return results;
  }
  used.insert(used.end(), segment.used.begin(), segment.used.end());
  check_unchanged(used, "by the function itself");
  // Created after everything that the function used, so that backward reaches it first.
  const auto node = make_node<Checkpoint>(std::move(call), std::move(used), std::move(keys));
  node->edges = std::move(segment.edges);
  node->module = current_module();
  return as_outputs(results, inputs, node, segment);
}

}  // namespace detail

}  // namespace mica::autograd
