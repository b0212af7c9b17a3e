#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <mica/nn/linear.h>
#include <mica/train/checkpoints.h>

/// The settings of a run.
struct Options {
  std::string model;                 // folder
  std::string data;                  // file
  std::string out = "adapter";       // folder
  std::vector<std::string> targets;  // patterns of layer names; empty: all linear layers but the head
  mica::nn::LoraOptions lora;
  std::optional<std::int64_t> bits;  // bits of the frozen weights; none: not quantized

  std::optional<std::int64_t> steps;  // overrides epochs
  double epochs = 1;
  std::int64_t batch = 4;
  std::int64_t accumulate = 1;          // batches per step
  std::optional<std::int64_t> context;  // maximum number of tokens per sequence
  bool skip_long = false;               // skip longer examples instead of throwing
  double lr = 2e-4;
  std::string schedule = "cosine";
  std::optional<std::int64_t> warmup;  // steps
  double weight_decay = 0;
  double clip = 1;
  double validation = 0;                   // fraction of the examples
  std::optional<std::int64_t> eval_every;  // steps

  std::string dtype = "auto";
  std::string device = "auto";
  int threads = 0;  // 0: one per core
  std::uint64_t seed = 1;
  bool pack = false;       // short examples share rows
  bool recompute = false;  // recompute the activations of each block in backward

  mica::train::CheckpointOptions checkpoint;
  std::optional<std::int64_t> checkpoint_every;  // steps; none: at each validation

  std::string tensorboard;  // folder for an event file; empty: none
};

/// Parses the command line and calls `body`. Returns the program's exit status.
int run_with_options(int argc, char** argv, const std::function<void(const Options&)>& body);
