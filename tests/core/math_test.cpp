#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include <mica/core/math.h>

using namespace mica;

namespace {

// |got - expected| in units of the last place of the float nearest to `expected`.
double ulps(float got, double expected) {
  const auto nearest = static_cast<float>(expected);
  if (std::isnan(expected) || std::isinf(nearest) || std::isnan(got) || std::isinf(got)) {
    const bool same = std::isnan(expected) ? std::isnan(got) : got == nearest;
    // One rounding separates the largest float from infinity.
    const bool edge = std::abs(expected) > 0x1.fffffcp127 && std::abs(got) > 0x1.fffffcp127f;
    return same || edge ? 0 : INFINITY;
  }
  int exponent = 0;
  std::frexp(nearest, &exponent);
  return std::abs(got - expected) / std::ldexp(1.0, std::max(exponent - 24, -149));
}

struct Case {
  const char* name;
  float (*function)(float);
  double (*reference)(double);
  double most;  // ulp
};

const Case kCases[] = {
    {"exp", [](float x) { return math::exp(x); }, [](double x) { return std::exp(x); }, 1.1},
    {"log", [](float x) { return math::log(x); }, [](double x) { return std::log(x); }, 1.0},
    {"tanh", [](float x) { return math::tanh(x); }, [](double x) { return std::tanh(x); }, 1.5},
    {"erf", [](float x) { return math::erf(x); }, [](double x) { return std::erf(x); }, 1.5},
    {"sigmoid", [](float x) { return math::sigmoid(x); }, [](double x) { return 1 / (1 + std::exp(-x)); }, 2.5},
};

// Samples from all exponents and signs, including subnormals and NaNs.
TEST(Math, FloatFunctionsAreAccurate) {
  for (const Case& c : kCases) {
    double worst = 0;
    float at = 0;
    for (std::uint64_t bits = 0; bits < (std::uint64_t{1} << 32); bits += 6007) {
      const auto x = std::bit_cast<float>(static_cast<std::uint32_t>(bits));
      const double error = ulps(c.function(x), c.reference(x));
      if (!(error <= worst)) {
        worst = error;
        at = x;
      }
    }
    EXPECT_LE(worst, c.most) << c.name << "(" << at << ") gives " << c.function(at) << " for " << c.reference(at);
  }
}

TEST(Math, FloatFunctionsAtSpecialValues) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kTiny = std::numeric_limits<float>::denorm_min();
  for (const Case& c : kCases) {
    for (const float x : {0.0f,
                          -0.0f,
                          1.0f,
                          -1.0f,
                          kTiny,
                          -kTiny,
                          1.17549421e-38f,
                          1.17549435e-38f,
                          kInfinity,
                          -kInfinity,
                          std::numeric_limits<float>::quiet_NaN(),
                          88.7228394f,
                          88.72284f,
                          -87.33655f,
                          -103.97208f,
                          -104.0f,
                          3.4028235e38f,
                          -3.4028235e38f,
                          0.625f,
                          4.0f,
                          1.41421354f}) {
      const float got = c.function(x);
      EXPECT_LE(ulps(got, c.reference(x)), c.most) << c.name << "(" << x << ") gives " << got;
      if (x == 0 && c.reference(x) == 0) {
        EXPECT_EQ(std::signbit(got), std::signbit(x)) << c.name;
      }
    }
  }
}

// Properties of a function that matter more than its last digit.
TEST(Math, FloatFunctionsStayInRange) {
  for (float x = 0; x < 20; x += 0.00137f) {
    EXPECT_LE(math::tanh(x), 1.0f);
    EXPECT_LE(math::erf(x), 1.0f);
    EXPECT_EQ(math::tanh(-x), -math::tanh(x));
    EXPECT_EQ(math::erf(-x), -math::erf(x));
  }
}

}  // namespace
