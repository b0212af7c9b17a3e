#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <set>
#include <type_traits>
#include <vector>

#include "tests/support.h"
#include <mica/core/philox.h>
#include <mica/core/rng.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

using Keys = std::vector<PhiloxKey>;
static_assert(std::is_constructible_v<ReplayPhiloxKeys, const Keys&> &&
                  !std::is_constructible_v<ReplayPhiloxKeys, Keys>,
              "a replay keeps a reference to its keys");

// Reference implementation of Philox4x32-10 from the paper, for any counter and key.
std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t left = std::uint64_t{counter[0]} * 0xD2511F53u;
    const std::uint64_t right = std::uint64_t{counter[2]} * 0xCD9E8D57u;
    counter = {static_cast<std::uint32_t>(right >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(right),
               static_cast<std::uint32_t>(left >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(left)};
    key = {key[0] + 0x9E3779B9u, key[1] + 0xBB67AE85u};
  }
  return counter;
}

TEST(Random, PhiloxKnownAnswers) {
  // Known answers published with Random123.
  using Block = std::array<std::uint32_t, 4>;
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}), (Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}), (Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));

  // cuRAND's use of it: the counter is offset / 4, then the subsequence.
  for (const std::uint64_t seed : std::vector<std::uint64_t>{0, 0x299f31d0a4093822, ~0ull}) {
    for (const std::uint64_t position : std::vector<std::uint64_t>{0, 5, 0x05a308d3243f6a88}) {
      for (const std::uint64_t subsequence : std::vector<std::uint64_t>{0, 9, 0x0370734413198a2e}) {
        const PhiloxBlock got = philox_block({.seed = seed, .offset = 4 * position}, subsequence);
        const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
        const auto high = [](std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); };
        EXPECT_EQ(
            (Block{got.word[0], got.word[1], got.word[2], got.word[3]}),
            philox({low(position), high(position), low(subsequence), high(subsequence)}, {low(seed), high(seed)}));
      }
    }
  }
}

// Expects the moments of a sample to be within 5 standard deviations of the expected ones.
void expect_moments(const std::vector<double>& x, double mean, double variance, double fourth) {
  const auto n = static_cast<double>(x.size());
  double sum = 0;
  for (const double value : x) {
    sum += value;
  }
  double squares = 0;
  double neighbors = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    squares += (x[i] - mean) * (x[i] - mean);
    neighbors += i > 0 ? (x[i] - mean) * (x[i - 1] - mean) : 0;
  }
  EXPECT_NEAR(sum / n, mean, 5 * std::sqrt(variance / n));
  EXPECT_NEAR(squares / n, variance, 5 * std::sqrt((fourth - variance * variance) / n));
  EXPECT_NEAR(neighbors / n, 0, 5 * variance / std::sqrt(n));
}

