#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include <mica/autograd/grad_mode.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/memory_stats.h>
#include <mica/core/progress.h>
#include <mica/core/rng.h>
#include <mica/io/graph.h>
#include <mica/nn/evaluation.h>
#include <mica/ops/inplace/inplace.h>
#include <mica/ops/join/join.h>
#include <mica/ops/view/view.h>
#include <mica/profiler/profiler.h>
#include <mica/train/detail/agreement.h>
#include <mica/train/detail/group_optimizer.h>
#include <mica/train/ranks.h>
#include <mica/train/training_step.h>

namespace mica::train {

namespace {

// The maximum number of steps between reads of results from a GPU; on the CPU, results are available immediately.
constexpr std::int64_t most_uncollected = 64;

// Steps before the capture, in which the optimizer creates its state and libraries choose their kernels.
constexpr std::int64_t plain_steps = 3;

Tensors trained_parameters(const nn::Module& model) {
  Tensors trained = model.parameters();
  std::erase_if(trained, [](const Tensor& parameter) { return !parameter.requires_grad(); });
  check(!trained.empty(), "TrainingStep: the model has no parameter that requires a gradient");
  return trained;
}

std::unique_ptr<detail::GroupOptimizer> group_optimizer_of(const AnyOptimizer& optimizer, const nn::Module& model,
                                                           const distributed::DataParallelOptions& options,
                                                           const distributed::Group& group) {
  if (const auto* const sharded = std::get_if<std::reference_wrapper<distributed::ShardedAdamW>>(&optimizer)) {
    return detail::group_optimizer(*sharded);
  }
  return detail::group_optimizer(std::get<0>(optimizer), model, options, group);
}

bool same_shapes(const Tensors& a, const Tensors& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Tensor& x, const Tensor& y) { return x.shape() == y.shape() && x.dtype() == y.dtype(); });
}

}  // namespace

TrainingStep::TrainingStep(nn::Module& model, Loss loss, Batches& batches, AnyOptimizer optimizer, StepOptions options,
                           const distributed::Group& group)
    : model_(model),
      loss_(std::move(loss)),
      source_(batches),
      options_(std::move(options)),
      group_(group),
      parameters_(trained_parameters(model)),
      device_(parameters_.front().device()),
      optimizer_(group_optimizer_of(optimizer, model, options_.parallel, group)),
      graph_allowed_(device_.is_cuda() && options_.cuda_graph) {
  check(options_.accumulate >= 1, "TrainingStep: expected at least 1 batch per step, got {}", options_.accumulate);
  check(options_.clip >= 0, "TrainingStep: expected a maximum gradient norm of at least 0, got {}", options_.clip);
  results_ = empty({device_.is_cuda() ? most_uncollected : 1, options_.accumulate + 1}, float64, device_);
  batches_.resize(static_cast<std::size_t>(options_.accumulate));
  if (parameters_.front().dtype() == float16) {
    scaler_.emplace();
  }
  if (options_.ema > 0) {
    ema_.emplace(parameters_, options_.ema);
  }
  set_rng_state(random_stream_of(group_.rank(), rng_state()));
}

TrainingStep::~TrainingStep() = default;

StateDict TrainingStep::model_state() const {
  StateDict state = model_.state_dict();
  if (options_.trained_only) {
    state.clear();
    for (const auto& [name, parameter] : model_.named_parameters()) {
      if (parameter.requires_grad()) {
        state.emplace(name, parameter);
      }
    }
  }
  return state;
}

void TrainingStep::load_model_state(const StateDict& state) {
  if (!options_.trained_only) {
    model_.load_state_dict(state);
    return;
  }
  for (const auto& [name, parameter] : model_state()) {
    check(state.contains(name) && state.at(name).shape() == parameter.shape(), "it lacks {} of shape {}", name,
          parameter.shape());
    const autograd::NoGrad no_grad;
    copy_(parameter, state.at(name));
  }
}

io::TrainingCheckpoint TrainingStep::checkpoint() const {
  io::TrainingCheckpoint checkpoint{
      .step = steps_done_, .parts = {}, .random = rng_state(), .data = source_.position(), .settings = {}};
  checkpoint.parts["model"] = model_state();
  checkpoint.parts["optimizer"] = optimizer_->state_dict();
  if (scaler_) {
    checkpoint.parts["scaler"] = scaler_->state_dict();
  }
  if (ema_) {
    checkpoint.parts["ema"] = ema_->state_dict();
  }
  return checkpoint;
}

