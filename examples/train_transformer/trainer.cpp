#include "examples/train_transformer/trainer.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "examples/common/checkpoints.h"
#include "examples/common/ranks.h"
#include <mica/autograd/profiler.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/memory_stats.h>
#include <mica/core/progress.h>
#include <mica/core/rng.h>
#include <mica/io/graph.h>
#include <mica/nn/evaluation.h>
#include <mica/ops/join/join.h>
#include <mica/ops/view/view.h>

using namespace mica;

namespace {

// Validation uses the last tenth of the text: all of it for a small text, a part of it for a large one.
constexpr std::int64_t validation_tokens = 1 << 17;

// The maximum number of steps between reads of results from a GPU; on the CPU, results are available immediately.
constexpr std::int64_t most_uncollected = 64;

// Steps before the capture, in which the optimizer creates its state and libraries choose their kernels.
constexpr std::int64_t plain_steps = 3;

// <|endoftext|> in files of GPT-2 tokens.
constexpr std::int64_t gpt2_separator = 50256;

std::optional<std::int64_t> separator_of(const Options& options) {
  return options.documents == "none" ? std::nullopt : std::optional(gpt2_separator);
}

// Rank r's part of the windows; parts differ by at most one window.
io::Batch part_of(const io::Batch& windows, const dist::Group& group) {
  const std::int64_t count = windows.inputs.size(0), rank = group.rank(), ranks = group.size();
  const std::int64_t first = rank * count / ranks, end = (rank + 1) * count / ranks;
  return {slice(windows.inputs, 0, first, end), slice(windows.targets, 0, first, end)};
}

// The fields of TokenWindows for windows on the CPU.
Tensors with_documents(const io::Batch& batch, const Options& options, Device device) {
  Tensors fields{batch.inputs, batch.targets};
  if (const std::optional<std::int64_t> separator = separator_of(options)) {
    fields.push_back(empty_like(batch.inputs));
    fields.push_back(empty_like(batch.inputs));
    for (std::int64_t i = 0; i < batch.inputs.size(0); ++i) {
      const io::Sample row(fields, i);
      io::mark_documents(row.field<std::int64_t>(0), *separator, options.documents == "begin",
                         row.field<std::int64_t>(1), row.field<std::int64_t>(2), row.field<std::int64_t>(3));
    }
  }
  for (Tensor& field : fields) {
    field = field.to(device);
  }
  return fields;
}

}  // namespace

Trainer::Trainer(nn::GPT& model, const io::TokenView& training, const io::TokenView& validation, const Options& options,
                 const dist::Group& group)
    : model_(model),
      group_(group),
      parameters_(model.parameters()),
      device_(parameters_.front().device()),
      batch_(options.batch),
      context_(options.context),
      accumulate_(options.accumulate),
      clip_(options.clip > 0 ? options.clip : std::numeric_limits<double>::infinity()),
      drawing_(options.draw_graph),
      schedule_{.peak = options.lr, .floor = options.min_lr, .warmup = options.warmup, .total = options.steps},
      optimizer_(group_optimizer(model, options, group)),
      windows_(training, {.context = options.context,
                          .seed = options.seed,
                          .separator = separator_of(options),
                          .separator_begins = options.documents == "begin"}),
      loading_{.batch = options.batch,
               .seed = options.seed,
               .workers = options.workers,
               .device = device_,
               .rank = group.rank(),
               .ranks = group.size()},
      results_(empty({device_.is_cuda() ? most_uncollected : 1, accumulate_ + 1}, float64, device_)),
      can_capture_(device_.is_cuda() && group.size() == 1),
      graph_allowed_(can_capture_ && options.cuda_graph) {
  if (parameters_.front().dtype() == float16) {
    scaler_.emplace();
  }
  if (options.ema > 0) {
    ema_.emplace(parameters_, options.ema);
  }
  loader_.emplace(windows_, loading_);
  const std::int64_t most = std::max<std::int64_t>(1, validation_tokens / options.context);
  for (const io::Batch& batch : io::even_windows(validation, options.context, options.batch, most)) {
    if (const io::Batch part = part_of(batch, group); part.inputs.size(0) > 0) {
      validation_.push_back(with_documents(part, options, device_));
    }
  }
}

