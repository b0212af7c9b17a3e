#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/support.h"
#include <mica/autograd/autocast.h>
#include <mica/autograd/grad_mode.h>
#include <mica/autograd/gradcheck.h>
#include <mica/core/parallel.h>
#include <mica/core/rng.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/join/join.h>
#include <mica/ops/recurrent/recurrent.h>
#include <mica/ops/reduce/sum.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace recurrent_test {

constexpr std::array kKinds{Recurrence::rnn_tanh, Recurrence::rnn_relu, Recurrence::gru, Recurrence::lstm};

struct Inputs {
  Tensor x;
  RecurrentWeights weights;
  Tensor h0, c0;
};

Inputs inputs_of(Recurrence kind, std::int64_t steps, std::int64_t batch, std::int64_t in, std::int64_t width,
                 DType dtype = float64, Device device = Device::cpu()) {
  const std::int64_t gates = gates_of(kind) * width;
  const auto normal = [&](const Shape& shape) {  // weights so small that rounding errors do not grow from step to step
    const double scale = shape[0] == gates && shape.size() == 2 ? std::sqrt(static_cast<double>(shape[1])) : 2;
    return (randn(shape, float64) / scale).to(device, dtype);
  };
  return {.x = normal({steps, batch, in}),
          .weights = {normal({gates, in}), normal({gates, width}), normal({gates}), normal({gates})},
          .h0 = normal({batch, width}),
          .c0 = kind == Recurrence::lstm ? normal({batch, width}) : Tensor{}};
}

Tensors list(const RecurrentResult& result) {
  return result.c.defined() ? Tensors{result.y, result.h, result.c} : Tensors{result.y, result.h};
}

double sigmoid_of(double x) { return 1 / (1 + std::exp(-x)); }

// y in float64, by the formulas of recurrent.h, in the order of time.
std::vector<double> reference(Recurrence kind, const Inputs& in, bool reverse) {
  const std::int64_t steps = in.x.size(0), batch = in.x.size(1), inputs = in.x.size(2), width = in.h0.size(1);
  const std::vector<double> x = to_vector<double>(in.x), w = to_vector<double>(in.weights.input),
                            u = to_vector<double>(in.weights.hidden), a = to_vector<double>(in.weights.input_bias),
                            b = to_vector<double>(in.weights.hidden_bias);
  std::vector<double> h = to_vector<double>(in.h0), y(static_cast<std::size_t>(steps * batch * width));
  std::vector<double> c = in.c0.defined() ? to_vector<double>(in.c0) : h;
  for (std::int64_t i = 0; i < steps; ++i) {
    const std::int64_t t = reverse ? steps - 1 - i : i;
    const std::vector<double> before = h;
    for (std::int64_t row = 0; row < batch; ++row) {
      for (std::int64_t j = 0; j < width; ++j) {
        std::array<double, 4> from_x{}, from_h{};
        for (std::int64_t g = 0; g < gates_of(kind); ++g) {
          const std::int64_t at = g * width + j;
          from_x[static_cast<std::size_t>(g)] = a[static_cast<std::size_t>(at)];
          from_h[static_cast<std::size_t>(g)] = b[static_cast<std::size_t>(at)];
          for (std::int64_t k = 0; k < inputs; ++k) {
            from_x[static_cast<std::size_t>(g)] += w[static_cast<std::size_t>(at * inputs + k)] *
                                                   x[static_cast<std::size_t>((t * batch + row) * inputs + k)];
          }
          for (std::int64_t k = 0; k < width; ++k) {
            from_h[static_cast<std::size_t>(g)] +=
                u[static_cast<std::size_t>(at * width + k)] * before[static_cast<std::size_t>(row * width + k)];
          }
        }
        const auto gate = [&](std::size_t g) { return sigmoid_of(from_x[g] + from_h[g]); };
        double& next = h[static_cast<std::size_t>(row * width + j)];
        double& cell = c[static_cast<std::size_t>(row * width + j)];
        switch (kind) {
          case Recurrence::rnn_tanh: next = std::tanh(from_x[0] + from_h[0]); break;
          case Recurrence::rnn_relu: next = std::max(from_x[0] + from_h[0], 0.0); break;
          case Recurrence::gru: {
            const double n = std::tanh(from_x[2] + gate(0) * from_h[2]);
            next = (1 - gate(1)) * n + gate(1) * next;
            break;
          }
          case Recurrence::lstm:
            cell = gate(1) * cell + gate(0) * std::tanh(from_x[2] + from_h[2]);
            next = gate(3) * std::tanh(cell);
            break;
        }
        y[static_cast<std::size_t>((t * batch + row) * width + j)] = next;
      }
    }
  }
  return y;
}

