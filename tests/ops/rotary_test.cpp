#include <tests/support.h>

#include <limits>

#include <mica/autograd/gradcheck.h>
#include <mica/core/parallel.h>
#include <mica/core/rng.h>
#include <mica/nn/rotary_embedding.h>
#include <mica/ops/rotary/rotary.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace rotary_test {

const std::vector<float> kFrequencies{1.0F, 0.3F, 0.01F};

// Rotates x (B, T, H, 6) by the definition; `positions` has one position for each of the B · T rows.
std::vector<double> reference(const Tensor& x, const std::vector<std::int64_t>& positions, double scale = 1) {
  const std::vector<double> from = to_vector<double>(x);
  std::vector<double> to(from.size());
  const std::size_t half = kFrequencies.size(), heads = static_cast<std::size_t>(x.size(-2));
  for (std::size_t row = 0; row < positions.size(); ++row) {
    for (std::size_t head = 0; head < heads; ++head) {
      for (std::size_t j = 0; j < half; ++j) {
        const std::size_t left = (row * heads + head) * 2 * half + j, right = left + half;
        const double angle = static_cast<float>(positions[row]) * kFrequencies[j];
        to[left] = scale * (from[left] * std::cos(angle) - from[right] * std::sin(angle));
        to[right] = scale * (from[right] * std::cos(angle) + from[left] * std::sin(angle));
      }
    }
  }
  return to;
}

double tolerance_of(DType dtype) {
  return dtype == float64 ? 1e-14 : dtype == float32 ? 1e-6 : dtype == float16 ? 1e-3 : 8e-3;
}

// The CUDA kernel converts an angle to a multiple of π in float64. For narrower dtypes, that error is below their own
// rounding.
double angle_error(DType dtype, double largest_angle) {
  return dtype == float64 ? 4 * std::numeric_limits<double>::epsilon() * largest_angle : 0;
}

TEST(Rotary, IsItsDefinition) {
  manual_seed(1);
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      const Tensor x = randn({2, 3, 5, 6}, dtype);
      const double tolerance = tolerance_of(dtype);
      const Tensor on_device = x.to(device);
      expect_close(rotary(on_device, kFrequencies), reference(x, {0, 1, 2, 0, 1, 2}), tolerance, tolerance);
      expect_close(rotary(on_device, kFrequencies, {.offset = 1000, .scale = 1.5}),
                   reference(x, {1000, 1001, 1002, 1000, 1001, 1002}, 1.5), tolerance,
                   4 * tolerance + angle_error(dtype, 1002));
      expect_close(rotary(on_device, kFrequencies, {.positions = from_data<std::int64_t>({7, 0, 100000}, device)}),
                   reference(x, {7, 0, 100000, 7, 0, 100000}), tolerance, tolerance + angle_error(dtype, 100000));
      const Tensor of_each = from_data<std::int32_t>({0, 0, 1, 5, 6, 70}, {2, 3}, device);
      expect_close(rotary(on_device, kFrequencies, {.positions = of_each}), reference(x, {0, 0, 1, 5, 6, 70}),
                   tolerance, tolerance + angle_error(dtype, 70));
    }
  }
}

TEST(Rotary, AnyStridesAndSizes) {
  manual_seed(2);
  for (const Device device : test_devices()) {
    const Tensor x = randn({3, 2, 6, 4}, float32, device);
    const Tensor view = transpose(x, 2, 3);  // (3, 2, 4, 6)
    expect_close(rotary(view, kFrequencies), rotary(contiguous(view), kFrequencies), 0, 0);
    expect_close(rotary(select(x.to(float64), 0, 1).to(float64), {1.0F, 0.5F}).to(float32),
                 select(rotary(x, {1.0F, 0.5F}), 0, 1), 1e-5, 1e-6);  // x without a batch axis
    EXPECT_EQ(rotary(zeros({2, 0, 5, 6}, float32, device), kFrequencies).shape(), (Shape{2, 0, 5, 6}));
    EXPECT_EQ(rotary(zeros({2, 1, 0, 6}, float32, device), kFrequencies).numel(), 0);
  }
}

TEST(Rotary, SameBitsWithAnyNumberOfThreads) {
  manual_seed(3);
  const Tensor x = randn({2, 700, 9, 6});
  const int threads = num_threads();
  set_num_threads(1);
  const std::vector<float> expected = to_vector<float>(rotary(x, kFrequencies));
  set_num_threads(3);
  EXPECT_EQ(to_vector<float>(rotary(x, kFrequencies)), expected);
  set_num_threads(threads);
}