void TrainingStep::resume(const io::TrainingCheckpoint& checkpoint) {
  load_model_state(checkpoint.part("model"));
  optimizer_->load_state_dict(checkpoint.part("optimizer"));
  if (scaler_) {
    scaler_->load_state_dict(checkpoint.part("scaler"));
  }
  if (ema_) {
    ema_->load_state_dict(checkpoint.part("ema"));
  }
  source_.seek(checkpoint.data);
  set_rng_state(random_stream_of(group_.rank(), checkpoint.random));
  steps_done_ = first_step_ = checkpoint.step;
}

void TrainingStep::give_up_graph(const std::string& reason) {
  graph_ = {};
  graph_error_ = reason;
}

// On a GPU, batches are written to the same memory in every step, in stream order, without waiting for earlier steps.
void TrainingStep::load(std::size_t i, const Tensors& fields) {
  if (device_.is_cpu()) {
    batches_[i] = fields;
    return;
  }
  if (!same_shapes(batches_[i], fields)) {
    if (!batches_[i].empty() && graph_error_.empty() && (graph_allowed_ || !graph_.empty())) {
      give_up_graph("batches have different shapes");
    }
    batches_[i].clear();
    for (const Tensor& field : fields) {
      batches_[i].push_back(empty(field.shape(), field.dtype(), device_));
    }
  }
  for (std::size_t field = 0; field < fields.size(); ++field) {
    copy_into(batches_[i][field], fields[field]);
  }
}

void TrainingStep::load_batches() {
  const ProfileRange range("batch");
  loss_weights_.clear();
  units_ = 0;
  double total = 0;
  bool weighted = false;
  for (std::size_t i = 0; i < batches_.size(); ++i) {
    const Batch batch = source_.next();
    load(i, batch.fields);
    loss_weights_.push_back(batch.weight);
    units_ += batch.units;
    total += batch.weight;
    weighted = weighted || batch.weight != 1;
  }
  if (!weighted) {
    loss_weights_.clear();
    return;
  }
  check(group_.size() == 1, "TrainingStep: with several ranks, expected batches of weight 1");
  if (batches_.size() == 1) {
    loss_weights_.clear();
    return;
  }
  if (graph_allowed_ && graph_error_.empty()) {
    give_up_graph("batches have weights");
  }
  for (double& share : loss_weights_) {
    share /= total;
  }
}

void TrainingStep::compute() {
  losses_.clear();
  optimizer_->zero_grad();
  for (std::size_t i = 0; i < batches_.size(); ++i) {
    const Tensor loss = loss_(batches_[i]);
    if (!options_.draw_graph.empty() && group_.rank() == 0 && steps_done_ == first_step_ && losses_.empty()) {
      io::write_graph(loss, options_.draw_graph);
    }
    const Tensor scaled = scaler_ ? scaler_->scale(loss) : loss;
    const double share = loss_weights_.empty() ? 1 / static_cast<double>(batches_.size()) : loss_weights_[i];
    const Tensor gradient = batches_.size() == 1 ? Tensor() : mica::full({}, share, scaled.dtype(), device_);
    optimizer_->backward(scaled, gradient, i + 1 == batches_.size());
    losses_.push_back(loss.detach());
  }
  const ProfileRange range("optimizer");
  norm_ =
      optimizer_->step({.max_grad_norm = options_.clip > 0 ? options_.clip : std::numeric_limits<double>::infinity(),
                        .scaler = scaler_ ? &*scaler_ : nullptr});
  if (scaler_) {
    scaler_->update();
  }
  if (ema_) {
    ema_->update();
  }
}

// Captures the step on all ranks, or on none.
void TrainingStep::capture() {
  graph_tried_ = true;
  if (graph_error_.empty()) {
    try {
      graph_ = cuda::capture([this] { compute(); }, device_);
    } catch (const Error& error) {
      give_up_graph(error.what());
    }
  }
  const std::vector<int> failed = detail::ranks_where(group_, graph_.empty());
  if (!failed.empty()) {
    optimizer_->discard();
    if (graph_error_.empty()) {
      give_up_graph(fmt::format("rank {} could not capture them", failed.front()));
    }
  }
}

