#pragma once

#include <cstdint>

#include <mica/core/detail/nesting.h>
#include <mica/core/progress.h>
#include <mica/core/tensor.h>

namespace mica::nn::init {

// These functions fill a tensor in place, without history, and return it. Random numbers are drawn on the CPU in
// float32 (float64 for float64 tensors), so that the same seed gives the same parameters on every device.

/// Uniform in [low, high). Throws unless low ≤ high.
Tensor uniform_(const Tensor& x, double low, double high);
/// Normal, with this mean and standard deviation. Throws unless std ≥ 0.
Tensor normal_(const Tensor& x, double mean = 0, double std = 1);
/// Sets every element to `value`.
Tensor constant_(const Tensor& x, double value);

/// While it exists, uniform_ and normal_ report their progress to the thread's ProgressObserver as one task,
/// "initializing the model". For models whose random numbers take seconds. An inner Progress replaces an outer one.
class Progress {
 public:
  /// `elements`: the number to be filled; an element filled twice counts twice.
  explicit Progress(std::int64_t elements);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

 private:
  mica::detail::Nested<Progress> nested_{"nn::init::Progress"};
  ProgressTask task_;
  ProgressTask* before_;
};

/// While it exists, the functions above write nothing on this thread. For modules whose parameters are all loaded
/// next.
class Skip {
 public:
  Skip();
  ~Skip();
  Skip(const Skip&) = delete;
  Skip& operator=(const Skip&) = delete;

 private:
  mica::detail::Nested<Skip> nested_{"nn::init::Skip"};
  bool before_;
};

}  // namespace mica::nn::init
