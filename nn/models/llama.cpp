#include <algorithm>
#include <optional>

#include <mica/core/copy.h>
#include <mica/core/progress.h>
#include <mica/nn/checkpoint.h>
#include <mica/nn/detail/most_layers.h>
#include <mica/nn/init.h>
#include <mica/nn/models/llama.h>
#include <mica/ops/attention/attention.h>
#include <mica/ops/cross_entropy/cross_entropy.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/gated/gated.h>
#include <mica/ops/view/view.h>

namespace mica::nn {

namespace {

std::int64_t head_width_of(const LlamaConfig& c) { return c.head_width > 0 ? c.head_width : c.width / c.heads; }

const LlamaConfig& checked(const LlamaConfig& c) {
  check(c.vocab >= 1 && c.width >= 1 && c.hidden >= 1 && c.layers >= 0 && c.layers <= detail::kMostLayers,
        "Llama: expected vocab, width and hidden of at least 1 and 0 to {} layers, got {}, {}, {} and {}",
        detail::kMostLayers, c.vocab, c.width, c.hidden, c.layers);
  check(c.heads >= 1 && c.key_heads >= 1 && c.heads % c.key_heads == 0,
        "Llama: expected key_heads to divide heads, got {} and {}", c.key_heads, c.heads);
  check(c.head_width > 0 || (c.head_width == 0 && c.width % c.heads == 0),
        "Llama: expected a head_width, or heads to divide width, got head_width {}, heads {} and width {}",
        c.head_width, c.heads, c.width);
  check(c.rotated_layers.empty() || static_cast<std::int64_t>(c.rotated_layers.size()) == c.layers,
        "Llama: expected rotated_layers to be empty or to have {} elements, got {}", c.layers, c.rotated_layers.size());
  check(head_width_of(c) <= INT64_MAX / c.heads, "Llama: {} heads of width {} are too many", c.heads, head_width_of(c));
  return c;
}

bool rotates_in(const LlamaConfig& c, std::int64_t layer) {
  return c.rotated_layers.empty() || c.rotated_layers[static_cast<std::size_t>(layer)];
}

RMSNorm head_norm(const LlamaConfig& c) {
  return RMSNorm{head_width_of(c), {.eps = c.norm_eps, .elementwise_affine = c.qk_norm}};
}

}  // namespace

LlamaAttention::LlamaAttention(const LlamaConfig& c, bool rotates)
    : heads(checked(c).heads),
      key_heads(c.key_heads),
      head_width(head_width_of(c)),
      dropout(c.dropout),
      q_proj(child("q_proj", Linear{c.width, heads * head_width, {.bias = c.qkv_bias}})),
      k_proj(child("k_proj", Linear{c.width, key_heads * head_width, {.bias = c.qkv_bias}})),
      v_proj(child("v_proj", Linear{c.width, key_heads * head_width, {.bias = c.qkv_bias}})),
      o_proj(child("o_proj", Linear{heads * head_width, c.width, {.bias = c.output_bias}})),
      q_norm(child("q_norm", head_norm(c))),
      k_norm(child("k_norm", head_norm(c))),
      rotary(child("rotary", RotaryEmbedding{head_width, c.rotary})),
      rotates(rotates),
      qk_norm_(c.qk_norm) {}

Tensor LlamaAttention::rotated(const Tensor& x, std::int64_t count, const RMSNorm& norm, const Tensor& positions,
                               const CachedLayer& cached) const {
  const Tensor by_head = reshape(x, {x.size(0), x.size(1), count, head_width});
  const Tensor normed = qk_norm_ ? norm(by_head) : by_head;
  if (!rotates) {
    return transpose(normed, 1, 2);
  }
  return transpose(positions.defined() ? rotary(normed, positions, cached ? cached.cache->longest() : 0)
                                       : rotary(normed, cached ? cached.cache->length() : 0),
                   1, 2);
}

Tensor LlamaAttention::operator()(const Tensor& x, const CachedLayer& cached) const {
  const Scope scope(*this);
  return attend(x, cached, cached ? cached.cache->positions() : Tensor{}, {});
}

Tensor LlamaAttention::operator()(const Tensor& x, const Tensor& positions, const Tensor& mask) const {
  const Scope scope(*this);
  return attend(x, {}, positions, mask);
}

Tensor LlamaAttention::attend(const Tensor& x, const CachedLayer& cached, const Tensor& positions,
                              const Tensor& mask) const {
  check(x.dim() == 3 && x.size(2) == q_proj.in_features(), "LlamaAttention: expected (B, T, {}), got {}",
        q_proj.in_features(), x.shape());
  const std::int64_t batch = x.size(0), length = x.size(1);
  const Tensor q = rotated(q_proj(x), heads, q_norm, positions, cached);
  const Tensor k = rotated(k_proj(x), key_heads, k_norm, positions, cached);
  const Tensor v = transpose(reshape(v_proj(x), {batch, length, key_heads, head_width}), 1, 2);
  Tensor y;
  if (cached) {
    const auto [keys, values] = cached.cache->append(cached.layer, k, v);
    y = scaled_dot_product_attention(q, keys, values, cached.cache->attention_options());
  } else {
    y = scaled_dot_product_attention(q, k, v, {.causal = true, .dropout = is_training() ? dropout : 0, .mask = mask});
  }
  return o_proj(reshape(transpose(y, 1, 2), {batch, length, heads * head_width}));
}

Tensor LlamaAttention::decode(const Tensor& x, const RMSNorm& norm, const CachedLayer& cached) const {
  const Scope scope(*this);
  return cached.cache->decode(cached.layer, x, {q_proj.decode_weight(), k_proj.decode_weight(), v_proj.decode_weight()},
                              {.norm_weight = norm.weight, .eps = norm.eps},
                              {.heads = heads,
                               .q_norm = q_norm.weight,
                               .k_norm = k_norm.weight,
                               .eps = q_norm.eps,
                               .frequencies = rotates ? rotary.frequencies() : std::vector<float>{},
                               .rotary_scale = rotary.scale()});
}

LlamaMlp::LlamaMlp(const LlamaConfig& c)
    : gate_proj(child("gate_proj", Linear{c.width, c.hidden, {.bias = c.mlp_bias}})),
      up_proj(child("up_proj", Linear{c.width, c.hidden, {.bias = c.mlp_bias}})),
      down_proj(child("down_proj", Linear{c.hidden, c.width, {.bias = c.mlp_bias}})) {}

Tensor LlamaMlp::operator()(const Tensor& x) const {
  const Scope scope(*this);
  return down_proj(swiglu(gate_proj(x), up_proj(x)));
}

LlamaBlock::LlamaBlock(const LlamaConfig& c, bool rotates)
    : input_layernorm(child("input_layernorm", RMSNorm{c.width, {.eps = c.norm_eps}})),
      self_attn(child("self_attn", LlamaAttention{c, rotates})),
      post_attention_layernorm(child("post_attention_layernorm", RMSNorm{c.width, {.eps = c.norm_eps}})),
      mlp(child("mlp", LlamaMlp{c})) {}

Tensor LlamaBlock::operator()(const Tensor& x, const CachedLayer& cached) const {
  const Scope scope(*this);
  return after_attention(x, self_attn(input_layernorm(x), cached));
}

Tensor LlamaBlock::operator()(const Tensor& x, const Tensor& positions, const Tensor& mask) const {
  const Scope scope(*this);
  return after_attention(x, self_attn(input_layernorm(x), positions, mask));
}

Tensor LlamaBlock::after_attention(const Tensor& x, const Tensor& attended) const {
  const auto [sum, y] = post_attention_layernorm(attended, x);
  return sum + mlp(y);
}

Tensor LlamaBlock::decode(const Tensor& x, const CachedLayer& cached) const {
  const Scope scope(*this);
  const Tensor y = self_attn.decode(x, input_layernorm, cached);
  const Tensor sum = decode_linear(y, {self_attn.o_proj.decode_weight()}, {.residual = x});
  const RMSNorm& norm = post_attention_layernorm;
  const Tensor hidden = decode_linear(sum, {mlp.gate_proj.decode_weight(), mlp.up_proj.decode_weight()},
                                      {.norm_weight = norm.weight, .eps = norm.eps, .swiglu = true});
  return decode_linear(hidden, {mlp.down_proj.decode_weight()}, {.residual = sum});
}

DecoderLayer LlamaBlock::decoder_layer() const {
  return {.input_norm = input_layernorm.weight,
          .post_norm = post_attention_layernorm.weight,
          .q = self_attn.q_proj.decode_weight(),
          .k = self_attn.k_proj.decode_weight(),
          .v = self_attn.v_proj.decode_weight(),
          .o = self_attn.o_proj.decode_weight(),
          .gate = mlp.gate_proj.decode_weight(),
          .up = mlp.up_proj.decode_weight(),
          .down = mlp.down_proj.decode_weight(),
          .q_norm = self_attn.q_norm.weight,
          .k_norm = self_attn.k_norm.weight};
}

std::array<const Linear*, 7> LlamaBlock::linear_layers() const {
  const LlamaAttention& a = self_attn;
  return {&a.q_proj, &a.k_proj, &a.v_proj, &a.o_proj, &mlp.gate_proj, &mlp.up_proj, &mlp.down_proj};
}

// A captured step has its frequencies for good, so a text that outgrows the original context takes the composed path.
bool LlamaBlock::can_decode() const {
  const auto layers = linear_layers();
  return std::none_of(layers.begin(), layers.end(), [](const Linear* layer) { return layer->has_lora(); }) &&
         !(self_attn.rotates && depends_on_length(self_attn.rotary.config.scaling));
}

bool LlamaBlock::is_quantized() const {
  const auto layers = linear_layers();
  return std::any_of(layers.begin(), layers.end(), [](const Linear* layer) { return layer->is_quantized(); });
}

LlamaModel::LlamaModel(const LlamaConfig& c)
    : embed_tokens(child("embed_tokens", Embedding{checked(c).vocab, c.width})),
      layers(child("layers", ModuleList<LlamaBlock>{})),
      norm(child("norm", RMSNorm{c.width, {.eps = c.norm_eps}})),
      checkpoint(c.checkpoint) {
  for (std::int64_t i = 0; i < c.layers; ++i) {
    layers.push_back(LlamaBlock{c, rotates_in(c, i)});
  }
}

bool LlamaModel::can_decode(const KeyValueCache& cache) const {
  return cache.can_decode() &&
         std::all_of(layers.begin(), layers.end(), [](const LlamaBlock& block) { return block.can_decode(); });
}

bool LlamaModel::decodes(const KeyValueCache& cache, std::int64_t count) const {
  if (count == 1) {
    return can_decode(cache);
  }
  // Products of many rows with quantized weights use other kernels.
  return cache.can_decode_prompt(count) && can_decode(cache) &&
         std::none_of(layers.begin(), layers.end(), [](const LlamaBlock& block) { return block.is_quantized(); });
}

Tensor LlamaModel::operator()(const Tensor& tokens, KeyValueCache* cache, const PackedDocuments& packed) const {
  const Scope scope(*this);
  return norm(stream(tokens, cache, packed));
}

Tensor LlamaModel::stream(const Tensor& tokens, KeyValueCache* cache, const PackedDocuments& packed) const {
  const Scope scope(*this);
  check(tokens.dim() == 2, "Llama: expected tokens of shape (B, T), got {}", tokens.shape());
  packed.check_shapes("Llama", tokens);
  Tensor x = embed_tokens(tokens);
  if (cache != nullptr) {
    check(!packed.positions.defined() && !packed.documents.defined(),
          "Llama: a KeyValueCache cannot be used with packed documents");
    cache->begin(tokens.size(0), tokens.size(1));
    const Shape shape = x.shape();
    const bool by_rows = decodes(*cache, tokens.size(1));
    if (by_rows) {
      x = reshape(x, {shape[0] * shape[1], shape[2]});
    }
    std::optional<ProgressTask> progress;
    if (tokens.size(1) > 1) {
      progress.emplace("reading the prompt", static_cast<std::int64_t>(layers.size()));
    }
    std::int64_t layer = 0;
    for (const LlamaBlock& block : layers) {
      const CachedLayer cached{cache, layer++};
      x = by_rows ? block.decode(x, cached) : block(x, cached);
      if (progress) {
        progress->advance();
      }
    }
    cache->end();
    return by_rows ? reshape(x, shape) : x;
  }
  const Tensor mask = packed.documents.defined() ? document_mask(packed.documents) : Tensor{};
  for (const LlamaBlock& block : layers) {
    x = checkpoint ? nn::checkpoint(block, x, packed.positions, mask) : block(x, packed.positions, mask);
  }
  return x;
}

Llama::Llama(const LlamaConfig& config)
    : config(config),
      model(child("model", LlamaModel{config})),
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

Tensor Llama::operator()(const Tensor& tokens) const {
  const Scope scope(*this);
  return lm_head(model(tokens));
}

Tensor Llama::loss(const Tensor& tokens, const Tensor& targets, const PackedDocuments& packed) const {
  const Scope scope(*this);
  const Tensor logits = lm_head(model(tokens, nullptr, packed));
  return cross_entropy(logits, targets, {.in_place = logits.dtype() != float16});
}

Tensor Llama::next_token_logits(const Tensor& tokens) const {
  const Scope scope(*this);
  check(tokens.dim() == 2 && tokens.size(1) >= 1, "Llama: expected at least one token to continue, got shape {}",
        tokens.shape());
  return lm_head(select(model(tokens), 1, -1));
}

KeyValueCache Llama::new_cache(std::int64_t batch, std::int64_t window) const {
  const Tensor& weight = model.embed_tokens.weight;
  return KeyValueCache({.layers = config.layers,
                        .batch = batch,
                        .key_heads = config.key_heads,
                        .head_width = head_width_of(config),
                        .dtype = weight.dtype(),
                        .device = weight.device(),
                        .window = window});
}

Tensor Llama::operator()(const Tensor& tokens, KeyValueCache& cache) const {
  const Scope scope(*this);
  return lm_head(model(tokens, &cache));
}

// The logits after one new position of one sequence; undefined if mica::decoder_step() cannot compute them.
Tensor Llama::decode_in_one_kernel(const Tensor& tokens, KeyValueCache& cache, const Tensor& next_token,
                                   std::int64_t* on_host) const {
  const Tensor& embedding = model.embed_tokens.weight;
  const bool by_token = tokens.dtype() == int64 && tokens.device() == embedding.device();
  if (tokens.numel() != 1 || (next_token.defined() && !by_token) || model.layers.size() == 0 || lm_head.has_lora() ||
      !model.can_decode(cache)) {
    return {};
  }
  const LlamaAttention& attention = model.layers[0].self_attn;
  DecoderStep step{.token = by_token ? tokens : Tensor{},
                   .embedding = by_token ? embedding : Tensor{},
                   .norm = model.norm.weight,
                   .head = lm_head.decode_weight(),
                   .eps = model.norm.eps,
                   .heads = attention.heads,
                   .frequencies = attention.rotary.frequencies(),
                   .rotary_scale = attention.rotary.scale(),
                   .next_token = next_token,
                   .tokens_on_host = on_host};
  for (const LlamaBlock& block : model.layers) {
    step.layers.push_back(block.decoder_layer());
    // That kernel has one eps and one table of frequencies for all layers.
    if (!block.self_attn.rotates || block.input_layernorm.eps != step.eps ||
        block.post_attention_layernorm.eps != step.eps || block.self_attn.q_norm.eps != step.eps) {
      return {};
    }
  }
  cache.begin(1, 1);
  if (!cache.prepare(step)) {
    return {};
  }
  if (!by_token) {
    step.x = reshape(model.embed_tokens(tokens), {1, embedding.size(1)});
  }
  const Tensor logits = decoder_step(step);
  cache.end();
  return logits;
}

bool Llama::replace_by_next_token(const Tensor& token, KeyValueCache& cache, std::int64_t* on_host) const {
  const Scope scope(*this);
  return decode_in_one_kernel(token, cache, token, on_host).defined();
}

Tensor Llama::next_token_logits(const Tensor& tokens, KeyValueCache& cache) const {
  const Scope scope(*this);
  if (tokens.shape() == Shape{1, 1}) {
    if (const Tensor logits = decode_in_one_kernel(tokens, cache); logits.defined()) {
      return logits;
    }
  }
  const Tensor x = select(model.stream(tokens, &cache), 1, -1);
  if (lm_head.has_lora()) {
    return lm_head(model.norm(x));
  }
  return decode_linear(contiguous_data(x), {lm_head.decode_weight()},
                       {.norm_weight = model.norm.weight, .eps = model.norm.eps});
}

}  // namespace mica::nn
