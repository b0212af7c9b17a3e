#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "examples/train_transformer/group_optimizer.h"
#include "examples/train_transformer/options.h"
#include <mica/core/cuda/graph.h>
#include <mica/dist/group.h>
#include <mica/io/data_loader.h>
#include <mica/io/text.h>
#include <mica/io/token_windows.h>
#include <mica/io/training_checkpoint.h>
#include <mica/nn/gpt.h>
#include <mica/optim/ema.h>
#include <mica/optim/grad_scaler.h>
#include <mica/optim/schedule.h>

/// The results of one step.
struct Step {
  double loss;
  double lr;
  double grad_norm;
  std::vector<int> diverged;  // if the loss is not finite: the ranks whose own loss is not
};

/// The device memory in use, in bytes.
struct MemoryUse {
  std::size_t weights;
  std::size_t gradients;
  std::size_t optimizer;
  std::size_t workspace;  // of cuBLAS
  std::size_t others;     // at the peak: activations, validation data
  std::size_t peak;
};

/// Trains a model: AdamW with decay of matrices only, warm-up and cosine schedule, clipped gradients.
///
/// The ranks of a group train it together: each computes the gradients of its rows of a batch, and all take the same
/// step with the mean gradients. All ranks must call the same functions. Losses are means over all ranks.
///
/// A step never waits for a GPU. On a GPU, after a few ordinary steps, one step is captured as a CUDA graph and then
/// replayed, with bit-identical results.
class Trainer {
 public:
  /// The model and the tokens must outlive the trainer. Training uses the model's device and dtype. All ranks get the
  /// weights of rank 0.
  Trainer(mica::nn::GPT& model, const mica::io::TokenView& training, const mica::io::TokenView& validation,
          const Options& options, const mica::dist::Group& group);

  /// Waits for the steps so far and returns the state after them, without settings. Rank 0's state can be restored by
  /// any number of ranks.
  mica::io::TrainingCheckpoint checkpoint() const;
  /// Continues from rank 0's checkpoint of a run with the same settings, except for the number of steps. The learning
  /// rate follows the schedule of the new number, after the checkpoint's warm-up. Call it before the first step.
  void resume(const mica::io::TrainingCheckpoint& checkpoint);
  /// The number of steps, including those before the checkpoint.
  std::int64_t steps_done() const { return steps_done_; }

  /// Starts a step on the next batch.
  void step();
  /// Whether results must be collected before the next step, since the device stores those of a limited number of
  /// steps.
  bool full() const;
  /// Waits for the steps started since the last call and returns their results. A loss is that before the step's
  /// update.
  std::vector<Step> finished();
  /// The mean loss over the validation windows.
  double validate();

  /// With --ema, the model has the averages of its weights during the lifetime of such an object. No step may be taken
  /// meanwhile.
  class Averages {
   public:
    explicit Averages(Trainer& trainer) : trainer_(trainer) { exchange(); }
    ~Averages() { exchange(); }
    Averages(const Averages&) = delete;
    Averages& operator=(const Averages&) = delete;

   private:
    void exchange() {
      if (trainer_.ema_) {
        trainer_.ema_->swap();
      }
    }
    Trainer& trainer_;
  };

  /// If false, the following steps do not use a CUDA graph.
  void allow_graph(bool on) { graph_allowed_ = on && can_capture_; }
  /// Why the requested CUDA graph is not used; empty otherwise.
  const std::string& graph_error() const { return graph_error_; }

  std::int64_t tokens_per_step() const;
  /// Floating-point operations of a step's matrix products on all ranks, counted as in the PaLM paper: 6 per parameter
  /// and token, plus those of attention.
  double flops_per_step() const;
  MemoryUse memory() const;

 private:
  void load_batches();
  mica::Tensor loss_of(const mica::Tensors& batch) const;
  void compute();
  bool replay();

  mica::nn::GPT& model_;
  mica::dist::Group group_;
  mica::Tensors parameters_;
  mica::Device device_;
  std::int64_t batch_;
  std::int64_t context_;
  std::int64_t accumulate_;
  double clip_;
  std::string drawing_;  // file for a picture of the first step's autograd graph; empty for none
  mica::optim::CosineSchedule schedule_;
  std::unique_ptr<GroupOptimizer> optimizer_;
  std::optional<mica::optim::GradScaler> scaler_;
  std::optional<mica::optim::Ema> ema_;
  mica::io::TokenWindows windows_;
  mica::io::DataLoaderOptions loading_;
  std::optional<mica::io::DataLoader> loader_;
  std::vector<mica::Tensors> validation_;  // this rank's share

  std::vector<mica::Tensors>
      batches_;           // of one step: the fields of TokenWindows; on a GPU always at the same addresses
  mica::Tensors losses_;  // of the last step's batches
  mica::Tensor norm_;
  mica::Tensor results_;       // rows of losses and norm, on the device, of the steps not yet collected
  std::vector<double> rates_;  // their learning rates
  std::int64_t steps_done_ = 0;
  std::int64_t first_step_ = 0;  // taken by this process

  bool can_capture_;  // false with several ranks
  bool graph_allowed_;
  std::string graph_error_;
  mica::cuda::Graph graph_;
};
