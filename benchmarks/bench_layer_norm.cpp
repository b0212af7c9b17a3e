// The speed of LayerNorm's kernels, compared with a copy of the same tensor, and the host time of a call through
// autograd.

#include <vector>

#include "benchmarks/common/report.h"
#include "benchmarks/common/run.h"
#include "benchmarks/common/timer.h"
#include <mica/core/creation.h>
#include <mica/nn/layer_norm.h>
#include <mica/ops/norm/detail/norm_backward.h>

using namespace mica;
using benchmarks::Case;

namespace {

std::vector<Case> default_cases(Device device) {
  if (device.is_cpu()) {
    return {{float32, 768, 128},  {float32, 4096, 1024},  {float32, 2048, 4096},
            {bfloat16, 768, 128}, {bfloat16, 4096, 1024}, {bfloat16, 2048, 4096}};
  }
  return {{float16, 4096, 1024},   {float16, 4096, 2048},   {float16, 4096, 4096},    {float16, 4096, 8192},
          {float16, 4096, 12288},  {float16, 4096, 15872},  {bfloat16, 4096, 1024},   {bfloat16, 4096, 4096},
          {bfloat16, 4096, 8192},  {bfloat16, 4096, 15872}, {float32, 131072, 512},   {float32, 10000, 10000},
          {float32, 4096, 16384},  {bfloat16, 65536, 768},  {bfloat16, 16384, 4096},  {bfloat16, 8192, 16384},
          {float32, 1024, 123479}, {float32, 2048, 66679},  {bfloat16, 1024, 262144}, {float32, 67, 123479},
          {float32, 70000, 64},    {float32, 131072, 128},  {float32, 256, 128},      {float32, 512, 1024},
          {float32, 32, 32}};
}

void measure(const Case& c, Device device, int repeats, benchmarks::Report& report) {
  const auto random = [&](const Shape& shape) { return randn(shape, c.dtype, device); };
  const Tensor x = random({c.m, c.n});
  const Tensor dy = random({c.m, c.n});
  const Tensor weight = random({c.n});
  const Tensor bias = random({c.n});
  const Tensor y = empty_like(x);
  const Tensor dweight = empty_like(weight);
  const Tensor dbias = empty_like(bias);
  const Tensor mean = empty({kernels::mean_parts(c.dtype), c.m}, accumulate_dtype(c.dtype), device);
  const Tensor rstd = empty({c.m}, mean.dtype(), device);
  const kernels::NormForward forward{.rows = c.m,
                                     .columns = c.n,
                                     .centered = true,
                                     .eps = 1e-5,
                                     .x = x,
                                     .weight = weight,
                                     .bias = bias,
                                     .y = y,
                                     .mean = mean,
                                     .rstd = rstd};
  const auto backward = [&](const Tensor& dx) {
    const kernels::NormBackward args{.rows = c.m,
                                     .columns = c.n,
                                     .centered = true,
                                     .dy = dy,
                                     .x = x,
                                     .weight = weight,
                                     .mean = mean,
                                     .rstd = rstd,
                                     .dx = dx,
                                     .dweight = dweight,
                                     .dbias = dbias};
    on_device(device, [&](auto tag) { kernels::norm_backward(tag, args); });
  };
  benchmarks::KernelTimes times(report, c, repeats, y, x);
  times.add("layer_norm_forward", 2,
            [&] { on_device(device, [&](auto tag) { kernels::norm_forward(tag, forward); }); });
  times.add("layer_norm_backward", 3, [&] { backward(y); });
  times.add("layer_norm_backward_parameters", 2, [&] { backward({}); });
}

// The host overhead of a call: nn::LayerNorm forward and backward; gradients are freed.
void measure_call(Device device, int repeats, benchmarks::Report& report) {
  constexpr std::int64_t kSize = 32;
  constexpr int kCalls = 50;
  nn::LayerNorm norm(kSize);
  norm.to(device);
  const Tensor x = randn({kSize, kSize}, float32, device).requires_grad_();
  const Tensor dy = randn({kSize, kSize}, float32, device);
  const double us = benchmarks::host_us(device, repeats, kCalls, [&] {
    norm(x).backward(dy);
    norm.zero_grad();
    x.set_grad({});
  });
  report.add({.op = "layer_norm_call", .device = device, .dtype = float32, .m = kSize, .n = kSize, .us = us});
}

}  // namespace

int main(int argc, char** argv) {
  return benchmarks::run(
      argc, argv, "bench_layer_norm",
      "Times LayerNorm's kernels, compared with a copy of the same tensor, and one call through autograd.",
      default_cases, [](const std::vector<Case>& cases, Device device, int repeats, benchmarks::Report& report) {
        for (const Case& c : cases) {
          measure(c, device, repeats, report);
        }
        measure_call(device, repeats, report);
      });
}