// Runs the step from a CUDA graph if possible; returns whether it did.
bool TrainingStep::replay() {
  if (!graph_allowed_ || steps_done_ - first_step_ < plain_steps) {
    return false;
  }
  if (!graph_tried_) {
    capture();
  }
  if (graph_.empty()) {
    return false;
  }
  graph_.replay();
  return true;
}

void TrainingStep::step() {
  if (options_.schedule) {
    optimizer_->set_lr(options_.schedule(steps_done_));
  }
  load_batches();
  if (!replay()) {
    compute();
  }
  // Each replay overwrites the losses and the norm of the previous one.
  const ProfileRange range("results");
  const auto row = static_cast<std::int64_t>(pending_.size()) * results_.size(1);
  for (std::int64_t i = 0; i < options_.accumulate; ++i) {
    copy_into(as_strided(results_, losses_[i].shape(), losses_[i].strides(), row + i), losses_[i]);
  }
  copy_into(as_strided(results_, norm_.shape(), norm_.strides(), row + options_.accumulate), norm_);
  pending_.push_back({optimizer_->lr(), units_ * group_.size(), loss_weights_});
  ++steps_done_;
}

bool TrainingStep::full() const { return static_cast<std::int64_t>(pending_.size()) == results_.size(0); }

std::vector<StepResult> TrainingStep::finished() {
  const Tensor own = empty_like(results_);
  copy_into(own, results_);
  group_.all_reduce(results_, distributed::Reduction::mean);
  const std::vector<double> values = to_vector<double>(results_);
  std::vector<StepResult> steps;
  const auto count = static_cast<std::size_t>(options_.accumulate);
  for (std::size_t i = 0; i < pending_.size(); ++i) {
    const double* const row = values.data() + i * (count + 1);
    const std::vector<double>& shares = pending_[i].shares;
    double loss = 0;
    for (std::size_t k = 0; k < count; ++k) {
      loss += shares.empty() ? row[k] : shares[k] * row[k];
    }
    loss = shares.empty() ? loss / static_cast<double>(count) : loss;
    steps.push_back({.loss = loss, .lr = pending_[i].lr, .grad_norm = row[count], .units = pending_[i].units});
  }
  // The mean losses are the same on all ranks, so either all of them call ranks_where() or none does.
  const auto bad =
      std::find_if(steps.begin(), steps.end(), [](const StepResult& step) { return !std::isfinite(step.loss); });
  if (bad != steps.end()) {
    const std::vector<double> of_this_rank = to_vector<double>(own);
    const double* const losses = of_this_rank.data() + (bad - steps.begin()) * results_.size(1);
    bad->diverged = detail::ranks_where(
        group_, !std::all_of(losses, losses + count, [](double loss) { return std::isfinite(loss); }));
  }
  pending_.clear();
  return steps;
}

double TrainingStep::mean_loss(const Validation& data) const {
  const nn::Evaluation guard;
  // One read at the end, to avoid waiting for a GPU after each batch.
  Tensors losses;
  std::vector<double> weights;
  ProgressTask progress("validating", data.size());
  data.each([&](const Batch& batch) {
    losses.push_back(loss_(batch.fields));
    weights.push_back(batch.weight);
    progress.advance();
  });
  const std::vector<double> values = losses.empty() ? std::vector<double>() : to_vector<double>(stack(losses));
  double sum = 0, weight = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    sum += values[i] * weights[i];
    weight += weights[i];
  }
  const Tensor total = from_data<double>({sum, weight}, {2}, device_);
  group_.all_reduce(total);
  const std::vector<double> of_all = to_vector<double>(total);
  return of_all[0] / of_all[1];
}

MemoryUse TrainingStep::memory() const {
  const MemoryStats stats = memory_stats(device_);
  MemoryUse use{.weights = 0,
                .gradients = 0,
                .optimizer = optimizer_->state_bytes(),
                .workspace = stats.workspace,
                .others = 0,
                .peak = stats.peak};
  for (const Tensor& parameter : model_.parameters()) {
    use.weights += parameter.bytes();
    if (const Tensor gradient = parameter.grad(); gradient.defined()) {
      use.gradients += gradient.bytes();
    }
  }
  use.others = use.peak - std::min(use.peak, use.weights + use.gradients + use.optimizer + use.workspace);
  return use;
}

}  // namespace mica::train
