#pragma once

// Ops on images as a table of cases, each a function of one tensor, of which everything but the values is tested here:
// row-major float64 on the CPU is compared with PyTorch's results in tests/conformance, and all other dtypes, devices
// and layouts are compared with it.

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "tests/rows_close.h"
#include "tests/support.h"
#include <mica/autograd/gradcheck.h>
#include <mica/core/rng.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/view/channels_last.h>
#include <mica/ops/view/view.h>

namespace mica::testing_support {

struct ImageCase {
  std::string name;
  Shape shape;
  std::function<Tensor(const Tensor&)> op;
  double tolerance = 2e-6;  // for float32
  bool keeps_layout = true;
};

struct ImageResults {
  Tensor y;
  Tensor dx;
};

inline ImageResults run_image_case(const ImageCase& c, const Tensor& x, const Tensor& dy) {
  const Tensor leaf = x.detach().requires_grad_();
  const Tensor y = c.op(leaf);
  y.backward(dy.to(y.device()).to(y.dtype()));
  return {y.detach(), leaf.grad()};
}

inline void expect_agreement(const ImageCase& c) {
  const Tensor x = randint(-40, 40, c.shape).to(float64) * 0.25;  // exact in 16 bits, with equal elements
  const Tensor dy = randint(-8, 8, c.op(x).shape()).to(float64);
  const ImageResults expected = run_image_case(c, x, dy);
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      for (const bool last : {false, true}) {
        if (last && c.shape.size() < 4) {
          continue;
        }
        const std::string what = fmt::format("{}, {} {}, last {}", c.name, device, dtype, last);
        const Tensor given = x.to(dtype).to(device);
        const ImageResults got = run_image_case(c, last ? channels_last(given) : given, dy);
        const double wide = dtype == float64 ? 1e-12 : c.tolerance;
        // Ops that round intermediate results to 16 bits have a larger tolerance.
        const double tolerance = size_of(dtype) == 2 && c.tolerance > 2e-6 ? 4 * epsilon_of(dtype) : wide;
        expect_rows_close(got.y, to_vector<double>(expected.y), expected.y.numel(), tolerance, what);
        expect_rows_close(got.dx, to_vector<double>(expected.dx), expected.dx.numel(), tolerance, what + ", dx");
        if (last && c.keeps_layout) {
          EXPECT_TRUE(is_channels_last(got.y)) << what;
        }
      }
    }
  }
}

inline void expect_gradients(const ImageCase& c, Device device) {
  // Distances between elements are larger than gradcheck's step, so that each maximum stays the maximum.
  const Tensor number = arange(static_cast<double>(numel_of(c.shape)), float64) * 37 + 11;
  const Tensor shuffled = (number - 7919.0 * floor_divide(number, 7919.0)) * 0.01 + 0.1;
  const Tensor x = reshape(shuffled, c.shape).to(device);
  EXPECT_TRUE(autograd::gradcheck(c.op, {x})) << c.name;
  EXPECT_TRUE(autograd::gradgradcheck(c.op, {x})) << c.name;
}

}  // namespace mica::testing_support
