#include "tests/support.h"
#include <mica/autograd/gradcheck.h>
#include <mica/ops/tril/tril.h>

using namespace mica;
using namespace mica::testing_support;
using autograd::gradcheck;

namespace tril_test {

TEST(Tril, EveryDiagonal) {
  for (const Device device : test_devices()) {
    for (const std::int64_t diagonal : {-3, -1, 0, 1, 2, 5}) {
      const Tensor x = rand({2, 3, 4}, float64, device);
      const std::vector<double> values = to_vector<double>(x);
      std::vector<double> lower = values;
      std::vector<double> upper = values;
      for (std::int64_t i = 0; i < 24; ++i) {
        const std::int64_t above = i % 4 - i / 4 % 3;
        (above > diagonal ? lower : upper)[static_cast<std::size_t>(i)] *= above == diagonal ? 1 : 0;
      }
      expect_close(tril(x, diagonal), lower, 0, 0);
      expect_close(triu(x, diagonal), upper, 0, 0);
    }
    expect_close(tril(ones({2, 2}, boolean, device)), {1, 0, 1, 1}, 0, 0);
    for (const std::int64_t far : {std::int64_t{3}, std::int64_t{1} << 53, INT64_MAX}) {
      const Tensor x = ones({2, 3}, float32, device);
      expect_close(tril(x, far), x, 0, 0);
      expect_close(triu(x, -far), x, 0, 0);
      expect_close(tril(x, -far), zeros_like(x), 0, 0);
      expect_close(triu(x, far), zeros_like(x), 0, 0);
    }
    expect_close(tril(ones({2, 3}, float32, device), INT64_MIN), zeros({2, 3}), 0, 0);
    EXPECT_EQ(tril(zeros({0, 3}, float32, device)).shape(), (Shape{0, 3}));
  }
}

TEST(Tril, Gradients) {
  for (const Device device : test_devices()) {
    EXPECT_TRUE(gradcheck([](const Tensor& x) { return tril(x, 1); }, {randn({2, 3, 3}, float64, device)}));
    EXPECT_TRUE(gradcheck([](const Tensor& x) { return triu(x, -1); }, {randn({4, 3}, float64, device)}));
  }
}

TEST(Tril, Errors) {
  expect_error([] { tril(zeros({3})); }, "tril: expected at least 2 axes, got shape [3]");
}

}  // namespace tril_test
