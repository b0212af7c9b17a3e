#include "tests/support.h"
#include <mica/autograd/anomaly.h>
#include <mica/autograd/detail/diagnostics.h>
#include <mica/autograd/function.h>
#include <mica/autograd/missing_gradients.h>
#include <mica/nn/linear.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/inplace/inplace.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;
using autograd::Context;
using autograd::DetectAnomaly;
using autograd::explain_missing_gradients;
using autograd::Missing;

namespace {

using Named = std::vector<std::pair<std::string, Tensor>>;

Tensor parameter(double value = 2) { return full({3}, value, float64).requires_grad_(); }

// Expects that only `name` is missing, for `reason` and with `text` in the message.
void expect_missing(const Tensor& loss, const Named& parameters, const std::string& name, Missing reason,
                    const std::string& text) {
  const auto missing = explain_missing_gradients(loss, parameters);
  ASSERT_EQ(missing.size(), 1u) << to_string(missing);
  EXPECT_EQ(missing[0].name, name);
  EXPECT_EQ(missing[0].reason, reason) << missing[0].text;
  EXPECT_NE(missing[0].text.find(text), std::string::npos) << missing[0].text;
}

// y = a + b; for b, it returns no gradient.
struct HalfDone {
  Tensor forward(Context& ctx, const Tensor& a, const Tensor& b) const {
    ctx.set_materialize_grads(false);
    return a + b;
  }
  Tensors backward(Context&, const Tensor& dy) const { return {dy, Tensor{}}; }
};

TEST(MissingGradients, NoneIsMissing) {
  const Tensor a = parameter(), b = parameter();
  const Tensor loss = sum(a * b);
  loss.backward();
  EXPECT_TRUE(explain_missing_gradients(loss, {{"a", a}, {"b", b}}).empty());
  EXPECT_EQ(to_string(explain_missing_gradients(loss, {})), "");
}

TEST(MissingGradients, KnowsWithoutAnomalyMode) {
  const Tensor a = parameter(), frozen = parameter(), cut = parameter(), unused = parameter();
  frozen.requires_grad_(false);
  const Tensor loss = sum(a * frozen * cut.detach());
  loss.backward();
  expect_missing(loss, {{"a", a}, {"frozen", frozen}}, "frozen", Missing::frozen, "requires_grad is false");
  expect_missing(loss, {{"a", a}, {"unused", unused}}, "unused", Missing::unused, "the loss does not depend on it");
  expect_missing(loss, {{"a", a}, {"cut", cut}}, "cut", Missing::unused, "or cut off");
  EXPECT_EQ(to_string(explain_missing_gradients(loss, {{"frozen", frozen}, {"unused", unused}})),
            "frozen: frozen: its requires_grad is false\nunused: unused, or cut off: the loss does not depend on it "
            "(enable DetectAnomaly in forward to see where)\n");
}

TEST(MissingGradients, BackwardHasNotRun) {
  const Tensor a = parameter();
  const Tensor loss = sum(a);
  expect_missing(loss, {{"a", a}}, "a", Missing::undefined, "backward() has not run");
}

TEST(MissingGradients, AGradientFromElsewhereDoesNotHideIt) {
  const Tensor a = parameter(), b = parameter();
  sum(b).backward();
  const Tensor loss = sum(a);
  loss.backward();
  expect_missing(loss, {{"a", a}, {"b", b}}, "b", Missing::unused, "unused");
}

TEST(MissingGradients, FindsDetach) {
  const DetectAnomaly guard;
  const Tensor a = parameter(), b = parameter(), c = parameter();
  // Recorded ops on both sides of the cut, and an op that is not recorded, since no input requires a gradient.
  const Tensor cut = exp(b * 2).detach() + 1;
  const Tensor loss = sum(a * cut);
  loss.backward();
  expect_missing(loss, {{"a", a}, {"b", b}}, "b", Missing::cut, "cut off by detach()\n  called from ");
  expect_missing(loss, {{"a", a}, {"c", c}}, "c", Missing::unused,
                 "unused: no op that the loss depends on has it as input");
}

TEST(MissingGradients, FindsOpsThatWereNotRecorded) {
  const DetectAnomaly guard;
  const Tensor a = parameter(), b = parameter();
  const Tensor weight = no_grad([&] { return exp(b + 1) * 2; });
  const Tensor loss = sum(a * weight);
  loss.backward();
  expect_missing(loss, {{"a", a}, {"b", b}}, "b", Missing::cut, "cut off by Add");
  expect_missing(loss, {{"a", a}, {"b", b}}, "b", Missing::cut, "which ran while recording was off");
}

TEST(MissingGradients, FindsOutputsWithoutDerivative) {
  const DetectAnomaly guard;
  const Tensor a = parameter(), b = parameter();
  const Tensor position = max(b, 0).indices.to(float64);
  const Tensor loss = sum(a * position);
  loss.backward();
  expect_missing(loss, {{"a", a}, {"b", b}}, "b", Missing::cut, "whose output 1 is int64");
  const Tensor whole = b.to(int64).to(float64);
  expect_missing(sum(a * whole), {{"b", b}}, "b", Missing::cut, "cut off by Cast");
}

TEST(MissingGradients, ALossWithoutHistory) {
  const DetectAnomaly guard;
  const Tensor a = parameter();
  const Tensor loss = sum(a).detach();
  expect_missing(loss, {{"a", a}}, "a", Missing::cut, "cut off by detach()");
}

TEST(MissingGradients, OnePathIsEnough) {
  const DetectAnomaly guard;
  const Tensor a = parameter();
  const Tensor loss = sum(a * a.detach());
  loss.backward();
  EXPECT_TRUE(explain_missing_gradients(loss, {{"a", a}}).empty());
}

TEST(MissingGradients, NamesTheModuleThatDetached) {
  const DetectAnomaly guard;
  struct Outer : nn::Module {
    struct Inner : nn::Module {
      nn::Linear fc = child("fc", nn::Linear{3, 3});
      Tensor operator()(const Tensor& x) const {
        const nn::Scope scope(*this);
        return fc(x).detach();
      }
    };
    Inner inner = child("inner", Inner{});
    nn::Linear head = child("head", nn::Linear{3, 1});
    Tensor operator()(const Tensor& x) const { return head(inner(x)); }
  };
  const Outer outer;
  const Tensor loss = sum(outer(ones({2, 3})));
  loss.backward();
  const auto missing = explain_missing_gradients(loss, outer.named_parameters());
  ASSERT_EQ(missing.size(), 2u) << to_string(missing);
  EXPECT_EQ(missing[0].name, "inner.fc.weight");
  EXPECT_EQ(missing[1].name, "inner.fc.bias");
  EXPECT_NE(missing[0].text.find("cut off by detach()\n  in module inner (Inner)"), std::string::npos)
      << missing[0].text;
}

TEST(MissingGradients, NamesTheOpThatReturnedNone) {
  const Tensor a = parameter(), b = parameter();
  {
    const DetectAnomaly guard;
    const Tensor loss = sum(autograd::apply(HalfDone{}, a * 1, exp(b)));
    loss.backward();
    expect_missing(loss, {{"a", a}, {"b", b}}, "b", Missing::undefined,
                   "the backward of HalfDone returned no gradient for input 1");
    // Also with a gradient left over from an earlier backward.
    b.set_grad(ones({3}, float64));
    expect_missing(loss, {{"a", a}, {"b", b}}, "b", Missing::undefined, "HalfDone");
    b.set_grad({});
  }
  const Tensor loss = sum(autograd::apply(HalfDone{}, a * 1, exp(b)));
  loss.backward();
  expect_missing(loss, {{"a", a}, {"b", b}}, "b", Missing::undefined, "or an op on the way returned none");
}

TEST(MissingGradients, MemoryDoesNotGrow) {
  const DetectAnomaly guard;
  const Tensor a = parameter(0.5), b = parameter(0.5);
  Tensor state = zeros({3}, float64);
  for (int step = 0; step < 200; ++step) {
    state = (state * a + b).detach();
  }
  EXPECT_EQ(autograd::notes_of(state).cuts.size(), 2u);
}

TEST(MissingGradients, Errors) {
  expect_error([] { explain_missing_gradients(Tensor{}, {}); }, "expected a defined loss");
  expect_error([] { explain_missing_gradients(ones({}), {{"w", Tensor{}}}); }, "parameter w is an undefined tensor");
}

TEST(MissingGradients, FindsWritesInPlaceThatWereNotRecorded) {
  const DetectAnomaly guard;
  const Tensor a = parameter(), b = parameter(), buffer = zeros({3}, float64);
  no_grad([&] { copy_(buffer, b * 2); });
  const Tensor loss = sum(a * buffer);
  loss.backward();
  expect_missing(loss, {{"a", a}, {"b", b}}, "b", Missing::cut, "cut off by Mul");
}

TEST(MissingGradients, GoesThroughWritesInPlace) {
  const DetectAnomaly guard;
  const Tensor a = parameter(), b = parameter(), c = parameter(), buffer = zeros({3}, float64);
  copy_(buffer, a * b.detach());
  add_(select(buffer, 0, 0), select(c, 0, 0));
  const Tensor loss = sum(buffer);
  loss.backward();
  expect_missing(loss, {{"a", a}, {"b", b}, {"c", c}}, "b", Missing::cut, "cut off by detach()");
}

TEST(MissingGradients, FindsInferenceMode) {
  const DetectAnomaly guard;
  struct Frozen : nn::Module {
    nn::Linear fc = child("fc", nn::Linear{3, 3});
    Tensor operator()(const Tensor& x) const {
      const nn::Scope scope(*this);
      return inference_mode([&] { return fc(x); });
    }
  };
  const Frozen model;
  const Tensor a = full({3}, 2).requires_grad_();
  const Tensor loss = sum(a + model(ones({1, 3})));
  EXPECT_EQ(autograd::current_module(), nullptr);
  loss.backward();
  expect_missing(loss, {{"a", a}, {"fc.weight", model.parameters()[0]}}, "fc.weight", Missing::cut,
                 "cut off by Linear, which ran while recording was off\n  in module fc (Linear)");
}

}  // namespace
