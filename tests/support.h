#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include <mica/core/creation.h>
#include <mica/core/device.h>

namespace mica::testing_support {

/// The devices that tests run on: the CPU, and the first GPU if there is one.
inline std::vector<Device> test_devices() {
  std::vector<Device> devices{Device::cpu()};
  if (cuda_available()) {
    devices.push_back(Device::cuda());
  }
  return devices;
}

/// A float64 tensor without axes, with the given value.
inline Tensor scalar(double value) { return full({}, value, float64); }

/// Expects |got − expected| ≤ atol + rtol · |expected| for each element. NaN must be, and may only be, where `expected`
/// is NaN.
inline void expect_close(const Tensor& got, const std::vector<double>& expected, double rtol, double atol,
                         const std::string& what = "") {
  const std::vector<double> values = to_vector<double>(got);
  ASSERT_EQ(values.size(), expected.size()) << what;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const bool both_nan = std::isnan(values[i]) && std::isnan(expected[i]);
    const bool equal = values[i] == expected[i];  // covers infinities
    ASSERT_TRUE(equal || both_nan || std::abs(values[i] - expected[i]) <= atol + rtol * std::abs(expected[i]))
        << what << ": element " << i << " is " << values[i] << ", expected " << expected[i];
  }
}

inline void expect_close(const Tensor& got, const Tensor& expected, double rtol, double atol,
                         const std::string& what = "") {
  ASSERT_EQ(got.shape(), expected.shape()) << what;
  expect_close(got, to_vector<double>(expected), rtol, atol, what);
}

/// Expects that f throws mica::Error with `text` in its message.
template <class F>
void expect_error(F&& f, const std::string& text) {
  try {
    f();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << "the message was: " << error.what();
    return;
  }
  ADD_FAILURE() << "expected an error with \"" << text << "\"";
}

}  // namespace mica::testing_support
