#pragma once

#include <CLI/CLI.hpp>

#include <cstdint>
#include <optional>
#include <string>

/// A published or tried combination of settings.
struct Recipe {
  std::int64_t steps;
  std::int64_t batch;
  std::int64_t context;
  std::int64_t layers;
  std::int64_t heads;
  std::int64_t width;
  double dropout;
  double lr;
  double min_lr;
  std::int64_t warmup;
  double weight_decay;
  double clip;
  std::int64_t eval_every;
  std::int64_t sample;
};

/// What one run does.
struct Options : Recipe {
  std::string preset;
  std::string data;  // empty: the built-in text
  std::string device;
  std::string out;
  std::uint64_t seed;
  int threads;  // 0: as many as there are cores
};

/// The command line of train_transformer.
class CommandLine {
 public:
  CommandLine();

  CLI::App app;
  /// After parsing: the preset with what was given in its place. Throws UsageError if the settings do not fit together.
  Options options() const;

 private:
  std::string preset_ = "default";
  std::string data_;
  std::string device_ = "auto";
  std::string out_ = "out";
  std::uint64_t seed_ = 1;
  int threads_ = 0;
  std::optional<std::int64_t> steps_, batch_, context_, layers_, heads_, width_, warmup_, eval_every_, sample_;
  std::optional<double> dropout_, lr_, min_lr_, weight_decay_, clip_;
};
