#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <mica/core/cuda_graph.h>
#include <mica/distributed/data_parallel.h>
#include <mica/distributed/group.h>
#include <mica/distributed/sharded_adamw.h>
#include <mica/io/training_checkpoint.h>
#include <mica/nn/module.h>
#include <mica/optim/ema.h>
#include <mica/optim/grad_scaler.h>
#include <mica/optim/optimizer.h>
#include <mica/train/batches.h>

namespace mica::train {

namespace detail {
class GroupOptimizer;
}

/// The mean loss of a batch, a scalar: a function of Batch::fields and the model.
using Loss = std::function<Tensor(const Tensors& batch)>;

/// Any optimizer; distributed::ShardedAdamW keeps only a part of the states on each rank. Converts from both.
using AnyOptimizer =
    std::variant<std::reference_wrapper<optim::Optimizer>, std::reference_wrapper<distributed::ShardedAdamW>>;

/// How steps are taken.
struct StepOptions {
  std::int64_t accumulate = 1;  ///< batches per step, whose gradients are accumulated
  double clip = 0;              ///< maximum norm of all gradients; 0: no clipping
  double ema = 0;               ///< decay of exponential moving averages of the weights (optim::Ema); 0: none
  /// The learning rate of a step, counted from 0; empty: that of the optimizer.
  std::function<double(std::int64_t step)> schedule{};
  /// On GPUs, replay steps from a CUDA graph, with the same bits. Batches must have the same shapes.
  bool cuda_graph = true;
  /// Checkpoints contain only the parameters that require a gradient. The others must be the same when a run resumes.
  bool trained_only = false;
  /// File for a picture of the first step's autograd graph on rank 0 (io::write_graph); empty: none.
  std::string draw_graph{};
  /// Of several ranks; not used with distributed::ShardedAdamW, which has options of its own.
  distributed::DataParallelOptions parallel{};
};

/// The results of one step.
struct StepResult {
  double loss;                  ///< before the step's update
  double lr;                    ///< the learning rate
  double grad_norm;             ///< before clipping
  std::int64_t units;           ///< Batch::units of all batches and ranks
  std::vector<int> diverged{};  ///< if the loss is not finite: the ranks whose own loss is not
};

/// The device memory in use, in bytes.
struct MemoryUse {
  std::size_t weights;
  std::size_t gradients;
  std::size_t optimizer;
  std::size_t workspace;  ///< of cuBLAS
  std::size_t others;     ///< at the peak: activations, validation data
  std::size_t peak;
};

/// Takes training steps: gradients accumulated over batches, clipped, loss scaling if the weights are float16, averages
/// of the weights. Trainer is a loop around it; use it alone in a loop of your own:
///
///     train::TrainingStep training(model, loss, batches, optimizer, {.clip = 1});
///     while (training.steps_done() < 1000) {
///       training.step();
///       if (training.full()) {
///         for (const train::StepResult& result : training.finished()) fmt::print("{}\n", result.loss);
///       }
///     }
///
/// The ranks of a group train one model together: each computes the gradients of its part of a batch, and all take the
/// same step with the mean gradients. All ranks must call the same functions. Losses are means over all ranks. With
/// several ranks, the weights of all training batches must be 1.
///
/// A step never waits for a GPU. On a GPU, after a few ordinary steps, one step is captured as a CUDA graph and then
/// replayed, with bit-identical results; its collectives are a part of the graph. If the step cannot be captured on all
/// ranks, none uses a graph.
class TrainingStep {
 public:
  /// Everything that is passed by reference must outlive this object. Training uses the model's device and dtype, which
  /// must not change any more. All ranks get the weights of rank 0, and each rank a random stream of its own
  /// (random_stream_of). Throws unless the model has a parameter that requires a gradient, accumulate ≥ 1 and clip ≥ 0.
  TrainingStep(nn::Module& model, Loss loss, Batches& batches, AnyOptimizer optimizer, StepOptions options = {},
               const distributed::Group& group = {});
  ~TrainingStep();
  TrainingStep(const TrainingStep&) = delete;
  TrainingStep& operator=(const TrainingStep&) = delete;

  /// Waits for the steps so far and returns the state after them, without settings: the parts "model", "optimizer",
  /// "scaler" with float16, and "ema". Rank 0's state can be restored by any number of ranks.
  io::TrainingCheckpoint checkpoint() const;
  /// Continues from rank 0's checkpoint. Call it before the first step.
  void resume(const io::TrainingCheckpoint& checkpoint);
  /// The number of steps, including those before the checkpoint.
  std::int64_t steps_done() const { return steps_done_; }

  /// Starts a step on the next batches.
  void step();
  /// Whether results must be collected before the next step, since the device stores those of a limited number of
  /// steps.
  bool full() const;
  /// Waits for the steps started since the last call and returns their results.
  std::vector<StepResult> finished();

  /// The mean loss over the batches of all ranks, in evaluation mode. Reports its progress (core/progress.h). Waits
  /// for the device.
  double mean_loss(const Validation& data) const;

  /// During its lifetime, the model's weights are their averages, if there are any. No step may be taken meanwhile.
  class Averages {
   public:
    explicit Averages(TrainingStep& training) : training_(training) { exchange(); }
    ~Averages() { exchange(); }
    Averages(const Averages&) = delete;
    Averages& operator=(const Averages&) = delete;

   private:
    void exchange() {
      if (training_.ema_) {
        training_.ema_->swap();
      }
    }
    TrainingStep& training_;
  };

  /// If false, the following steps do not use a CUDA graph.
  void allow_graph(bool on) { graph_allowed_ = on && device_.is_cuda(); }
  /// Why the requested CUDA graph is not used; empty otherwise.
  const std::string& graph_error() const { return graph_error_; }

  Device device() const { return device_; }
  MemoryUse memory() const;

 private:
  void load_batches();
  void load(std::size_t i, const Tensors& fields);
  void give_up_graph(const std::string& reason);
  void compute();
  void capture();
  bool replay();
  StateDict model_state() const;
  void load_model_state(const StateDict& state);

  nn::Module& model_;
  Loss loss_;
  Batches& source_;
  StepOptions options_;
  distributed::Group group_;
  Tensors parameters_;  // those that are trained
  Device device_;
  std::unique_ptr<detail::GroupOptimizer> optimizer_;
  std::optional<optim::GradScaler> scaler_;
  std::optional<optim::Ema> ema_;

  std::vector<Tensors> batches_;      // of one step; on a GPU always at the same addresses
  std::vector<double> loss_weights_;  // weights of the batches' losses in the step's loss; empty: all equal
  Tensors losses_;                    // of the last step's batches
  Tensor norm_;
  Tensor results_;  // rows of losses and norm, on the device, of the steps not yet collected
  /// What the host knows about a step not yet collected.
  struct Pending {
    double lr;
    std::int64_t units;
    std::vector<double> shares;
  };
  std::vector<Pending> pending_;
  std::int64_t units_ = 0;  // of the step's batches on this rank
  std::int64_t steps_done_ = 0;
  std::int64_t first_step_ = 0;  // taken by this process

  bool graph_allowed_;        // the same on all ranks
  bool graph_tried_ = false;  // the ranks have tried to capture a step; the same on all ranks
  std::string graph_error_;
  cuda::Graph graph_;  // empty: none yet, or given up
};

}  // namespace mica::train
