#include <cmath>
#include <string>

#include <mica/core/creation.h>
#include <mica/nn/detail/most_layers.h>
#include <mica/nn/init.h>
#include <mica/nn/recurrent.h>
#include <mica/ops/dropout/dropout.h>
#include <mica/ops/join/join.h>
#include <mica/ops/view/view.h>

namespace mica::nn {

namespace {

Recurrence recurrence_of(Nonlinearity nonlinearity) {
  return nonlinearity == Nonlinearity::relu ? Recurrence::rnn_relu : Recurrence::rnn_tanh;
}

std::int64_t checked_width(const char* name, std::int64_t input_width, std::int64_t width) {
  check(input_width >= 1 && width >= 1 && width <= INT64_MAX / 4,
        "{}: expected an input width and a width of at least 1, got {} and {}", name, input_width, width);
  return width;
}

const RecurrentLayersOptions& checked_options(const char* name, const RecurrentLayersOptions& o) {
  check(o.layers >= 1 && o.layers <= detail::kMostLayers, "{}: expected 1 to {} layers, got {}", name,
        detail::kMostLayers, o.layers);
  check(o.dropout >= 0 && o.dropout < 1, "{}: expected a dropout in [0, 1), got {}", name, o.dropout);
  return o;
}

// Calls add(name, shape) for each weight, in PyTorch's order.
template <class Add>
RecurrentWeights new_weights(Recurrence kind, std::int64_t in, std::int64_t width, bool bias, const Add& add) {
  const std::int64_t gates = gates_of(kind) * width;
  const double bound = 1 / std::sqrt(static_cast<double>(width));
  const auto uniform = [&](const char* name, const Shape& shape) {
    return add(name, init::uniform_(empty(shape), -bound, bound));
  };
  RecurrentWeights weights{.input = uniform("weight_ih", {gates, in}), .hidden = uniform("weight_hh", {gates, width})};
  if (bias) {
    weights.input_bias = uniform("bias_ih", {gates});
    weights.hidden_bias = uniform("bias_hh", {gates});
  }
  return weights;
}

}  // namespace

RecurrentLayers::RecurrentLayers(const char* name, Recurrence kind, std::int64_t input_width, std::int64_t width,
                                 RecurrentLayersOptions options)
    : options(checked_options(name, options)),
      input_width(input_width),
      width(checked_width(name, input_width, width)),
      name_(name),
      kind_(kind) {
  const std::int64_t directions = options.bidirectional ? 2 : 1;
  for (std::int64_t layer = 0; layer < options.layers; ++layer) {
    for (std::int64_t direction = 0; direction < directions; ++direction) {
      const std::string suffix = "_l" + std::to_string(layer) + (direction == 1 ? "_reverse" : "");
      weights_.push_back(
          new_weights(kind, layer == 0 ? input_width : directions * width, width, options.bias,
                      [&](const char* weight, const Tensor& value) { return param(weight + suffix, value); }));
    }
  }
}

RecurrentResult RecurrentLayers::run(const Tensor& x, const Tensor& h0, const Tensor& c0, const Tensor& lengths) const {
  check(x.dim() == 2 || x.dim() == 3, "{}: expected x of shape ({}, {}) or (T, {}), got {}", name_,
        options.batch_first ? "B, T" : "T, B", input_width, input_width, x.shape());
  check(x.size(-1) == input_width, "{}: expected x with a last axis of {}, got {}", name_, input_width, x.shape());
  const auto each = static_cast<std::int64_t>(weights_.size());
  if (x.dim() == 2) {
    const std::int64_t batch_axis = options.batch_first ? 0 : 1;
    const auto with_batch = [](const Tensor& t, std::int64_t axis) { return t.defined() ? unsqueeze(t, axis) : t; };
    check((!h0.defined() || h0.dim() == 2) && (!c0.defined() || c0.dim() == 2),
          "{}: expected states of shape ({}, {}) for one sequence", name_, each, width);
    const RecurrentResult result =
        run(unsqueeze(x, batch_axis), with_batch(h0, 1), with_batch(c0, 1), with_batch(lengths, 0));
    return {.y = squeeze(result.y, batch_axis),
            .h = squeeze(result.h, 1),
            .c = result.c.defined() ? squeeze(result.c, 1) : Tensor{}};
  }
  const Shape states{each, x.size(options.batch_first ? 0 : 1), width};
  check(!h0.defined() || h0.shape() == states, "{}: expected h0 of shape {}, got {}", name_, states,
        h0.defined() ? h0.shape() : Shape{});
  check(!c0.defined() || c0.shape() == states, "{}: expected c0 of shape {}, got {}", name_, states,
        c0.defined() ? c0.shape() : Shape{});

  const std::int64_t directions = options.bidirectional ? 2 : 1;
  const auto state = [](const Tensor& t, std::int64_t i) { return t.defined() ? select(t, 0, i) : t; };
  Tensor y = options.batch_first ? transpose(x, 0, 1) : x;
  Tensors last_h, last_c;
  for (std::int64_t layer = 0; layer < options.layers; ++layer) {
    Tensors sides;
    for (std::int64_t direction = 0; direction < directions; ++direction) {
      const std::int64_t i = layer * directions + direction;
      const RecurrentResult result = recurrent(kind_, y, weights_[static_cast<std::size_t>(i)], state(h0, i),
                                               state(c0, i), {.reverse = direction == 1, .lengths = lengths});
      sides.push_back(result.y);
      last_h.push_back(result.h);
      last_c.push_back(result.c);
    }
    y = directions == 2 ? cat(sides, 2) : sides[0];
    if (layer + 1 < options.layers) {
      y = dropout(y, options.dropout, is_training());
    }
  }
  return {.y = options.batch_first ? transpose(y, 0, 1) : y,
          .h = stack(last_h),
          .c = kind_ == Recurrence::lstm ? stack(last_c) : Tensor{}};
}

RNN::RNN(std::int64_t input_width, std::int64_t width, RecurrentLayersOptions options, Nonlinearity nonlinearity)
    : RecurrentLayers("RNN", recurrence_of(nonlinearity), input_width, width, options) {}

RecurrentOutput RNN::operator()(const Tensor& x, const Tensor& h0, const Tensor& lengths) const {
  return call(*this, x, h0, lengths, [&](const Tensor& x, const Tensor& h0, const Tensor& lengths) {
    const RecurrentResult result = run(x, h0, {}, lengths);
    return RecurrentOutput{result.y, result.h};
  });
}

LSTM::LSTM(std::int64_t input_width, std::int64_t width, RecurrentLayersOptions options)
    : RecurrentLayers("LSTM", Recurrence::lstm, input_width, width, options) {}

LSTMOutput LSTM::operator()(const Tensor& x, const Tensor& h0, const Tensor& c0, const Tensor& lengths) const {
  return call(*this, x, h0, c0, lengths,
              [&](const Tensor& x, const Tensor& h0, const Tensor& c0, const Tensor& lengths) {
                const RecurrentResult result = run(x, h0, c0, lengths);
                return LSTMOutput{result.y, result.h, result.c};
              });
}

GRU::GRU(std::int64_t input_width, std::int64_t width, RecurrentLayersOptions options)
    : RecurrentLayers("GRU", Recurrence::gru, input_width, width, options) {}

RecurrentOutput GRU::operator()(const Tensor& x, const Tensor& h0, const Tensor& lengths) const {
  return call(*this, x, h0, lengths, [&](const Tensor& x, const Tensor& h0, const Tensor& lengths) {
    const RecurrentResult result = run(x, h0, {}, lengths);
    return RecurrentOutput{result.y, result.h};
  });
}

RecurrentCell::RecurrentCell(const char* name, Recurrence kind, std::int64_t input_width, std::int64_t width, bool bias)
    : width(checked_width(name, input_width, width)),
      name_(name),
      kind_(kind),
      weights_(new_weights(kind, input_width, width, bias,
                           [this](const char* weight, const Tensor& value) { return param(weight, value); })) {}

RecurrentResult RecurrentCell::run(const Tensor& x, const Tensor& h, const Tensor& c) const {
  const std::int64_t in = weights_.input.size(1);
  check((x.dim() == 1 || x.dim() == 2) && x.size(-1) == in, "{}: expected x of shape (B, {}) or ({}), got {}", name_,
        in, in, x.shape());
  for (const Tensor& state : {h, c}) {
    check(!state.defined() || state.dim() == x.dim(), "{}: expected states of {} axes, as x, got shape {}", name_,
          x.dim(), state.defined() ? state.shape() : Shape{});
  }
  if (x.dim() == 1) {
    const auto row = [](const Tensor& t) { return t.defined() ? unsqueeze(t, 0) : t; };
    const RecurrentResult result = run(row(x), row(h), row(c));
    return {.y = {}, .h = squeeze(result.h, 0), .c = result.c.defined() ? squeeze(result.c, 0) : Tensor{}};
  }
  return recurrent(kind_, unsqueeze(x, 0), weights_, h, c);
}

RNNCell::RNNCell(std::int64_t input_width, std::int64_t width, bool bias, Nonlinearity nonlinearity)
    : RecurrentCell("RNNCell", recurrence_of(nonlinearity), input_width, width, bias) {}

Tensor RNNCell::operator()(const Tensor& x, const Tensor& h) const {
  return call(*this, x, h, [&](const Tensor& x, const Tensor& h) { return run(x, h, {}).h; });
}

LSTMCell::LSTMCell(std::int64_t input_width, std::int64_t width, bool bias)
    : RecurrentCell("LSTMCell", Recurrence::lstm, input_width, width, bias) {}

std::array<Tensor, 2> LSTMCell::operator()(const Tensor& x, const Tensor& h, const Tensor& c) const {
  return call(*this, x, h, c, [&](const Tensor& x, const Tensor& h, const Tensor& c) {
    const RecurrentResult result = run(x, h, c);
    return std::array<Tensor, 2>{result.h, result.c};
  });
}

GRUCell::GRUCell(std::int64_t input_width, std::int64_t width, bool bias)
    : RecurrentCell("GRUCell", Recurrence::gru, input_width, width, bias) {}

Tensor GRUCell::operator()(const Tensor& x, const Tensor& h) const {
  return call(*this, x, h, [&](const Tensor& x, const Tensor& h) { return run(x, h, {}).h; });
}

}  // namespace mica::nn
