#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/ranks/rank_device.h"
#include "tests/support.h"
#include <mica/autograd/checkpoint.h>
#include <mica/autograd/early_accumulation.h>
#include <mica/autograd/grad_mode.h>
#include <mica/core/copy.h>
#include <mica/core/rng.h>
#include <mica/distributed/data_parallel.h>
#include <mica/nn/layer_norm.h>
#include <mica/nn/linear.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/loss/loss.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>
#include <mica/optim/adamw.h>

namespace mica::distributed {
namespace {

using namespace testing_support;

constexpr std::int64_t kRows = 24;  // in the whole batch, so that 1, 2, 3 or 4 ranks have parts of equal size

enum class Path { plain, checkpointed };

struct Mlp : nn::Module {
  nn::Linear fc1 = child("fc1", nn::Linear(6, 16));
  nn::LayerNorm norm = child("norm", nn::LayerNorm(16));
  nn::Linear fc2 = child("fc2", nn::Linear(16, 10));
  nn::Linear fc3 = child("fc3", nn::Linear(10, 3));

  Tensor hidden(const Tensor& x) const { return fc1(x); }
  Tensor rest(const Tensor& h) const { return fc3(gelu(fc2(norm(gelu(h))))); }
  Tensor operator()(const Tensor& x, Path path = Path::plain) const {
    if (path == Path::plain) {
      return rest(hidden(x));
    }
    return fc3(autograd::checkpoint([this](const Tensor& y) { return gelu(fc2(norm(gelu(fc1(y))))); }, x));
  }
};

// The whole batch, the same on all ranks.
struct Batch {
  Tensor x, target;

