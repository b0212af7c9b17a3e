#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "tests/support.h"
#include <mica/autograd/grad.h>
#include <mica/autograd/gradcheck.h>
#include <mica/core/creation.h>
#include <mica/core/rng.h>
#include <mica/ops/ctc/ctc.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/softmax/softmax.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace ctc_test {

using Values = std::vector<double>;
using Labels = std::vector<std::int64_t>;

Tensor integers(const Labels& values, Device device) {
  return from_data(values, {static_cast<std::int64_t>(values.size())}, device);
}

// Sums the probabilities of all paths of classes that become the target.
double loss_by_all_paths(const Values& log_probs, std::int64_t times, std::int64_t classes, const Labels& target,
                         std::int64_t blank) {
  double total = 0;
  std::int64_t paths = 1;
  for (std::int64_t t = 0; t < times; ++t) {
    paths *= classes;
  }
  for (std::int64_t path = 0; path < paths; ++path) {
    Labels merged;
    double log_p = 0;
    std::int64_t rest = path, previous = -1;
    for (std::int64_t t = 0; t < times; ++t, rest /= classes) {
      const std::int64_t c = rest % classes;
      log_p += log_probs[static_cast<std::size_t>(t * classes + c)];
      if (c != previous && c != blank) {
        merged.push_back(c);
      }
      previous = c;
    }
    total += merged == target ? std::exp(log_p) : 0;
  }
  return -std::log(total);
}

TEST(Ctc, MatchesTheSumOverAllPaths) {
  manual_seed(1);
  const std::vector<Labels> targets{{1}, {1, 2}, {2, 2}, {1, 2, 1}, {}, {1, 1, 1}};
  for (const Device device : test_devices()) {
    for (const std::int64_t blank : {0, 3}) {
      for (const DType dtype : {float64, float32, float16, bfloat16}) {
        const std::int64_t times = 6, samples = 6, classes = 4;
        const Tensor x = log_softmax(randn({times, samples, classes}, float64, device), -1).to(dtype);
        Labels padded, lengths, input_lengths{6, 5, 3, 3, 4, 4};  // the last one is too short
        Values expected;
        for (std::int64_t n = 0; n < samples; ++n) {
          Labels target = targets[static_cast<std::size_t>(n)];
          for (std::int64_t& label : target) {
            label -= blank == 0 ? 0 : 1;
          }
          const std::int64_t t = input_lengths[static_cast<std::size_t>(n)];
          expected.push_back(
              loss_by_all_paths(to_vector<double>(slice(select(x, 1, n), 0, 0, t)), t, classes, target, blank));
          lengths.push_back(static_cast<std::int64_t>(target.size()));
          target.resize(4, -7);  // what is after the end is not used
          padded.insert(padded.end(), target.begin(), target.end());
        }
        const Tensor matrix = from_data(padded, {samples, 4}, device);
        const double tolerance = dtype == float64 ? 1e-12 : dtype == float32 ? 1e-5 : dtype == float16 ? 2e-3 : 1e-2;
        const CtcOptions options{.blank = blank, .reduction = Reduction::none};
        const Tensor losses = ctc_loss(x, matrix, integers(input_lengths, device), integers(lengths, device), options);
        EXPECT_EQ(losses.dtype(), dtype);
        expect_close(losses, expected, tolerance, 0);
        const CtcOptions finite{.blank = blank, .zero_infinity = true, .reduction = Reduction::sum};
        double sum = 0;
        for (const double loss : expected) {
          sum += std::isfinite(loss) ? loss : 0;
        }
        EXPECT_NEAR(ctc_loss(x, matrix, integers(input_lengths, device), integers(lengths, device), finite).item(), sum,
                    tolerance * sum);
      }
    }
  }
}

