#include <mica/train/detail/group_optimizer.h>

namespace mica::train::detail {

namespace {

/// Each rank has the whole optimizer state.
class Replicated final : public GroupOptimizer {
 public:
  Replicated(optim::Optimizer& optimizer, const nn::Module& model, const distributed::DataParallelOptions& options,
             const distributed::Group& group)
      : parallel_(model, group, options), optimizer_(optimizer) {}

  void backward(const Tensor& loss, const Tensor& gradient, bool last) override {
    const auto guard = parallel_.accumulate(!last);
    loss.backward(gradient);
  }
  Tensor step(const optim::StepOptions& options) override {
    parallel_.wait();
    return optimizer_.step(options);
  }
  void zero_grad() override { optimizer_.zero_grad(); }
  void discard() override { parallel_.discard(); }
  void set_lr(double lr) override { optimizer_.set_lr(lr); }
  double lr() const override { return optimizer_.lr(); }
  StateDict state_dict() const override { return optimizer_.state_dict(); }
  void load_state_dict(const StateDict& state) override { optimizer_.load_state_dict(state); }
  std::size_t state_bytes() const override {
    std::size_t bytes = 0;
    for (const auto& [name, tensor] : optimizer_.state_dict()) {
      bytes += tensor.bytes();
    }
    return bytes;
  }

 private:
  distributed::DataParallel parallel_;
  optim::Optimizer& optimizer_;
};

/// Each rank has the state for its part of the weights.
class Sharded final : public GroupOptimizer {
 public:
  explicit Sharded(distributed::ShardedAdamW& optimizer) : optimizer_(optimizer) {}

  void backward(const Tensor& loss, const Tensor& gradient, bool last) override {
    const auto guard = optimizer_.accumulate(!last);
    loss.backward(gradient);
  }
  Tensor step(const optim::StepOptions& options) override { return optimizer_.step(options); }
  void zero_grad() override { optimizer_.zero_grad(); }
  void discard() override { optimizer_.discard(); }
  void set_lr(double lr) override { optimizer_.set_lr(lr); }
  double lr() const override { return optimizer_.lr(); }
  StateDict state_dict() const override { return optimizer_.state_dict(0); }
  void load_state_dict(const StateDict& state) override { optimizer_.load_state_dict(state); }
  std::size_t state_bytes() const override { return optimizer_.state_bytes(); }

 private:
  distributed::ShardedAdamW& optimizer_;
};

}  // namespace

std::unique_ptr<GroupOptimizer> group_optimizer(optim::Optimizer& optimizer, const nn::Module& model,
                                                const distributed::DataParallelOptions& options,
                                                const distributed::Group& group) {
  return std::make_unique<Replicated>(optimizer, model, options, group);
}

std::unique_ptr<GroupOptimizer> group_optimizer(distributed::ShardedAdamW& optimizer) {
  return std::make_unique<Sharded>(optimizer);
}

}  // namespace mica::train::detail
