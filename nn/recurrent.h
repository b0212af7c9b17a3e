#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include <mica/nn/module.h>
#include <mica/ops/recurrent/recurrent.h>

namespace mica::nn {

struct RecurrentLayersOptions {
  std::int64_t layers = 1;  ///< each takes the outputs of the one before
  bool bias = true;
  bool batch_first = false;    ///< x and y are (B, T, …) instead of (T, B, …)
  double dropout = 0;          ///< of the outputs of all layers but the last, in [0, 1)
  bool bidirectional = false;  ///< each layer runs in both directions, and its outputs are those of both, side by side
};

/// What RNN, LSTM and GRU share. Parameters have PyTorch's names and order: weight_ih_l0 (G · H, in), weight_hh_l0
/// (G · H, H), bias_ih_l0, bias_hh_l0 (G · H), then those of the reverse direction, with the suffix _reverse, then
/// those of the next layer. All are initialized uniformly in ±1/√H, as in PyTorch. Each layer is a mica::recurrent.
class RecurrentLayers : public Module {
 public:
  const RecurrentLayersOptions options;
  const std::int64_t input_width;
  const std::int64_t width;  ///< of the hidden state, H

 protected:
  RecurrentLayers(const char* name, Recurrence kind, std::int64_t input_width, std::int64_t width,
                  RecurrentLayersOptions options);

  /// y, h and c for x, and for initial states (layers · directions, B, H) or undefined ones.
  RecurrentResult run(const Tensor& x, const Tensor& h0, const Tensor& c0, const Tensor& lengths) const;

 private:
  const char* name_;
  Recurrence kind_;
  std::vector<RecurrentWeights> weights_;  // by layer, then by direction
};

struct RecurrentOutput {
  Tensor y;  ///< (T, B, directions · H), or (B, T, …): the last layer's state after each step
  Tensor h;  ///< (layers · directions, B, H): the last state of each
};

struct LSTMOutput {
  Tensor y;
  Tensor h;
  Tensor c;  ///< (layers · directions, B, H)
};

enum class Nonlinearity { tanh, relu };

// x is (T, B, in), or (B, T, in) with batch_first; a single sequence may be (T, in), and its results have no axis B.
// States are (layers · directions, B, H); undefined ones are 0. `lengths` (B) are the steps of each sequence, which
// padding follows: see RecurrentOptions::lengths. Unlike a packed sequence of PyTorch, y keeps all T steps.
//
//     nn::LSTM lstm{64, 256, {.layers = 2, .batch_first = true}};
//     const auto [y, h, c] = lstm(x);                // (B, T, 64) to (B, T, 256)
//     const auto [z, h2, c2] = lstm(more, h, c);     // continues
//
// Constructors throw unless both widths and the layers are at least 1 and the dropout is in [0, 1).

/// A recurrent network with h ← f(W x + U h).
class RNN : public RecurrentLayers {
 public:
  RNN(std::int64_t input_width, std::int64_t width, RecurrentLayersOptions options = {},
      Nonlinearity nonlinearity = Nonlinearity::tanh);
  RecurrentOutput operator()(const Tensor& x, const Tensor& h0 = {}, const Tensor& lengths = {}) const;
};

/// A long short-term memory (Hochreiter and Schmidhuber, 1997): see Recurrence::lstm.
class LSTM : public RecurrentLayers {
 public:
  LSTM(std::int64_t input_width, std::int64_t width, RecurrentLayersOptions options = {});
  LSTMOutput operator()(const Tensor& x, const Tensor& h0 = {}, const Tensor& c0 = {},
                        const Tensor& lengths = {}) const;
};

/// Gated recurrent units (Cho et al., 2014, arXiv:1406.1078), in cuDNN's form: see Recurrence::gru.
class GRU : public RecurrentLayers {
 public:
  GRU(std::int64_t input_width, std::int64_t width, RecurrentLayersOptions options = {});
  RecurrentOutput operator()(const Tensor& x, const Tensor& h0 = {}, const Tensor& lengths = {}) const;
};

/// What the cells share: one step, with the parameters weight_ih, weight_hh, bias_ih and bias_hh.
class RecurrentCell : public Module {
 public:
  const std::int64_t width;

 protected:
  RecurrentCell(const char* name, Recurrence kind, std::int64_t input_width, std::int64_t width, bool bias);
  RecurrentResult run(const Tensor& x, const Tensor& h, const Tensor& c) const;

 private:
  const char* name_;
  Recurrence kind_;
  RecurrentWeights weights_;
};

// x is (B, in) or (in), states are (B, H) or (H); undefined ones are 0.

class RNNCell : public RecurrentCell {
 public:
  RNNCell(std::int64_t input_width, std::int64_t width, bool bias = true,
          Nonlinearity nonlinearity = Nonlinearity::tanh);
  /// The next h.
  Tensor operator()(const Tensor& x, const Tensor& h = {}) const;
};

class LSTMCell : public RecurrentCell {
 public:
  LSTMCell(std::int64_t input_width, std::int64_t width, bool bias = true);
  /// The next h and c.
  std::array<Tensor, 2> operator()(const Tensor& x, const Tensor& h = {}, const Tensor& c = {}) const;
};

class GRUCell : public RecurrentCell {
 public:
  GRUCell(std::int64_t input_width, std::int64_t width, bool bias = true);
  /// The next h.
  Tensor operator()(const Tensor& x, const Tensor& h = {}) const;
};

}  // namespace mica::nn