TEST(RecurrentOp, ValuesInAllDtypesSizesAndDirections) {
  for (const Device device : test_devices()) {
    for (const Recurrence kind : kKinds) {
      for (const DType dtype : {float64, float32, float16, bfloat16}) {
        const double tolerance = dtype == float64 ? 1e-12 : dtype == float32 ? 1e-5 : dtype == float16 ? 5e-3 : 4e-2;
        for (const auto& [steps, batch, in, width] :
             std::vector<std::array<std::int64_t, 4>>{{1, 1, 1, 1}, {3, 2, 5, 17}, {4, 9, 3, 40}}) {
          for (const bool reverse : {false, true}) {
            const Inputs i = inputs_of(kind, steps, batch, in, width, dtype, device);
            const RecurrentResult r = recurrent(kind, i.x, i.weights, i.h0, i.c0, {.reverse = reverse});
            expect_close(r.y, reference(kind, i, reverse), tolerance, tolerance, std::string(name_of(dtype)));
            expect_close(r.h, select(r.y, 0, reverse ? 0 : -1), 0, 0);
            EXPECT_EQ(r.y.dtype(), dtype);
            EXPECT_EQ(r.c.defined(), kind == Recurrence::lstm);
          }
        }
      }
    }
  }
}

TEST(RecurrentOp, FirstAndSecondDerivatives) {
  for (const Device device : test_devices()) {
    for (const Recurrence kind : kKinds) {
      for (const bool padded : {false, true}) {
        manual_seed(11);
        const Inputs i = inputs_of(kind, 3, 2, 2, 2, float64, device);
        const RecurrentOptions options{.reverse = padded,
                                       .lengths = padded ? from_data<std::int64_t>({1, 3}) : Tensor{}};
        Tensors inputs{i.x, i.weights.input, i.weights.hidden, i.weights.input_bias, i.weights.hidden_bias, i.h0};
        if (i.c0.defined()) {
          inputs.push_back(i.c0);
        }
        const auto f = [&](const Tensors& in) {
          return list(
              recurrent(kind, in[0], {in[1], in[2], in[3], in[4]}, in[5], in.size() > 6 ? in[6] : Tensor{}, options));
        };
        EXPECT_TRUE(autograd::gradcheck(f, inputs));
        EXPECT_TRUE(autograd::gradgradcheck(f, inputs));
      }
    }
  }
}

TEST(RecurrentOp, OneTensorMayBeSeveralInputs) {
  const Inputs i = inputs_of(Recurrence::lstm, 3, 2, 2, 2);
  const auto f = [&](const Tensor& state, const Tensor& bias) {
    return recurrent(Recurrence::lstm, i.x, {i.weights.input, i.weights.hidden, bias, bias}, state, state).y;
  };
  EXPECT_TRUE(autograd::gradcheck(f, {i.h0, i.weights.input_bias}));
  EXPECT_TRUE(autograd::gradgradcheck(f, {i.h0, i.weights.input_bias}));
}