TEST(Rotary, Gradients) {
  manual_seed(4);
  for (const Device device : test_devices()) {
    const Tensor x = randn({2, 3, 2, 6}, float64, device);
    const Tensor positions = from_data<std::int64_t>({3, 1, 9}, device);
    const auto by_offset = [](const Tensor& t) { return rotary(t, kFrequencies, {.offset = 5, .scale = 0.7}); };
    const auto by_position = [&](const Tensor& t) { return rotary(t, kFrequencies, {.positions = positions}); };
    EXPECT_TRUE(autograd::gradcheck(by_offset, {x}));
    EXPECT_TRUE(autograd::gradcheck(by_position, {x}));
    EXPECT_TRUE(autograd::gradgradcheck(by_offset, {x}));
    EXPECT_TRUE(autograd::gradgradcheck(by_position, {x}));
  }
}

TEST(Rotary, Errors) {
  const Tensor x = zeros({2, 3, 5, 6});
  expect_error(
      [&] {
        rotary(zeros({3, 6}), kFrequencies);
      },
      "expected floating x of shape (…, T, H, D), got float32 [3, 6]");
  expect_error([&] { rotary(zeros({1, 3, 6}, int64), kFrequencies); }, "expected floating x");
  expect_error([&] { rotary(zeros({1, 3, 5}), kFrequencies); }, "expected heads of even width from 2 to 512, got 5");
  expect_error([&] { rotary(zeros({1, 1, 514}), kFrequencies); }, "from 2 to 512, got 514");
  expect_error([&] { rotary(x, {1.0F}); }, "expected 3 frequencies for heads of width 6, got 1");
  expect_error([&] { rotary(x, kFrequencies, {.scale = NAN}); }, "expected a finite scale, got nan");
  expect_error([&] { rotary(x, kFrequencies, {.positions = zeros({3})}); }, "positions of int64 or int32, got float32");
  expect_error([&] { rotary(x, kFrequencies, {.positions = zeros({5}, int64)}); },
               "positions of shape [2, 3] or [3], got [5]");
}

TEST(RotaryEmbedding, Frequencies) {
  const auto expect = [](const nn::RotaryConfig& config, const std::vector<double>& expected, std::int64_t length = 0) {
    const std::vector<float> got = nn::rotary_frequencies(8, config, length);
    ASSERT_EQ(got.size(), expected.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_NEAR(got[i], expected[i], 1e-6 * expected[i]) << i;
    }
  };
  const std::vector<double> plain{1, 0.1, 0.01, 0.001};  // 10000^(−2j/8)
  expect({}, plain);
  expect({.scaling = nn::RotaryScaling::linear, .factor = 4}, {0.25, 0.025, 0.0025, 0.00025});
  const nn::RotaryConfig dynamic{.scaling = nn::RotaryScaling::dynamic, .factor = 2, .original_context = 100};
  expect(dynamic, plain, 100);
  const double theta = 10000 * std::pow(2 * 3.0 - 1, 8.0 / 6);
  expect(dynamic, {1, std::pow(theta, -0.25), std::pow(theta, -0.5), std::pow(theta, -0.75)}, 300);
  // In 1000 positions, the four pairs make 159, 15.9, 1.59 and 0.159 turns.
  const double ramp = (1.5915494309189535 - 1) / 3;
  expect({.scaling = nn::RotaryScaling::llama3, .factor = 8, .original_context = 1000},
         {1, 0.1, 0.01 * (ramp + (1 - ramp) / 8), 0.001 / 8});
  // The ramp goes from index ⌊4 ln(1000 / 64π) / ln(10000)⌋ = 0 to ⌈4 ln(1000 / 2π) / ln(10000)⌉ = 3.
  const nn::RotaryConfig yarn{.scaling = nn::RotaryScaling::yarn, .factor = 10, .original_context = 1000};
  expect(yarn, {1, 0.1 * 0.7, 0.01 * 0.4, 0.001 * 0.1});
  EXPECT_NEAR(nn::rotary_scale(yarn), 0.1 * std::log(10) + 1, 1e-12);
  EXPECT_EQ(nn::rotary_scale({}), 1);
}