Tensor Trainer::loss_of(const Tensors& batch) const {
  const bool packed = batch.size() > 2;
  return model_.loss(batch[0], batch[1], packed ? nn::PackedDocuments{batch[2], batch[3]} : nn::PackedDocuments{});
}

io::TrainingCheckpoint Trainer::checkpoint() const {
  io::TrainingCheckpoint checkpoint{
      .step = steps_done_, .parts = {}, .random = rng_state(), .data = loader_->position(), .settings = {}};
  checkpoint.parts["model"] = model_.state_dict();
  checkpoint.parts["optimizer"] = optimizer_->state_dict();
  if (scaler_) {
    checkpoint.parts["scaler"] = scaler_->state_dict();
  }
  if (ema_) {
    checkpoint.parts["ema"] = ema_->state_dict();
  }
  return checkpoint;
}

void Trainer::resume(const io::TrainingCheckpoint& checkpoint) {
  schedule_.warmup = number_of(checkpoint.settings, "warmup");
  check(schedule_.warmup <= schedule_.total, "expected at least as many steps as its warm-up has, {}, got --steps {}",
        schedule_.warmup, schedule_.total);
  model_.load_state_dict(checkpoint.part("model"));
  optimizer_->load_state_dict(checkpoint.part("optimizer"));
  if (scaler_) {
    scaler_->load_state_dict(checkpoint.part("scaler"));
  }
  if (ema_) {
    ema_->load_state_dict(checkpoint.part("ema"));
  }
  loading_.start = checkpoint.data;
  loader_.emplace(windows_, loading_);
  set_rng_state(random_stream_of(group_.rank(), checkpoint.random));
  steps_done_ = first_step_ = checkpoint.step;
}

// On a GPU, batches are written to the same memory in every step, in stream order, without waiting for earlier steps.
void Trainer::load_batches() {
  const ProfileRange range("batch");
  for (std::int64_t i = 0; i < accumulate_; ++i) {
    const Tensors tensors = loader_->next();
    if (device_.is_cpu()) {
      batches_.resize(accumulate_);
      batches_[i] = tensors;
      continue;
    }
    if (static_cast<std::int64_t>(batches_.size()) == i) {
      Tensors kept;
      for (const Tensor& tensor : tensors) {
        kept.push_back(empty(tensor.shape(), tensor.dtype(), device_));
      }
      batches_.push_back(std::move(kept));
    }
    for (std::size_t field = 0; field < tensors.size(); ++field) {
      copy_into(batches_[i][field], tensors[field]);
    }
  }
}

void Trainer::compute() {
  losses_.clear();
  optimizer_->zero_grad();
  for (std::size_t i = 0; i < batches_.size(); ++i) {
    const Tensor loss = loss_of(batches_[i]);
    if (steps_done_ == first_step_ && losses_.empty() && !drawing_.empty()) {
      io::write_graph(loss, drawing_);
    }
    const Tensor scaled = scaler_ ? scaler_->scale(loss) : loss;
    const Tensor share =
        accumulate_ == 1 ? Tensor() : mica::full({}, 1 / static_cast<double>(accumulate_), scaled.dtype(), device_);
    optimizer_->backward(scaled, share, i + 1 == batches_.size());
    losses_.push_back(loss.detach());
  }
  const ProfileRange range("optimizer");
  norm_ = optimizer_->step({.max_grad_norm = clip_, .scaler = scaler_ ? &*scaler_ : nullptr});
  if (scaler_) {
    scaler_->update();
  }
  if (ema_) {
    ema_->update();
  }
}

// Runs the step from a CUDA graph if possible; returns whether it did.
bool Trainer::replay() {
  if (!graph_allowed_ || steps_done_ - first_step_ < plain_steps) {
    return false;
  }
  if (graph_.empty()) {
    try {
      graph_ = cuda::capture([this] { compute(); }, device_);
    } catch (const Error& error) {
      graph_error_ = error.what();
      graph_allowed_ = false;
      return false;
    }
  }
  graph_.replay();
  return true;
}

