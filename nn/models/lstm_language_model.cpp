#include <mica/nn/init.h>
#include <mica/nn/models/lstm_language_model.h>
#include <mica/ops/cross_entropy/cross_entropy.h>

namespace mica::nn {

namespace {

const LSTMLanguageModelConfig& checked(const LSTMLanguageModelConfig& c) {
  check(c.vocab >= 1 && c.width >= 1 && c.hidden >= 1,
        "LSTMLanguageModel: expected vocab, width and hidden of at least 1, got {}, {} and {}", c.vocab, c.width,
        c.hidden);
  check(!c.tied_head || c.width == c.hidden,
        "LSTMLanguageModel: a tied head needs width and hidden to be equal, got {} and {}", c.width, c.hidden);
  return c;
}

}  // namespace

LSTMState LSTMState::detach() const { return {.h = h.defined() ? h.detach() : h, .c = c.defined() ? c.detach() : c}; }

LSTMLanguageModel::LSTMLanguageModel(const LSTMLanguageModelConfig& config)
    : config(checked(config)),
      drop(child("drop", Dropout{config.dropout})),
      encoder(child("encoder", Embedding{config.vocab, config.width})),
      rnn(child("rnn", LSTM{config.width,
                            config.hidden,
                            {.layers = config.layers, .batch_first = true, .dropout = config.dropout}})),
      decoder(child("decoder", config.tied_head ? Linear{encoder.weight, empty({config.vocab})}
                                                : Linear{config.hidden, config.vocab})) {
  init::uniform_(encoder.weight, -0.1, 0.1);
  init::uniform_(decoder.weight, -0.1, 0.1);
  init::constant_(decoder.bias, 0);
}

Tensor LSTMLanguageModel::operator()(const Tensor& tokens, LSTMState* state) const {
  return call(*this, tokens, [&](const Tensor& tokens) {
    check(tokens.dim() == 2, "LSTMLanguageModel: expected tokens of shape (B, T), got {}", tokens.shape());
    const LSTMState before = state == nullptr ? LSTMState{} : *state;
    const auto [y, h, c] = rnn(drop(encoder(tokens)), before.h, before.c);
    if (state != nullptr) {
      *state = {.h = h, .c = c};
    }
    return decoder(drop(y));
  });
}

Tensor LSTMLanguageModel::loss(const Tensor& tokens, const Tensor& targets, LSTMState* state) const {
  const Scope scope(*this);
  const Tensor logits = (*this)(tokens, state);
  return cross_entropy(logits, targets, {.in_place = logits.dtype() != float16});
}

}  // namespace mica::nn
