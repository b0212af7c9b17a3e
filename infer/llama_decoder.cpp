#include <algorithm>
#include <array>
#include <optional>

#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/progress.h>
#include <mica/infer/kernels/detail/decode_linear.h>
#include <mica/infer/llama_decoder.h>
#include <mica/nn/evaluation.h>
#include <mica/ops/join/join.h>
#include <mica/ops/view/view.h>

namespace mica::infer {

namespace {

std::array<const nn::Linear*, 7> linear_layers_of(const nn::LlamaBlock& block) {
  const nn::LlamaAttention& a = block.self_attn;
  const nn::LlamaMlp& m = block.mlp;
  return {&a.q_proj, &a.k_proj, &a.v_proj, &a.o_proj, &m.gate_proj, &m.up_proj, &m.down_proj};
}

template <class F>
bool any_linear_layer(const nn::LlamaModel& model, const F& f) {
  return std::any_of(model.layers.begin(), model.layers.end(), [&](const nn::LlamaBlock& block) {
    const auto layers = linear_layers_of(block);
    return std::any_of(layers.begin(), layers.end(), [&](const nn::Linear* layer) { return f(*layer); });
  });
}

// Whether the layers are of the kind for which there are kernels.
bool is_plain(const nn::LlamaConfig& c, std::int64_t head_width) {
  return !c.norms_after && !c.wide_qk_norm && c.embedding_scale == 1 && c.residual_scale == 1 && c.logit_divisor == 1 &&
         !c.attention_scale && (c.rotary.width == 0 || c.rotary.width == head_width);
}

// Whether the kernels of a layer can compute the model.
bool has_layer_kernels(const nn::Llama& llama, const nn::KeyValueCache::Config& cache) {
  const bool is_16_bit = cache.dtype == float16 || cache.dtype == bfloat16;
  const auto is_adapted = [](const nn::Linear& layer) { return layer.has_lora(); };
  return is_16_bit && is_plain(llama.config, cache.head_width) &&
         has_decode_attention(cache.dtype, cache.head_width, cache.device) && cache.layers > 0 &&
         !nn::depends_on_length(llama.config.rotary.scaling) && !is_adapted(llama.lm_head) &&
         !any_linear_layer(llama.model, is_adapted);
}

DecodeWeight weight_of(const nn::Linear& layer) {
  return {.matrix = layer.weight, .quantized = layer.quantized, .bias = layer.bias};
}

DecoderLayer layer_of(const nn::LlamaBlock& block) {
  const nn::LlamaAttention& a = block.self_attn;
  return {.input_norm = block.input_layernorm.weight,
          .post_norm = block.post_attention_layernorm.weight,
          .q = weight_of(a.q_proj),
          .k = weight_of(a.k_proj),
          .v = weight_of(a.v_proj),
          .o = weight_of(a.o_proj),
          .gate = weight_of(block.mlp.gate_proj),
          .up = weight_of(block.mlp.up_proj),
          .down = weight_of(block.mlp.down_proj),
          .q_norm = a.q_norm.weight,
          .k_norm = a.k_norm.weight};
}

}  // namespace

LlamaDecoder::LlamaDecoder(const nn::Llama& llama, const DecoderOptions& options)
    : Decoder(llama.new_cache(options.batch, options.window), llama.config.vocab, options.round_activations),
      llama_(llama) {
  if (!has_layer_kernels(llama, cache_.config())) {
    return;
  }
  const nn::LlamaModel& model = llama.model;
  const auto is_quantized = [](const nn::Linear& layer) { return layer.is_quantized(); };
  steps_ = Steps::by_layers;
  prompts_by_layers_ = has_prompt_kernels(device()) && !any_linear_layer(model, is_quantized);
  const nn::LlamaAttention& attention = model.layers[0].self_attn;
  step_ = {.embedding = model.embed_tokens.weight,
           .norm = model.norm.weight,
           .head = weight_of(llama.lm_head),
           .eps = llama.config.norm_eps,
           .heads = attention.heads,
           .frequencies = attention.rotary.frequencies(),
           .rotary_scale = attention.rotary.scale(),
           .length = cache_.device_length(),
           .adds_to_length = true};
  for (const nn::LlamaBlock& block : model.layers) {
    step_.layers.push_back(layer_of(block));
  }
  const bool all_alike = std::all_of(model.layers.begin(), model.layers.end(), [&](const nn::LlamaBlock& block) {
    return block.self_attn.rotates && block.self_attn.window == attention.window;
  });
  if (batch() == 1 && all_alike && !model.embed_tokens.is_quantized()) {
    reserve(1);
    use_cache();
    if (has_decoder_step(step_)) {
      steps_ = Steps::in_one_kernel;
      step_.scratch = zeros({decoder_step_scratch(step_)}, int64, device());
    }
  }
}

Tensor LlamaDecoder::read(const Tensor& tokens) {
  const std::int64_t count = tokens.size(1);
  if (count == 1 && steps_ == Steps::in_one_kernel) {
    return in_one_kernel(tokens);
  }
  if (llama_.config.rotary.recompute && llama_.config.rotary.scaling == nn::RotaryScaling::longrope) {
    return by_model_or_again(tokens);
  }
  if (count == 1 ? steps_ == Steps::by_layers : prompts_by_layers_ && cache_.keeps_all(count)) {
    return by_layers(tokens);
  }
  return llama_.next_token_logits(tokens, &cache_);
}

Tensor LlamaDecoder::by_model_or_again(const Tensor& tokens) {
  const std::int64_t original = llama_.config.rotary.original_context;
  const std::int64_t before = cache_.longest(), after = before + tokens.size(1);
  const bool is_first = cache_.length() == 0;
  const Tensor text = is_first || before > original ? tokens : cat({text_, tokens}, 1);
  const bool again = !is_first && before <= original && after > original;
  if (again) {
    const Tensor padding = cache_.padding();
    cache_.clear();
    if (padding.defined()) {
      cache_.set_padding(to_vector<std::int64_t>(padding));
    }
  }
  const Tensor logits = llama_.next_token_logits(again ? text : tokens, &cache_);
  text_ = after > original ? Tensor{} : text;
  return logits;
}

bool LlamaDecoder::replace(const Tensor& tokens, std::int64_t* on_host) {
  if (steps_ != Steps::in_one_kernel) {
    return Decoder::replace(tokens);
  }
  const nn::Evaluation guard;
  in_one_kernel(tokens, tokens, on_host);
  return on_host != nullptr;
}

void LlamaDecoder::use_cache() {
  for (std::size_t i = 0; i < step_.layers.size(); ++i) {
    step_.layers[i].keys = cache_.keys(static_cast<std::int64_t>(i));
    step_.layers[i].values = cache_.values(static_cast<std::int64_t>(i));
  }
}

Tensor LlamaDecoder::in_one_kernel(const Tensor& token, const Tensor& next_token, std::int64_t* on_host) {
  cache_.begin(1, 1);
  reserve(length() + 1);
  use_cache();
  step_.token = token;
  step_.next_token = next_token;
  step_.tokens_on_host = on_host;
  const Tensor logits = decoder_step(step_);
  cache_.end(/*counted=*/true);
  return logits;
}

Tensor LlamaDecoder::by_layers(const Tensor& tokens) {
  const std::int64_t count = tokens.size(1), width = llama_.config.width;
  cache_.begin(tokens.size(0), count);
  const bool moved = reserve(length() + count);
  std::optional<ProgressTask> progress;
  if (count > 1) {
    progress.emplace("reading the prompt", static_cast<std::int64_t>(step_.layers.size()));
  }
  Tensor x = reshape(llama_.model.embed_tokens(tokens), {batch() * count, width});
  const Tensor rotations =
      count > 1 ? decode_rotations(step_.frequencies, step_.rotary_scale, length(), count, device()) : Tensor{};
  for (std::size_t i = 0; i < step_.layers.size(); ++i) {
    const DecoderLayer& l = step_.layers[i];
    const Tensor y = attend(i, x, count, rotations, /*ready_early=*/i > 0 || !moved);
    const Tensor sum = decode_linear(y, {l.o}, {.residual = x});
    const Tensor hidden =
        decode_linear(sum, {l.gate, l.up}, {.norm_weight = l.post_norm, .eps = step_.eps, .swiglu = true});
    x = decode_linear(hidden, {l.down}, {.residual = sum});
    if (progress) {
      progress->advance();
    }
  }
  cache_.end();
  const Tensor last = contiguous_data(select(reshape(x, {batch(), count, width}), 1, -1));
  return decode_linear(last, {step_.head}, {.norm_weight = step_.norm, .eps = step_.eps});
}

// The attention of x (batch · count, width), without o_proj: (batch · count, heads · head_width).
Tensor LlamaDecoder::attend(std::size_t layer, const Tensor& x, std::int64_t count, const Tensor& rotations,
                            bool ready_early) const {
  const DecoderLayer& l = step_.layers[layer];
  const auto index = static_cast<std::int64_t>(layer);
  const nn::LlamaAttention& attention = llama_.model.layers[layer].self_attn;
  const DecodeLinearOptions norm{.norm_weight = l.input_norm, .eps = step_.eps};
  DecodeAttention a{.heads = step_.heads,
                    .q_norm = l.q_norm,
                    .k_norm = l.k_norm,
                    .eps = step_.eps,
                    .frequencies = attention.rotates ? step_.frequencies : std::vector<float>{},
                    .rotary_scale = step_.rotary_scale,
                    .keys = cache_.keys(index),
                    .values = cache_.values(index),
                    .length = step_.length,
                    .padding = cache_.padding(),
                    .ready_early = ready_early};
  const std::int64_t q_width = a.heads * a.width(), kv_width = a.key_heads() * a.width();
  if (count > 1) {
    const Tensor q =
        decode_linear_append(x, {l.q, l.k, l.v}, norm, a, length(), attention.rotates ? rotations : Tensor{});
    return reshape(cache_.attend_stored(index, transpose(q, 1, 2)), {x.size(0), q_width});
  }
  const Tensor qkv = decode_linear(x, {l.q, l.k, l.v}, norm);
  a.q = slice(qkv, 1, 0, q_width);
  a.k = slice(qkv, 1, q_width, q_width + kv_width);
  a.v = slice(qkv, 1, q_width + kv_width, q_width + 2 * kv_width);
  return decode_attention(a);
}

}  // namespace mica::infer