  explicit Batch(DType dtype) {
    manual_seed(5);
    x = here(randn({kRows, 6}, float64).to(dtype));
    target = here(randn({kRows, 3}, float64).to(dtype));
  }
  Batch(const Batch& whole, const Group& group) {
    const std::int64_t rows = kRows / group.size(), begin = group.rank() * rows;
    x = slice(whole.x, 0, begin, begin + rows);
    target = slice(whole.target, 0, begin, begin + rows);
  }
  // Part i of n parts.
  Batch part(std::int64_t i, std::int64_t n) const {
    Batch result = *this;
    const std::int64_t rows = x.size(0) / n;
    result.x = slice(x, 0, i * rows, (i + 1) * rows);
    result.target = slice(target, 0, i * rows, (i + 1) * rows);
    return result;
  }
};

bool usable(const Group& group) { return kRows / 2 % group.size() == 0; }

template <class Model = Mlp>
std::unique_ptr<Model> make(DType dtype, unsigned seed) {
  manual_seed(seed);
  auto model = std::make_unique<Model>();
  model->to(rank_device(), dtype);
  return model;
}

Tensor loss_of(const Mlp& model, const Batch& batch, Path path = Path::plain) {
  return mse_loss(model(batch.x, path), batch.target);
}

std::vector<std::vector<double>> grads_of(const nn::Module& model) {
  std::vector<std::vector<double>> result;
  for (const Tensor& parameter : model.parameters()) {
    result.push_back(parameter.grad().defined() ? to_vector<double>(parameter.grad()) : std::vector<double>{});
  }
  return result;
}

void expect_same_on_all_ranks(const Group& group, const Tensor& x) {
  const Tensor least = x.detach().to(float64), greatest = full_like(least, 0);
  copy_into(greatest, x.detach());
  const Tensor own = full_like(least, 0);
  copy_into(own, greatest);
  group.all_reduce(own, Reduction::min);
  group.all_reduce(greatest, Reduction::max);
  EXPECT_EQ(to_vector<double>(own), to_vector<double>(greatest));
}

void expect_grads(const nn::Module& model, const nn::Module& reference, double tolerance, const Group& group) {
  const auto got = model.named_parameters(), expected = reference.named_parameters();
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_TRUE(got[i].second.grad().defined()) << got[i].first;
    expect_close(got[i].second.grad(), expected[i].second.grad(), tolerance, tolerance, got[i].first);
    expect_same_on_all_ranks(group, got[i].second.grad());
  }
}

TEST(DataParallelRanks, GradientsAreThoseOfTheWholeBatch) {
  const Group group = world();
  if (!usable(group)) {
    GTEST_SKIP() << "for numbers of ranks that divide " << kRows / 2;
  }
  for (const DType dtype : {float64, float32}) {
    const double tolerance = dtype == float64 ? 1e-12 : 2e-6;
    const Batch whole(dtype), own(whole, group);
    const auto reference = make(dtype, 1);
    loss_of(*reference, whole).backward();
    for (const std::int64_t bucket_bytes : {std::int64_t{1}, std::int64_t{700}, std::int64_t{25} << 20}) {
      for (const Path path : {Path::plain, Path::checkpointed}) {
        const auto model = make(dtype, 1 + group.rank());  // DataParallel replaces the weights by those of rank 0
        const DataParallel parallel(*model, group, {.bucket_bytes = bucket_bytes});
        std::vector<std::vector<double>> first;
        for (int time = 0; time < 2; ++time) {
          model->zero_grad();
          loss_of(*model, own, path).backward();
          EXPECT_EQ(parallel.started(), parallel.buckets());
          parallel.wait();
          EXPECT_EQ(parallel.started(), 0);
          expect_grads(*model, *reference, tolerance, group);
          if (time == 0) {
            first = grads_of(*model);
          }
        }
        EXPECT_EQ(grads_of(*model), first);  // with the same bits
        if (group.size() > 1) {
          EXPECT_EQ(parallel.buckets(), bucket_bytes == 1 ? 8 : bucket_bytes == 700 ? (dtype == float64 ? 4 : 3) : 1);
        }
      }
    }
  }
}

TEST(DataParallelRanks, ReductionsStartDuringBackward) {
  const Group group = world();
  const auto model = make(float32, 1);
  const DataParallel parallel(*model, group, {.bucket_bytes = 1});
  const Tensor h = model->hidden(here(ones({4, 6})));
  int started = -1;
  h.register_hook([&](const Tensor&) {
    started = parallel.started();
    return Tensor{};
  });
  sum(model->rest(h)).backward();
  EXPECT_EQ(started, group.size() > 1 ? 6 : 0);  // all except the weight and bias of fc1
  for (const auto& [name, parameter] : model->named_parameters()) {
    EXPECT_EQ(parameter.grad().defined(), group.size() == 1) << name;  // otherwise it is still being reduced
  }
  parallel.wait();
}

TEST(DataParallelRanks, Accumulation) {
  const Group group = world();
  if (!usable(group)) {
    GTEST_SKIP() << "for numbers of ranks that divide " << kRows / 2;
  }
  const Batch whole(float64), own(whole, group);
  const auto reference = make(float64, 1), model = make(float64, 1 + group.rank());
  loss_of(*reference, whole).backward();
  const DataParallel parallel(*model, group, {.bucket_bytes = 500});
  for (const int passes : {1, 2}) {
    model->zero_grad();
    for (int i = 0; i < passes; ++i) {
      const auto guard = parallel.accumulate(i + 1 < passes);
      (loss_of(*model, own.part(i, passes)) / passes).backward();
      EXPECT_EQ(parallel.started(), i + 1 < passes ? 0 : parallel.buckets());
    }
    parallel.wait();
    expect_grads(*model, *reference, 1e-12, group);
  }
  // wait() reduces the gradients that exist, even if no backward has started to.
  model->zero_grad();
  {
    const auto guard = parallel.accumulate();
    loss_of(*model, own).backward();
  }
  parallel.wait();
  expect_grads(*model, *reference, 1e-12, group);
}

struct Branches : nn::Module {
  Tensor always = param("always", ones({5}, float64));
  Tensor left = param("left", ones({3}, float64));
  Tensor right = param("right", ones({2, 2}, float64));
  Tensor never = param("never", ones({7}, float64));
  Tensor count = buffer("count", zeros({2}, int64));

