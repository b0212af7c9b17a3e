#include <thread>

#include "tests/support.h"
#include <mica/autograd/function.h>
#include <mica/autograd/grad.h>
#include <mica/nn/linear.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/inplace/inplace.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

Tensor leaf() { return full({2}, 3, float64).requires_grad_(); }

TEST(GradMode, EnableGradRecordsInsideNoGrad) {
  const Tensor x = leaf();
  no_grad([&] {
    EXPECT_FALSE((x * 2).requires_grad());
    EXPECT_TRUE(enable_grad([&] { return x * 2; }).requires_grad());
    {
      const autograd::EnableGrad guard;
      EXPECT_TRUE((x * 2).requires_grad());
    }
    EXPECT_FALSE((x * 2).requires_grad());
  });
  EXPECT_TRUE((x * 2).requires_grad());
}

TEST(GradMode, IsRestoredAfterExceptions) {
  EXPECT_THROW(no_grad([] { enable_grad([] { fail("out"); }); }), Error);
  EXPECT_TRUE(autograd::grad_enabled());
  EXPECT_THROW(inference_mode([] { fail("out"); }), Error);
  EXPECT_TRUE(autograd::grad_enabled());
  EXPECT_FALSE(autograd::inference_mode_enabled());
}

TEST(GradMode, IsThreadLocal) {
  const Tensor x = leaf();
  inference_mode([&] {
    std::thread([&] {
      EXPECT_TRUE(autograd::grad_enabled());
      EXPECT_FALSE(autograd::inference_mode_enabled());
      EXPECT_FALSE((x * 2).is_inference());
      EXPECT_TRUE((x * 2).requires_grad());
    }).join();
  });
}

TEST(InferenceMode, RecordsNothingAndCountsNoWrites) {
  const Tensor x = leaf();
  const Tensor y = inference_mode([&] {
    EXPECT_TRUE(autograd::inference_mode_enabled());
    EXPECT_FALSE(autograd::grad_enabled());
    EXPECT_FALSE(enable_grad([&] { return x * 2; }).requires_grad()) << "enable_grad does not end the mode";
    Tensor y = x * 2;
    add_(y, ones({2}, float64));
    return y;
  });
  EXPECT_TRUE(y.is_inference());
  EXPECT_TRUE(slice(y, 0, 0, 1).is_inference()) << "and so are its views, wherever they are taken";
  EXPECT_FALSE(y.requires_grad());
  EXPECT_EQ(y.version(), 0u);
  expect_close(y, {7, 7}, 0, 0);
  EXPECT_FALSE(x.is_inference());
}

TEST(InferenceMode, OrdinaryTensorsAreWrittenAndCounted) {
  const Tensor x = leaf();
  const Tensor w = full({2}, 5, float64);
  const Tensor y = x * w;
  inference_mode([&] {
    const Tensor part = slice(w, 0, 0, 1);
    EXPECT_FALSE(part.is_inference());
    zero_(part);
  });
  expect_error([&] { sum(y).backward(); },
               "Mul: a tensor of shape [2] that it saved for backward was modified in place");
}

TEST(InferenceMode, CanBeDisabledInside) {
  const Tensor x = leaf();
  inference_mode([&] {
    const autograd::InferenceMode ordinary(false);
    const Tensor y = x * 2;
    EXPECT_FALSE(y.is_inference());
    EXPECT_TRUE(y.requires_grad());
  });
}

TEST(InferenceMode, ItsTensorsCanBeReadOutside) {
  const Tensor c = inference_mode([] { return full({2}, 5, float64); });
  const Tensor x = leaf();
  const Tensor y = x + c;  // saves nothing
  EXPECT_FALSE(y.is_inference());
  sum(y).backward();
  expect_close(x.grad(), {1, 1}, 0, 0);
}

TEST(InferenceMode, ItsTensorsCannotBeSavedOutside) {
  const Tensor c = inference_mode([] { return full({2}, 5, float64); });
  const Tensor x = leaf();
  expect_error([&] { x* c; }, "Mul: a tensor of shape [2] that was created in inference mode cannot be saved");
  EXPECT_FALSE(no_grad([&] { return x * c; }).requires_grad());
  sum(x * clone(c)).backward();
  expect_close(x.grad(), {5, 5}, 0, 0);
}

TEST(InferenceMode, ItsTensorsCannotBeWrittenOrAskForGradientsOutside) {
  const Tensor c = inference_mode([] { return full({2}, 5, float64); });
  const std::string message = "fill_: the target of shape [2] was created in inference mode and can be written in";
  expect_error([&] { fill_(c, 0); }, message);
  expect_error([&] { no_grad([&] { fill_(c, 0); }); }, message);
  expect_error([&] { c.requires_grad_(); }, "requires_grad_: the tensor of shape [2] was created in inference mode");
  inference_mode([&] { fill_(c, 1); });
  expect_close(clone(c).requires_grad_(), {1, 1}, 0, 0);
}

TEST(InferenceMode, ModulesBuiltInItCanBeRunInIt) {
  const Tensor y = inference_mode([] {
    const nn::Linear layer(3, 2);
    EXPECT_TRUE(layer.parameters().at(0).requires_grad());
    return layer(ones({4, 3}));
  });
  EXPECT_EQ(y.shape(), (Shape{4, 2}));
  EXPECT_FALSE(y.requires_grad());
}

TEST(InferenceMode, BackwardInItMakesOrdinaryGradients) {
  const Tensor x = leaf();
  const Tensor y = sum(x * x);
  inference_mode([&] { y.backward(); });
  EXPECT_FALSE(x.grad().is_inference());
  expect_close(x.grad(), {6, 6}, 0, 0);
}

}  // namespace
