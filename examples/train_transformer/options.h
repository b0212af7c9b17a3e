#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include <mica/nn/models/gpt.h>
#include <mica/optim/adamw.h>
#include <mica/optim/schedule.h>
#include <mica/train/trainer.h>

/// The settings of a run, most of which are options of the command line: --help explains them.
struct Options {
  // A preset sets these.
  mica::nn::GPTConfig model;
  mica::train::TrainerOptions train;
  mica::optim::CosineSchedule schedule;
  std::int64_t batch;   // sequences, for all ranks together
  std::int64_t sample;  // characters
  mica::optim::AdamWOptions adamw{.betas = {0.9, 0.99}, .weight_decay = 0.1};

  std::string preset = "default", data{}, documents = "none", device = "auto", dtype = "auto";
  std::uint64_t seed = 1;
  int gpus = 0, threads = 0, workers = 1;
  bool zero = false, reduce_float32 = false, tf32 = false, no_cuda_graph = false;

  /// Whether the data is a file of tokens, which has no characters.
  bool has_tokens() const { return data.ends_with(".bin"); }
};

/// Parses the command line (the preset, overridden by the given options) and calls `body` with the result. Returns the
/// program's exit status.
int run_with_options(int argc, char** argv, const std::function<void(const Options&)>& body);
