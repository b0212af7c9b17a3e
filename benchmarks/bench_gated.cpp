// The speed of the gated activations' kernels, on two tensors and on the halves of one, compared with a copy of a
// tensor of the result's size.

#include <string>
#include <vector>

#include "benchmarks/common/report.h"
#include "benchmarks/common/run.h"
#include <mica/core/creation.h>
#include <mica/ops/gated/detail/gated_kernels.h>

using namespace mica;
using benchmarks::Case;

namespace {

std::vector<Case> default_cases(Device device) {
  if (device.is_cpu()) {
    return {{float32, 512, 2048}, {float32, 4096, 1024}, {bfloat16, 512, 2048}, {bfloat16, 4096, 1024}};
  }
  return {{bfloat16, 16384, 11008}, {bfloat16, 8192, 14336}, {bfloat16, 4096, 4096}, {bfloat16, 16384, 11007},
          {float16, 16384, 11008},  {float32, 16384, 5504},  {float32, 4096, 4096},  {bfloat16, 1024, 3072}};
}

// (M, N) inside (M, N) or, as one of its halves, (M, 2 N).
struct Operands {
  Tensor gate;
  Tensor up;
};

Operands operands(const Case& c, Device device, bool halves) {
  if (!halves) {
    return {.gate = randn({c.m, c.n}, c.dtype, device), .up = randn({c.m, c.n}, c.dtype, device)};
  }
  const Tensor x = randn({c.m, 2 * c.n}, c.dtype, device);
  const auto half = [&](std::int64_t offset) { return as_strided(x, {c.m, c.n}, {2 * c.n, 1}, offset); };
  return {.gate = half(0), .up = half(c.n)};
}

void measure(const Case& c, Device device, int repeats, benchmarks::Report& report) {
  const Tensor y = empty({c.m, c.n}, c.dtype, device);
  const Tensor dy = randn({c.m, c.n}, c.dtype, device);
  benchmarks::KernelTimes times(report, c, repeats, y, dy);
  for (const bool halves : {false, true}) {
    const Operands in = operands(c, device, halves);
    const Operands out = operands(c, device, halves);
    const auto add_op = [&](const char* name, const kernels::GatedFunction& function) {
      const std::string suffix = halves ? "_halves" : "";
      times.add(fmt::format("{}_forward{}", name, suffix), 3, [&] {
        on_device(device, [&](auto tag) { kernels::gated_forward(tag, function, y, in.gate, in.up); });
      });
      times.add(fmt::format("{}_backward{}", name, suffix), 5, [&] {
        on_device(device,
                  [&](auto tag) { kernels::gated_backward(tag, function, out.gate, out.up, dy, in.gate, in.up); });
      });
    };
    add_op("swiglu", functions::Silu{});
    add_op("geglu", functions::Gelu{});
    add_op("geglu_tanh", functions::GeluTanh{});
  }
}

}  // namespace

int main(int argc, char** argv) {
  return benchmarks::run(
      argc, argv, "bench_gated",
      "Times the kernels of swiglu and geglu, compared with a copy of a tensor of the result's size.", default_cases,
      [](const std::vector<Case>& cases, Device device, int repeats, benchmarks::Report& report) {
        for (const Case& c : cases) {
          measure(c, device, repeats, report);
        }
      });
}