  Branches() { to(rank_device()); }
};

TEST(DataParallelRanks, ParametersThatOnlySomeRanksUse) {
  const Group group = world();
  const int n = group.size(), rank = group.rank();
  for (const std::int64_t bucket_bytes : {1, 64, 10000}) {
    Branches model;
    const DataParallel parallel(model, group, {.bucket_bytes = bucket_bytes});
    for (int step = 0; step < 3; ++step) {
      model.zero_grad();
      Tensor loss = sum(model.always) * (rank + 1);
      if (rank == step % n) {
        loss = loss + sum(model.left) * 6;
      } else {
        loss = sum(model.right) * 2 + loss;  // unlike `left`, the first operand: gradients arrive in another order
      }
      loss.backward();
      parallel.wait();
      expect_close(model.always.grad(), std::vector<double>(5, (n + 1) / 2.0), 1e-15, 0);
      expect_close(model.left.grad(), std::vector<double>(3, 6.0 / n), 1e-15, 0);
      EXPECT_EQ(model.right.grad().defined(), n > 1);
      if (n > 1) {
        expect_close(model.right.grad(), std::vector<double>(4, 2.0 * (n - 1) / n), 1e-15, 0);
      }
      EXPECT_FALSE(model.never.grad().defined());
    }
    // Without any backward, nothing changes on any rank.
    model.zero_grad();
    parallel.wait();
    for (const Tensor& parameter : model.parameters()) {
      EXPECT_FALSE(parameter.grad().defined());
    }
  }
}

TEST(DataParallelRanks, AnyOrderOfArrival) {
  const Group group = world();
  const int n = group.size(), rank = group.rank();
  Branches model;
  const DataParallel parallel(model, group, {.bucket_bytes = 1});
  const Tensors parameters = model.parameters();
  // Each rank uses the parameters in a different order.
  Tensor loss = here(scalar(0));
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const std::size_t k = (i + static_cast<std::size_t>(rank)) % parameters.size();
    loss = loss + sum(parameters[rank % 2 == 0 ? k : parameters.size() - 1 - k]) * (rank + 1);
  }
  loss.backward();
  parallel.wait();
  for (const Tensor& parameter : parameters) {
    expect_close(parameter.grad(), std::vector<double>(static_cast<std::size_t>(parameter.numel()), (n + 1) / 2.0),
                 1e-15, 0);
  }
}

struct Tied : nn::Module {
  Tensor matrix = param("matrix", randn({6, 6}, float64));
  Tensor shift = param("shift", randn({6}, float64));
  Tensor same = param("same", matrix);

  Tensor operator()(const Tensor& x) const {
    return matmul(gelu(matmul(x, matrix) + shift), transpose(same, 0, 1)) + matmul(x, matrix);
  }
};

TEST(DataParallelRanks, TiedWeights) {
  const Group group = world();
  if (!usable(group)) {
    GTEST_SKIP() << "for numbers of ranks that divide " << kRows / 2;
  }
  const Batch whole(float64), own(whole, group);
  const auto reference = make<Tied>(float64, 1), model = make<Tied>(float64, 1 + group.rank());
  const auto loss = [](const Tied& tied, const Batch& batch) {
    const Tensor y = tied(batch.x);
    return mean(y * y);
  };
  loss(*reference, whole).backward();
  const DataParallel parallel(*model, group, {.bucket_bytes = 1});
  loss(*model, own).backward();
  parallel.wait();
  expect_grads(*model, *reference, 1e-12, group);
}

TEST(DataParallelRanks, ContinuesAfterABackwardThatThrew) {
  const Group group = world();
  if (!usable(group)) {
    GTEST_SKIP() << "for numbers of ranks that divide " << kRows / 2;
  }
  const Batch whole(float64), own(whole, group);
  const auto reference = make(float64, 1), model = make(float64, 1 + group.rank());
  loss_of(*reference, whole).backward();
  const DataParallel parallel(*model, group, {.bucket_bytes = 1});
  for (const bool on_all : {true, false}) {
    const bool throws = on_all || group.rank() == group.size() - 1;
    const Tensor h = model->hidden(own.x);
    if (throws) {
      h.register_hook([](const Tensor&) -> Tensor { throw Error("the hook failed"); });
    }
    const Tensor loss = mse_loss(model->rest(h), own.target);
    if (throws) {
      expect_error([&] { loss.backward(); }, "the hook failed");
      if (group.size() > 1) {
        expect_error([&] { loss_of(*model, own).backward(); }, "DataParallel: a backward reached parameter \"fc3.");
      }
    } else {
      loss.backward();
    }
    parallel.wait();
    model->zero_grad();
    loss_of(*model, own).backward();
    parallel.wait();
    expect_grads(*model, *reference, 1e-12, group);
    model->zero_grad();
  }
}

TEST(DataParallelRanks, ASecondBackwardBeforeWaitIsAnError) {
  const Group group = world();
  if (group.size() == 1) {
    GTEST_SKIP() << "for several ranks";
  }
  Branches model;
  const DataParallel parallel(model, group, {.bucket_bytes = 1});
  // Several backward passes that share no parameter count as one.
  sum(model.never).backward();
  sum(model.right).backward();
  EXPECT_EQ(parallel.started(), 2);
  expect_error([&] { sum(model.never).backward(); },
               "DataParallel: a backward reached parameter \"never\" a second time before wait()");
  {
    const auto guard = parallel.accumulate();
    expect_error([&] { sum(model.right).backward(); }, "reached parameter \"right\" a second time");
  }
  parallel.wait();
  expect_close(model.right.grad(), std::vector<double>(4, 1), 0, 0);
  EXPECT_FALSE(model.left.grad().defined());
}