TEST(Ctc, GradientsReductionsAndForms) {
  manual_seed(2);
  for (const Device device : test_devices()) {
    const Tensor x = randn({7, 3, 5}, float64, device);
    const Tensor targets = from_data<std::int64_t>({1, 2, 2, 4, 0, 0, 3, 3, 0}, {3, 3}, device);
    const Tensor input_lengths = integers({7, 4, 6}, device), target_lengths = integers({3, 1, 2}, device);
    for (const Reduction reduction : {Reduction::none, Reduction::mean, Reduction::sum}) {
      const auto f = [&](const Tensor& t) {
        return ctc_loss(t, targets, input_lengths, target_lengths, {.reduction = reduction});
      };
      EXPECT_TRUE(autograd::gradcheck(f, {x}));  // not only of normalized probabilities
      const auto joined = [&](const Tensor& t) {
        return ctc_loss(t, integers({1, 2, 2, 4, 3, 3}, device), input_lengths.to(int32), target_lengths.to(int32),
                        {.reduction = reduction});
      };
      expect_close(joined(x), f(x), 0, 0);
    }
    const Tensor single = ctc_loss(select(x, 1, 0), integers({1, 2, 2}, device), full({}, 7, int64, device),
                                   full({}, 3, int64, device), {.reduction = Reduction::none});
    EXPECT_EQ(single.dim(), 0);
    expect_close(single,
                 ctc_loss(slice(x, 1, 0, 1), slice(targets, 0, 0, 1), integers({7}, device), integers({3}, device),
                          {.reduction = Reduction::sum}),
                 0, 0);
    // An infinite loss has a gradient of 0 with zero_infinity.
    const Tensor leaf = x.detach().requires_grad_();
    ctc_loss(leaf, targets, integers({2, 4, 0}, device), target_lengths, {.zero_infinity = true}).backward();
    EXPECT_TRUE(std::isfinite(sum(leaf.grad()).item()));
    expect_close(select(leaf.grad(), 1, 0), zeros({7, 5}, float64), 0, 0);
    EXPECT_EQ(ctc_loss(slice(x, 1, 0, 0), empty({0, 3}, int64, device), empty({0}, int64, device),
                       empty({0}, int64, device), {.reduction = Reduction::sum})
                  .item(),
              0);
    const Tensor y = x.detach().requires_grad_();
    const Tensor loss = ctc_loss(y, targets, input_lengths, target_lengths);
    const Tensor dy = autograd::grad({loss}, {y}, {}, {.create_graph = true})[0];
    expect_error([&] { sum(dy * dy).backward(); }, "CtcLoss");
  }
}

// More labels than a block has threads, and many times.
TEST(Ctc, LongTargets) {
  manual_seed(3);
  for (const Device device : test_devices()) {
    const std::int64_t times = 500, labels = 260, classes = 6;
    const Tensor x = log_softmax(randn({times, 2, classes}, float64), -1);
    const Tensor targets = randint(1, classes, {2, labels});
    const auto run = [&](Device on, DType dtype) {
      const Tensor leaf = x.to(on, dtype).detach().requires_grad_();
      const Tensor loss = ctc_loss(leaf, targets.to(on), integers({times, times - 100}, on),
                                   integers({labels, 200}, on), {.reduction = Reduction::sum});
      loss.backward();
      return Tensors{loss.detach(), leaf.grad()};
    };
    const Tensors exact = run(Device::cpu(), float64), got = run(device, float32);
    expect_close(got[0], exact[0], 1e-5, 0);
    expect_close(got[1], exact[1], 1e-4, 1e-5);
    // The states' probabilities at each time add up to 1.
    expect_close(sum(slice(got[1], 0, 0, times - 100), {2}), full({times - 100, 2}, -1, float64), 1e-4, 0);
    EXPECT_EQ(to_vector<float>(run(device, float32)[1]), to_vector<float>(got[1]));
  }
}

TEST(Ctc, Errors) {
  for (const Device device : test_devices()) {
    const Tensor x = randn({4, 2, 3}, float32, device), targets = ones({2, 2}, int64, device);
    const Tensor four = full({2}, 4, int64, device), two = full({2}, 2, int64, device);
    const auto none = CtcOptions{.reduction = Reduction::none};
    struct Case {
      Labels targets, input_lengths, target_lengths;
      const char* error;
    };
    for (const Case& c :
         {Case{{1, 3, 1, 1}, {4, 4}, {2, 2}, "got 3 in sample 0"},
          Case{{1, 1, 0, 1}, {4, 4}, {2, 2}, "got 0 in sample 1"},
          Case{{1, 1, 1, 1}, {4, 5}, {2, 2}, "expected input lengths from 0 to 4, got 5 for sample 1"},
          Case{{1, 1, 1, 1}, {4, 4}, {3, 2}, "expected target lengths from 0 to 2, got 3 for sample 0"}}) {
      const auto call = [&] {
        return ctc_loss(x, from_data(c.targets, {2, 2}, device), integers(c.input_lengths, device),
                        integers(c.target_lengths, device), none);
      };
      if (device.is_cpu()) {
        expect_error(call, c.error);
      } else {
        const Values losses = to_vector<double>(call());
        EXPECT_NE(std::isnan(losses[0]), std::isnan(losses[1])) << c.error;
      }
    }
    expect_error([&] { ctc_loss(x, targets, four, ones({3}, int64, device)); }, "ctc_loss: expected target_lengths of");
    expect_error([&] { ctc_loss(x, targets.to(float32), four, two); }, "ctc_loss: expected targets of int64");
    expect_error([&] { ctc_loss(x, targets, four, two, {.blank = 3}); }, "ctc_loss: expected a blank from 0 to 2");
    expect_error([&] { ctc_loss(x, ones({3}, int64, device), four, two); }, "ctc_loss: expected target lengths");
    expect_error([&] { ctc_loss(ones({4}), targets, four, two); }, "ctc_loss: expected log_probs of shape");
  }
}

}  // namespace ctc_test
