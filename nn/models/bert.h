#pragma once

#include <cstdint>
#include <optional>

#include <mica/nn/containers.h>
#include <mica/nn/dropout.h>
#include <mica/nn/embedding.h>
#include <mica/nn/layer_norm.h>
#include <mica/nn/linear.h>

namespace mica::nn {

/// The defaults are MiniLM's with 6 layers (Wang et al., 2020, arXiv:2002.10957).
struct BertConfig {
  std::int64_t vocab = 30522;  ///< tokens are 0 … vocab − 1
  std::int64_t context = 512;  ///< the longest sequence
  std::int64_t types = 2;      ///< number of token types: first and second sentence
  std::int64_t layers = 6;
  std::int64_t heads = 12;  ///< must divide width
  std::int64_t width = 384;
  std::int64_t hidden = 1536;  ///< inner width of the feed-forward part
  double norm_eps = 1e-12;
  double dropout = 0;            ///< of the embeddings and of each residual branch
  double attention_dropout = 0;  ///< of the attention weights
  Activation activation = Activation::gelu;
  bool pooler = true;              ///< whether there are weights for pooled()
  bool gelu_pytorch_tanh = false;  ///< the name of gelu_tanh in config.json: see GPTConfig
};

/// Self-attention, x (B, T, width) to (B, T, width), without the output projection. Names are those of Hugging Face's
/// files: attention.self.query.weight.
class BertSelfAttention : public Module {
 public:
  explicit BertSelfAttention(const BertConfig& config);
  /// visible: boolean, broadcasts to (B, heads, T, T); or undefined.
  Tensor operator()(const Tensor& x, const Tensor& visible) const;

  std::int64_t heads;
  double dropout;
  Linear query, key, value;
};

/// The end of a branch: LayerNorm(residual + dropout(dense(x))), from x (B, T, in) and residual (B, T, width).
class BertOutput : public Module {
 public:
  BertOutput(std::int64_t in, const BertConfig& config);
  Tensor operator()(const Tensor& x, const Tensor& residual) const;

  Linear dense;
  LayerNorm norm;  // "LayerNorm"
  Dropout dropout;
};

/// Attention with its output, x (B, T, width) to (B, T, width).
class BertAttention : public Module {
 public:
  explicit BertAttention(const BertConfig& config);
  Tensor operator()(const Tensor& x, const Tensor& visible) const;

  BertSelfAttention self;
  BertOutput output;
};

/// One post-norm layer, x (B, T, width) to (B, T, width).
class BertLayer : public Module {
 public:
  explicit BertLayer(const BertConfig& config);
  Tensor operator()(const Tensor& x, const Tensor& visible) const;

  /// A linear layer with an activation.
  struct Intermediate : Module {
    explicit Intermediate(const BertConfig& config);
    Tensor operator()(const Tensor& x) const;

    Activation activation;
    Linear dense;
  };

  BertAttention attention;
  Intermediate intermediate;
  BertOutput output;
};

/// A bidirectional encoder (Devlin et al., 2018, arXiv:1810.04805): word, position and type embeddings, post-norm
/// layers, and a pooler.
///
/// Initialized with normal weights of standard deviation 0.02; biases are 0, the norms' weights 1. Parameters are named
/// as in Hugging Face's BertModel: embeddings.word_embeddings.weight, encoder.layer.0.attention.self.query.weight, …,
/// pooler.dense.weight. See io/pretrained.h for reading and writing these.
class Bert : public Module {
 public:
  explicit Bert(const BertConfig& config);  ///< throws unless the sizes fit together

  /// Tokens (B, T), int64 or int32, T at most the context, to features (B, T, width). `visible` (B, T), bool or
  /// integers: false or 0 for padding, which no token attends to; undefined: all are visible. `types` (B, T), integers
  /// in [0, types); undefined: 0.
  Tensor operator()(const Tensor& tokens, const Tensor& visible = {}, const Tensor& types = {}) const;

  /// BERT's own summary of the features (B, T, width): tanh(dense(the first token)), (B, width). Throws without a
  /// pooler.
  Tensor pooled(const Tensor& features) const;

  struct Embeddings : Module {
    explicit Embeddings(const BertConfig& config);
    Tensor operator()(const Tensor& tokens, const Tensor& types) const;

    Embedding word_embeddings, position_embeddings, token_type_embeddings;
    LayerNorm norm;  // "LayerNorm"
    Dropout dropout;
  };
  struct Encoder : Module {
    explicit Encoder(const BertConfig& config);

    ModuleList<BertLayer> layer;
  };
  struct Pooler : Module {
    explicit Pooler(const BertConfig& config);

    Linear dense;
  };

  BertConfig config;
  Embeddings embeddings;
  Encoder encoder;
  std::optional<Pooler> pooler;
};

}  // namespace mica::nn
