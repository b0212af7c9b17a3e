#pragma once

#include <cstdint>
#include <functional>
#include <string>

/// A published or tested combination of settings.
struct Recipe {
  std::int64_t steps;
  std::int64_t batch;  // sequences, for all ranks together
  std::int64_t context;
  std::int64_t layers;
  std::int64_t heads;
  std::int64_t width;
  bool bias = false;  // of linear layers and norms
  double dropout;
  double lr;
  double min_lr;
  std::int64_t warmup;
  double beta2 = 0.99;  // of AdamW; beta1 is 0.9
  double weight_decay = 0.1;
  double clip = 1;
  std::int64_t eval_every = 250;
  std::int64_t sample;
  std::int64_t accumulate = 1;  // batches per step, whose gradients are accumulated
  std::string dtype = "auto";   // float32, float16, bfloat16, or auto: bfloat16 if has_fast_bfloat16()
};

/// The settings of a run.
struct Options : Recipe {
  std::string preset;
  bool warmup_given;      // by --warmup; otherwise `warmup` was derived from the steps
  std::string data;       // a text, or tokens if its name ends in .bin; empty: the built-in text
  std::string documents;  // where the separator of documents is: none, begin or end
  std::string device;
  int gpus;  // number of GPUs of this machine, each with a rank of its own; 0: start no ranks
  std::string out;
  bool zero;             // each rank keeps the optimizer's state for its share of the weights
  bool reduce_float32;   // sum 16-bit gradients of the ranks in float32
  bool check_gradients;  // name the first rank whose gradient is not finite
  std::uint64_t seed;
  int threads;                    // 0: one per core
  int workers;                    // threads that prepare batches
  double ema;                     // decay of the averages of the weights; 0: none
  bool recompute;                 // recompute the activations of each block in backward
  bool tf32;                      // use TF32 for float32 products on a GPU
  bool cuda_graph;                // replay steps from a CUDA graph
  bool profile;                   // profile some steps
  std::string draw_graph;         // file for a picture of the autograd graph; empty: none
  std::string tensorboard;        // folder for an event file of TensorBoard; empty: none
  std::string checkpoint;         // folder for checkpoints; empty: none
  std::int64_t checkpoint_every;  // steps
  int keep;                       // how many of the newest checkpoints to keep
  bool resume;                    // continue from the newest checkpoint
};

/// Whether these options train on a file of tokens, which has no characters.
bool trains_on_tokens(const Options& options);

/// Parses the command line (the preset, overridden by the given options) and calls `body` with the result. Returns the
/// program's exit status.
int run_with_options(int argc, char** argv, const std::function<void(const Options&)>& body);
