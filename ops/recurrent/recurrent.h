#pragma once

#include <mica/core/tensor.h>

namespace mica {

// One layer of a recurrent network in one direction. nn::RNN, nn::LSTM and nn::GRU (nn/recurrent.h) are made of these;
// README.md beside this file has the derivation.

/// The cell, with PyTorch's formulas and order of gates. W is the weight of the input, U that of the hidden state h,
/// and each has a bias.
enum class Recurrence {
  rnn_tanh,  ///< h ← tanh(W x + U h)
  rnn_relu,  ///< h ← relu(W x + U h)
  lstm,      ///< i, f, g, o = W x + U h;  c ← sigmoid(f) · c + sigmoid(i) · tanh(g);  h ← sigmoid(o) · tanh(c)
  gru  ///< r, z, n: h ← (1 − z) · tanh(Wₙ x + r · (Uₙ h)) + z · h, where r and z are sigmoids of W x + U h
};

/// The number of gates: 1, 4 for lstm, 3 for gru.
int gates_of(Recurrence kind);

/// Weights of a layer with inputs of width I, a hidden state of width H, and G gates.
struct RecurrentWeights {
  Tensor input;          ///< (G · H, I)
  Tensor hidden;         ///< (G · H, H)
  Tensor input_bias{};   ///< (G · H), or undefined: no biases
  Tensor hidden_bias{};  ///< (G · H), defined if input_bias is
};

struct RecurrentOptions {
  bool reverse = false;  ///< from the last step to the first; y keeps the order of x
  /// (B), int64 or int32, on any device: the steps of each sequence, which are followed by padding. The result is that
  /// of PyTorch's packed sequences: padding is not read, y is 0 there, and h and c are those after the last step (in
  /// reverse, after the first). A sequence of length 0 keeps its initial state. Undefined: all have T steps.
  Tensor lengths{};
};

struct RecurrentResult {
  Tensor y;  ///< (T, B, H): h after each step
  Tensor h;  ///< (B, H): the last state; may share memory with y
  Tensor c;  ///< (B, H) for lstm, else undefined
};

/// Runs the cell over a sequence.
///
/// @param x   (T, B, I), T ≥ 1, floating.
/// @param h0  (B, H), the initial state; undefined: 0.
/// @param c0  (B, H), lstm only; undefined: 0.
///
/// Weights and states have x's dtype and device. The products of all inputs are one matrix product, and so is each
/// gradient of a weight; 16-bit floats are computed in float32, in which c and its gradients also stay from step to
/// step. Nothing is read on the host, so that a CUDA graph can be captured, unless `lengths` are on the CPU: these are
/// checked to be in [0, T]. Differentiable any number of times; from the second on, by the ops of which a step is
/// composed. Throws Error before anything is computed if a shape, dtype or device does not match.
RecurrentResult recurrent(Recurrence kind, const Tensor& x, const RecurrentWeights& weights, const Tensor& h0 = {},
                          const Tensor& c0 = {}, const RecurrentOptions& options = {});

}  // namespace mica
