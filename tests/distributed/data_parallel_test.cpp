#include "tests/support.h"
#include <mica/autograd/early_accumulation.h>
#include <mica/distributed/data_parallel.h>
#include <mica/nn/linear.h>
#include <mica/ops/reduce/reduce.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

// Several ranks: tests/ranks/data_parallel_ranks.cpp.

TEST(DataParallel, OfAGroupOfOneChangesNothing) {
  const nn::Linear model(3, 2);
  const std::vector<float> weight = to_vector<float>(model.weight);
  distributed::DataParallel parallel(model, distributed::Group());
  EXPECT_EQ(to_vector<float>(model.weight), weight);
  EXPECT_EQ(autograd::EarlyAccumulation::leaves(), nullptr);
  const Tensor x = ones({4, 3});
  sum(model(x)).backward();
  const Tensor grad = model.weight.grad();
  parallel.wait();
  EXPECT_TRUE(model.weight.grad().is_same(grad));
  EXPECT_EQ(to_vector<float>(grad), std::vector<float>(6, 4));
  {
    const auto guard = parallel.accumulate();
    sum(model(x)).backward();
  }
  const distributed::DataParallel moved = std::move(parallel);
  moved.wait();
  moved.check(3);
  EXPECT_EQ(to_vector<float>(model.weight.grad()), std::vector<float>(6, 8));
  EXPECT_EQ(moved.buckets(), 0);
  EXPECT_EQ(moved.started(), 0);
  const std::string message = "DataParallel: used after it was moved from";
  // NOLINTBEGIN(bugprone-use-after-move)
  expect_error([&] { parallel.wait(); }, message);
  expect_error([&] { parallel.check(3); }, message);
  expect_error([&] { (void)parallel.accumulate(); }, message);
  // NOLINTEND(bugprone-use-after-move)
}

TEST(DataParallel, RefusesBadOptions) {
  const nn::Linear model(3, 2);
  const distributed::Group group;
  expect_error([&] { distributed::DataParallel(model, group, {.bucket_bytes = 0}); },
               "DataParallel: expected bucket_bytes > 0, got 0");
  expect_error([&] { distributed::DataParallel(model, group, {.check_every = -1}); },
               "DataParallel: expected check_every >= 0, got -1");
  expect_error([&] { distributed::DataParallel(model, group, {.reduce_dtype = bfloat16}); },
               "DataParallel: expected a reduce_dtype of float32, got bfloat16");
}

}  // namespace
