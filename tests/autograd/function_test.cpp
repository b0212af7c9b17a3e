#include <gtest/gtest.h>

#include <mica/autograd/function.h>
#include <mica/autograd/gradcheck.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>

using namespace mica;

namespace {

// y = a + b, small enough to build long graphs of.
struct Plus {
  Tensor forward(autograd::Context&, const Tensor& a, const Tensor& b) const {
    const Tensor y = empty_like(a);
    copy_into(y, a);
    add_into(y, b);
    return y;
  }
  Tensors backward(autograd::Context&, const Tensor& dy) const { return {dy, dy}; }
};

Tensor plus(const Tensor& a, const Tensor& b) {
  return autograd::apply(Plus{}, a, b);
}

TEST(Autograd, MillionOpsRunAndAreDestroyed) {
  const Tensor x = ones({1});
  x.requires_grad_();
  Tensor y = x;
  for (int i = 0; i < 1'000'000; ++i) {
    y = plus(y, ones({1}));
  }
  y.backward();
  EXPECT_EQ(x.grad().item(), 1);
}

TEST(Autograd, TensorUsedTwice) {
  const Tensor x = randn({3, 4}, float64);
  EXPECT_TRUE(autograd::gradcheck([](const Tensor& a) { return plus(a, plus(a, a)); }, {x}));
}

TEST(Autograd, SecondBackwardIsAnError) {
  const Tensor x = ones({1}).requires_grad_();
  const Tensor y = plus(x, x);
  y.backward();
  EXPECT_THROW(y.backward(), Error);
}

}  // namespace
