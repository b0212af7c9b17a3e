#include <algorithm>
#include <functional>
#include <limits>
#include <thread>

#include "tests/support.h"
#include <mica/autograd/anomaly.h>
#include <mica/autograd/detail/accumulate.h>
#include <mica/autograd/detail/call_site.h>
#include <mica/autograd/function.h>
#include <mica/autograd/grad.h>
#include <mica/core/detail/finite.h>
#include <mica/nn/containers.h>
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

namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

// y = x; its backward returns `fault` in the last element.
struct Faulty {
  double fault;
  Tensor forward(Context& ctx, const Tensor& x) const {
    ctx.save_for_backward(x);
    return x + 0;
  }
  Tensor backward(Context&, const Tensor& dy) const {
    std::vector<double> values = to_vector<double>(dy);
    values.back() = fault;
    return from_data(values, dy.shape()).to(dy.device(), dy.dtype());
  }
};

Tensor faulty(const Tensor& x, double fault) { return autograd::apply(Faulty{fault}, x); }

// Returns auto: symbols of templates start with their return type, and a test searches for functions of std.
template <class F>
auto message_of(F&& f) {
  try {
    f();
  } catch (const Error& error) {
    return std::string(error.what());
  }
  ADD_FAILURE() << "expected an error";
  return std::string();
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

[[gnu::noinline]] Tensor loss_made_here(const Tensor& x) {
  const Tensor y = sum(log(x) * 2);
  return y;
}

struct Model : nn::Module {
  nn::Linear fc = child("fc", nn::Linear{3, 2});
  Tensor scale = param("scale", zeros({2}));
  Tensor operator()(const Tensor& x) const {
    const nn::Scope scope(*this);
    return sqrt(scale) * fc(x);  // √x has an infinite slope at 0
  }
};

TEST(Anomaly, FindsFaultsOfEveryKindDtypeAndDevice) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      for (const double value : {kNaN, kInf, -kInf}) {
        std::vector<double> values(1000, 1.0);
        const Tensor fine = from_data(values, {10, 100}).to(device, dtype);
        EXPECT_EQ(first_fault(fine), nullptr);
        values[637] = value;
        const Tensor bad = from_data(values, {10, 100}).to(device, dtype);
        EXPECT_STREQ(first_fault(bad), std::isnan(value) ? "NaN" : "Inf");

        const DetectAnomaly guard;
        const Tensor x = fine.detach().requires_grad_();
        expect_error([&] { faulty(x, value).backward(fine); },
                     fmt::format("Faulty: its backward made {} in the gradient of input 0 (a leaf), {} of shape [10, "
                                 "100], from finite gradients",
                                 std::isnan(value) ? "NaN" : "Inf", dtype));
        EXPECT_FALSE(x.grad().defined());
      }
    }
  }
  EXPECT_EQ(first_fault(zeros({0, 3})), nullptr);
}

TEST(Anomaly, NamesTheOpAndWhoCalledIt) {
  const DetectAnomaly guard;
  const Tensor x = from_data<double>({1.0, 0.0, 2.0}).requires_grad_();
  const std::string message = message_of([&] { loss_made_here(x).backward(); });
  EXPECT_TRUE(contains(message, "Log")) << message;
  EXPECT_TRUE(contains(message, "made Inf in the gradient of input 0")) << message;
  EXPECT_TRUE(contains(message, "all tensors that it saved in forward are finite")) << message;
  EXPECT_TRUE(contains(message, "called from ")) << message;
#if MICA_WITH_LIBBACKTRACE
  EXPECT_TRUE(contains(message, "loss_made_here")) << message;
  EXPECT_FALSE(contains(message, "from mica::")) << message;
  EXPECT_FALSE(contains(message, "from std::")) << message;
  EXPECT_LT(message.find("loss_made_here"), message.find("TestBody")) << message;
#else
  GTEST_SKIP() << "mica was built without libbacktrace, so functions of this file have no names";
#endif
}

// The function that calls the lambda belongs to std::function, and the lambda is inlined into it.
TEST(Anomaly, FunctionsOfTheStandardLibraryAreOmitted) {
  autograd::CallSite site;
  const std::function<void()> find_site = [&] { site = autograd::CallSite::here(); };
  const std::function<void()>* volatile unknown = &find_site;  // so that the compiler does not see what it calls
  (*unknown)();
  const std::vector<std::string> functions = site.user_functions(20);
  for (const std::string& function : functions) {
    EXPECT_FALSE(function.starts_with("std::")) << function;
  }
#if MICA_WITH_LIBBACKTRACE
  EXPECT_TRUE(std::any_of(functions.begin(), functions.end(), [](const auto& f) { return contains(f, "TestBody"); }));
#else
  GTEST_SKIP() << "mica was built without libbacktrace, so functions of this file have no names";
#endif
}

TEST(Anomaly, NamesModuleAndParameter) {
  const DetectAnomaly guard;
  Model model;
  const std::string message = message_of([&] { sum(model(ones({4, 3}))).backward(); });
  EXPECT_TRUE(contains(message, "(the parameter scale)")) << message;
  EXPECT_TRUE(contains(message, "in module Model")) << message;

  struct Outer : nn::Module {
    nn::Sequential layers = child("layers", nn::Sequential{nn::Linear{2, 3}});
    Tensor operator()(const Tensor& x) const { return layers(x); }
  };
  Outer outer;
  outer.parameters()[0].register_hook([](const Tensor& g) { return g * kNaN; });
  const std::string of_hook = message_of([&] { sum(outer(ones({4, 2}))).backward(); });
  EXPECT_TRUE(contains(of_hook,
                       "a hook of the tensor of shape [3, 2] that is the parameter layers.0.weight was given a "
                       "finite gradient and returned NaN"))
      << of_hook;
}

