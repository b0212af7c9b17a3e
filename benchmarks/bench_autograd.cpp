// Host overhead of autograd: one small op without and with a gradient, and chains of ops forward and backward.

#include <string>

#include "benchmarks/common/report.h"
#include "benchmarks/common/timer.h"
#include "examples/common/command_line.h"
#include <mica/autograd/grad_mode.h>
#include <mica/core/creation.h>
#include <mica/core/parallel.h>
#include <mica/ops/elementwise/binary.h>

using namespace mica;

namespace {

constexpr std::int64_t kSize = 64;
constexpr int kChain = 2000;

// Few elements, so that overhead dominates arithmetic.
void measure(Device device, int repeats, benchmarks::Report& report) {
  const Tensor x = randn({kSize}, float32, device).requires_grad_();
  const Tensor b = randn({kSize}, float32, device);
  const Tensor dy = randn({kSize}, float32, device);
  const auto add = [&](const char* op, std::int64_t ops, int calls, const benchmarks::Work& work) {
    const double us = benchmarks::host_us(device, repeats, calls, work) / static_cast<double>(ops);
    report.add({.op = op, .device = device, .dtype = float32, .m = ops, .n = kSize, .us = us});
  };
  // Without and with a gradient; each graph is freed before the next.
  constexpr int kCalls = 200;
  add("add", 1, kCalls, [&] { b + dy; });
  add("add_recorded", 1, kCalls, [&] { x + b; });
  add("mul_recorded", 1, kCalls, [&] { x* b; });
  // Forward, backward and freeing the graph, per op. The backward of add runs no kernel, that of mul runs one.
  const auto chain = [&](const auto& op) {
    Tensor y = x;
    for (int i = 0; i < kChain; ++i) {
      y = op(y, b);
    }
    y.backward(dy);
    x.set_grad({});
  };
  add("chain_add", kChain, 1, [&] { chain([](const Tensor& y, const Tensor& c) { return y + c; }); });
  add("chain_mul", kChain, 1, [&] { chain([](const Tensor& y, const Tensor& c) { return y * c; }); });
}

}  // namespace

int main(int argc, char** argv) {
  CommandLine command_line(
      "Times what autograd costs the host: us per op on 64 floats; M is the number of ops in the graph.",
      "bench_autograd");
  std::string device_name = "auto", json;
  int threads = 1, repeats = 50;
  command_line.add_option("--device", device_name, "auto, cpu or cuda; auto: the CPU and, if there is one, the GPU")
      .one_of({"auto", "cpu", "cuda"})
      .show_default();
  command_line.add_option("--threads", threads, "CPU threads").between(1, 1024).show_default();
  command_line.add_option("--repeats", repeats, "Number of runs per median").at_least(1).show_default();
  command_line.add_option("--json", json, "File for the results as lines of JSON");

  return command_line.run(argc, argv, [&] {
    set_num_threads(threads);
    benchmarks::Report report(json);
    if (device_name != "cuda") {
      measure(Device::cpu(), repeats, report);
    }
    if (device_name == "cuda" || (device_name == "auto" && cuda_available())) {
      measure(device_named("cuda"), repeats, report);
    }
  });
}
