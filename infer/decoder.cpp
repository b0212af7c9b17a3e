#include <algorithm>

#include <mica/core/copy.h>
#include <mica/infer/decoder.h>
#include <mica/infer/sample.h>
#include <mica/nn/evaluation.h>
#include <mica/ops/quantized/round_activations.h>
#include <mica/ops/view/view.h>

namespace mica::infer {

Tensor Decoder::prefill(const Tensor& tokens, const std::vector<std::int64_t>& padding) {
  const nn::Evaluation guard;
  const RoundActivations rounding(round_activations_);
  check(tokens.dim() == 2 && tokens.size(0) == batch() && tokens.size(1) >= 1,
        "Decoder: expected tokens of shape ({}, T), T >= 1, got {}", batch(), tokens.shape());
  cache_.clear();
  if (padding.size() == 1 && batch() == 1) {  // a single text needs none
    check(padding[0] >= 0 && padding[0] < tokens.size(1), "Decoder: expected padding of 0 to {}, got {}",
          tokens.size(1) - 1, padding[0]);
    return read(slice(tokens, 1, padding[0], tokens.size(1)));
  }
  if (!padding.empty()) {
    cache_.set_padding(padding);
  }
  return read(tokens);
}

Tensor Decoder::step(const Tensor& tokens) {
  const nn::Evaluation guard;
  const RoundActivations rounding(round_activations_);
  check(tokens.shape() == Shape{batch()}, "Decoder: expected one token for each of {} texts, got shape {}", batch(),
        tokens.shape());
  return read(unsqueeze(tokens, 1));
}

bool Decoder::replace(const Tensor& tokens, std::int64_t*) {
  copy_into(tokens, sample(step(tokens), {.temperature = 0}, {}));
  return false;
}

}  // namespace mica::infer
