#include <tests/nn/support.h>

#include <mica/nn/loss.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

TEST(CrossEntropyLoss, KeepsOptionsAndMovesWeights) {
  const Tensor logits = randn({4, 3}, float64);
  const Tensor labels = from_data<std::int64_t>({0, 1, 2, 1});
  const CrossEntropyOptions options{
      .reduction = Reduction::sum, .weight = from_data({1.f, 2.f, 0.5f}), .label_smoothing = 0.1, .softcap = 5};
  nn::CrossEntropyLoss loss(options);
  EXPECT_TRUE(loss.parameters().empty());
  EXPECT_EQ(loss.state_dict().size(), 1u);
  const double in_float = loss(logits.to(float32), labels).item();
  EXPECT_NEAR(in_float, cross_entropy(logits.to(float32), labels, options).item(), 1e-6);
  loss.to(float64);
  EXPECT_EQ(loss.options.weight.dtype(), float64);
  EXPECT_NEAR(loss(logits, labels).item(), in_float, 1e-5);
  EXPECT_NEAR(nn::CrossEntropyLoss()(logits, labels).item(), cross_entropy(logits, labels).item(), 1e-12);
}

}  // namespace