// Each sequence of a padded batch gives what it gives alone.
TEST(RecurrentOp, PaddingIsNotRead) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<std::int64_t> lengths{2, 0, 4, 3};
  for (const Device device : test_devices()) {
    for (const Recurrence kind : kKinds) {
      for (const bool reverse : {false, true}) {
        const Inputs i = inputs_of(kind, 4, 4, 3, 5, float64, device);
        Tensors sequences;
        for (std::size_t b = 0; b < lengths.size(); ++b) {
          const Tensor x = select(i.x, 1, static_cast<std::int64_t>(b));
          const Tensor padding = full({4 - lengths[b], 3}, nan, float64, device);
          sequences.push_back(cat({slice(x, 0, 0, lengths[b]), padding}));
        }
        const Tensor x = stack(sequences, 1).detach().requires_grad_();
        const RecurrentWeights weights{i.weights.input.detach().requires_grad_(),
                                       i.weights.hidden.detach().requires_grad_(), i.weights.input_bias,
                                       i.weights.hidden_bias};
        const RecurrentResult r =
            recurrent(kind, x, weights, i.h0, i.c0, {.reverse = reverse, .lengths = from_data(lengths, {4})});
        (sum(r.y) + sum(r.h) * 2).backward();

        Tensor total;
        for (std::size_t b = 0; b < lengths.size(); ++b) {
          const auto at = static_cast<std::int64_t>(b);
          const std::string what = "sequence " + std::to_string(b);
          const std::int64_t length = lengths[b];
          const auto row = [&](const Tensor& t) { return t.defined() ? slice(t, 0, at, at + 1) : t; };
          expect_close(slice(select(r.y, 1, at), 0, length, 4), std::vector<double>((4 - length) * 5, 0), 0, 0, what);
          expect_close(slice(select(x.grad(), 1, at), 0, length, 4), std::vector<double>((4 - length) * 3, 0), 0, 0,
                       what);
          if (length == 0) {
            expect_close(row(r.h), row(i.h0), 0, 0, what);
            continue;
          }
          const RecurrentResult alone = recurrent(kind, slice(slice(i.x, 1, at, at + 1), 0, 0, length), weights,
                                                  row(i.h0), row(i.c0), {.reverse = reverse});
          expect_close(slice(slice(r.y, 1, at, at + 1), 0, 0, length), alone.y, 1e-12, 1e-12, what);
          expect_close(row(r.h), alone.h, 1e-12, 1e-12, what);
          if (alone.c.defined()) {
            expect_close(row(r.c), alone.c, 1e-12, 1e-12, what);
          }
          const Tensor part = sum(alone.y) + sum(alone.h) * 2;
          total = total.defined() ? total + part : part;
        }
        const std::vector<double> input = to_vector<double>(weights.input.grad()),
                                  hidden = to_vector<double>(weights.hidden.grad());
        weights.input.set_grad({});
        weights.hidden.set_grad({});
        total.backward();
        expect_close(weights.input.grad(), input, 1e-11, 1e-11);
        expect_close(weights.hidden.grad(), hidden, 1e-11, 1e-11);
      }
    }
  }
}

TEST(RecurrentOp, DevicesAgree) {
  if (!cuda_available()) {
    GTEST_SKIP() << "there is no GPU";
  }
  for (const Recurrence kind : kKinds) {
    const Inputs i = inputs_of(kind, 12, 33, 24, 72, float32);
    std::array<Tensors, 2> results;
    for (const int on : {0, 1}) {
      const Device device = on == 0 ? Device::cpu() : Device::cuda();
      const auto leaf = [&](const Tensor& t) { return t.defined() ? t.to(device).detach().requires_grad_() : t; };
      const Tensors leaves{leaf(i.x),
                           leaf(i.weights.input),
                           leaf(i.weights.hidden),
                           leaf(i.weights.input_bias),
                           leaf(i.weights.hidden_bias),
                           leaf(i.h0)};
      const RecurrentResult r =
          recurrent(kind, leaves[0], {leaves[1], leaves[2], leaves[3], leaves[4]}, leaves[5], leaf(i.c0));
      sum(r.y * r.y).backward();
      results[static_cast<std::size_t>(on)] = list(r);
      for (const Tensor& t : leaves) {
        results[static_cast<std::size_t>(on)].push_back(t.grad());
      }
    }
    for (std::size_t k = 0; k < results[0].size(); ++k) {
      expect_close(results[1][k], results[0][k], 1e-3, 1e-3, "result " + std::to_string(k));
    }
  }
}