TEST(Random, Distributions) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32}) {
      manual_seed(12);
      expect_moments(to_vector<double>(rand({100'003}, dtype, device)), 0.5, 1.0 / 12, 1.0 / 80);
      expect_moments(to_vector<double>(randn({100'003}, dtype, device)), 0, 1, 3);
    }
  }
}

TEST(Random, UniformsAreBelowOne) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      for (const double value : to_vector<double>(rand({70'001}, dtype, device))) {
        ASSERT_TRUE(value >= 0 && value < 1) << name_of(dtype);
      }
    }
  }
}

// Values do not depend on the device, and a shorter tensor is a prefix of a longer one.
TEST(Random, SameNumbersEverywhere) {
  const auto drawn = [](auto make) {
    manual_seed(13);
    (void)rand({5});
    return to_vector<double>(make());
  };
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      for (const std::int64_t n : {1, 2, 3, 4, 5, 4097}) {
        const auto here = drawn([&] { return rand({n}, dtype); });
        EXPECT_EQ(drawn([&] { return rand({n}, dtype, device); }), here);
        auto longer = drawn([&] { return rand({n + 3}, dtype, device); });
        longer.resize(n);
        EXPECT_EQ(longer, here);
        // Normals use each device's own log, sin and cos.
        const double unit = dtype == float64   ? 0x1p-52
                            : dtype == float32 ? 0x1p-23
                            : dtype == float16 ? 0x1p-10
                                               : 0x1p-7;
        expect_close(from_data(drawn([&] { return randn({n}, dtype, device); }), {n}),
                     drawn([&] { return randn({n}, dtype); }), 8 * unit, 8 * unit);
      }
    }
    for (const DType dtype : {int64, int32, uint8}) {
      const auto here = drawn([&] { return randint(3, 17, {1001}, dtype); });
      EXPECT_EQ(drawn([&] { return randint(3, 17, {1001}, dtype, device); }), here);
    }
  }
}

TEST(Random, SeedsAndStates) {
  manual_seed(14);
  const auto first = to_vector<double>(rand({100}));
  const PhiloxKey state = rng_state();
  const auto second = to_vector<double>(rand({100}));
  EXPECT_NE(first, second);
  set_rng_state(state);
  EXPECT_EQ(to_vector<double>(rand({100})), second);
  manual_seed(14);
  EXPECT_EQ(to_vector<double>(rand({100})), first);
  manual_seed(15);
  EXPECT_NE(to_vector<double>(rand({100})), first);
}

TEST(Random, IntegersCoverTheirRange) {
  for (const Device device : test_devices()) {
    const std::vector<double> values = to_vector<double>(randint(-2, 3, {2000}, int64, device));
    EXPECT_EQ(std::set<double>(values.begin(), values.end()), (std::set<double>{-2, -1, 0, 1, 2}));
    expect_close(randint(7, 8, {100}, int32, device), std::vector<double>(100, 7), 0, 0);
    const std::vector<double> bytes = to_vector<double>(randint(0, 256, {20'000}, uint8, device));
    EXPECT_EQ(std::set<double>(bytes.begin(), bytes.end()).size(), 256u);
    bool low = false;
    bool high = false;
    for (const std::int64_t value : to_vector<std::int64_t>(randint(INT64_MIN, INT64_MAX, {100}, int64, device))) {
      low = low || value < 0;
      high = high || value > 0;
    }
    EXPECT_TRUE(low && high);
    EXPECT_EQ(randint(0, 2, {0}, int64, device).numel(), 0);
  }
}

TEST(Random, Errors) {
  expect_error([] { rand({2}, int64); }, "rand: expected a floating dtype, got int64");
  expect_error([] { randn({2}, boolean); }, "randn: expected a floating dtype, got bool");
  expect_error([] { randint(0, 2, {2}, float32); }, "randint: expected an integer dtype, got float32");
  expect_error([] { randint(2, 2, {2}); }, "randint: expected low < high");
  expect_error([] { randint(0, 257, {2}, uint8); }, "randint: expected low < high within uint8");
}

// The 64 bits of an element are two words of a Philox block, which no other element uses; the second word is the upper
// half.
TEST(Random, IntegersUseAllTheirBits) {
  for (const Device device : test_devices()) {
    const std::vector<std::int64_t> values = to_vector<std::int64_t>(randint(0, INT64_MAX, {4000}, int64, device));
    EXPECT_EQ(std::set<std::int64_t>(values.begin(), values.end()).size(), values.size());
    for (int bit = 0; bit < 63; ++bit) {
      int ones = 0;
      int as_the_next = 0;
      for (std::size_t i = 0; i < values.size(); ++i) {
        const auto of = [&](std::int64_t value) { return (value >> bit & 1) != 0; };
        ones += of(values[i]);
        as_the_next += of(values[i]) == of(values[(i + 1) % values.size()]);
      }
      // Six standard deviations of 4000 coin tosses.
      EXPECT_NEAR(ones, 2000, 190) << "bit " << bit;
      EXPECT_NEAR(as_the_next, 2000, 190) << "bit " << bit;
    }
  }
}

// The smallest value, from word 0, must be above 0, for log and the like.
TEST(Random, UniformsAreAboveZero) {
  const PhiloxBlock none{{0, 0, 0, 0}}, all{{~0u, ~0u, ~0u, ~0u}};
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(PhiloxReals<float>::uniform(none, i), 0x1p-33f);
    EXPECT_EQ(PhiloxReals<float>::uniform(all, i), 1.0f);
  }
}

}  // namespace