TEST(DataParallelRanks, SixteenBitGradientsInFloat32) {
  const Group group = world();
  const int n = group.size();
  for (const DType dtype : {bfloat16, float16}) {
    Branches model;
    model.to(dtype);
    const DataParallel parallel(model, group, {.bucket_bytes = 1, .reduce_dtype = float32});
    // If partial sums were rounded to 16 bits, 256 + 1/4 would be 256, and the small terms would be lost one by one.
    const double factor = group.rank() == 0 ? (dtype == bfloat16 ? 256 : 2048) : (dtype == bfloat16 ? 0.875 : 0.9375);
    (sum(model.always) * factor).backward();
    parallel.wait();
    const double total = dtype == bfloat16 ? 256 + 0.875 * (n - 1) : 2048 + 0.9375 * (n - 1);
    EXPECT_EQ(model.always.grad().dtype(), dtype);
    const Tensor expected = full({5}, static_cast<float>(total) / static_cast<float>(n)).to(dtype);
    EXPECT_EQ(to_vector<double>(model.always.grad()), to_vector<double>(expected));
    EXPECT_FALSE(model.left.grad().defined());
  }
}

TEST(DataParallelRanks, BroadcastsParametersAndBuffersOfRankZero) {
  const Group group = world();
  Branches model;
  // Not contiguous, behind one that is.
  const Tensor square = transpose(here(randn({3, 4})), 0, 1), wide = transpose(here(randn({2, 9})), 0, 1);
  struct Odd : nn::Module {
    Tensor row = param("row", ones({2}));
    Odd(const Tensor& value, const Tensor& other) {
      to(rank_device());
      param("value", value);
      buffer("other", other);
    }
  } odd(square, wide);
  fill_data(odd.row, group.rank() + 7);
  fill_data(wide, group.rank() + 9);
  fill_data(model.count, group.rank() + 3);
  fill_data(model.left, group.rank() + 1);
  fill_data(square, group.rank() + 5);
  const DataParallel first(model, group), second(odd, group);
  EXPECT_EQ(to_vector<int>(model.count), (std::vector<int>{3, 3}));
  EXPECT_EQ(to_vector<double>(model.left), (std::vector<double>{1, 1, 1}));
  EXPECT_EQ(to_vector<double>(odd.row), (std::vector<double>{7, 7}));
  EXPECT_EQ(to_vector<double>(square), std::vector<double>(12, 5));
  EXPECT_EQ(to_vector<double>(wide), std::vector<double>(18, 9));
}

struct Other : nn::Module {
  Tensor a = param("a", ones({2, 3}));
  explicit Other(int variant) {
    param(variant == 1 ? "x" : "b", ones(variant == 2 ? Shape{4} : Shape{5}, variant == 3 ? float64 : float32))
        .requires_grad_(variant != 4);
    if (variant != 5) {
      buffer("c", zeros({1}, variant == 6 ? int32 : int64));
    }
    to(rank_device());
  }
};

TEST(DataParallelRanks, DisagreementsNameTheRankAndTheParameter) {
  const Group group = world();
  const int last = group.size() - 1;
  if (last == 0) {
    GTEST_SKIP() << "for several ranks";
  }
  const auto expect = [&](int variant, const DataParallelOptions& options, const std::string& has,
                          const std::string& expected) {
    const Other model(group.rank() == last ? variant : 0);
    expect_error(
        [&] { const DataParallel parallel(model, group, group.rank() == last ? options : DataParallelOptions{}); },
        fmt::format("DataParallel: the ranks disagree: rank {} has {}, rank 0 has {}", last, has, expected));
  };
  const std::string right = "parameter \"b\" of float32 [5] that requires a gradient";
  expect(1, {}, "parameter \"x\" of float32 [5] that requires a gradient", right);
  expect(2, {}, "parameter \"b\" of float32 [4] that requires a gradient", right);
  expect(3, {}, "parameter \"b\" of float64 [5] that requires a gradient", right);
  expect(4, {}, "parameter \"b\" of float32 [5]", right);
  expect(5, {}, "nothing more", "buffer \"c\" of int64 [1]");
  expect(6, {}, "buffer \"c\" of int32 [1]", "buffer \"c\" of int64 [1]");
  expect(0, {.bucket_bytes = 7}, "bucket_bytes 7", "bucket_bytes 26214400");
  expect(0, {.reduce_dtype = float32}, "reduce_dtype float32", "reduce_dtype none");
  expect(0, {.bucket_bytes = -1}, "bucket_bytes -1", "bucket_bytes 26214400");
  const Other model(0);
  expect_error([&] { const DataParallel parallel(model, group, {.bucket_bytes = -1}); },
               "DataParallel: expected bucket_bytes > 0, got -1");
  EXPECT_EQ(autograd::EarlyAccumulation::leaves(), nullptr);
  const DataParallel parallel(model, group);
  expect_error([&] { const DataParallel again(model, group); },
               "DataParallel: parameter \"a\" is already in another DataParallel or EarlyAccumulation");
}

