#include "layer_norm_reference.h"
#include "norm_kernel_cases.h"
#include "tests/launches.h"
#include <mica/autograd/grad_mode.h>
#include <mica/autograd/gradcheck.h>

using namespace mica;

namespace layer_norm_test {

using namespace mica::layer_norm_testing;

// One test for each pair of dtypes, so that they can run in parallel.
class LayerNormTypes : public testing::TestWithParam<std::pair<DType, DType>> {};
INSTANTIATE_TEST_SUITE_P(All, LayerNormTypes, testing::ValuesIn(kNormTypes), name_of_types);

TEST_P(LayerNormTypes, MatchReference) {
  manual_seed(1);
  for (const Device device : test_devices()) {
    for (const NormCase& c : norm_grid(device, GetParam())) {
      SCOPED_TRACE(to_string(device));
      const Inputs in = random_inputs(c, device);
      expect_matches(run(in), reference(in), c);
      if (HasFatalFailure()) {
        return;
      }
    }
  }
}

// Runs each kernel. The other tests are too long for compute-sanitizer:
//   MICA_POOL=0 compute-sanitizer build/cuda/bin/mica_tests --gtest_filter='*LayerNormTypes.EachKernel/float32*'
TEST_P(LayerNormTypes, EachKernel) {
  manual_seed(16);
  for (const Device device : test_devices()) {
    const cuda::LaunchRecord all;
    for (const auto& [c, kernel] : norm_kernel_cases(device, GetParam(), /*centered=*/true)) {
      const cuda::LaunchRecord record;
      Inputs in = random_inputs(c, device);
      const Reference expected = reference(in);
      expect_matches(run(in), expected, c);
      expect_launched(record, device, {kernel.name.c_str()}, c.name());
      expect_matches(run(in, {.x = false}), expected, c);
      if (c.dtype == float32) {  // in every other row, squares overflow
        std::vector<double> x = to_vector<double>(in.x);
        for (std::size_t i = 0; i < x.size(); ++i) {
          x[i] = std::clamp(x[i], -4.0, 4.0) * (i / c.columns % 2 == 0 ? 1e30 : 1);
        }
        in.x = with_values(x, in.x);
        expect_matches(run(in, {.x = false}), reference(in), c);
      }
      if (HasFailure()) {
        return;
      }
    }
    expect_launched(all, device, {"norm_backward_parameters_kernel", "norm_backward_sum_kernel"});
  }
}

TEST(LayerNorm, WeightAndBiasAreOptional) {
  manual_seed(2);
  OneIn three(3);
  for (const Device device : test_devices()) {
    std::vector<std::int64_t> lengths = some_columns(device);
    lengths.insert(lengths.end(), {5, 333, 2048});
    for (const auto& [dtype, weight_dtype] : kNormTypes) {
      for (const std::int64_t columns : lengths) {
        if (three.skips()) {
          continue;
        }
        const NormCase c{dtype, weight_dtype, columns <= 16'384 ? 9 : 3, columns};
        for (const bool has_weight : {false, true}) {
          for (const bool has_bias : {false, true}) {
            Inputs in = random_inputs(c, device);
            in.weight = has_weight ? in.weight : Tensor{};
            in.bias = has_bias ? in.bias : Tensor{};
            const Results got = run(in);
            EXPECT_EQ(got.dweight.defined(), has_weight);
            EXPECT_EQ(got.dbias.defined(), has_bias);
            expect_matches(got, reference(in), c);
          }
        }
      }
    }
  }
}

TEST(LayerNorm, GradientsNotNeededAreNotComputedAndChangeNoOther) {
  manual_seed(3);
  OneIn three(3);
  for (const Device device : test_devices()) {
    for (const auto& [dtype, weight_dtype] : kNormTypes) {
      for (const std::int64_t columns : some_columns(device)) {
        if (three.skips()) {
          continue;
        }
        // On a GPU, it depends on the number of rows whether dweight and dbias alone are computed by partial sums.
        const std::int64_t few = columns <= 16'384 ? 19 : 5;
        const std::int64_t many = device.is_cuda() && columns <= 4005 ? 521 : few;
        for (std::int64_t rows = few; rows <= many; rows += 502) {
          const NormCase c{dtype, weight_dtype, rows, columns};
          const Inputs in = random_inputs(c, device);
          const Results all = run(in);
          const Reference expected = reference(in);
          expect_matches(all, expected, c);
          for (int mask = 0; mask < 7; ++mask) {
            const Needs needs{.x = (mask & 1) != 0, .weight = (mask & 2) != 0, .bias = (mask & 4) != 0};
            const Results some = run(in, needs);
            // Without dx, a GPU may sum over rows in another order.
            const bool same_sums = needs.x || device.is_cpu();
            expect_same({.y = all.y,
                         .dx = needs.x ? all.dx : Tensor{},
                         .dweight = needs.weight && same_sums ? all.dweight : Tensor{},
                         .dbias = needs.bias && same_sums ? all.dbias : Tensor{}},
                        {.y = some.y,
                         .dx = some.dx,
                         .dweight = same_sums ? some.dweight : Tensor{},
                         .dbias = same_sums ? some.dbias : Tensor{}},
                        fmt::format("{}, needs {}", c.name(), mask));
            EXPECT_EQ(some.dweight.defined(), needs.weight);
            EXPECT_EQ(some.dbias.defined(), needs.bias);
            expect_sums_match(some, expected, c);
          }
          expect_same_bits(no_grad([&] { return run(in).y; }), all.y);
        }
      }
    }
  }
}

TEST(LayerNorm, SeveralAxesAreOneRow) {
  manual_seed(4);
  for (const Device device : test_devices()) {
    const Inputs in{.x = randn({2, 3, 4, 5}, float32, device),
                    .weight = randn({4, 5}, float32, device),
                    .bias = randn({4, 5}, float32, device),
                    .dy = randn({2, 3, 4, 5}, float32, device)};
    const Results got = run(in);
    EXPECT_EQ(got.y.shape(), (Shape{2, 3, 4, 5}));
    EXPECT_EQ(got.dweight.shape(), (Shape{4, 5}));
    expect_matches(got, reference(in), {float32, float32, 6, 20});

    if (device.is_cuda()) {  // more rows than a grid can have blocks along y
      const Inputs many{.x = randn({100'000, 8, 16}, float32, device),
                        .weight = randn({8, 16}, float32, device),
                        .bias = randn({8, 16}, float32, device),
                        .dy = randn({100'000, 8, 16}, float32, device)};
      expect_matches(run(many), reference(many), {float32, float32, 100'000, 128});
    }

    const Inputs whole{.x = in.x, .weight = randn({2, 3, 4, 5}, float32, device), .bias = {}, .dy = in.dy};
    expect_matches(run(whole), reference(whole), {float32, float32, 1, 120});
  }
}

TEST(LayerNorm, AnyLayout) {
  manual_seed(5);
  OneIn three(3);
  for (const Device device : test_devices()) {
    for (const auto& [dtype, weight_dtype] : kNormTypes) {
      for (const std::int64_t columns : some_columns(device)) {
        if (three.skips()) {
          continue;
        }
        const NormCase c{dtype, weight_dtype, columns <= 16'384 ? 6 : 3, columns};
        const Inputs in = random_inputs(c, device);
        const Reference expected = reference(in);
        for (const auto layout : {with_gaps, off_by_one}) {
          // Changes the layout of one tensor at a time, then of all, since a kernel might check only one pointer's
          // alignment.
          for (int which = 0; which < 5; ++which) {
            const auto laid_out = [&](int i, const Tensor& x) { return which == i || which == 4 ? layout(x) : x; };
            const Inputs moved{.x = laid_out(0, in.x),
                               .weight = laid_out(1, in.weight),
                               .bias = laid_out(2, in.bias),
                               .dy = laid_out(3, in.dy)};
            expect_matches(run(moved), expected, c);
          }
        }
      }
    }
    // dy is one row expanded to all rows, as the gradient of a sum over rows is.
    Inputs in = random_inputs({float32, float32, 6, 40}, device);
    in.dy = broadcast_view(randn({40}, float32, device), {6, 40});
    expect_matches(run(in), reference(in), {float32, float32, 6, 40});
  }
}

TEST(LayerNorm, Gradcheck) {
  manual_seed(6);
  const auto norm = [](std::int64_t columns, bool has_weight, bool has_bias) {
    return [=](const Tensors& in) -> Tensor {
      return layer_norm(in[0], {columns}, has_weight ? in[1] : Tensor{}, has_bias ? in.back() : Tensor{});
    };
  };
  for (const Device device : test_devices()) {
    for (const std::int64_t columns : {1, 2, 3, 8, 33}) {
      const Tensor x = randn({4, columns}, float64, device);
      const Tensor weight = randn({columns}, float64, device);
      const Tensor bias = randn({columns}, float64, device);
      EXPECT_TRUE(autograd::gradcheck(norm(columns, true, true), {x, weight, bias}));
      EXPECT_TRUE(autograd::gradcheck(norm(columns, true, false), {x, weight}));
      EXPECT_TRUE(autograd::gradcheck(norm(columns, false, true), {x, bias}));
      EXPECT_TRUE(autograd::gradcheck(norm(columns, false, false), {x}));
    }
    const auto two_axes = [](const Tensor& x, const Tensor& weight, const Tensor& bias) {
      return layer_norm(x, {3, 4}, weight, bias, 0.1);
    };
    EXPECT_TRUE(autograd::gradcheck(
        two_axes, {randn({2, 3, 4}, float64, device), randn({3, 4}, float64, device), randn({3, 4}, float64, device)}));
  }
}

TEST(LayerNorm, GradientsAccumulate) {
  manual_seed(7);
  for (const Device device : test_devices()) {
    const Inputs in = random_inputs({float64, float64, 5, 12}, device);
    const Results once = run(in);
    const Tensor x = in.x.detach().requires_grad_();
    const Tensor weight = in.weight.detach().requires_grad_();
    const Tensor bias = in.bias.detach().requires_grad_();
    x.set_grad(full({5, 12}, -1, float64, device));
    weight.set_grad(full({12}, 3, float64, device));
    for (int i = 0; i < 2; ++i) {
      layer_norm(x, {12}, weight, bias).backward(in.dy);
    }
    const auto twice = [](const Tensor& gradient, double before) {
      std::vector<double> values = to_vector<double>(gradient);
      for (double& value : values) {
        value = before + value + value;
      }
      return values;
    };
    expect_close(x.grad(), twice(once.dx, -1), 1e-14, 1e-14);
    expect_close(weight.grad(), twice(once.dweight, 3), 1e-14, 1e-14);
    expect_close(bias.grad(), twice(once.dbias, 0), 1e-14, 0);
  }
}

TEST(LayerNorm, NoElements) {
  for (const Device device : test_devices()) {
    const Results no_rows = run({.x = empty({0, 6}, float32, device),
                                 .weight = ones({6}, float32, device),
                                 .bias = ones({6}, float32, device),
                                 .dy = empty({0, 6}, float32, device)});
    EXPECT_EQ(no_rows.y.shape(), (Shape{0, 6}));
    EXPECT_EQ(no_rows.dx.shape(), (Shape{0, 6}));
    expect_close(no_rows.dweight, std::vector<double>(6, 0), 0, 0);
    expect_close(no_rows.dbias, std::vector<double>(6, 0), 0, 0);

    const Results no_columns = run({.x = empty({4, 0}, float32, device),
                                    .weight = empty({0}, float32, device),
                                    .bias = empty({0}, float32, device),
                                    .dy = empty({4, 0}, float32, device)});
    EXPECT_EQ(no_columns.y.shape(), (Shape{4, 0}));
    EXPECT_EQ(no_columns.dweight.shape(), (Shape{0}));
  }
}

TEST(LayerNorm, MoreElementsThan32BitsCount) {
  if (!cuda_available()) {
    GTEST_SKIP() << "needs a GPU";
  }
  manual_seed(16);
  const std::int64_t rows = (std::int64_t{1} << 32) / 64 + 77;
  try {
    const NormCase c{float16, float32, rows, 64};
    const Inputs in = random_inputs(c, Device::cuda());
    const Results all = run(in);
    for (const std::int64_t begin : {std::int64_t{0}, rows / 2 - 3, rows - 9}) {
      const Inputs part = part_of(in, begin, 9);
      const Results some = run(part);
      expect_matches(some, reference(part), c);
      expect_same_bits(some.y, rows_of(all.y, begin, 9), "y");
      expect_same_bits(some.dx, rows_of(all.dx, begin, 9), "dx");
    }
    // The sums over all rows must equal those over two halves; each of their elements is about √rows.
    const Results low = run(part_of(in, 0, rows / 2), {.x = false});
    const Results high = run(part_of(in, rows / 2, rows - rows / 2), {.x = false});
    const auto halves = [](const Tensor& a, const Tensor& b) {
      std::vector<double> sum = to_vector<double>(a);
      const std::vector<double> other = to_vector<double>(b);
      for (std::size_t i = 0; i < sum.size(); ++i) {
        sum[i] += other[i];
      }
      return sum;
    };
    const double tolerance = 0.01 * std::sqrt(static_cast<double>(rows));
    expect_close(all.dweight, halves(low.dweight, high.dweight), 0, tolerance, "dweight");
    expect_close(all.dbias, halves(low.dbias, high.dbias), 0, tolerance, "dbias");
  } catch (const OutOfMemory& error) {
    GTEST_SKIP() << error.what();
  }
}

// Rows longer than 31 bits can count. Sums are exact in float32: x alternates, and dy is orthogonal to it.
TEST(LayerNorm, RowsLongerThan31BitsCount) {
  if (!cuda_available()) {
    GTEST_SKIP() << "needs a GPU";
  }
  const Device device = Device::cuda();
  const std::int64_t packs = (std::int64_t{1} << 28) + 3;
  const std::int64_t columns = 8 * packs;
  const std::vector<double> x = {1, -1, 1, -1, 1, -1, 1, -1};
  const std::vector<double> dy = {1, 1, -1, -1, 1, 1, -1, -1};
  try {
    const auto repeat = [&](const std::vector<double>& pattern) {
      const Tensor result = empty({2, packs, 8}, float16, device);
      copy_into(result, broadcast_view(from_data(pattern, {8}, device).to(float16), {2, packs, 8}));
      return as_strided(result, {2, columns}, {columns, 1}, 0);
    };
    const Results got = run({.x = repeat(x),
                             .weight = full({columns}, 2, float16, device),
                             .bias = full({columns}, 0.5, float16, device),
                             .dy = repeat(dy)});
    const auto expect_pattern = [&](const Tensor& result, const std::vector<double>& pattern, double a, double b,
                                    const std::string& what) {
      for (const std::int64_t begin : {std::int64_t{0}, columns / 2, columns - 64, columns, result.numel() - 64}) {
        std::vector<double> expected;
        for (int i = 0; i < 64; ++i) {
          expected.push_back(a * pattern[i % 8] + b);
        }
        if (begin < result.numel()) {
          expect_close(as_strided(result, {64}, {1}, begin), expected, 1e-3, 0, fmt::format("{} at {}", what, begin));
        }
      }
    };
    std::vector<double> products = x;
    for (int i = 0; i < 8; ++i) {
      products[i] *= dy[i];
    }
    expect_pattern(got.y, x, 2, 0.5, "y");
    expect_pattern(got.dx, dy, 2, 0, "dx");
    expect_pattern(got.dweight, products, 2, 0, "dweight");
    expect_pattern(got.dbias, dy, 2, 0, "dbias");
  } catch (const OutOfMemory& error) {
    GTEST_SKIP() << error.what();
  }
}

TEST(LayerNorm, Errors) {
  const Tensor x = randn({2, 768});
  expect_error([&] { layer_norm({}, {768}); }, "layer_norm: expected a defined x");
  expect_error([&] { layer_norm(x, {768}, ones({512})); }, "layer_norm: expected weight of shape [768], got [512]");
  expect_error([&] { layer_norm(x, {768}, {}, ones({512})); }, "layer_norm: expected bias of shape [768], got [512]");
  expect_error([&] { layer_norm(x, {768}, ones({1, 768})); }, "expected weight of shape [768], got [1, 768]");
  expect_error([&] { layer_norm(x, {512}); }, "layer_norm: expected x of a shape that ends in [512], got [2, 768]");
  expect_error([&] { layer_norm(x, {1, 2, 768}); }, "ends in [1, 2, 768], got [2, 768]");
  expect_error([&] { layer_norm(x, {}); }, "layer_norm: expected normalized_shape of at least one axis, got []");
  expect_error([&] { layer_norm(x, {768}, ones({768}, float16)); },
               "layer_norm: expected weight of float32, got float16");
  expect_error(
      [&] {
        layer_norm(randn({2, 8}, float16), {8}, {}, ones({8}, float64));
      },
      "layer_norm: expected bias of float16 or float32, got float64");
  expect_error(
      [&] {
        layer_norm(randn({2, 8}, float16), {8}, ones({8}, float16), ones({8}));
      },
      "layer_norm: expected bias of weight's float16, got float32");
  expect_error([&] { layer_norm(ones({2, 8}, int64), {8}); }, "layer_norm: expected x of a floating dtype, got int64");
  expect_error([&] { layer_norm(x, {768}, {}, {}, -1); }, "layer_norm: expected eps of at least 0, got -1");
  expect_error([&] { layer_norm(x, {768}, {}, {}, NAN); }, "layer_norm: expected eps of at least 0, got nan");
}

TEST(LayerNorm, ParametersOnAnotherDevice) {
  if (!cuda_available()) {
    GTEST_SKIP() << "needs a GPU";
  }
  expect_error(
      [] {
        layer_norm(randn({2, 8}, float32, Device::cuda()), {8}, ones({8}));
      },
      "layer_norm: expected weight on cuda:0, got it on cpu");
}

}  // namespace layer_norm_test
