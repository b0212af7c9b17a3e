#pragma once

#include <mica/nn/dropout.h>
#include <mica/nn/embedding.h>
#include <mica/nn/linear.h>
#include <mica/nn/recurrent.h>

namespace mica::nn {

struct LSTMLanguageModelConfig {
  std::int64_t vocab = 0;    ///< tokens are 0 … vocab − 1
  std::int64_t width = 200;  ///< of the embedding
  std::int64_t hidden = 200;
  std::int64_t layers = 2;
  double dropout = 0.2;    ///< of the embeddings, between layers, and of the outputs
  bool tied_head = false;  ///< the head's weight is the embedding's; needs width = hidden
};

/// The state of an LSTMLanguageModel between two parts of a text; default-constructed at its beginning.
struct LSTMState {
  Tensor h, c;  ///< (layers, B, hidden)

  /// Without history, so that backward ends here: truncated backpropagation through time.
  LSTMState detach() const;
};

/// A language model: an embedding, an LSTM and a head (Zaremba et al., 2014, arXiv:1409.2329). Parameters have the
/// names of PyTorch's example word_language_model: encoder.weight, rnn.weight_ih_l0, …, decoder.weight, decoder.bias,
/// and are initialized as there: encoder and decoder uniformly in ±0.1, the decoder's bias to 0.
class LSTMLanguageModel : public Module {
 public:
  explicit LSTMLanguageModel(const LSTMLanguageModelConfig& config);  ///< throws unless the sizes fit together

  /// Tokens (B, T), int64 or int32, to logits (B, T, vocab). With `state`, the text continues from it, and it is
  /// replaced by the state after the tokens.
  Tensor operator()(const Tensor& tokens, LSTMState* state = nullptr) const;
  /// The mean cross entropy of predicting `targets` (B, T), the next tokens, as labels of mica::cross_entropy.
  Tensor loss(const Tensor& tokens, const Tensor& targets, LSTMState* state = nullptr) const;

  LSTMLanguageModelConfig config;
  Dropout drop;
  Embedding encoder;
  LSTM rnn;
  Linear decoder;
};

}  // namespace mica::nn
