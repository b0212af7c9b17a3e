#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "examples/common/character_model.h"
#include "examples/train_transformer/options.h"
#include <mica/io/text.h>
#include <mica/optim/adamw.h>
#include <mica/optim/schedule.h>

/// What one step was like.
struct Step {
  double loss;
  double lr;
  double grad_norm;
};

/// Trains a model: AdamW with decay of matrices only, warm-up and cosine schedule, clipped gradients.
class Trainer {
 public:
  /// The model and the training tokens must outlive the trainer; the model is on the device to train on.
  Trainer(CharacterModel& model, std::span<const std::int32_t> training, std::span<const std::int32_t> validation,
          const Options& options);

  /// One step on the next batch. The loss is that of the batch before the step.
  Step step();
  /// The mean loss over the validation windows.
  double validate();

 private:
  CharacterModel& model_;
  mica::Tensors parameters_;
  mica::Device device_;
  std::int64_t batch_;
  double clip_;
  std::string graph_;  // where to draw the first step's graph; empty for nowhere
  mica::optim::CosineSchedule schedule_;
  mica::optim::AdamW optimizer_;
  mica::io::RandomWindows windows_;
  std::vector<mica::io::Batch> validation_;
  std::int64_t steps_done_ = 0;
};
