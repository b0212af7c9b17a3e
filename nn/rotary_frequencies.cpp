#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include <mica/nn/rotary_embedding.h>
#include <mica/ops/rotary/detail/rotary_kernels.h>

namespace mica::nn {

namespace {

constexpr double kPi = std::numbers::pi;

std::int64_t rotated_width(std::int64_t head_width, const RotaryConfig& c) {
  return c.width > 0 ? c.width : head_width;
}

void check_config(std::int64_t head_width, const RotaryConfig& c) {
  constexpr std::int64_t kWidest = 2 * kernels::kMostRotaryPairs;
  check(head_width >= 2 && head_width % 2 == 0 && head_width <= kWidest,
        "RotaryEmbedding: expected heads of even width from 2 to {}, got {}", kWidest, head_width);
  check(c.width >= 0 && c.width % 2 == 0 && c.width <= head_width,
        "RotaryEmbedding: expected to rotate an even number of a head's {} elements, got {}", head_width, c.width);
  // Written so that NaN fails.
  check(c.theta > 1 && std::isfinite(c.theta), "RotaryEmbedding: expected a finite theta above 1, got {}", c.theta);
  check(c.factor > 0 && std::isfinite(c.factor), "RotaryEmbedding: expected a finite factor above 0, got {}", c.factor);
  check(c.original_context >= 1, "RotaryEmbedding: expected an original context of at least 1, got {}",
        c.original_context);
  check(c.low_frequency_factor > 0 && c.high_frequency_factor > c.low_frequency_factor,
        "RotaryEmbedding: expected 0 < low_frequency_factor < high_frequency_factor, got {} and {}",
        c.low_frequency_factor, c.high_frequency_factor);
  check(c.beta_slow > 0 && c.beta_fast >= c.beta_slow,
        "RotaryEmbedding: expected 0 < beta_slow <= beta_fast, got {} and {}", c.beta_slow, c.beta_fast);
  check(c.attention_factor.value_or(0) >= 0 && std::isfinite(c.attention_factor.value_or(0)),
        "RotaryEmbedding: expected a finite attention factor of at least 0, got {}", c.attention_factor.value_or(0));
  if (c.scaling != RotaryScaling::longrope) {
    return;
  }
  check(c.factor <= 1 || c.original_context > 1 || c.attention_factor.has_value(),
        "RotaryEmbedding: expected an original context above 1, or an attention factor, for longrope scaling by {}",
        c.factor);
  const std::int64_t width = rotated_width(head_width, c);
  for (const auto& [name, factors] : {std::pair{"short", &c.short_factors}, std::pair{"long", &c.long_factors}}) {
    check(static_cast<std::int64_t>(factors->size()) == width / 2,
          "RotaryEmbedding: expected {} {} factors for heads of width {}, got {}", width / 2, name, width,
          factors->size());
    for (const double factor : *factors) {
      // In float32, in which frequencies are computed.
      check(static_cast<float>(factor) > 0 && std::isfinite(static_cast<float>(factor)),
            "RotaryEmbedding: expected finite {} factors above 0, got {}", name, factor);
    }
  }
}

std::vector<float> plain_frequencies(std::int64_t head_width, double theta) {
  std::vector<float> result;
  for (std::int64_t j = 0; j < head_width; j += 2) {
    const float exponent = static_cast<float>(j) / static_cast<float>(head_width);
    result.push_back(1.0F / static_cast<float>(std::pow(theta, static_cast<double>(exponent))));
  }
  return result;
}

std::vector<float> divided_frequencies(std::int64_t head_width, double theta, const std::vector<double>& divisors) {
  std::vector<float> result;
  for (const double divisor : divisors) {
    const float exponent = static_cast<float>(2 * result.size()) / static_cast<float>(head_width);
    const float turn = static_cast<float>(std::pow(theta, static_cast<double>(exponent)));
    result.push_back(1.0F / (static_cast<float>(divisor) * turn));
  }
  return result;
}

// The function apply_scaling of Meta's code for Llama 3.1.
float llama3_frequency(float frequency, const RotaryConfig& c) {
  const double context = static_cast<double>(c.original_context);
  const double turns = context * frequency / (2 * kPi);  // in the context of pretraining
  if (turns > c.high_frequency_factor) {
    return frequency;
  }
  const double divided = frequency / c.factor;
  if (turns < c.low_frequency_factor) {
    return static_cast<float>(divided);
  }
  const double smooth = (turns - c.low_frequency_factor) / (c.high_frequency_factor - c.low_frequency_factor);
  return static_cast<float>((1 - smooth) * divided + smooth * frequency);
}

// Between the frequencies `low` and `high`, a linear ramp from kept to divided (equations 17 to 21 of the paper).
void scale_by_yarn(std::vector<float>& frequencies, const RotaryConfig& c) {
  const double width = 2 * static_cast<double>(frequencies.size());
  const auto index_of = [&](double turns) {  // of the frequency with this many turns in the original context
    return width * std::log(static_cast<double>(c.original_context) / (turns * 2 * kPi)) / (2 * std::log(c.theta));
  };
  double low = index_of(c.beta_fast);
  double high = index_of(c.beta_slow);
  if (c.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, width - 1);
  const double length = low == high ? 0.001 : high - low;
  for (std::size_t j = 0; j < frequencies.size(); ++j) {
    const double divided_part = std::clamp((static_cast<double>(j) - low) / length, 0.0, 1.0);
    const double kept = frequencies[j];
    frequencies[j] = static_cast<float>(kept / c.factor * divided_part + kept * (1 - divided_part));
  }
}

}  // namespace

bool depends_on_length(RotaryScaling scaling) {
  return scaling == RotaryScaling::dynamic || scaling == RotaryScaling::longrope;
}

std::vector<float> rotary_frequencies(std::int64_t head_width, const RotaryConfig& c, std::int64_t length) {
  check_config(head_width, c);
  head_width = rotated_width(head_width, c);
  if (c.scaling == RotaryScaling::longrope) {
    return divided_frequencies(head_width, c.theta, length > c.original_context ? c.long_factors : c.short_factors);
  }
  double theta = c.theta;
  if (c.scaling == RotaryScaling::dynamic && length > c.original_context && head_width > 2) {
    const double ratio = static_cast<double>(length) / static_cast<double>(c.original_context);
    const double width = static_cast<double>(head_width);
    theta *= std::pow(c.factor * ratio - (c.factor - 1), width / (width - 2));
  }
  std::vector<float> result = plain_frequencies(head_width, theta);
  switch (c.scaling) {
    case RotaryScaling::none:
    case RotaryScaling::dynamic:
    case RotaryScaling::longrope: break;  // see above
    case RotaryScaling::linear:
      for (float& frequency : result) {
        frequency /= static_cast<float>(c.factor);
      }
      break;
    case RotaryScaling::yarn: scale_by_yarn(result, c); break;
    case RotaryScaling::llama3:
      for (float& frequency : result) {
        frequency = llama3_frequency(frequency, c);
      }
      break;
  }
  return result;
}

double rotary_scale(const RotaryConfig& config) {
  if (config.scaling != RotaryScaling::yarn && config.scaling != RotaryScaling::longrope) {
    return 1;
  }
  if (config.attention_factor.has_value() || config.factor <= 1) {
    return config.attention_factor.value_or(1);
  }
  return config.scaling == RotaryScaling::yarn
             ? 0.1 * std::log(config.factor) + 1
             : std::sqrt(1 + std::log(config.factor) / std::log(static_cast<double>(config.original_context)));
}

}  // namespace mica::nn
