#pragma once

#include <cstdint>
#include <optional>

#include <mica/nn/containers.h>
#include <mica/nn/dropout.h>
#include <mica/nn/embedding.h>
#include <mica/nn/layer_norm.h>
#include <mica/nn/linear.h>
#include <mica/nn/models/encoder_head.h>

namespace mica::nn {

/// Models that differ in their embeddings and heads, and in the names of their files.
enum class BertKind {
  bert,
  roberta,      ///< positions are those among the tokens that are not padding (Liu et al., 2019, arXiv:1907.11692)
  xlm_roberta,  ///< the same (Conneau et al., 2019, arXiv:1911.02116)
  distilbert,   ///< no token types and no pooler (Sanh et al., 2019, arXiv:1910.01108)
};

/// The defaults are MiniLM's with 6 layers (Wang et al., 2020, arXiv:2002.10957).
struct BertConfig {
  BertKind kind = BertKind::bert;
  std::int64_t vocab = 30522;  ///< tokens are 0 … vocab − 1
  std::int64_t context = 512;  ///< the longest sequence
  std::int64_t types = 2;      ///< number of token types: first and second sentence; DistilBERT: 0
  std::int64_t padding = 1;    ///< RoBERTa: the token of padding, whose position embedding has the same index
  std::int64_t layers = 6;
  std::int64_t heads = 12;  ///< must divide width
  std::int64_t width = 384;
  std::int64_t hidden = 1536;  ///< inner width of the feed-forward part
  double norm_eps = 1e-12;
  double dropout = 0;            ///< of the embeddings and of each residual branch
  double attention_dropout = 0;  ///< of the attention weights
  Activation activation = Activation::gelu;
  bool pooler = true;  ///< whether there are weights for pooled(); not in DistilBERT
  EncoderHead head = EncoderHead::none;
  std::int64_t labels = 2;         ///< number of classes, for EncoderHead::sequence and tokens
  double head_dropout = 0;         ///< of the input of the last layer of these two
  bool next_sentence = false;      ///< whether there are weights for next_sentence_logits(); needs the pooler
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
/// layers, a pooler and a head. BertKind lists the models that differ from BERT.
///
/// Initialized with normal weights of standard deviation 0.02; biases are 0, the norms' weights 1. Parameters of the
/// encoder are named as in Hugging Face's BertModel, in all kinds: embeddings.word_embeddings.weight,
/// encoder.layer.0.attention.self.query.weight, …, pooler.dense.weight. See io/pretrained.h for reading and writing
/// these.
class Bert : public Module {
 public:
  explicit Bert(const BertConfig& config);  ///< throws unless the sizes and parts fit together

  /// Tokens (B, T), int64 or int32, T at most the context, to features (B, T, width). `visible` (B, T), bool or
  /// integers: false or 0 for padding, which no token attends to; undefined: all are visible. `types` (B, T), integers
  /// in [0, types); undefined: 0.
  Tensor operator()(const Tensor& tokens, const Tensor& visible = {}, const Tensor& types = {}) const;

  /// BERT's own summary of the features (B, T, width): tanh(dense(the first token)), (B, width). Throws without a
  /// pooler. For other summaries, see nn/pooling.h.
  Tensor pooled(const Tensor& features) const;

  /// What the head computes from the features (B, T, width): see EncoderHead for shapes. Throws without a head.
  Tensor logits(const Tensor& features) const;
  /// Whether the second sentence follows the first, (B, 2), from the features (B, T, width): index 0 for yes.
  Tensor next_sentence_logits(const Tensor& features) const;

  struct Embeddings : Module {
    explicit Embeddings(const BertConfig& config);
    Tensor operator()(const Tensor& tokens, const Tensor& types) const;

    std::optional<std::int64_t> padding;  // with RoBERTa's positions
    Embedding word_embeddings, position_embeddings;
    std::optional<Embedding> token_type_embeddings;
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
  std::optional<PredictionHead> head;    // masked_lm
  std::optional<Linear> lm_head;         // masked_lm: the word embedding, with a bias
  std::optional<Linear> pre_classifier;  // sequence; BERT uses its pooler instead
  std::optional<Linear> classifier;      // sequence, tokens
  std::optional<Linear> next_sentence;

 private:
  Tensor first_token(const Tensor& features) const;
  Tensor summary(const Tensor& features) const;  // what the classifier of a sequence sees
  Tensor dropped(const Tensor& x) const;
};

}  // namespace mica::nn