TEST(DataParallelRanks, ChecksStepAndWeights) {
  const Group group = world();
  const int last = group.size() - 1;
  const auto model = make(float32, 1);
  const DataParallel parallel(*model, group, {.check_every = 2});
  parallel.check(7);
  if (last == 0) {
    return;
  }
  expect_error([&] { parallel.check(group.rank() == last ? 8 : 7); },
               fmt::format("DataParallel: the ranks disagree: rank {} is at step 8, rank 0 at step 7", last));
  // Rank 0 has another value than all others, which outvote it if there are enough of them.
  if (group.rank() == 0) {
    const autograd::NoGrad guard;
    const Tensor element = as_strided(model->fc2.bias.detach(), {1}, {1}, model->fc2.bias.handle()->offset + 9);
    fill_data(element, element.item() + 1e-6);
  }
  parallel.wait();
  expect_error([&] { parallel.wait(); },
               fmt::format("DataParallel: the ranks disagree: at step 2, rank {} has other values in parameter "
                           "\"fc2.bias\" than rank {}",
                           last == 1 ? 1 : 0, last == 1 ? 0 : 1));
}

// Detects differences that a sum of the elements would not show, and differences in the last bytes.
TEST(DataParallelRanks, ChecksEachBitOfWeights) {
  const Group group = world();
  struct Odd : nn::Module {
    Tensor a = param("a", ones({3, 5}));
    Tensor b = param("b", ones({1025, 1027}));
  };
  const auto model = make<Odd>(bfloat16, 1);
  model->b.set_data(model->b.detach().to(float32));
  const DataParallel parallel(*model, group);
  parallel.check(1);
  if (group.size() == 1) {
    return;
  }
  const auto element = [](const Tensor& x, std::int64_t i) {
    return as_strided(x.detach(), {1}, {1}, x.handle()->offset + i);
  };
  const auto expect_found = [&](const Tensor& x, const std::string& name, std::int64_t i, double value) {
    const double before = element(x, i).item();
    if (group.rank() == 1) {
      fill_data(element(x, i), value);
    }
    expect_error([&] { parallel.check(2); },
                 fmt::format("DataParallel: the ranks disagree: at step 2, rank 1 has other values in parameter "
                             "\"{}\" than rank 0",
                             name));
    fill_data(element(x, i), before);
    parallel.check(2);
  };
  expect_found(model->a, "a", 14, 1.0078125);  // the next number after 1, in the tensor's last two bytes
  expect_found(model->a, "a", 0, -1);
  expect_found(model->b, "b", 1025 * 1027 - 1, 1.0 + 0x1p-23);
  expect_found(model->b, "b", 1 << 20, std::numeric_limits<double>::quiet_NaN());
  // Two elements are exchanged.
  if (group.rank() == 1) {
    fill_data(element(model->b, 7), 2);
  } else {
    fill_data(element(model->b, 8), 2);
  }
  expect_error([&] { parallel.check(3); }, "parameter \"b\"");
}

