#include "examples/train_transformer/trainer.h"

#include <algorithm>
#include <limits>

#include <mica/autograd/grad_mode.h>
#include <mica/core/creation.h>
#include <mica/io/graph.h>
#include <mica/ops/cross_entropy/cross_entropy.h>
#include <mica/ops/join/join.h>

using namespace mica;

namespace {

// All of a small text's last tenth, and enough of a large one's.
constexpr std::int64_t validation_tokens = 1 << 17;

Tensor loss_of(CharacterModel& model, const io::Batch& batch) {
  return cross_entropy(model.gpt(batch.inputs), batch.targets);
}

}  // namespace

Trainer::Trainer(CharacterModel& model, std::span<const std::int32_t> training,
                 std::span<const std::int32_t> validation, const Options& options)
    : model_(model),
      parameters_(model.gpt.parameters()),
      device_(parameters_.front().device()),
      batch_(options.batch),
      clip_(options.clip > 0 ? options.clip : std::numeric_limits<double>::infinity()),
      graph_(options.graph),
      schedule_{.peak = options.lr, .floor = options.min_lr, .warmup = options.warmup, .total = options.steps},
      optimizer_(optim::AdamW::decay_matrices(
          parameters_, {.lr = options.lr, .betas = {0.9, 0.99}, .weight_decay = options.weight_decay})),
      windows_(training, options.context, options.seed),
      validation_(io::even_windows(validation, options.context, options.batch,
                                   std::max<std::int64_t>(1, validation_tokens / options.context), device_)) {}

Step Trainer::step() {
  const double lr = schedule_.lr(steps_done_);
  optimizer_.set_lr(lr);
  const Tensor loss = loss_of(model_, windows_.next(batch_, device_));
  if (steps_done_ == 0 && !graph_.empty()) {
    io::write_graph(loss, graph_);
  }
  optimizer_.zero_grad();
  loss.backward();
  const Tensor grad_norm = optimizer_.step({.max_grad_norm = clip_});
  ++steps_done_;
  return {loss.item(), lr, grad_norm.item()};
}

double Trainer::validate() {
  const autograd::NoGrad no_grad;
  model_.gpt.eval();
  // One read at the end, so that a GPU is not waited for batch by batch.
  Tensors losses;
  for (const io::Batch& batch : validation_) {
    losses.push_back(loss_of(model_, batch));
  }
  const std::vector<double> values = to_vector<double>(stack(losses));
  model_.gpt.train();
  double sum = 0;
  std::int64_t windows = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    sum += values[i] * static_cast<double>(validation_[i].inputs.size(0));
    windows += validation_[i].inputs.size(0);
  }
  return sum / static_cast<double>(windows);
}
