#include <tests/support.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/philox.h>
#include <mica/core/rng.h>
#include <mica/infer/sample.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

using Values = std::vector<double>;

TEST(Sampler, DrawsByProbability) {
  const Tensor logits = from_data<double>({std::log(0.5), std::log(0.3), std::log(0.2), -INFINITY}, {1, 4});
  const auto shares = [&](infer::SamplingOptions options) {
    infer::Sampler sampler(options);
    std::vector<double> counts(4);
    for (int i = 0; i < 5000; ++i) {
      counts[sampler(logits)[0]] += 1.0 / 5000;
    }
    return counts;
  };
  const auto expect_shares = [](const std::vector<double>& got, const std::vector<double>& expected) {
    for (std::size_t i = 0; i < 4; ++i) {
      EXPECT_NEAR(got[i], expected[i], expected[i] == 0 ? 0 : 0.02);
    }
  };
  expect_shares(shares({}), {0.5, 0.3, 0.2, 0});
  expect_shares(shares({.top_k = 2}), {0.625, 0.375, 0, 0});
  expect_shares(shares({.top_k = 1}), {1, 0, 0, 0});
  expect_shares(shares({.temperature = 0}), {1, 0, 0, 0});
  expect_shares(shares({.temperature = 0.5}), {0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38, 0});
  expect_shares(shares({.top_k = 10}), {0.5, 0.3, 0.2, 0});
}

TEST(Sampler, RowsAreIndependentAndErrorsAreClear) {
  infer::Sampler sampler({.seed = 3});
  const std::vector<std::int64_t> rows = sampler(zeros({200, 5}));
  ASSERT_EQ(rows.size(), 200u);
  for (std::int64_t token = 0; token < 5; ++token) {
    EXPECT_GT(std::count(rows.begin(), rows.end(), token), 10);
  }
  EXPECT_NE(sampler(zeros({200, 5})), rows);
  expect_error([] { infer::Sampler({.temperature = -1}); }, "Sampler: expected temperature >= 0, got -1");
  expect_error([] { infer::Sampler({.top_k = -1}); }, "Sampler: expected top_k >= 0");
  expect_error([&] { sampler(from_data<double>({0.0, NAN}, {1, 2})); }, "row 0 of the logits is not finite");
  expect_error([&] { sampler(full({1, 2}, -INFINITY)); }, "row 0 of the logits is not finite");
  expect_error([&] { sampler(ones({3})); }, "expected logits of shape (B, vocab), got [3]");
}

// Draw n of row r is the n-th block of Philox's subsequence r: for equally likely tokens, it selects the token whose
// part of [0, 1] contains the first number of that block.
TEST(Sampler, IsPhiloxFromTheSeedOn) {
  const Tensor logits = zeros({3, 1000});
  for (const bool seeded : {false, true}) {
    infer::Sampler sampler(seeded ? infer::SamplingOptions{.seed = 7} : infer::SamplingOptions{});
    for (std::uint64_t draw = 0; draw < 3; ++draw) {
      std::vector<std::int64_t> expected;
      for (std::uint64_t row = 0; row < 3; ++row) {
        const PhiloxBlock block = philox_block({.seed = seeded ? 7u : 0u, .offset = 4 * draw}, row);
        expected.push_back(static_cast<std::int64_t>(std::ceil(1000 * PhiloxReals<double>::uniform(block, 0))) - 1);
      }
      EXPECT_EQ(sampler(logits), expected) << "draw " << draw;
    }
  }
}

// The reference: a row's candidates with their probabilities, in the order in which Sampler goes through them.
std::vector<std::pair<std::int64_t, double>> candidates_of(Values logits, const std::vector<bool>& seen,
                                                           const infer::SamplingOptions& o) {
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (seen[i]) {
      logits[i] = logits[i] > 0 ? logits[i] / o.repetition_penalty : logits[i] * o.repetition_penalty;
    }
  }
  std::vector<std::pair<std::int64_t, double>> result;
  double total = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    result.emplace_back(i, std::exp(logits[i] / o.temperature));
    total += result.back().second;
  }
  const bool ordered = (o.top_k > 0 && o.top_k < static_cast<std::int64_t>(logits.size())) || o.top_p < 1;
  if (ordered) {
    std::stable_sort(result.begin(), result.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
  }
  if (o.top_k > 0) {
    result.resize(std::min(result.size(), static_cast<std::size_t>(o.top_k)));
    total = 0;
    for (const auto& [token, weight] : result) {
      total += weight;
    }
  }
  double sum = 0;
  std::size_t kept = 0;
  while (kept < result.size() && sum < o.top_p * total) {
    sum += result[kept++].second;
  }
  result.resize(kept);
  for (auto& [token, weight] : result) {
    weight /= sum;
  }
  return result;
}

// A copy would draw from the same random numbers.
static_assert(!std::is_copy_constructible_v<infer::Sampler> && !std::is_copy_assignable_v<infer::Sampler>);

