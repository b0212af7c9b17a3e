#include <tests/paths.h>
#include <tests/support.h>

#include <functional>
#include <map>
#include <string>

#include <mica/autograd/grad_mode.h>
#include <mica/core/copy.h>
#include <mica/core/cuda_graph.h>
#include <mica/core/rng.h>
#include <mica/io/safetensors.h>
#include <mica/nn/clone.h>
#include <mica/nn/models/lstm_language_model.h>
#include <mica/nn/recurrent.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/reduce/sum.h>
#include <mica/ops/view/view.h>
#include <mica/optim/adamw.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

// PyTorch's results (make_recurrent.py), for one case.
class Fixture {
 public:
  Fixture(const StateDict& all, const std::string& name) {
    for (const auto& [key, tensor] : all) {
      if (key.starts_with(name + ".")) {
        tensors_[key.substr(name.size() + 1)] = tensor;
      }
    }
  }
  Tensor get(const std::string& name) const {
    const auto at = tensors_.find(name);
    return at == tensors_.end() ? Tensor{} : at->second;
  }
  StateDict weights() const {
    StateDict result;
    for (const auto& [name, tensor] : tensors_) {
      if (name.starts_with("weight.")) {
        result[name.substr(7)] = tensor;
      }
    }
    return result;
  }

 private:
  StateDict tensors_;
};

// Calls a module and returns y, h and c, as far as it has them.
using Run = std::function<Tensors(const Tensor& x, const Tensor& h0, const Tensor& c0, const Tensor& lengths)>;

void compare_with_pytorch(const std::string& name, const Fixture& fixture, nn::Module& module, const Run& run) {
  ASSERT_EQ(module.state_dict().size(), fixture.weights().size()) << name;
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      const std::string what = name + " " + to_string(device) + " " + std::string(name_of(dtype));
      const double tolerance = dtype == float64 ? 1e-12 : dtype == float32 ? 5e-6 : dtype == float16 ? 4e-3 : 3e-2;
      module.to(device, dtype);
      module.load_state_dict(fixture.weights());
      module.zero_grad();
      std::map<std::string, Tensor> leaves;
      for (const char* const leaf : {"x", "h0", "c0"}) {
        const Tensor value = fixture.get(leaf);
        leaves[leaf] = value.defined() ? value.to(device, dtype).detach().requires_grad_() : value;
      }
      const Tensors results = run(leaves["x"], leaves["h0"], leaves["c0"], fixture.get("lengths"));
      Tensor loss;
      for (std::size_t i = 0; i < results.size(); ++i) {
        const std::string kind(1, "yhc"[i]);
        if (fixture.get(kind).defined()) {
          expect_close(results[i], fixture.get(kind), tolerance, tolerance, what + ": " + kind);
          const Tensor part = sum(results[i] * fixture.get("d" + kind).to(device, dtype));
          loss = loss.defined() ? loss + part : part;
        }
      }
      loss.backward();
      for (const auto& [leaf, tensor] : leaves) {
        if (tensor.defined()) {
          expect_close(tensor.grad(), fixture.get("grad." + leaf), 4 * tolerance, 4 * tolerance, what + ": " + leaf);
        }
      }
      for (const auto& [weight, tensor] : module.named_parameters()) {
        expect_close(tensor.grad(), fixture.get("grad." + weight), 8 * tolerance, 8 * tolerance, what + ": " + weight);
      }
    }
  }
}

TEST(Recurrent, WeightsOfPyTorchGiveItsResultsAndGradients) {
  const StateDict all = io::load(MICA_SOURCE "/tests/nn/fixtures/recurrent.safetensors");
  const auto run_rnn = [&](const std::string& name, auto module) {
    compare_with_pytorch(name, Fixture(all, name), module,
                         [&](const Tensor& x, const Tensor& h0, const Tensor&, const Tensor& lengths) {
                           const auto [y, h] = module(x, h0, lengths);
                           return Tensors{y, h};
                         });
  };
  const auto run_lstm = [&](const std::string& name, nn::LSTM module) {
    compare_with_pytorch(name, Fixture(all, name), module,
                         [&](const Tensor& x, const Tensor& h0, const Tensor& c0, const Tensor& lengths) {
                           const auto [y, h, c] = module(x, h0, c0, lengths);
                           return Tensors{y, h, c};
                         });
  };
  const auto run_cell = [&](const std::string& name, auto module) {
    compare_with_pytorch(name, Fixture(all, name), module,
                         [&](const Tensor& x, const Tensor& h0, const Tensor&, const Tensor&) {
                           return Tensors{{}, module(x, h0)};
                         });
  };
  const nn::RecurrentLayersOptions both{.layers = 2, .bidirectional = true};
  const nn::RecurrentLayersOptions both_batch_first{.layers = 2, .batch_first = true, .bidirectional = true};
  run_rnn("rnn_tanh", nn::RNN{4, 3});
  run_rnn("rnn_relu", nn::RNN{4, 3, both, nn::Nonlinearity::relu});
  run_lstm("lstm", nn::LSTM{4, 3, {.bias = false}});
  run_lstm("lstm_lengths", nn::LSTM{4, 3, both_batch_first});
  run_lstm("lstm_one", nn::LSTM{4, 3, {.layers = 2}});
  run_rnn("gru", nn::GRU{4, 3, both_batch_first});
  run_rnn("gru_lengths", nn::GRU{4, 3, {.bidirectional = true}});
  run_rnn("gru_no_bias", nn::GRU{4, 3, {.bias = false}});
  run_cell("rnn_cell", nn::RNNCell{4, 3, true, nn::Nonlinearity::relu});
  run_cell("gru_cell", nn::GRUCell{4, 3});
  nn::LSTMCell cell{4, 3};
  compare_with_pytorch("lstm_cell", Fixture(all, "lstm_cell"), cell,
                       [&](const Tensor& x, const Tensor& h0, const Tensor& c0, const Tensor&) {
                         const auto [h, c] = cell(x, h0, c0);
                         return Tensors{{}, h, c};
                       });
}