TEST(RecurrentOp, TheSameBitsWithAnyNumberOfThreads) {
  const int threads = num_threads();
  for (const Recurrence kind : kKinds) {
    const Inputs i = inputs_of(kind, 3, 20, 16, 64, float32);
    const Tensor hidden = i.weights.hidden.detach().requires_grad_();
    std::vector<std::vector<double>> results;
    for (const int n : {1, 3}) {
      set_num_threads(n);
      hidden.set_grad({});
      const RecurrentResult r =
          recurrent(kind, i.x, {i.weights.input, hidden, i.weights.input_bias, i.weights.hidden_bias}, i.h0, i.c0);
      sum(r.y).backward();
      results.push_back(to_vector<double>(cat({flatten(r.y), flatten(hidden.grad())})));
    }
    EXPECT_EQ(results[0], results[1]);
  }
  set_num_threads(threads);
}

TEST(RecurrentOp, EmptyBatchAutocastAndNoGradient) {
  for (const Device device : test_devices()) {
    const Inputs none = inputs_of(Recurrence::gru, 3, 0, 2, 4, float32, device);
    const Tensor x = none.x.detach().requires_grad_();
    const RecurrentResult r = recurrent(Recurrence::gru, x, none.weights);
    EXPECT_EQ(r.y.shape(), (Shape{3, 0, 4}));
    EXPECT_EQ(r.h.shape(), (Shape{0, 4}));
    sum(r.y).backward();
    EXPECT_EQ(x.grad().shape(), x.shape());

    for (const Recurrence kind : kKinds) {
      const Inputs i = inputs_of(kind, 3, 2, 2, 4, float32, device);
      const Tensor y = recurrent(kind, i.x, i.weights).y;
      {
        const autograd::Autocast autocast;
        const Tensor narrow = recurrent(kind, i.x, i.weights).y;
        EXPECT_EQ(narrow.dtype(), bfloat16);
        expect_close(narrow, y, 5e-2, 5e-2);
      }
      const Tensor leaf = i.x.detach().requires_grad_();
      expect_close(recurrent(kind, leaf, i.weights).y, y, 0, 0);  // forward with and without what backward needs
    }
  }
}

TEST(RecurrentOp, WrongArgumentsAreErrors) {
  const Inputs i = inputs_of(Recurrence::lstm, 3, 2, 4, 5);
  const auto run = [&](const Tensor& x, const RecurrentWeights& weights, const Tensor& h0 = {}, const Tensor& c0 = {},
                       const RecurrentOptions& options = {}) {
    return recurrent(Recurrence::lstm, x, weights, h0, c0, options);
  };
  const RecurrentWeights& w = i.weights;
  expect_error([&] { run(zeros({3, 4}), w); }, "lstm: expected x of shape (T, B, I) with T >= 1, got [3, 4]");
  expect_error([&] { run(zeros({3, 2, 4}, int64), w); }, "lstm: expected x of a floating dtype, got int64");
  expect_error(
      [&] {
        run(i.x, {w.input, zeros({19, 5}, float64)});
      },
      "lstm: expected hidden weights of shape (4 H, H), got [19, 5]");
  expect_error(
      [&] {
        run(i.x, {zeros({20, 3}, float64), w.hidden});
      },
      "lstm: expected input weights of shape [20, 4], got [20, 3]");
  expect_error(
      [&] {
        run(i.x, {w.input.to(float32), w.hidden});
      },
      "lstm: expected input weights of float64 on cpu, got float32 on cpu");
  expect_error([&] { run(i.x, {w.input, w.hidden, w.input_bias}); }, "lstm: expected both biases or none");
  expect_error([&] { run(i.x, w, zeros({2, 4}, float64)); }, "lstm: expected h0 of shape [2, 5], got [2, 4]");
  expect_error([&] { run(i.x, w, {}, {}, {.lengths = zeros({2}, float64)}); },
               "lstm: expected lengths of int64 or int32, got float64");
  const Inputs g = inputs_of(Recurrence::gru, 3, 2, 4, 5);
  expect_error([&] { recurrent(Recurrence::gru, g.x, g.weights, {}, g.h0); }, "gru: only lstm has a c0");
}

}  // namespace recurrent_test