TEST(Anomaly, ReportsNonFiniteInputGradients) {
  const DetectAnomaly guard;
  const Tensor x = from_data<double>({1.0, kNaN}).requires_grad_();
  const std::string message = message_of([&] { faulty(x, kInf).backward(ones({2}, float64)); });
  EXPECT_TRUE(contains(message, "in forward it had already saved NaN in tensor 0 of shape [2]")) << message;
  expect_error(
      [&] {
        (x + 1).backward(from_data<double>({1.0, kInf}));
      },
      "backward: the gradient of shape [2] to start from has Inf");
  const Tensor y = ones({2}, float64).requires_grad_();
  expect_error([&] { (y + y).backward(full({2}, 1.5e308, float64)); },
               "backward: the gradients of the tensor of shape [2] that is a leaf are finite, but their sum has Inf");
}

TEST(Anomaly, NamesTheFirstOfSeveral) {
  // The second op in backward's order produces the NaN, the third one spreads it.
  const DetectAnomaly guard;
  const Tensor x = ones({2}, float64).requires_grad_();
  const Tensor y = faulty(exp(x), kNaN) * 3;
  const std::string message = message_of([&] { y.backward(ones({2}, float64)); });
  EXPECT_TRUE(message.starts_with("Faulty: ")) << message;
  EXPECT_TRUE(contains(message, "(made by Exp)")) << message;
}

TEST(Anomaly, ChecksGradAndSecondDerivatives) {
  const DetectAnomaly guard;
  const Tensor x = zeros({1}, float64).requires_grad_();
  expect_error([&] { autograd::grad({faulty(x, kNaN)}, {x}); }, "Faulty: its backward made NaN");
  const Tensor y = pow(x, 1.5);  // at 0, its first derivative is 0 and its second infinite
  const Tensors first = autograd::grad({y}, {x}, {}, {.create_graph = true});
  EXPECT_EQ(first[0].item(), 0);
  expect_error([&] { autograd::grad(first, {x}); }, "its backward made Inf");
}

TEST(Anomaly, ChecksNothingWhenOff) {
  const Tensor x = ones({2}, float64).requires_grad_();
  const Tensor y = faulty(x, kNaN);
  EXPECT_FALSE(autograd::anomaly_enabled());
  EXPECT_EQ(autograd::gradient_edge(y).node->trace, nullptr);
  y.backward(ones({2}, float64), {.retain_graph = true});
  EXPECT_TRUE(std::isnan(to_vector<double>(x.grad())[1]));
  // An op recorded before the guard is found, too, and the graph remains usable after the error.
  x.set_grad({});
  {
    const DetectAnomaly guard;
    expect_error([&] { y.backward(ones({2}, float64)); }, "Faulty: its backward made NaN");
    const DetectAnomaly off(false);
    EXPECT_FALSE(autograd::anomaly_enabled());
  }
  EXPECT_FALSE(autograd::anomaly_enabled());
  y.backward(ones({2}, float64));
  EXPECT_EQ(to_vector<double>(x.grad())[0], 1);
}

TEST(Anomaly, IsThreadLocal) {
  const DetectAnomaly guard;
  bool elsewhere = true;
  std::thread([&] { elsewhere = autograd::anomaly_enabled(); }).join();
  EXPECT_FALSE(elsewhere);
  EXPECT_TRUE(autograd::anomaly_enabled());
}

TEST(Anomaly, DistinguishesNodeHooksFromBackward) {
  const DetectAnomaly guard;
  const Tensor x = ones({2}, float64).requires_grad_();
  const auto nan = [](const Tensors& gradients) { return Tensors{gradients[0] * kNaN}; };
  const Tensor before = exp(x);
  autograd::HookHandle hook = before.grad_fn()->register_prehook(nan);
  expect_error(
      [&] { sum(before).backward(); },
      "backward: a prehook of Exp, for its output 0 of shape [2], was given a finite gradient and returned NaN");
  const Tensor after = exp(x);
  after.grad_fn()->register_hook([&](const Tensors& results, const Tensors&) { return nan(results); });
  expect_error([&] { sum(after).backward(); },
               "backward: a hook of Exp, for its input 0 of shape [2], was given a finite gradient and returned NaN");
  const Tensor faulty_before = faulty(x, kNaN);
  faulty_before.grad_fn()->register_prehook([](const Tensors& gradients) { return gradients; });
  faulty_before.grad_fn()->register_hook([](const Tensors&, const Tensors&) { return Tensors{}; });
  expect_error([&] { sum(faulty_before).backward(); }, "Faulty: its backward made NaN");
  EXPECT_FALSE(x.grad().defined());
}

TEST(Anomaly, FollowsWritesInPlace) {
  const DetectAnomaly guard;
  const Tensor x = ones({2}, float64).requires_grad_();
  const Tensor h = x * 1;
  add_(select(h, 0, 0), full({}, kNaN, float64));  // not checked: forward
  expect_error([&] { sum(faulty(h, kInf)).backward(); },
               "Faulty: its backward made Inf in the gradient of input 0 (made by WriteView)");
}

TEST(Anomaly, PostAccumulateHooksSeeWhatWasChecked) {
  const DetectAnomaly guard;
  const Tensor x = ones({2}, float64).requires_grad_();
  int calls = 0;
  x.register_post_accumulate_grad_hook([&](const Tensor&) { ++calls; });
  expect_error([&] { sum(faulty(x, kNaN)).backward(); }, "Faulty: its backward made NaN");
  EXPECT_EQ(calls, 0);
  sum(x * 2).backward();
  EXPECT_EQ(calls, 1);
}

}  // namespace