TEST(Recurrent, ContinuesFromItsLastState) {
  const nn::LSTM lstm{3, 4, {.layers = 2, .batch_first = true}};
  const Tensor x = randn({2, 7, 3});
  const auto [y, h, c] = lstm(x);
  const auto [y1, h1, c1] = lstm(slice(x, 1, 0, 3));
  const auto [y2, h2, c2] = lstm(slice(x, 1, 3, 7), h1, c1);
  expect_close(y2, slice(y, 1, 3, 7), 1e-5, 1e-6);
  expect_close(h2, h, 1e-5, 1e-6);
  expect_close(c2, c, 1e-5, 1e-6);
}

TEST(Recurrent, DropoutIsBetweenLayersAndInTrainingOnly) {
  nn::GRU gru{3, 8, {.layers = 2, .dropout = 0.5}};
  const Tensor x = randn({4, 2, 3});
  manual_seed(3);
  const auto [y, h] = gru(x);
  manual_seed(3);
  expect_close(gru(x).y, y, 0, 0);
  manual_seed(4);
  const auto [other, other_h] = gru(x);
  EXPECT_NE(to_vector<double>(other), to_vector<double>(y));
  expect_close(select(other_h, 0, 0), select(h, 0, 0), 0, 0);  // the first layer's state
  gru.eval();
  expect_close(gru(x).y, gru(x).y, 0, 0);
  const nn::GRU single{3, 8, {.dropout = 0.5}};
  expect_close(single(x).y, single(x).y, 0, 0);
}

TEST(Recurrent, NamesClonesAndInitialization) {
  manual_seed(1);
  const nn::LSTM lstm{5, 16, {.layers = 2, .bidirectional = true}};
  std::vector<std::string> names;
  for (const auto& [name, tensor] : lstm.named_parameters()) {
    names.push_back(name);
    for (const double value : to_vector<double>(tensor)) {
      ASSERT_LE(std::abs(value), 0.25) << name;
    }
  }
  ASSERT_EQ(names.size(), 16u);
  EXPECT_EQ(names[0], "weight_ih_l0");
  EXPECT_EQ(names[3], "bias_hh_l0");
  EXPECT_EQ(names[5], "weight_hh_l0_reverse");
  EXPECT_EQ(names[14], "bias_ih_l1_reverse");
  EXPECT_EQ(lstm.named_parameters()[8].second.shape(), (Shape{64, 32}));

  const nn::LSTM copy = nn::clone(lstm);
  const Tensor x = randn({3, 2, 5});
  const Tensor y = copy(x).y;
  expect_close(y, lstm(x).y, 0, 0);
  sum(y).backward();
  EXPECT_TRUE(copy.parameters()[7].grad().defined());
  EXPECT_FALSE(lstm.parameters()[7].grad().defined());
}

