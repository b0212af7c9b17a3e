#include <limits>

#include <mica/core/creation.h>
#include <mica/nn/rotary_embedding.h>
#include <mica/ops/join/join.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

namespace mica::nn {

RotaryEmbedding::RotaryEmbedding(std::int64_t head_width, const RotaryConfig& config)
    : config(config),
      head_width_(head_width),
      frequencies_(rotary_frequencies(head_width, config)),
      scale_(rotary_scale(config)) {
  if (config.scaling == RotaryScaling::longrope) {
    long_frequencies_ = rotary_frequencies(head_width, config, config.original_context + 1);
  }
}

Tensor RotaryEmbedding::operator()(const Tensor& x, std::int64_t offset) const {
  return call(*this, x,
              [&](const Tensor& x) { return rotated(x, {.offset = offset}, x.dim() >= 3 ? offset + x.size(-3) : 0); });
}

Tensor RotaryEmbedding::operator()(const Tensor& x, const Tensor& positions, std::int64_t length) const {
  return call(*this, x, positions, [&](const Tensor& x, const Tensor& positions) {
    if (length == 0 && depends_on_length(config.scaling) && positions.defined() && positions.numel() > 0) {
      const std::int64_t last = to_vector<std::int64_t>(amax(positions))[0];
      length = last < std::numeric_limits<std::int64_t>::max() ? last + 1 : last;
    }
    return rotated(x, {.positions = positions}, length);
  });
}

Tensor RotaryEmbedding::rotated(const Tensor& x, RotaryOptions options, std::int64_t length) const {
  options.scale = scale_;
  const auto rotate = [&](const Tensor& part) {
    if (!depends_on_length(config.scaling) || length <= config.original_context) {
      return rotary(part, frequencies_, options);
    }
    return config.scaling == RotaryScaling::longrope
               ? rotary(part, long_frequencies_, options)
               : rotary(part, rotary_frequencies(head_width_, config, length), options);
  };
  const std::int64_t width = config.width;
  if (width == 0 || width == head_width_) {
    return rotate(x);
  }
  check(x.dim() >= 1 && x.size(-1) == head_width_, "RotaryEmbedding: expected heads of width {}, got {}", head_width_,
        x.shape());
  return cat({rotate(slice(x, -1, 0, width)), slice(x, -1, width, head_width_)}, -1);
}

}  // namespace mica::nn
