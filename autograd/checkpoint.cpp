#include <algorithm>

#include <mica/autograd/checkpoint.h>

namespace mica::autograd {

namespace {

thread_local SegmentWatch* watch = nullptr;

// What the tensors inside of a segment are recorded as while it is watched.
class InsideSegment final : public Node {
 public:
  std::string name() const override { return "an op inside of a checkpoint"; }
  Tensors backward(Tensors) override {
    throw Error(
        "checkpoint: asked for the gradient of a tensor that was made in a checkpointed function and left it other "
        "than "
        "as its result; the function has to return it");
  }
};

// In the part of backward that runs the program's code again.
class Replaying {
 public:
  Replaying() : previous_(watch) { watch = nullptr; }
  ~Replaying() { watch = previous_; }
  Replaying(const Replaying&) = delete;
  Replaying& operator=(const Replaying&) = delete;

 private:
  InsideOp not_inside_{false};
  SegmentWatch* previous_;
};

}  // namespace

Tensors Segment::backward(Tensors) { throw Error(name() + ": it is replayed and has no backward of its own"); }

SegmentWatch::SegmentWatch() : previous_(watch), inside_(make_node<InsideSegment>()) { watch = this; }

SegmentWatch::~SegmentWatch() { watch = previous_; }

SegmentWatch* SegmentWatch::current() { return watch; }

bool SegmentWatch::made(const Tensor& x) const { return gradient_edge(x).node == inside_; }

void SegmentWatch::note_use(const Tensor& x) {
  Edge edge = gradient_edge(x);
  if (edge.node == nullptr || edge.node == inside_ || !seen_.insert(x.handle().get()).second) {
    return;
  }
  used.push_back({x.handle(), x.version()});
  edges.push_back(std::move(edge));
}

void SegmentWatch::note_op(const Tensor* const* inputs, std::size_t count, const Tensors& outputs,
                           const Tensors& non_differentiable) {
  for (std::size_t i = 0; i < count; ++i) {
    note_use(*inputs[i]);
  }
  for (const Tensor& output : outputs) {
    const auto is_output = [&](const Tensor& x) { return x.is_same(output); };
    if (output.defined() && is_floating(output.dtype()) &&
        std::none_of(non_differentiable.begin(), non_differentiable.end(), is_output)) {
      inside_->outputs.push_back({output.shape(), output.dtype(), output.device()});
      set_history(output, inside_, static_cast<int>(inside_->outputs.size()) - 1);
    }
  }
}

void check_unchanged(const std::vector<SegmentWatch::Used>& used) {
  for (const auto& [tensor, version] : used) {
    if (const auto impl = tensor.lock()) {
      check(impl->storage->version() == version,
            "checkpoint: a tensor of shape {} that the function used was modified in place since, so that it cannot be "
            "computed again",
            impl->shape);
    }
  }
}

namespace detail {

void note_input(std::vector<SegmentWatch::Used>& used, const Tensor& x) {
  if (x.defined()) {
    used.push_back({x.handle(), x.version()});
  }
}

Tensors CheckpointBase::run(const std::shared_ptr<CheckpointBase>& node) {
  node->note_inputs(node->used_);
  SegmentWatch segment;
  Tensors results;
  {
    const RecordPhiloxKeys keys(node->keys_);
    results = node->call();
  }
  node->edges = std::move(segment.edges);
  node->used_.insert(node->used_.end(), segment.used.begin(), segment.used.end());
  node->module = current_module();
  const Tensors inner = results;
  for (std::size_t k = 0; k < results.size(); ++k) {
    node->outputs.push_back(inner[k].defined() ? OutputInfo{inner[k].shape(), inner[k].dtype(), inner[k].device()}
                                               : OutputInfo{});
    if (!segment.made(inner[k])) {
      continue;  // an input that f returned keeps its own history
    }
    const auto same = std::find_if(inner.begin(), inner.end(), [&](const Tensor& x) { return x.is_same(inner[k]); });
    if (const auto first = static_cast<std::size_t>(same - inner.begin()); first < k) {
      results[k] = results[first];
      continue;
    }
    results[k] = without_history(inner[k]);  // f may have kept the other
    set_history(results[k], node, static_cast<int>(k));
  }
  return results;
}

std::vector<std::pair<Edge, Tensor>> CheckpointBase::replay(const Tensors& gradients) {
  check(
      !released_,
      "Checkpoint: backward has already run through this op and its inputs are gone; pass {{.retain_graph = true}} to "
      "the first backward to run it again");
  check_unchanged(used_);
  Tensors results;
  {
    const Replaying guard;
    const CurrentModule module_guard(module);
    const ReplayPhiloxKeys keys(keys_);
    results = call();
    check(keys.left() == 0, "checkpoint: the function made {} random tensors and, when called again, {} fewer",
          keys_.size(), keys.left());
  }
  check(results.size() == outputs.size(), "checkpoint: the function returned {} tensors and, when called again, {}",
        outputs.size(), results.size());
  std::vector<std::pair<Edge, Tensor>> ends;
  for (std::size_t k = 0; k < results.size(); ++k) {
    if (!gradients[k].defined()) {
      continue;
    }
    const Tensor& result = results[k];
    check(result.defined() && result.shape() == outputs[k].shape && result.dtype() == outputs[k].dtype,
          "checkpoint: the function returned {} {} as output {} and, when called again, {}", outputs[k].dtype,
          outputs[k].shape, k,
          result.defined() ? fmt::format("{} {}", result.dtype(), result.shape()) : "an undefined tensor");
    Edge edge = gradient_edge(result);
    check(edge.node != nullptr,
          "checkpoint: output {} of the function depended on something that requires a gradient and, when called "
          "again, did not",
          k);
    ends.emplace_back(std::move(edge), gradients[k]);
  }
  return ends;
}

void CheckpointBase::release() {
  drop();
  released_ = true;
}

}  // namespace detail

}  // namespace mica::autograd