TEST(Recurrent, WrongArgumentsAreErrors) {
  const nn::LSTM lstm{4, 3, {.batch_first = true}};
  const Tensor x = zeros({2, 5, 4});
  expect_error([&] { nn::LSTM(0, 3); }, "LSTM: expected an input width and a width of at least 1, got 0 and 3");
  expect_error([&] { nn::GRU(4, 3, {.layers = 0}); }, "GRU: expected 1 to 4096 layers, got 0");
  expect_error([&] { nn::RNN(4, 3, {.dropout = 1}); }, "RNN: expected a dropout in [0, 1), got 1");
  expect_error([&] { lstm(zeros({4})); }, "LSTM: expected x of shape (B, T, 4) or (T, 4), got [4]");
  expect_error([&] { lstm(zeros({2, 5, 3})); }, "LSTM: expected x with a last axis of 4, got [2, 5, 3]");
  expect_error([&] { lstm(x, zeros({1, 5, 3})); }, "LSTM: expected h0 of shape [1, 2, 3], got [1, 5, 3]");
  expect_error([&] { lstm(x, {}, zeros({2, 2, 3})); }, "LSTM: expected c0 of shape [1, 2, 3], got [2, 2, 3]");
  expect_error([&] { lstm(x, {}, {}, from_data<std::int64_t>({1, 6})); }, "lstm: expected lengths from 0 to 5, got 6");
  expect_error([&] { lstm(x, {}, {}, from_data<std::int64_t>({1})); }, "lstm: expected lengths of shape [2], got [1]");
  expect_error([&] { lstm(zeros({2, 0, 4})); }, "lstm: expected x of shape (T, B, I) with T >= 1");
  expect_error([&] { lstm(zeros({5, 4}), zeros({1, 2, 3})); }, "LSTM: expected states of shape (1, 3)");
  const nn::GRUCell cell{4, 3};
  expect_error([&] { cell(zeros({2, 3})); }, "GRUCell: expected x of shape (B, 4) or (4), got [2, 3]");
  expect_error([&] { cell(zeros({2, 4}), zeros({3})); }, "GRUCell: expected states of 2 axes, as x, got shape [3]");
}

// Tokens that count upwards by a step which differs from sequence to sequence.
Tensor counting(std::int64_t batch, std::int64_t length, std::int64_t vocab) {
  std::vector<std::int64_t> tokens;
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t t = 0; t < length; ++t) {
      tokens.push_back((b + t * (1 + b % 2)) % vocab);
    }
  }
  return from_data(tokens, {batch, length});
}

TEST(LSTMLanguageModel, Learns) {
  manual_seed(5);
  for (const bool tied : {false, true}) {
    nn::LSTMLanguageModel model({.vocab = 8, .width = 16, .hidden = 16, .layers = 2, .dropout = 0, .tied_head = tied});
    optim::AdamW optimizer(model.parameters(), {.lr = 2e-2, .weight_decay = 0});
    const Tensor tokens = counting(4, 13, 8);
    const Tensor inputs = slice(tokens, 1, 0, 12), targets = slice(tokens, 1, 1, 13);
    const double before = model.loss(inputs, targets).item();
    EXPECT_NEAR(before, std::log(8.0), 0.3);
    for (int step = 0; step < 120; ++step) {
      optimizer.zero_grad();
      model.loss(inputs, targets).backward();
      optimizer.step();
    }
    EXPECT_LT(model.loss(inputs, targets).item(), 0.3) << (tied ? "tied" : "not tied");
  }
}

TEST(LSTMLanguageModel, KeepsItsStateFromOnePartToTheNext) {
  nn::LSTMLanguageModel model({.vocab = 8, .width = 5, .hidden = 6});
  model.eval();
  const Tensor tokens = counting(2, 9, 8);
  nn::LSTMState state;
  const Tensor first = model(slice(tokens, 1, 0, 4), &state);
  EXPECT_EQ(state.h.shape(), (Shape{2, 2, 6}));
  EXPECT_TRUE(state.c.requires_grad() && !state.detach().c.requires_grad());
  state = state.detach();
  expect_close(model(slice(tokens, 1, 4, 9), &state), slice(model(tokens), 1, 4, 9), 1e-5, 1e-6);
  expect_error([&] { model(zeros({3}, int64)); }, "LSTMLanguageModel: expected tokens of shape (B, T), got [3]");
  expect_error([] { nn::LSTMLanguageModel({.vocab = 8, .width = 5, .hidden = 6, .tied_head = true}); },
               "LSTMLanguageModel: a tied head needs width and hidden to be equal, got 5 and 6");
}

TEST(LSTMLanguageModel, TrainsInACudaGraph) {
  if (!cuda_available()) {
    GTEST_SKIP() << "there is no GPU";
  }
  const auto train = [](bool captured) {
    manual_seed(9);
    nn::LSTMLanguageModel model({.vocab = 8, .width = 16, .hidden = 16, .dropout = 0.1});
    model.to(Device::cuda());
    optim::AdamW optimizer(model.parameters(), {.lr = 1e-2});
    const Tensor tokens = counting(4, 13, 8).to(Device::cuda());
    const Tensor inputs = contiguous(slice(tokens, 1, 0, 12)), targets = contiguous(slice(tokens, 1, 1, 13));
    const auto step = [&] {
      optimizer.zero_grad();
      model.loss(inputs, targets).backward();
      optimizer.step();
    };
    step();
    cuda::Graph graph;
    for (int i = 0; i < 4; ++i) {
      if (!captured) {
        step();
      } else if (graph.empty()) {
        graph = cuda::capture(step);
        graph.replay();
      } else {
        graph.replay();
      }
    }
    return to_vector<double>(model.rnn.parameters()[1]);
  };
  EXPECT_EQ(train(true), train(false));
}

}  // namespace
