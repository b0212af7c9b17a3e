#pragma once

#include <optional>
#include <vector>

#include <mica/nn/module.h>
#include <mica/ops/rotary/rotary.h>

namespace mica::nn {

/// How the frequencies of a rotary embedding are changed for a context longer than in pretraining.
enum class RotaryScaling {
  none,
  linear,    ///< all frequencies divided by factor
  dynamic,   ///< a larger theta for sequences longer than original_context ("NTK-aware")
  yarn,      ///< low frequencies divided by factor, and the result scaled (Peng et al., 2023, arXiv:2309.00071)
  llama3,    ///< low frequencies divided by factor, as in Llama 3.1
  longrope,  ///< each divided by its own factor, and the result scaled (LongRoPE, Ding et al., 2024, arXiv:2402.13753)
};

struct RotaryConfig {
  double theta = 10000;  ///< frequency j of D/2 is theta^(−2j/D)
  RotaryScaling scaling = RotaryScaling::none;
  double factor = 1;                     ///< longrope: only the scale of the result depends on it
  std::int64_t original_context = 8192;  ///< dynamic, yarn, llama3, longrope
  double low_frequency_factor = 1;       ///< llama3: wavelengths above original_context / this are divided
  double high_frequency_factor = 4;      ///< llama3: wavelengths below original_context / this are kept
  double beta_fast = 32;                 ///< yarn: frequencies with more turns in original_context are kept
  double beta_slow = 1;                  ///< yarn: frequencies with fewer turns are divided
  bool truncate = true;                  ///< yarn: round the two bounds to whole frequency indices
  std::vector<double> short_factors{};   ///< longrope: D/2 divisors for lengths up to original_context
  std::vector<double> long_factors{};    ///< longrope: D/2 divisors for greater lengths
  /// yarn, longrope: scale of the result. The default is 1 if factor ≤ 1, otherwise 0.1 ln(factor) + 1 for yarn and √(1
  /// + ln(factor) / ln(original_context)) for longrope.
  std::optional<double> attention_factor{};
  /// D: only the first D elements of a head are rotated, and scaled (Phi 4 mini). Even; 0: the whole head.
  std::int64_t width = 0;
  /// longrope: a decoder computes a text again when it outgrows original_context, so that all keys have the long
  /// factors (Phi 3). See infer::LlamaDecoder.
  bool recompute = false;
};

/// Whether the frequencies depend on the length: dynamic and longrope.
bool depends_on_length(RotaryScaling scaling);

/// The D/2 frequencies, in radians per position, for heads of width D, or config.width if it is not 0. `length`, the
/// length of the sequence in positions, matters for dynamic and longrope scaling only. Computed in float32, as in
/// Hugging Face's transformers. Throws unless D is even, at most 512 and not greater than the head's width, the
/// configuration's numbers are positive and, for longrope, there are D/2 factors of each kind.
std::vector<float> rotary_frequencies(std::int64_t head_width, const RotaryConfig& config, std::int64_t length = 0);

/// The factor by which rotated queries and keys are multiplied: 1 unless the scaling is yarn or longrope. It does not
/// depend on the length.
double rotary_scale(const RotaryConfig& config);

/// Rotates the heads (B, T, H, D) of queries or keys by their positions: see mica::rotary. It has no parameters.
///
/// Dynamic and longrope scaling depend on the length that a call reaches: the largest position in it, of any sequence
/// of the batch, plus 1. All rows of the call use the frequencies for that length, as in transformers: with longrope,
/// the short factors up to original_context, and the long factors beyond it. Keys in a cache keep the rotation of the
/// call that computed them. So beyond original_context, queries with long factors are multiplied by keys with short
/// ones, until these have left the cache's window, as in transformers; for RotaryConfig::recompute, see there.
class RotaryEmbedding : public Module {
 public:
  RotaryEmbedding(std::int64_t head_width, const RotaryConfig& config = {});

  /// For rows at positions offset, offset + 1, …
  Tensor operator()(const Tensor& x, std::int64_t offset = 0) const;
  /// For rows at the given positions, (T) or (B, T). `length` is that of the longest sequence; 0: the largest position
  /// plus 1. To find it, dynamic and longrope scaling read the positions, and so wait for the device.
  Tensor operator()(const Tensor& x, const Tensor& positions, std::int64_t length = 0) const;

  /// In radians per position. With dynamic and longrope scaling, those for lengths up to original_context.
  const std::vector<float>& frequencies() const { return frequencies_; }
  double scale() const { return scale_; }

  RotaryConfig config;

 private:
  Tensor rotated(const Tensor& x, RotaryOptions options, std::int64_t length) const;

  std::int64_t head_width_;
  std::vector<float> frequencies_;       // for lengths up to original_context
  std::vector<float> long_frequencies_;  // longrope: for greater lengths
  double scale_;
};

}  // namespace mica::nn
