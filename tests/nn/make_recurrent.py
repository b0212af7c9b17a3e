#!/usr/bin/env python3
"""Writes fixtures/recurrent.safetensors: PyTorch's recurrent modules with random weights, and their results.

    python3 tests/nn/make_recurrent.py

A case has tensors CASE.x, .h0, .c0, .lengths, .y, .h, .c, .dy, .dh, .dc, .weight.NAME, and .grad.NAME for x, h0, c0 and
each weight, as far as it has them.
"""

import pathlib

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

FILE = pathlib.Path(__file__).parent / "fixtures" / "recurrent.safetensors"
STEPS, BATCH, INPUTS, WIDTH = 5, 3, 4, 3
LENGTHS = [2, 5, 3]


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def case(tensors, name, module, x, states=(), lengths=None):
    """Runs a module and stores what it took and gave."""
    module = module.double()
    leaves = {"x": x, **dict(zip(("h0", "c0"), states))}
    for leaf in leaves.values():
        leaf.requires_grad_()
    is_lstm = isinstance(module, (nn.LSTM, nn.LSTMCell))
    given = () if not states else (tuple(states),) if is_lstm else (states[0],)
    if lengths is not None:
        packed = pack_padded_sequence(x, lengths, batch_first=module.batch_first, enforce_sorted=False)
        packed, last = module(packed, *given)
        y, _ = pad_packed_sequence(packed, batch_first=module.batch_first, total_length=STEPS)
        tensors[f"{name}.lengths"] = torch.tensor(lengths)
        results = [y, *last] if is_lstm else [y, last]
    elif isinstance(module, nn.RNNBase):
        y, last = module(x, *given)
        results = [y, *last] if is_lstm else [y, last]
    else:
        result = module(x, *given)
        results = [None, *result] if is_lstm else [None, result]
    loss = 0
    for kind, result in zip(("y", "h", "c"), results):
        if result is not None:
            d = random(*result.shape)
            loss = loss + (result * d).sum()
            tensors[f"{name}.{kind}"] = result
            tensors[f"{name}.d{kind}"] = d
    loss.backward()
    for kind, leaf in leaves.items():
        tensors[f"{name}.{kind}"] = leaf
        tensors[f"{name}.grad.{kind}"] = leaf.grad
    for kind, weight in module.named_parameters():
        tensors[f"{name}.weight.{kind}"] = weight
        tensors[f"{name}.grad.{kind}"] = weight.grad


def main():
    torch.manual_seed(0)
    tensors = {}

    def sequence(batch_first=False):
        return random(BATCH, STEPS, INPUTS) if batch_first else random(STEPS, BATCH, INPUTS)

    def states(count, number):
        return [random(count, BATCH, WIDTH) for _ in range(number)]

    both = dict(num_layers=2, bidirectional=True)
    case(tensors, "rnn_tanh", nn.RNN(INPUTS, WIDTH), sequence())
    case(tensors, "rnn_relu", nn.RNN(INPUTS, WIDTH, nonlinearity="relu", **both), sequence(), states(4, 1), LENGTHS)
    case(tensors, "lstm", nn.LSTM(INPUTS, WIDTH, bias=False), sequence())
    case(tensors, "lstm_lengths", nn.LSTM(INPUTS, WIDTH, batch_first=True, **both), sequence(True), states(4, 2), LENGTHS)
    case(tensors, "lstm_one", nn.LSTM(INPUTS, WIDTH, num_layers=2), random(STEPS, INPUTS),
         [random(2, WIDTH), random(2, WIDTH)])
    case(tensors, "gru", nn.GRU(INPUTS, WIDTH, batch_first=True, **both), sequence(True), states(4, 1))
    case(tensors, "gru_lengths", nn.GRU(INPUTS, WIDTH, bidirectional=True), sequence(), states(2, 1), LENGTHS)
    case(tensors, "gru_no_bias", nn.GRU(INPUTS, WIDTH, bias=False), sequence())
    case(tensors, "rnn_cell", nn.RNNCell(INPUTS, WIDTH, nonlinearity="relu"), random(BATCH, INPUTS),
         [random(BATCH, WIDTH)])
    case(tensors, "lstm_cell", nn.LSTMCell(INPUTS, WIDTH), random(BATCH, INPUTS),
         [random(BATCH, WIDTH), random(BATCH, WIDTH)])
    case(tensors, "gru_cell", nn.GRUCell(INPUTS, WIDTH), random(INPUTS), [random(WIDTH)])
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, FILE,
              {"pytorch": torch.__version__})


if __name__ == "__main__":
    main()
