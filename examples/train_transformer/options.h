#pragma once

#include <cstdint>
#include <functional>
#include <string>

/// A published or tried combination of settings.
struct Recipe {
  std::int64_t steps;
  std::int64_t batch;
  std::int64_t context;
  std::int64_t layers;
  std::int64_t heads;
  std::int64_t width;
  bool bias = false;  // of linear layers and norms
  double dropout;
  double lr;
  double min_lr;
  std::int64_t warmup;
  double beta2 = 0.99;  // of AdamW; the other is 0.9
  double weight_decay = 0.1;
  double clip = 1;
  std::int64_t eval_every = 250;
  std::int64_t sample;
  std::int64_t accumulate = 1;  // batches whose gradients are added up in a step
  std::string dtype = "auto";   // float32, float16, bfloat16, or auto: bfloat16 where has_fast_bfloat16()
};

/// What one run does.
struct Options : Recipe {
  std::string preset;
  std::string data;  // a text, or tokens if its name ends in .bin; empty: the built-in text
  std::string device;
  std::string out;
  std::uint64_t seed;
  int threads;             // 0: as many as there are cores
  bool checkpoint;         // compute the inside of each block again in backward
  bool tf32;               // multiply float32 on a GPU with fewer digits
  bool cuda_graph;         // replay steps from a CUDA graph
  bool profile;            // measure some steps
  std::string draw_graph;  // file for a picture of the autograd graph; empty: none
};

/// Whether these options train on a file of tokens, which has no characters.
bool trains_on_tokens(const Options& options);

/// Parses the command line (the preset, with what was given in its place) and calls `body` with it. Returns the
/// program's exit status.
int run_with_options(int argc, char** argv, const std::function<void(const Options&)>& body);
