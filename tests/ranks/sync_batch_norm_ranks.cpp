#include "tests/ranks/rank_device.h"
#include "tests/support.h"
#include <mica/core/rng.h>
#include <mica/distributed/group.h>
#include <mica/distributed/sync_batch_norm.h>
#include <mica/nn/batch_norm.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/view/view.h>

namespace mica::distributed {
namespace {

using namespace testing_support;

struct OneNorm : nn::Module {
  nn::BatchNorm1d norm = child("norm", nn::BatchNorm1d(3));
};

TEST(SyncBatchNorm, PartsOfDifferentSizesAreOneBatch) {
  const Group group = world();
  manual_seed(7);
  const std::int64_t rows = group.size() * (group.size() + 3) / 2;  // rank r has r + 2 of them
  const Tensor x = here(randn({rows, 3}, float64) * 2 + 5), dy = here(randn({rows, 3}, float64));
  OneNorm whole, parts;
  for (OneNorm* model : {&whole, &parts}) {
    model->to(rank_device(), float64);
  }
  synchronize_batch_norms(parts, group);

  const Tensor leaf = x.detach().requires_grad_();
  const Tensor y = whole.norm(leaf);
  y.backward(dy);
  const std::int64_t begin = group.rank() * (group.rank() + 3) / 2, end = begin + group.rank() + 2;
  const Tensor part = contiguous(slice(x, 0, begin, end)).requires_grad_();
  const Tensor result = parts.norm(part);
  result.backward(slice(dy, 0, begin, end));

  expect_close(result, slice(y, 0, begin, end), 1e-11, 1e-11);
  expect_close(part.grad(), slice(leaf.grad(), 0, begin, end), 1e-10, 1e-10);
  expect_close(parts.norm.running_var, whole.norm.running_var, 1e-11, 1e-11);
  parts.eval();
  whole.eval();
  expect_close(parts.norm(part), whole.norm(part), 1e-11, 1e-11);
}

}  // namespace
}  // namespace mica::distributed
