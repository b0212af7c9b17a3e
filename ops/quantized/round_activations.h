#pragma once

#include <utility>

namespace mica {

/// Until the end of scope, quantized_matmul() on this thread may round x to 8 bits, as decoders do: products of
/// integers are faster. It does so on CPUs with AVX2, for up to 8 rows of x that are not float64: 32 consecutive
/// elements (16 if the weight's groups have 16) get a scale s, their largest magnitude / 127, and each is off by at
/// most s / 2. docs/quantization.md has the loss. Gradients are those of the product without rounding.
class RoundActivations {
 public:
  explicit RoundActivations(bool on = true) : previous_(std::exchange(on_, on)) {}
  ~RoundActivations() { on_ = previous_; }
  RoundActivations(const RoundActivations&) = delete;
  RoundActivations& operator=(const RoundActivations&) = delete;

  /// Whether this thread's innermost guard is on.
  static bool is_on() { return on_; }

 private:
  static inline thread_local constinit bool on_ = false;
  bool previous_;
};

}  // namespace mica
