#include <array>
#include <string>
#include <string_view>
#include <utility>

#include <mica/core/check.h>
#include <mica/io/families/detail/family.h>

// GPT-2.

namespace mica::io::detail {

namespace {

nn::GPTConfig gpt_config(const ConfigEntries& c, const std::string&) {
  nn::GPTConfig result{.vocab = c.count("vocab_size", 1, kMostTokens),
                       .context = c.count("n_positions", 1, kMostPositions),
                       .layers = c.count("n_layer", 0, kMostLayers),
                       .heads = c.count("n_head", 1, kMostHeads),
                       .width = c.count("n_embd", 1, kWidest),
                       .dropout = c.probability("resid_pdrop", 0.1)};
  c.require_divisor("n_head", result.heads, "n_embd", result.width);
  for (const auto& [name, own] :
       {std::pair{"embd_pdrop", &result.embedding_dropout}, std::pair{"attn_pdrop", &result.attention_dropout}}) {
    if (const double p = c.probability(name, 0.1); p != result.dropout) {
      *own = p;
    }
  }
  if (c.count("n_inner", 1, 4 * kWidest, 4 * result.width) != 4 * result.width) {
    c.refuse("n_inner", fmt::format("four times \"n_embd\", {}", 4 * result.width));
  }
  result.gelu = c.choice("activation_function", "gelu_new", kGelus);
  result.gelu_pytorch_tanh = c.text("activation_function", "") == kPytorchTanh;
  result.norm_eps = c.number("layer_norm_epsilon", 0, 1e-5);
  c.require_flag("scale_attn_weights", true);
  c.require_flag("scale_attn_by_inverse_layer_idx", false);
  c.require_flag("tie_word_embeddings", true);
  c.require_flag("add_cross_attention", false);
  c.require_flag("is_causal", true);
  return result;
}

JsonValue::Object gpt_entries(const nn::GPTConfig& c) {
  check(c.bias, "save_pretrained: transformers has no GPT-2 without biases");
  return {{"model_type", json(std::string("gpt2"))},
          {"architectures", json_list("GPT2LMHeadModel")},
          {"vocab_size", json(c.vocab)},
          {"n_positions", json(c.context)},
          {"n_layer", json(c.layers)},
          {"n_head", json(c.heads)},
          {"n_embd", json(c.width)},
          {"n_inner", {}},
          {"activation_function",
           json(c.gelu == GeluApproximation::tanh && c.gelu_pytorch_tanh ? kPytorchTanh : name_of(c.gelu, kGelus))},
          {"layer_norm_epsilon", json(c.norm_eps)},
          {"resid_pdrop", json(c.dropout)},
          {"embd_pdrop", json(c.embedding_dropout.value_or(c.dropout))},
          {"attn_pdrop", json(c.attention_dropout.value_or(c.dropout))},
          {"scale_attn_weights", json(true)},
          {"scale_attn_by_inverse_layer_idx", json(false)},
          {"add_cross_attention", json(false)},
          {"tie_word_embeddings", json(true)},
          {"bos_token_id", {}},
          {"eos_token_id", {}}};
}

std::int64_t gpt_parameters(const nn::GPTConfig& c) {
  const std::int64_t block = 12 * c.width * c.width + (c.bias ? 13 : 2) * c.width;
  return (c.vocab + c.context) * c.width + c.layers * block + (c.bias ? 2 : 1) * c.width;
}

nn::GPTConfig gpt_config_of_gguf(const GgufSource& source) {
  const JsonValue::Object json{{"model_type", {"gpt2"}},
                               {"vocab_size", {source.vocabulary()}},
                               {"n_positions", {source.count("context_length")}},
                               {"n_layer", {source.count("block_count")}},
                               {"n_head", {source.count("attention.head_count")}},
                               {"n_embd", {source.count("embedding_length")}},
                               {"n_inner", {source.count("feed_forward_length")}},
                               {"layer_norm_epsilon", {source.real("attention.layer_norm_epsilon")}},
                               {"resid_pdrop", {0.0}},
                               {"embd_pdrop", {0.0}},
                               {"attn_pdrop", {0.0}}};
  return gpt_config(ConfigEntries({json}, source.what() + ": as a config.json"), "gpt2");
}

GgufMetadata gpt_gguf(const nn::GPTConfig& c) {
  check(c.bias && c.gelu == GeluApproximation::tanh,
        "save_gguf: llama.cpp's GPT-2 has biases and the tanh approximation of GELU");
  const auto count = [](std::int64_t n) { return static_cast<std::uint32_t>(n); };
  return {{"general.architecture", std::string("gpt2")},
          {"gpt2.vocab_size", count(c.vocab)},
          {"gpt2.context_length", count(c.context)},
          {"gpt2.block_count", count(c.layers)},
          {"gpt2.embedding_length", count(c.width)},
          {"gpt2.feed_forward_length", count(4 * c.width)},
          {"gpt2.attention.head_count", count(c.heads)},
          {"gpt2.attention.layer_norm_epsilon", static_cast<float>(c.norm_eps)}};
}

bool has_gpt_head(const nn::GPTConfig&) { return true; }  // tied

constexpr std::array<std::string_view, 1> kGptTypes{"gpt2"};
constexpr std::array<std::string_view, 1> kGptHead{"lm_head."};
constexpr std::array<std::string_view, 3> kGptTransposed{".c_attn.weight", ".c_proj.weight", ".c_fc.weight"};
constexpr std::array<std::string_view, 2> kGptObsolete{".attn.bias", ".attn.masked_bias"};  // masks

constexpr std::array<Names, 4> kGptOutside{{
    {kGgufEmbedding, "transformer.wte.weight"},
    {"position_embd.weight", "transformer.wpe.weight"},
    {"output_norm.weight", "transformer.ln_f.weight"},
    {"output_norm.bias", "transformer.ln_f.bias"},
}};
constexpr std::array<Names, 6> kGptInside{{
    {"attn_norm", "ln_1"},
    {"attn_qkv", "attn.c_attn"},
    {"attn_output", "attn.c_proj"},
    {"ffn_norm", "ln_2"},
    {"ffn_up", "mlp.c_fc"},
    {"ffn_down", "mlp.c_proj"},
}};
}  // namespace

template <>
const ModelFamily<nn::GPT>& family() {
  static constexpr ModelFamily<nn::GPT> value{.types = kGptTypes,
                                              .read = gpt_config,
                                              .write = gpt_entries,
                                              .parameter_count = gpt_parameters,
                                              .tensors = {.prefix = "transformer.",
                                                          .unprefixed = kGptHead,
                                                          .embedding = "wte.weight",
                                                          .transposed = kGptTransposed,
                                                          .obsolete = kGptObsolete},
                                              .has_tied_head = has_gpt_head,
                                              .adapter_task = "CAUSAL_LM",
                                              .gguf = {.architectures = kGptTypes,
                                                       .block = {"blk.", "transformer.h."},
                                                       .outside = kGptOutside,
                                                       .inside = kGptInside,
                                                       .read = gpt_config_of_gguf,
                                                       .write = gpt_gguf}};
  return value;
}

}  // namespace mica::io::detail
