#include <array>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <mica/core/check.h>
#include <mica/io/families/detail/encoder_heads.h>
#include <mica/io/families/detail/family.h>
#include <mica/io/families/detail/layer_types.h>
#include <mica/io/families/detail/rotary_entries.h>

// ModernBERT.

namespace mica::io::detail {

namespace {

using nn::EncoderHead;

constexpr std::array<std::pair<std::string_view, bool>, 2> kPoolings{{{"cls", false}, {"mean", true}}};

std::vector<bool> modern_windows(const ConfigEntries& c, std::int64_t layers) {
  if (c.has("layer_types")) {
    return read_layer_types(c, layers, /*allows_windows=*/true,
                            fmt::format("\"{}\" or \"{}\" for each of {} layers", kWindowedLayer, kFullLayer, layers));
  }
  const std::int64_t period = c.count("global_attn_every_n_layers", 1, kMostLayers, 3);
  std::vector<bool> result;
  for (std::int64_t i = 0; i < layers; ++i) {
    result.push_back(i % period != 0);
  }
  return result;
}

nn::ModernBertConfig modern_config(const ConfigEntries& c, const std::string&) {
  const HeadEntries head = head_entries(c);
  nn::ModernBertConfig result{.vocab = c.count("vocab_size", 1, kMostTokens),
                              .context = c.count("max_position_embeddings", 1, kMostPositions),
                              .window = c.count("local_attention", 1, kMostPositions, 128),
                              .layers = c.count("num_hidden_layers", 0, kMostLayers),
                              .heads = c.count("num_attention_heads", 1, kMostHeads),
                              .width = c.count("hidden_size", 1, kWidest),
                              .hidden = c.count("intermediate_size", 1, 16 * kWidest),
                              .norm_eps = c.number("norm_eps", 0, 1e-5),
                              .rotary = {},
                              .local_rotary = {},
                              .norm_bias = c.flag("norm_bias", false),
                              .attention_bias = c.flag("attention_bias", false),
                              .mlp_bias = c.flag("mlp_bias", false),
                              .dropout = c.probability("embedding_dropout", 0),
                              .attention_dropout = c.probability("attention_dropout", 0),
                              .mlp_dropout = c.probability("mlp_dropout", 0),
                              .gelu = c.choice("hidden_activation", "gelu", kGelus),
                              .head = head.head,
                              .labels = head.labels,
                              .head_dropout = c.probability("classifier_dropout", 0),
                              .mean_pooling = c.choice("classifier_pooling", "cls", kPoolings),
                              .head_bias = c.flag("classifier_bias", false),
                              .decoder_bias = c.flag("decoder_bias", true),
                              .head_gelu = c.choice("classifier_activation", "gelu", kGelus)};
  c.require_divisor("num_attention_heads", result.heads, "hidden_size", result.width);
  const std::int64_t head_width = result.width / result.heads;
  if (head_width % 2 != 0 || head_width > kWidestHead) {
    c.refuse("num_attention_heads", fmt::format("heads of an even number of columns, at most {}", kWidestHead));
  }
  result.windowed_layers = modern_windows(c, result.layers);
  result.rotary = rotary_config_of(c, kFullLayer, true, result.context, head_width,
                                   c.number("global_rope_theta", kLeastTheta, 160000.0));
  result.local_rotary = rotary_config_of(c, kWindowedLayer, true, result.context, head_width,
                                         c.number("local_rope_theta", kLeastTheta, 10000.0));
  return result;
}

JsonValue::Object modern_entries(const nn::ModernBertConfig& c) {
  std::vector<bool> windowed = c.windowed_layers;
  for (std::int64_t i = 0; c.windowed_layers.empty() && i < c.layers; ++i) {
    windowed.push_back(i % 3 != 0);
  }
  JsonValue::Object entries{{"model_type", json(std::string("modernbert"))},
                            {"vocab_size", json(c.vocab)},
                            {"max_position_embeddings", json(c.context)},
                            {"local_attention", json(c.window)},
                            {"layer_types", layer_types(windowed)},
                            {"num_hidden_layers", json(c.layers)},
                            {"num_attention_heads", json(c.heads)},
                            {"hidden_size", json(c.width)},
                            {"intermediate_size", json(c.hidden)},
                            {"norm_eps", json(c.norm_eps)},
                            {"norm_bias", json(c.norm_bias)},
                            {"attention_bias", json(c.attention_bias)},
                            {"mlp_bias", json(c.mlp_bias)},
                            {"embedding_dropout", json(c.dropout)},
                            {"attention_dropout", json(c.attention_dropout)},
                            {"mlp_dropout", json(c.mlp_dropout)},
                            {"hidden_activation", json(name_of(c.gelu, kGelus))},
                            {"classifier_dropout", json(c.head_dropout)},
                            {"classifier_pooling", json(name_of(c.mean_pooling, kPoolings))},
                            {"classifier_bias", json(c.head_bias)},
                            {"decoder_bias", json(c.decoder_bias)},
                            {"classifier_activation", json(name_of(c.head_gelu, kGelus))},
                            {"pad_token_id", {}}};  // transformers' defaults are tokens that small vocabularies lack
  add_head_entries(entries, "ModernBert", {c.head, c.labels, false});
  add_rotary_entries_of_kinds(entries, c.rotary, c.local_rotary, c.context, c.width / c.heads);
  // Versions that read these know no scaling.
  entries.erase("rope_theta");
  entries.erase("rope_scaling");
  entries["global_rope_theta"] = json(c.rotary.theta);
  entries["local_rope_theta"] = json(c.local_rotary.theta);
  return entries;
}

std::int64_t modern_parameters(const nn::ModernBertConfig& c) {
  const std::int64_t norm = c.width * (c.norm_bias ? 2 : 1);
  const std::int64_t attention = 4 * c.width * c.width + (c.attention_bias ? 4 * c.width : 0);
  const std::int64_t mlp = 3 * c.width * c.hidden + (c.mlp_bias ? 2 * c.hidden + c.width : 0);
  std::int64_t head = 0;
  if (c.head != EncoderHead::none) {
    head = c.width * c.width + (c.head_bias ? c.width : 0) + norm;
    head += c.head != EncoderHead::masked_lm ? (c.width + 1) * c.labels : c.decoder_bias ? c.vocab : 0;
  }
  const std::int64_t norms = c.layers == 0 ? 2 : 2 * c.layers + 1;  // the first layer has one, not two
  return c.vocab * c.width + c.layers * (attention + mlp) + norms * norm + head;
}

void adapt_modern(nn::ModernBertConfig& config, const StateDict& tensors) {
  if (tensors.contains("classifier.weight") || tensors.contains("classifier.bias")) {
    config.head = config.head == EncoderHead::tokens ? config.head : EncoderHead::sequence;
  } else {
    config.head = tensors.contains("head.dense.weight") ? EncoderHead::masked_lm : EncoderHead::none;
  }
}

bool ties_modern_head(const nn::ModernBertConfig&) { return true; }

constexpr std::array<std::string_view, 1> kModernTypes{"modernbert"};
constexpr std::array<std::string_view, 3> kModernHeads{"head.", "lm_head.", "classifier."};
constexpr std::array<Names, 1> kModernNames{{{"decoder.", "lm_head."}}};

FileTensors modern_tensors(const nn::ModernBertConfig& c) {
  return {.prefix = c.head == EncoderHead::none ? "" : "model.",
          .outer_prefix = "model.",
          .unprefixed = kModernHeads,
          .embedding = "embeddings.tok_embeddings.weight",
          .names = kModernNames};
}

}  // namespace

template <>
const ModelFamily<nn::ModernBert>& family() {
  static constexpr ModelFamily<nn::ModernBert> value{.types = kModernTypes,
                                                     .read = modern_config,
                                                     .write = modern_entries,
                                                     .parameter_count = modern_parameters,
                                                     .tensors_of = modern_tensors,
                                                     .has_tied_head = ties_modern_head,
                                                     .adapt = adapt_modern,
                                                     .heads = kEncoderHeads,
                                                     .adapter_task = "FEATURE_EXTRACTION"};
  return value;
}

}  // namespace mica::io::detail
