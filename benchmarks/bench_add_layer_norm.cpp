// The speed of add_layer_norm's kernels, compared with a copy of the same tensor.

#include <vector>

#include "benchmarks/common/report.h"
#include "benchmarks/common/run.h"
#include "benchmarks/common/timer.h"
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/norm/detail/norm_backward.h>

using namespace mica;
using benchmarks::Case;

namespace {

// Only shapes with fused kernels, which do not exist on the CPU.
std::vector<Case> default_cases(Device device) {
  if (device.is_cpu()) {
    return {};
  }
  return {{bfloat16, 65536, 768}, {bfloat16, 16384, 4096}, {bfloat16, 8192, 8192},
          {float16, 4096, 1024},  {float32, 131072, 512},  {float32, 16384, 4096}};
}

void measure(const Case& c, Device device, double p, int repeats, benchmarks::Report& report) {
  const auto random = [&] { return randn({c.m, c.n}, c.dtype, device); };
  const auto row = [&] { return randn({c.n}, c.dtype, device); };
  const Tensor x = random(), residual = random(), dy = random(), dsum = random();
  const Tensor sum = random(), y = random(), weight = row(), bias = row(), dweight = row(), dbias = row();
  const Tensor mean = empty({kernels::mean_parts(c.dtype), c.m}, accumulate_dtype(c.dtype), device);
  const Tensor rstd = empty({c.m}, mean.dtype(), device);
  const ElementDropout dropout{.key = {}, .threshold = ElementDropout::threshold_of(p)};
  const Tensor none;
  const kernels::NormForward forward{.rows = c.m,
                                     .columns = c.n,
                                     .centered = true,
                                     .eps = 1e-5,
                                     .x = x,
                                     .weight = weight,
                                     .bias = bias,
                                     .y = y,
                                     .mean = mean,
                                     .rstd = rstd,
                                     .residual = residual,
                                     .dropout = dropout,
                                     .sum = sum};
  // Results overwrite inputs of forward.
  const kernels::NormBackward backward{.rows = c.m,
                                       .columns = c.n,
                                       .centered = true,
                                       .dy = dy,
                                       .x = sum,
                                       .weight = weight,
                                       .mean = mean,
                                       .rstd = rstd,
                                       .dx = residual,
                                       .dweight = dweight,
                                       .dbias = dbias,
                                       .dsum = dsum,
                                       .dropout = dropout,
                                       .dx_dropped = p > 0 ? x : none};
  const double copy_us = benchmarks::median_us(device, repeats, [&] { copy_into(y, x); });
  const auto add = [&](const char* op, int passes, const benchmarks::Work& work) {
    report.add({.op = fmt::format("{}{}", op, p > 0 ? "_dropout" : ""),
                .device = device,
                .dtype = c.dtype,
                .m = c.m,
                .n = c.n,
                .us = benchmarks::median_us(device, repeats, work),
                .bytes = static_cast<double>(passes) * x.bytes(),
                .copy_us = copy_us});
  };
  const auto expect = [](bool done) { check(done, "add_layer_norm: there is no kernel for this shape"); };
  add("add_layer_norm_forward", 4,
      [&] { expect(on_device(device, [&](auto tag) { return kernels::add_norm_forward(tag, forward); })); });
  add("add_layer_norm_backward", p > 0 ? 5 : 4,
      [&] { expect(on_device(device, [&](auto tag) { return kernels::add_norm_backward(tag, backward); })); });
}

}  // namespace

int main(int argc, char** argv) {
  return benchmarks::run(argc, argv, "bench_add_layer_norm",
                         "Times add_layer_norm's kernels on a GPU, compared with a copy of the same tensor.",
                         default_cases,
                         [](const std::vector<Case>& cases, Device device, int repeats, benchmarks::Report& report) {
                           for (const Case& c : cases) {
                             for (const double p : {0.0, 0.1}) {
                               measure(c, device, p, repeats, report);
                             }
                           }
                         });
}