TEST(Sampler, DrawsFromTheCandidates) {
  manual_seed(9);
  constexpr std::int64_t kRows = 4000, kVocab = 9;
  const Tensor row = randn({1, kVocab}, float64) * 2;
  const Values logits = to_vector<double>(row);
  std::vector<bool> seen(kVocab);
  seen[1] = seen[4] = seen[5] = true;
  const Tensor seen_row = from_data<std::int64_t>({0, 1, 0, 0, 1, 1, 0, 0, 0}, {1, kVocab}).to(boolean);
  for (const Device device : test_devices()) {
    for (const infer::SamplingOptions& options :
         {infer::SamplingOptions{}, infer::SamplingOptions{.temperature = 0.6}, infer::SamplingOptions{.top_k = 4},
          infer::SamplingOptions{.top_p = 0.7}, infer::SamplingOptions{.top_p = 1e-9},
          infer::SamplingOptions{.temperature = 1.5, .top_k = 6, .top_p = 0.8, .repetition_penalty = 1.7},
          infer::SamplingOptions{.repetition_penalty = 0.5}}) {
      infer::Sampler sampler(options);
      const Tensor tokens =
          sampler.draw(expand(row, {kRows, kVocab}).to(device), expand(seen_row, {kRows, kVocab}).to(device));
      EXPECT_EQ(tokens.device(), device);
      EXPECT_EQ(tokens.shape(), (Shape{kRows}));
      std::vector<double> share(kVocab), expected(kVocab);
      for (const std::int64_t token : to_vector<std::int64_t>(tokens)) {
        ASSERT_TRUE(token >= 0 && token < kVocab) << token;
        share[static_cast<std::size_t>(token)] += 1.0 / kRows;
      }
      const std::vector<bool> penalized = options.repetition_penalty == 1 ? std::vector<bool>(kVocab) : seen;
      for (const auto& [token, probability] : candidates_of(logits, penalized, options)) {
        expected[static_cast<std::size_t>(token)] = probability;
      }
      for (std::size_t i = 0; i < kVocab; ++i) {
        EXPECT_NEAR(share[i], expected[i], expected[i] == 0 ? 0 : 0.035) << i;
      }
    }
  }
}

TEST(Sampler, SameTokensOnBothDevices) {
  if (!cuda_available()) {
    GTEST_SKIP() << "there is no GPU";
  }
  manual_seed(10);
  // Includes many equal scores, and more candidates than one batch of the kernel.
  const Tensors cases{randn({300, 5000}) * 3, (randn({20, 9001}) * 2).to(bfloat16), zeros({5, 3000}),
                      (randn({3, 40000}) * 0.01).to(float16), randn({7, 11}, float64)};
  for (const Tensor& logits : cases) {
    const Tensor seen = lt(rand(logits.shape()), 0.3);
    for (const infer::SamplingOptions& options :
         {infer::SamplingOptions{.seed = 1}, infer::SamplingOptions{.temperature = 0},
          infer::SamplingOptions{.top_k = 50}, infer::SamplingOptions{.top_k = 2500},
          infer::SamplingOptions{.temperature = 0.8, .top_p = 0.9},
          infer::SamplingOptions{.temperature = 5, .top_p = 0.99},
          infer::SamplingOptions{.temperature = 0.7, .top_k = 300, .top_p = 0.5, .repetition_penalty = 1.3}}) {
      SCOPED_TRACE(fmt::format("{} {}, temperature {}, top_k {}, top_p {}", logits.dtype(), logits.shape(),
                               options.temperature, options.top_k, options.top_p));
      infer::Sampler host(options), device(options);
      for (int i = 0; i < 2; ++i) {
        EXPECT_EQ(device(logits.to(Device::cuda()), seen.to(Device::cuda())), host(logits, seen));
      }
    }
  }
}

TEST(Sampler, PenaltiesLowerNegativeLogits) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float32, float64}) {
      const auto drawn = [&](const Values& logits, double penalty) {
        const Tensor row = from_data(logits, {1, 2}, device).to(dtype);
        const Tensor seen = from_data<std::int64_t>({1, 0}, {1, 2}, device).to(boolean);
        return infer::Sampler({.temperature = 0, .repetition_penalty = penalty})(row, seen)[0];
      };
      EXPECT_EQ(drawn({-1, -1.5}, 2), 1);    // −2 and −1.5
      EXPECT_EQ(drawn({-2, -1.5}, 0.5), 0);  // −1 and −1.5
      EXPECT_EQ(drawn({1.5, 1}, 2), 1);      // 0.75 and 1
      EXPECT_EQ(drawn({0.75, 1}, 0.5), 0);   // 1.5 and 1
    }
  }
}

TEST(Sampler, MoreErrors) {
  expect_error([] { infer::Sampler({.top_p = 0}); }, "Sampler: expected top_p in (0, 1], got 0");
  expect_error([] { infer::Sampler({.top_p = NAN}); }, "Sampler: expected top_p in (0, 1], got nan");
  expect_error([] { infer::Sampler({.repetition_penalty = 0}); }, "Sampler: expected repetition_penalty > 0, got 0");
  infer::Sampler sampler({.repetition_penalty = 2});
  expect_error(
      [&] {
        sampler.draw(ones({2, 3}), ones({2, 3}));
      },
      "sample: expected seen of bool and shape [2, 3] on cpu, got float32 [2, 3]");
  for (const Device device : test_devices()) {
    const double inf = INFINITY, nan = NAN;
    const Tensor logits = from_data<double>({0.0, nan, 1.0, inf, -inf, -inf, -inf, 2.0}, {4, 2}, device);
    expect_close(sampler.draw(logits), Values{-1, -1, -1, 1}, 0, 0);
    expect_error([&] { sampler(logits); }, "Sampler: row 0 of the logits is not finite");
    Tensor rows = zeros({4, 8}, float32, device);
    copy_into(slice(slice(rows, 0, 0, 1), 1, 7, 8), full({1, 1}, nan, float32, device));
    copy_into(slice(slice(rows, 0, 1, 2), 1, 2, 3), full({1, 1}, inf, float32, device));
    copy_into(slice(rows, 0, 2, 3), full({1, 8}, -inf, float32, device));
    copy_into(slice(slice(rows, 0, 3, 4), 1, 0, 5), full({1, 5}, -inf, float32, device));
    expect_close(infer::Sampler({.temperature = 0}).draw(rows), Values{-1, -1, -1, 5}, 0, 0);
  }
}

}  // namespace
