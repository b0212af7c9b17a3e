#include "examples/train_transformer/group_optimizer.h"

#include <optional>

#include <mica/dist/data_parallel.h>
#include <mica/dist/sharded_adamw.h>
#include <mica/optim/adamw.h>

using namespace mica;

namespace {

std::vector<optim::AdamW::Group> parameters_of(const nn::GPT& model, const Options& options) {
  return optim::AdamW::decay_matrices(
      model.parameters(), {.lr = options.lr, .betas = {0.9, options.beta2}, .weight_decay = options.weight_decay});
}

std::optional<DType> reduce_dtype(const nn::GPT& model, const Options& options) {
  const DType dtype = model.parameters().front().dtype();
  return options.reduce_float32 && dtype != float32 ? std::optional(float32) : std::nullopt;
}

/// Each rank has the whole optimizer state.
class Replicated final : public GroupOptimizer {
 public:
  Replicated(nn::GPT& model, const Options& options, const dist::Group& group)
      : parallel_(model, group,
                  {.reduce_dtype = reduce_dtype(model, options), .check_gradients = options.check_gradients}),
        optimizer_(parameters_of(model, options)) {}

  void backward(const Tensor& loss, const Tensor& gradient, bool last) override {
    const auto guard = parallel_.accumulate(!last);
    loss.backward(gradient);
  }
  Tensor step(const optim::StepOptions& options) override {
    parallel_.wait();
    return optimizer_.step(options);
  }
  void zero_grad() override { optimizer_.zero_grad(); }
  void set_lr(double lr) override { optimizer_.set_lr(lr); }
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
  dist::DataParallel parallel_;
  optim::AdamW optimizer_;
};

/// Each rank has the state for its share of the weights.
class Sharded final : public GroupOptimizer {
 public:
  Sharded(nn::GPT& model, const Options& options, const dist::Group& group)
      : optimizer_(parameters_of(model, options), group,
                   {.reduce_dtype = reduce_dtype(model, options),
                    .overlap = true,
                    .overlap_gather = true,
                    .check_gradients = options.check_gradients}) {}

  void backward(const Tensor& loss, const Tensor& gradient, bool last) override {
    const auto guard = optimizer_.accumulate(!last);
    loss.backward(gradient);
  }
  Tensor step(const optim::StepOptions& options) override { return optimizer_.step(options); }
  void zero_grad() override { optimizer_.zero_grad(); }
  void set_lr(double lr) override { optimizer_.set_lr(lr); }
  StateDict state_dict() const override { return optimizer_.state_dict(0); }
  void load_state_dict(const StateDict& state) override { optimizer_.load_state_dict(state); }
  std::size_t state_bytes() const override { return optimizer_.state_bytes(); }

 private:
  dist::ShardedAdamW optimizer_;
};

}  // namespace

std::unique_ptr<GroupOptimizer> group_optimizer(nn::GPT& model, const Options& options, const dist::Group& group) {
  if (options.zero) {
    return std::make_unique<Sharded>(model, options, group);
  }
  return std::make_unique<Replicated>(model, options, group);
}
