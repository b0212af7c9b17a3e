#include <cmath>

#include <mica/nn/detail/block_pass.h>
#include <mica/nn/detail/most_layers.h>
#include <mica/nn/init.h>
#include <mica/nn/models/gpt.h>
#include <mica/ops/attention/attention.h>
#include <mica/ops/cross_entropy/cross_entropy.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/view/view.h>

namespace mica::nn {

namespace {

const GPTConfig& checked(const GPTConfig& c) {
  check(c.vocab >= 1 && c.context >= 1 && c.width >= 1 && c.layers >= 0 && c.layers <= detail::kMostLayers,
        "GPT: expected vocab, context and width of at least 1 and 0 to {} layers, got {}, {}, {} and {}",
        detail::kMostLayers, c.vocab, c.context, c.width, c.layers);
  check(c.heads >= 1 && c.width % c.heads == 0, "GPT: expected heads to divide width, got width {} and heads {}",
        c.width, c.heads);
  return c;
}

}  // namespace

GPTConfig gpt2_config(std::string_view size) {
  struct Size {
    std::string_view name;
    std::int64_t layers, heads, width;
  };
  constexpr Size kSizes[] = {
      {"124m", 12, 12, 768}, {"350m", 24, 16, 1024}, {"774m", 36, 20, 1280}, {"1558m", 48, 25, 1600}};
  for (const Size& s : kSizes) {
    if (s.name == size) {
      return {.vocab = 50304, .layers = s.layers, .heads = s.heads, .width = s.width};
    }
  }
  fail("gpt2_config: expected 124m, 350m, 774m or 1558m, got {}", size);
}

GPT::GPT(const GPTConfig& config)
    : config(checked(config)),
      wte(child("wte", Embedding{config.vocab, config.width})),
      wpe(child("wpe", Embedding{config.context, config.width})),
      drop(child("drop", Dropout{config.embedding_dropout.value_or(config.dropout)})),
      h(child("h", ModuleList<TransformerBlock>{})),
      ln_f(child("ln_f", LayerNorm{config.width, {.eps = config.norm_eps, .bias = config.bias}})),
      lm_head(child("lm_head", Linear{wte.weight})) {
  for (std::int64_t i = 0; i < config.layers; ++i) {
    h.push_back(TransformerBlock{config.width,
                                 {.heads = config.heads,
                                  .dropout = config.dropout,
                                  .bias = config.bias,
                                  .gelu = config.gelu,
                                  .norm_eps = config.norm_eps,
                                  .attention_dropout = config.attention_dropout}});
  }
  const double residual_std = 0.02 / std::sqrt(2.0 * static_cast<double>(std::max<std::int64_t>(config.layers, 1)));
  for (const auto& [name, parameter] : named_parameters()) {
    if (parameter.dim() == 2) {
      init::normal_(parameter, 0, name.ends_with("c_proj.weight") ? residual_std : 0.02);
    } else if (name.ends_with(".bias")) {
      init::constant_(parameter, 0);
    }
  }
}

Tensor GPT::features(const Tensor& tokens, KeyValueCache* cache, const PackedDocuments& packed) const {
  check(tokens.dim() == 2, "GPT: expected tokens of shape (B, T), got {}", tokens.shape());
  const std::int64_t start = cache == nullptr ? 0 : cache->length(), end = start + tokens.size(1);
  check(end <= config.context, "GPT: expected at most {} tokens, the context, got {}", config.context, end);
  detail::BlockPass pass("GPT", tokens, cache, packed, config.layers, config.checkpoint);
  const Tensor& positions = pass.positions();
  ResidualAndBranch stream{wte(tokens, positions.defined() ? wpe(positions) : slice(wpe.weight, 0, start, end), drop),
                           {}};
  Tensor bias;  // of the branch
  for (const TransformerBlock& block : h) {
    const auto& [residual, branch] = stream;
    stream = pass(block, residual, branch, bias, pass.mask());
    bias = block.mlp.c_proj.bias;
  }
  pass.end();
  const auto& [residual, branch] = stream;
  return branch.defined() ? ln_f(branch, residual, drop, bias).y : ln_f(residual);
}

Tensor GPT::operator()(const Tensor& tokens, KeyValueCache* cache) const {
  return call(*this, tokens, [&](const Tensor& tokens) { return lm_head(features(tokens, cache)); });
}

Tensor GPT::loss(const Tensor& tokens, const Tensor& targets, const PackedDocuments& packed) const {
  const Scope scope(*this);
  packed.check_shapes("GPT", tokens);
  const Tensor logits = lm_head(features(tokens, nullptr, packed));
  return cross_entropy(logits, targets, {.in_place = logits.dtype() != float16});
}

Tensor GPT::next_token_logits(const Tensor& tokens, KeyValueCache* cache) const {
  const Scope scope(*this);
  check(tokens.dim() == 2 && tokens.size(1) >= 1, "GPT: expected at least one token to continue, got shape {}",
        tokens.shape());
  return lm_head(select(features(tokens, cache), 1, -1));
}

KeyValueCache GPT::new_cache(std::int64_t batch, std::int64_t window) const {
  return KeyValueCache({.layers = config.layers,
                        .batch = batch,
                        .key_heads = config.heads,
                        .head_width = config.width / config.heads,
                        .dtype = wte.weight.dtype(),
                        .device = wte.weight.device(),
                        .window = window,
                        .context = config.context});
}

}  // namespace mica::nn
