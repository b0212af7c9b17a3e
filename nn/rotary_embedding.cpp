#include <mica/nn/rotary_embedding.h>

namespace mica::nn {

RotaryEmbedding::RotaryEmbedding(std::int64_t head_width, const RotaryConfig& config)
    : config(config),
      head_width_(head_width),
      frequencies_(rotary_frequencies(head_width, config)),
      scale_(rotary_scale(config)) {}

Tensor RotaryEmbedding::operator()(const Tensor& x, std::int64_t offset) const {
  const Scope scope(*this);
  const std::int64_t length = x.dim() >= 3 ? offset + x.size(-3) : 0;
  const bool grown = config.scaling == RotaryScaling::dynamic && length > config.original_context;
  return rotary(x, grown ? rotary_frequencies(head_width_, config, length) : frequencies_,
                {.offset = offset, .scale = scale_});
}

Tensor RotaryEmbedding::operator()(const Tensor& x, const Tensor& positions) const {
  const Scope scope(*this);
  check(config.scaling != RotaryScaling::dynamic,
        "RotaryEmbedding: dynamic scaling takes no tensor of positions, since it depends on the largest one");
  return rotary(x, frequencies_, {.positions = positions, .scale = scale_});
}

}  // namespace mica::nn