void Trainer::step() {
  const double lr = schedule_.lr(steps_done_);
  optimizer_->set_lr(lr);
  load_batches();
  if (!replay()) {
    compute();
  }
  // Each replay overwrites the losses and the norm of the previous one.
  const ProfileRange range("results");
  const auto row = static_cast<std::int64_t>(rates_.size()) * results_.size(1);
  for (std::int64_t i = 0; i < accumulate_; ++i) {
    copy_into(as_strided(results_, losses_[i].shape(), losses_[i].strides(), row + i), losses_[i]);
  }
  copy_into(as_strided(results_, norm_.shape(), norm_.strides(), row + accumulate_), norm_);
  rates_.push_back(lr);
  ++steps_done_;
}

bool Trainer::full() const { return static_cast<std::int64_t>(rates_.size()) == results_.size(0); }

std::vector<Step> Trainer::finished() {
  const Tensor own = empty_like(results_);
  copy_into(own, results_);
  group_.all_reduce(results_, dist::Reduction::mean);
  const std::vector<double> values = to_vector<double>(results_);
  std::vector<Step> steps;
  for (std::size_t i = 0; i < rates_.size(); ++i) {
    const double* const row = values.data() + i * static_cast<std::size_t>(accumulate_ + 1);
    double sum = 0;
    for (std::int64_t k = 0; k < accumulate_; ++k) {
      sum += row[k];
    }
    steps.push_back({sum / static_cast<double>(accumulate_), rates_[i], row[accumulate_], {}});
  }
  // The mean losses are the same on all ranks, so either all of them call ranks_where() or none does.
  const auto bad = std::find_if(steps.begin(), steps.end(), [](const Step& step) { return !std::isfinite(step.loss); });
  if (bad != steps.end()) {
    const std::vector<double> of_this_rank = to_vector<double>(own);
    const double* const losses = of_this_rank.data() + (bad - steps.begin()) * results_.size(1);
    bad->diverged = ranks_where(
        group_, !std::all_of(losses, losses + accumulate_, [](double loss) { return std::isfinite(loss); }));
  }
  rates_.clear();
  return steps;
}

double Trainer::validate() {
  const nn::Evaluation guard;
  // One read at the end, to avoid waiting for a GPU after each batch.
  Tensors losses;
  ProgressTask progress("validating", static_cast<std::int64_t>(validation_.size()));
  for (const Tensors& batch : validation_) {
    losses.push_back(loss_of(batch));
    progress.advance();
  }
  const std::vector<double> values = losses.empty() ? std::vector<double>() : to_vector<double>(stack(losses));
  double sum = 0;
  std::int64_t windows = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    sum += values[i] * static_cast<double>(validation_[i][0].size(0));
    windows += validation_[i][0].size(0);
  }
  const Tensor total = from_data({sum, static_cast<double>(windows)}, {2}, device_);
  group_.all_reduce(total);
  const std::vector<double> of_all = to_vector<double>(total);
  return of_all[0] / of_all[1];
}

std::int64_t Trainer::tokens_per_step() const { return accumulate_ * batch_ * context_; }

double Trainer::flops_per_step() const {
  const nn::GPTConfig& config = model_.config;
  std::int64_t count = 0;
  for (const Tensor& parameter : parameters_) {
    count += parameter.numel();
  }
  return static_cast<double>(tokens_per_step()) *
         static_cast<double>(6 * count + 12 * config.layers * config.width * context_);
}

MemoryUse Trainer::memory() const {
  const MemoryStats stats = memory_stats(device_);
  MemoryUse use{.weights = 0,
                .gradients = 0,
                .optimizer = optimizer_->state_bytes(),
                .workspace = stats.workspace,
                .others = 0,
                .peak = stats.peak};
  for (const Tensor& parameter : parameters_) {
    use.weights += parameter.bytes();
    if (const Tensor gradient = parameter.grad(); gradient.defined()) {
      use.gradients += gradient.bytes();
    }
  }
  use.others = use.peak - std::min(use.peak, use.weights + use.gradients + use.optimizer + use.workspace);
  return use;
}