TEST(RotaryEmbedding, OffsetsAndPositions) {
  manual_seed(5);
  const Tensor x = randn({1, 6, 2, 8});
  const nn::RotaryEmbedding plain(8);
  expect_close(plain(slice(x, 1, 2, 6), 2), slice(plain(x), 1, 2, 6), 0, 0);
  expect_close(plain(x, arange(6)), plain(x), 0, 0);
  const nn::RotaryEmbedding dynamic(8, {.scaling = nn::RotaryScaling::dynamic, .factor = 2, .original_context = 4});
  expect_close(dynamic(slice(x, 1, 0, 4)), plain(slice(x, 1, 0, 4)), 0, 0);
  expect_close(dynamic(x), rotary(x, nn::rotary_frequencies(8, dynamic.config, 6)), 0, 0);
  expect_close(dynamic(x, from_data<std::int64_t>({5, 0, 1, 2, 3, 4}, {6})),
               rotary(x, nn::rotary_frequencies(8, dynamic.config, 6),
                      {.positions = from_data<std::int64_t>({5, 0, 1, 2, 3, 4}, {6})}),
               0, 0);
  const nn::RotaryConfig config{.scaling = nn::RotaryScaling::longrope,
                                .factor = 3,
                                .original_context = 6,
                                .short_factors = {1, 2, 3, 4},
                                .long_factors = {5, 6, 7, 8}};
  const nn::RotaryEmbedding longrope(8, config);
  const double scale = std::sqrt(1 + std::log(3) / std::log(6));
  const std::vector<float> short_ones = nn::rotary_frequencies(8, config, 6),
                           long_ones = nn::rotary_frequencies(8, config, 7);
  const std::vector<double> expected{1, 0.05, 0.01 / 3, 0.001 / 4};
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_NEAR(short_ones[i], expected[i], 1e-6 * expected[i]);
    EXPECT_NEAR(long_ones[i] * config.long_factors[i], short_ones[i] * config.short_factors[i], 1e-6 * expected[i]);
  }
  EXPECT_EQ(longrope.frequencies(), short_ones);
  expect_close(longrope(x), rotary(x, short_ones, {.scale = scale}), 0, 0);
  expect_close(longrope(x, 1), rotary(x, long_ones, {.offset = 1, .scale = scale}), 0, 0);
  for (const DType dtype : {int64, int32}) {
    // Short documents in a long row, and a long one.
    const Tensor documents = from_data<std::int64_t>({0, 1, 2, 0, 1, 5}, {6}).to(dtype);
    const Tensor far = from_data<std::int64_t>({0, 1, 2, 0, 1, 6}, {6}).to(dtype);
    expect_close(longrope(x, documents), rotary(x, short_ones, {.positions = documents, .scale = scale}), 0, 0);
    expect_close(longrope(x, far), rotary(x, long_ones, {.positions = far, .scale = scale}), 0, 0);
    // The length of the longest sequence may be known.
    expect_close(longrope(x, documents, 7), rotary(x, long_ones, {.positions = documents, .scale = scale}), 0, 0);
  }
  expect_close(longrope(zeros({0, 4, 8}), zeros({0}, int64)), zeros({0, 4, 8}), 0, 0);
  const auto longrope_error = [&](auto change, const char* message) {
    nn::RotaryConfig wrong = config;
    change(wrong);
    expect_error([&] { nn::RotaryEmbedding(8, wrong); }, message);
  };
  longrope_error([](nn::RotaryConfig& c) { c.short_factors.pop_back(); },
                 "expected 4 short factors for heads of width 8");
  longrope_error([](nn::RotaryConfig& c) { c.long_factors.clear(); },
                 "expected 4 long factors for heads of width 8, got 0");
  longrope_error([](nn::RotaryConfig& c) { c.long_factors[2] = 0; }, "expected finite long factors above 0, got 0");
  longrope_error([](nn::RotaryConfig& c) { c.short_factors[3] = NAN; },
                 "expected finite short factors above 0, got nan");
  longrope_error([](nn::RotaryConfig& c) { c.original_context = 1; }, "expected an original context above 1");
  longrope_error([](nn::RotaryConfig& c) { c.attention_factor = -1; }, "attention factor of at least 0, got -1");
  expect_error([] { nn::RotaryEmbedding(7); }, "expected heads of even width from 2 to 512, got 7");
  expect_error([] { nn::rotary_frequencies(514, {}, 1); }, "expected heads of even width from 2 to 512, got 514");
  expect_error([] { nn::rotary_frequencies(INT64_MAX - 1, {}, 1); }, "expected heads of even width from 2 to 512");
  expect_error([] { nn::RotaryEmbedding(8, {.theta = 1}); }, "expected a finite theta above 1, got 1");
  expect_error([] { nn::RotaryEmbedding(8, {.factor = 0}); }, "expected a finite factor above 0, got 0");
  expect_error([] { nn::RotaryEmbedding(8, {.original_context = 0}); }, "an original context of at least 1");
  expect_error([] { nn::RotaryEmbedding(8, {.high_frequency_factor = 1}); }, "low_frequency_factor < high_frequency");
  expect_error([] { nn::RotaryEmbedding(8, {.beta_fast = 0.5}); }, "0 < beta_slow <= beta_fast");
}

}  // namespace rotary_test
