// Checks swiglu as any custom op should be checked: its values against plain ops, its gradients against finite
// differences, the GPU against the CPU. Exits with 1 if any check fails.

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "swiglu.h"
#include <mica/mica.h>

using namespace mica;

namespace {

bool all_good = true;

void report(const std::string& what, bool good) {
  std::printf("%-72s %s\n", what.c_str(), good ? "ok" : "WRONG");
  all_good = all_good && good;
}

// The maximum of |a − b| ÷ (1 + |b|); NaN if an element is NaN.
double difference(const Tensor& a, const Tensor& b) {
  if (b.numel() == 0) {
    return 0;
  }
  const Tensor exact = b.to(Device::cpu(), float64);
  return max(abs(a.to(Device::cpu(), float64) - exact) / (abs(exact) + 1)).item();
}

// The error of rounding an element once.
double tolerance(DType dtype) {
  switch (dtype) {
    case DType::float64: return 1e-13;
    case DType::float32: return 2e-6;
    case DType::float16: return 1e-3;
    default: return 8e-3;
  }
}

struct Results {
  Tensor y, dgate, dup;
};

template <class F>
Results run(F f, const Tensor& gate, const Tensor& up, const Tensor& dy) {
  const Tensor g = gate.detach().requires_grad_();
  const Tensor u = up.detach().requires_grad_();
  const Tensor y = f(g, u);
  y.backward(dy);
  return {y, g.grad(), u.grad()};
}

double difference(const Results& a, const Results& b) {
  return std::max({difference(a.y, b.y), difference(a.dgate, b.dgate), difference(a.dup, b.dup)});
}

// Compares values and gradients with those of plain ops in float64 on the CPU.
void compare(Device device, DType dtype, const Shape& shape) {
  const Tensor gate = randn(shape, dtype, device), up = randn(shape, dtype, device), dy = randn(shape, dtype, device);
  const auto exact = [](const Tensor& x) { return x.to(Device::cpu(), float64); };
  const Results expected =
      run([](const Tensor& g, const Tensor& u) { return silu(g) * u; }, exact(gate), exact(up), exact(dy));
  const double off = difference(run(custom::swiglu, gate, up, dy), expected);
  report(fmt::format("{} {} {} against silu(gate) * up: error {:.1e}", device, dtype, shape, off),
         off <= tolerance(dtype));
}

void check_derivatives(Device device) {
  const Tensor gate = randn({3, 5}, float64, device), up = randn({3, 5}, float64, device);
  report(fmt::format("{} gradcheck", device), autograd::gradcheck(custom::swiglu, {gate, up}, {.raise = false}));
  report(fmt::format("{} gradgradcheck", device),
         autograd::gradgradcheck(custom::swiglu, {gate, up}, {.raise = false}));
}

void check_refusal() {
  std::string message;
  try {
    custom::swiglu(randn({3, 5}), randn({3, 4}));
  } catch (const Error& error) {
    message = error.what();
  }
  report("refused: " + message, message.starts_with("swiglu: expected up like gate"));
}

}  // namespace

int main() {
  try {
    std::vector<Device> devices{Device::cpu()};
    if (cuda_available()) {
      devices.push_back(Device::cuda());
    }
    for (const Device device : devices) {
      for (const DType dtype : {float64, float32, float16, bfloat16}) {
        compare(device, dtype, {129, 257});
      }
      compare(device, float32, {1});
      compare(device, float32, {0, 4});
      check_derivatives(device);
    }
    check_refusal();
    if (!cuda_available()) {
      std::printf("not tested on CUDA: %s\n", MICA_WITH_CUDA ? "no GPU was found" : "mica was built without CUDA");
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "custom_op: %s\n", error.what());
    return 1;
  }
  return all_good ? 0 : 1;
}