TEST(DataParallelRanks, NamesTheRankWhoseGradientIsNotFinite) {
  const Group group = world();
  if (group.size() == 1) {
    return;
  }
  const int bad = group.size() - 1;
  for (const float value : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    const auto model = make(float32, 1);
    const DataParallel parallel(*model, group, {.check_gradients = true});
    const Batch batch(Batch(float32), group);
    loss_of(*model, batch).backward();
    parallel.wait();
    optim::AdamW(model->parameters()).zero_grad();
    const autograd::HookHandle hook = model->fc2.bias.register_hook(
        [&](const Tensor& g) { return group.rank() == bad ? full_like(g, value) : Tensor(); });
    loss_of(*model, batch).backward();
    expect_error([&] { parallel.wait(); },
                 fmt::format("DataParallel: at step 2, on rank {}, the gradient of parameter \"fc2.bias\" has {}", bad,
                             std::isnan(value) ? "NaN" : "Inf"));
  }
}

TEST(DataParallelRanks, ForgetsABackwardThatIsDiscarded) {
  const Group group = world();
  const Batch batch(Batch(float64), group);
  const auto reference = make(float64, 1), model = make(float64, 1);
  const DataParallel expected(*reference, group, {.bucket_bytes = 700}), parallel(*model, group, {.bucket_bytes = 700});
  loss_of(*reference, batch).backward();
  expected.wait();
  for (const bool whole : {true, false}) {
    (whole ? loss_of(*model, batch) : sum(model->fc3.weight)).backward();
    parallel.discard();
    model->zero_grad();
  }
  loss_of(*model, batch).backward();
  parallel.wait();
  EXPECT_EQ(grads_of(*model), grads_of(*reference));
}

TEST(DataParallelRanks, FrozenParameters) {
  const Group group = world();
  if (group.size() == 1) {
    GTEST_SKIP() << "for several ranks";
  }
  Branches model;
  fill_data(model.left, group.rank());
  model.left.requires_grad_(false);
  const DataParallel parallel(model, group, {.bucket_bytes = 1});
  EXPECT_EQ(parallel.buckets(), 3);
  EXPECT_EQ(to_vector<double>(model.left), (std::vector<double>{0, 0, 0}));
  (sum(model.always) + sum(model.left) + sum(model.right) + sum(model.never)).backward();
  EXPECT_EQ(parallel.started(), 3);
  parallel.wait();
  model.left.requires_grad_();
  sum(model.left).backward();
  expect_error([&] { parallel.wait(); },
               "parameter \"left\" has a gradient, but did not require one when the DataParallel was constructed");
}

TEST(DataParallelRanks, DestroyedWhileReductionsRun) {
  const Group group = world();
  const auto model = make(float32, 1);
  {
    const DataParallel parallel(*model, group);
    sum((*model)(here(ones({2, 6})))).backward();
  }
  EXPECT_EQ(autograd::EarlyAccumulation::leaves(), nullptr);
  model->zero_grad();
  sum((*model)(here(ones({2, 6})))).backward();
  EXPECT_TRUE(model->fc1.weight.grad().defined());
}

// Compares 20 steps of AdamW with the whole batch on one rank, and with a part of it on each rank.
TEST(DataParallelRanks, TrainsAsOneRankDoes) {
  const Group group = world();
  if (!usable(group)) {
    GTEST_SKIP() << "for numbers of ranks that divide " << kRows / 2;
  }
  for (const DType dtype : {float64, float32}) {
    const auto reference = make(dtype, 1), model = make(dtype, 1 + group.rank());
    const DataParallel parallel(*model, group, {.bucket_bytes = 700, .check_every = 5});
    optim::AdamW one(reference->parameters(), {.lr = 3e-2}), optimizer(model->parameters(), {.lr = 3e-2});
    double first = 0, last = 0;
    for (int step = 0; step < 20; ++step) {
      const Batch whole(dtype), own(whole, group);
      const Tensor expected = loss_of(*reference, whole);
      expected.backward();
      one.step();
      one.zero_grad();

      const Tensor loss = loss_of(*model, own);
      loss.backward();
      parallel.wait();
      optimizer.step();
      optimizer.zero_grad();
      const Tensor all = loss.detach();
      group.all_reduce(all, Reduction::mean);
      EXPECT_NEAR(all.item(), expected.item(), dtype == float64 ? 1e-11 : 1e-4) << step;
      (step == 0 ? first : last) = all.item();
    }
    EXPECT_LT(last, 0.8 * first);
    parallel.check(20);
    if (dtype == float64) {
      const auto got = model->named_parameters(), expected = reference->named_parameters();
      for (std::size_t i = 0; i < got.size(); ++i) {
        expect_close(got[i].second, expected[i].second, 1e-9, 1e-9, got[i].first);
      }
    }
  }
}

}  // namespace
}  // namespace mica::distributed
