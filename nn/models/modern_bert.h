#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <mica/nn/containers.h>
#include <mica/nn/dropout.h>
#include <mica/nn/embedding.h>
#include <mica/nn/layer_norm.h>
#include <mica/nn/linear.h>
#include <mica/nn/models/encoder_head.h>
#include <mica/nn/rotary_embedding.h>
#include <mica/ops/elementwise/unary.h>

namespace mica::nn {

/// The defaults are those of ModernBERT base.
struct ModernBertConfig {
  std::int64_t vocab = 50368;           ///< tokens are 0 … vocab − 1
  std::int64_t context = 8192;          ///< the longest sequence in training
  std::int64_t window = 128;            ///< in windowed layers, a token sees those up to window / 2 away
  std::vector<bool> windowed_layers{};  ///< empty: all but the first and every third after it
  std::int64_t layers = 22;
  std::int64_t heads = 12;  ///< must divide width, into an even number of columns
  std::int64_t width = 768;
  std::int64_t hidden = 1152;  ///< inner width of the feed-forward part
  double norm_eps = 1e-5;
  RotaryConfig rotary{.theta = 160000};
  RotaryConfig local_rotary{.theta = 10000};  ///< of windowed layers
  bool norm_bias = false;
  bool attention_bias = false;
  bool mlp_bias = false;
  double dropout = 0;            ///< of the embeddings
  double attention_dropout = 0;  ///< of the attention weights, and of attention's result
  double mlp_dropout = 0;        ///< of the hidden features
  GeluApproximation gelu = GeluApproximation::none;
  EncoderHead head = EncoderHead::none;
  std::int64_t labels = 2;    ///< number of classes, for EncoderHead::sequence and tokens
  double head_dropout = 0;    ///< of the input of the last layer of these two
  bool mean_pooling = false;  ///< EncoderHead::sequence classifies the mean of the visible tokens, not the first one
  bool head_bias = false;     ///< of the head's first layer
  bool decoder_bias = true;   ///< of masked_lm's last layer
  GeluApproximation head_gelu = GeluApproximation::none;
};

/// Self-attention with rotary embeddings, x (B, T, width) to (B, T, width).
class ModernBertAttention : public Module {
 public:
  /// Attention of layer `layer`.
  explicit ModernBertAttention(const ModernBertConfig& config, std::int64_t layer = 0);
  /// mask: boolean, broadcasts to (B, heads, T, T); or undefined.
  Tensor operator()(const Tensor& x, const Tensor& mask) const;

  std::int64_t heads;
  double dropout;
  std::optional<std::int64_t> reach;  // with a window: tokens see those up to this far away
  Linear qkv;                         // "Wqkv"
  Linear out;                         // "Wo"
  RotaryEmbedding rotary;
};

/// The feed-forward part, x (…, width) to (…, width): out(gelu(a) · b), where in(x) is [a | b].
class ModernBertMlp : public Module {
 public:
  explicit ModernBertMlp(const ModernBertConfig& config);
  Tensor operator()(const Tensor& x) const;

  GeluApproximation gelu;
  Linear in;   // "Wi"
  Linear out;  // "Wo"
  Dropout dropout;
};

/// One pre-norm layer, x (B, T, width) to (B, T, width). The first layer has no norm before attention.
class ModernBertLayer : public Module {
 public:
  explicit ModernBertLayer(const ModernBertConfig& config, std::int64_t layer = 0);
  /// See ModernBertAttention.
  Tensor operator()(const Tensor& x, const Tensor& mask) const;

  std::optional<LayerNorm> attn_norm;
  ModernBertAttention attn;
  LayerNorm mlp_norm;
  ModernBertMlp mlp;
};

/// A bidirectional encoder with rotary embeddings, pre-norm layers, gated feed-forward parts, and attention to near
/// tokens only in two of three layers (Warner et al., 2024, arXiv:2412.13663).
///
/// Initialized with normal weights of standard deviation 0.02; biases are 0, the norms' weights 1. Parameters of the
/// encoder are named as in Hugging Face's ModernBertModel: embeddings.tok_embeddings.weight, layers.0.attn.Wqkv.weight,
/// …, final_norm.weight. See io/pretrained.h for reading and writing these.
class ModernBert : public Module {
 public:
  explicit ModernBert(const ModernBertConfig& config);  ///< throws unless the sizes fit together

  /// Tokens (B, T), int64 or int32, to features (B, T, width). `visible` (B, T), bool or integers: false or 0 for
  /// padding, which no token attends to; undefined: all are visible.
  Tensor operator()(const Tensor& tokens, const Tensor& visible = {}) const;

  /// What the head computes from the features (B, T, width): see EncoderHead for shapes. `visible`, as above, matters
  /// with mean_pooling. Throws without a head.
  Tensor logits(const Tensor& features, const Tensor& visible = {}) const;

  struct Embeddings : Module {
    explicit Embeddings(const ModernBertConfig& config);
    Tensor operator()(const Tensor& tokens) const;

    Embedding tok_embeddings;
    LayerNorm norm;
    Dropout dropout;
  };

  ModernBertConfig config;
  Embeddings embeddings;
  ModuleList<ModernBertLayer> layers;
  LayerNorm final_norm;
  std::optional<PredictionHead> head;  // with any head
  std::optional<Linear> lm_head;       // masked_lm: the embedding, with decoder_bias
  std::optional<Linear> classifier;    // sequence, tokens
};

}  // namespace mica::nn
