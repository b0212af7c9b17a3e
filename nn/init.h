#pragma once

#include <cstdint>

#include <mica/core/progress.h>
#include <mica/core/tensor.h>

namespace mica::nn::init {

// Fill a tensor in place, without history. The random ones draw on the CPU in float32 (float64 for float64), so that
// the same seed gives the same parameters on every device. Each returns the tensor that it filled.

/// Uniform in [low, high).
Tensor uniform_(const Tensor& x, double low, double high);
/// Normal.
Tensor normal_(const Tensor& x, double mean = 0, double std = 1);
/// Sets every element to `value`.
Tensor constant_(const Tensor& x, double value);

/// While one exists, uniform_ and normal_ report to the thread's ProgressObserver, all as one task, "initializing the
/// model": for new models so large that their random numbers take seconds. An inner one replaces an outer one.
class Progress {
 public:
  /// `elements`: how many are to be filled; an element filled twice counts twice.
  explicit Progress(std::int64_t elements);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

 private:
  ProgressTask task_;
  ProgressTask* before_;
};

/// While one exists, the functions above write nothing on this thread: for modules whose parameters are all loaded
/// next.
class Skip {
 public:
  Skip();
  ~Skip();
  Skip(const Skip&) = delete;
  Skip& operator=(const Skip&) = delete;

 private:
  bool before_;
};

}  // namespace mica::nn::init
