#include <mica/nn/detail/block_pass.h>
#include <mica/nn/detail/most_layers.h>
#include <mica/nn/init.h>
#include <mica/nn/models/starcoder.h>
#include <mica/ops/cross_entropy/cross_entropy.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/view/view.h>

namespace mica::nn {

namespace {

const StarcoderConfig& checked_starcoder(const StarcoderConfig& c) {
  check(c.vocab >= 1 && c.width >= 1 && c.hidden >= 1 && c.layers >= 0 && c.layers <= detail::kMostLayers,
        "Starcoder: expected vocab, width and hidden of at least 1 and 0 to {} layers, got {}, {}, {} and {}",
        detail::kMostLayers, c.vocab, c.width, c.hidden, c.layers);
  return c;
}

// What LlamaAttention needs to know, which checks the heads and the window.
LlamaConfig attention_config(const StarcoderConfig& c) {
  return {.vocab = c.vocab,
          .context = c.context,
          .layers = c.layers,
          .heads = c.heads,
          .key_heads = c.key_heads,
          .head_width = c.head_width,
          .width = c.width,
          .hidden = c.hidden,
          .rotary = c.rotary,
          .window = c.window,
          .qkv_bias = c.bias,
          .output_bias = c.bias,
          .dropout = c.attention_dropout};
}

LayerNorm norm_of(const StarcoderConfig& c) { return LayerNorm{c.width, {.eps = c.norm_eps}}; }

}  // namespace

StarcoderBlock::StarcoderBlock(const StarcoderConfig& c)
    : input_layernorm(child("input_layernorm", norm_of(c))),
      self_attn(child("self_attn", LlamaAttention{attention_config(c)})),
      dropout(child("dropout", Dropout{c.dropout})),
      post_attention_layernorm(child("post_attention_layernorm", norm_of(c))),
      mlp(child("mlp", Mlp{c.width, {.dropout = c.dropout, .bias = c.bias, .hidden = c.hidden}})) {}

Tensor StarcoderBlock::operator()(const Tensor& x, const Tensor& positions, const Tensor& mask,
                                  const CachedLayer& cached) const {
  return call(*this, x, positions, mask, [&](const Tensor& x, const Tensor& positions, const Tensor& mask) {
    const Tensor attended = self_attn(input_layernorm(x), positions, mask, cached);
    const auto [sum, y] = post_attention_layernorm(attended, x, dropout);
    return sum + mlp(y);
  });
}

StarcoderModel::StarcoderModel(const StarcoderConfig& c)
    : embed_tokens(child("embed_tokens", Embedding{checked_starcoder(c).vocab, c.width})),
      dropout(child("dropout", Dropout{c.embedding_dropout})),
      layers(child("layers", ModuleList<StarcoderBlock>{})),
      norm(child("norm", norm_of(c))),
      checkpoint(c.checkpoint) {
  for (std::int64_t i = 0; i < c.layers; ++i) {
    layers.push_back(StarcoderBlock{c});
  }
}

Tensor StarcoderModel::operator()(const Tensor& tokens, KeyValueCache* cache, const PackedDocuments& packed) const {
  return call(*this, tokens, [&](const Tensor& tokens) {
    check(tokens.dim() == 2, "Starcoder: expected tokens of shape (B, T), got {}", tokens.shape());
    packed.check_shapes("Starcoder", tokens);
    detail::BlockPass pass("Starcoder", tokens, cache, packed, static_cast<std::int64_t>(layers.size()), checkpoint);
    Tensor x = dropout(embed_tokens(tokens));
    for (const StarcoderBlock& block : layers) {
      x = pass(block, x, pass.positions(), pass.mask());
    }
    pass.end();
    return norm(x);
  });
}

Starcoder::Starcoder(const StarcoderConfig& config)
    : config(config),
      model(child("model", StarcoderModel{config})),
      lm_head(child("lm_head", config.tied_head ? Linear{model.embed_tokens.weight}
                                                : Linear{config.width, config.vocab, {.bias = false}})) {
  for (const auto& [name, parameter] : named_parameters()) {
    if (parameter.dim() == 2) {
      init::normal_(parameter, 0, 0.02);
    } else if (name.ends_with(".bias")) {
      init::constant_(parameter, 0);
    }
  }
}

Tensor Starcoder::operator()(const Tensor& tokens, KeyValueCache* cache) const {
  return call(*this, tokens, [&](const Tensor& tokens) { return lm_head(model(tokens, cache)); });
}

Tensor Starcoder::loss(const Tensor& tokens, const Tensor& targets, const PackedDocuments& packed) const {
  const Scope scope(*this);
  const Tensor logits = lm_head(model(tokens, nullptr, packed));
  return cross_entropy(logits, targets, {.in_place = logits.dtype() != float16});
}

Tensor Starcoder::next_token_logits(const Tensor& tokens, KeyValueCache* cache) const {
  const Scope scope(*this);
  check(tokens.dim() == 2 && tokens.size(1) >= 1, "Starcoder: expected at least one token to continue, got shape {}",
        tokens.shape());
  return lm_head(select(model(tokens, cache), 1, -1));
}

KeyValueCache Starcoder::new_cache(std::int64_t batch, std::int64_t window) const {
  const Tensor& weight = model.embed_tokens.weight;
  return KeyValueCache({.layers = config.layers,
                        .batch = batch,
                        .key_heads = config.key_heads,
                        .head_width = config.head_width > 0 ? config.head_width : config.width / config.heads,
                        .dtype = weight.dtype(),
                        .device = weight.device(),
                        .window = window,
                        .windows = detail::windows_of(model.layers)});
}

}  // namespace mica::nn
