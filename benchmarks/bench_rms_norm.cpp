// The speed of RMSNorm's kernels, compared with a copy of the same tensor.

#include <vector>

#include "benchmarks/common/report.h"
#include "benchmarks/common/run.h"
#include <mica/core/creation.h>
#include <mica/ops/norm/detail/norm_backward.h>

using namespace mica;
using benchmarks::Case;

namespace {

std::vector<Case> default_cases(Device device) {
  if (device.is_cpu()) {
    return {{float32, 768, 128}, {float32, 4096, 1024}, {bfloat16, 768, 128}, {bfloat16, 4096, 1024}};
  }
  return {{bfloat16, 65536, 768},  {bfloat16, 16384, 4096}, {bfloat16, 8192, 8192}, {bfloat16, 4096, 12288},
          {bfloat16, 4096, 16384}, {bfloat16, 524288, 128}, {float16, 4096, 1024},  {float16, 4096, 4096},
          {float32, 131072, 512},  {float32, 16384, 4096},  {float32, 4096, 8192},  {float32, 1024, 66679}};
}

void measure(const Case& c, Device device, int repeats, benchmarks::Report& report) {
  const Tensor x = randn({c.m, c.n}, c.dtype, device);
  const Tensor dy = randn({c.m, c.n}, c.dtype, device);
  const Tensor weight = randn({c.n}, c.dtype, device);
  const Tensor y = empty_like(x);
  const Tensor dweight = empty_like(weight);
  const Tensor rstd = empty({c.m}, accumulate_dtype(c.dtype), device);
  const kernels::NormForward forward{
      .rows = c.m, .columns = c.n, .centered = false, .eps = 1e-6, .x = x, .weight = weight, .y = y, .rstd = rstd};
  const kernels::NormBackward backward{.rows = c.m,
                                       .columns = c.n,
                                       .centered = false,
                                       .dy = dy,
                                       .x = x,
                                       .weight = weight,
                                       .rstd = rstd,
                                       .dx = y,
                                       .dweight = dweight};
  benchmarks::KernelTimes times(report, c, repeats, y, x);
  times.add("rms_norm_forward", 2, [&] { on_device(device, [&](auto tag) { kernels::norm_forward(tag, forward); }); });
  times.add("rms_norm_backward", 3,
            [&] { on_device(device, [&](auto tag) { kernels::norm_backward(tag, backward); }); });
}

}  // namespace

int main(int argc, char** argv) {
  return benchmarks::run(argc, argv, "bench_rms_norm",
                         "Times RMSNorm's kernels, compared with a copy of the same tensor.", default_cases,
                         [](const std::vector<Case>& cases, Device device, int repeats, benchmarks::Report& report) {
                           for (const Case& c : cases) {
                             measure(c, device, repeats, report);
                           }
                         });
}
