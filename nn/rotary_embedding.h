#pragma once

#include <optional>
#include <vector>

#include <mica/nn/module.h>
#include <mica/ops/rotary/rotary.h>

namespace mica::nn {

/// How the frequencies of a rotary embedding are changed for a context longer than that of pretraining.
enum class RotaryScaling {
  none,
  linear,   ///< all divided by factor
  dynamic,  ///< a larger theta for sequences longer than original_context ("NTK-aware")
  yarn,     ///< low frequencies divided by factor, and the result scaled (Peng et al., arXiv:2309.00071)
  llama3,   ///< low frequencies divided by factor, as in Llama 3.1
};

struct RotaryConfig {
  double theta = 10000;  ///< frequency j of D/2 is theta^(−2j/D)
  RotaryScaling scaling = RotaryScaling::none;
  double factor = 1;
  std::int64_t original_context = 8192;      ///< dynamic, yarn, llama3
  double low_frequency_factor = 1;           ///< llama3: wavelengths above original_context / this are divided
  double high_frequency_factor = 4;          ///< llama3: wavelengths below original_context / this are kept
  double beta_fast = 32;                     ///< yarn: frequencies with more turns in original_context are kept
  double beta_slow = 1;                      ///< yarn: frequencies with fewer are divided
  bool truncate = true;                      ///< yarn: round the bounds between the two to whole frequencies
  std::optional<double> attention_factor{};  ///< yarn: scale of the result; 0.1 ln(factor) + 1 unless given
};

/// The D/2 frequencies, in radians per position, for heads of width D and sequences of `length` positions, which only
/// dynamic scaling uses. Computed in float32 as Hugging Face's transformers does. Throws unless D is even and the
/// configuration's numbers are positive.
std::vector<float> rotary_frequencies(std::int64_t head_width, const RotaryConfig& config, std::int64_t length = 0);

/// The factor of the rotated queries and keys: 1 unless the scaling is yarn.
double rotary_scale(const RotaryConfig& config);

/// Rotates the heads (B, T, H, D) of queries or keys by their positions: see mica::rotary. It has no parameters.
class RotaryEmbedding : public Module {
 public:
  RotaryEmbedding(std::int64_t head_width, const RotaryConfig& config = {});

  /// Rows at positions offset, offset + 1, …
  Tensor operator()(const Tensor& x, std::int64_t offset = 0) const;
  /// Rows at the given positions, (T) or (B, T). Throws for dynamic scaling, which needs the length on the host.
  Tensor operator()(const Tensor& x, const Tensor& positions) const;

  /// Of every position, unless the scaling is dynamic.
  const std::vector<float>& frequencies() const { return frequencies_; }
  double scale() const { return scale_; }

  RotaryConfig config;

 private:
  std::int64_t head_width_;
  std::vector<float> frequencies_;
  double scale_;
};

}  // namespace mica::nn
