// The time of an AdamW step for all parameters of GPT-2, compared with a copy of the same number of elements.

#include <string>
#include <vector>

#include "benchmarks/common/report.h"
#include "benchmarks/common/timer.h"
#include "examples/common/command_line.h"
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/parallel.h>
#include <mica/core/rng.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/optim/adamw.h>
#include <mica/optim/clip_grad.h>

using namespace mica;

namespace {

// The shapes of GPT-2's parameters, with the vocabulary padded to 50304.
std::vector<Shape> gpt2_shapes(std::int64_t layers, std::int64_t width) {
  std::vector<Shape> shapes{{50304, width}, {1024, width}};
  for (std::int64_t layer = 0; layer < layers; ++layer) {
    shapes.insert(shapes.end(), {{width},
                                 {width},
                                 {3 * width, width},
                                 {3 * width},
                                 {width, width},
                                 {width},
                                 {width},
                                 {width},
                                 {4 * width, width},
                                 {4 * width},
                                 {width, 4 * width},
                                 {width}});
  }
  shapes.insert(shapes.end(), {{width}, {width}});
  return shapes;
}

struct Setting {
  DType dtype;
  bool master;
};

void measure(const Setting& setting, Device device, std::int64_t layers, std::int64_t width, int repeats,
             benchmarks::Report& report) {
  manual_seed(1);
  Tensors parameters;
  std::int64_t numel = 0;
  for (const Shape& shape : gpt2_shapes(layers, width)) {
    parameters.push_back((randn(shape, setting.dtype, device) * 0.02).requires_grad_());
    parameters.back().set_grad(randn(shape, setting.dtype, device) * 1e-3);
    numel += parameters.back().numel();
  }
  optim::AdamW optimizer(
      optim::AdamW::decay_matrices(parameters, {.lr = 1e-4, .weight_decay = 0.1, .master_weights = setting.master}));
  optimizer.step();

  const auto size = static_cast<double>(size_of(setting.dtype));
  const double state = static_cast<double>(size_of(accumulate_dtype(setting.dtype)));
  // Both averages and the parameter, or its master copy, are read and written; the gradient is read. With master
  // weights, the parameter is only written.
  const double step_bytes = size + (setting.master ? 6 * state + size : 4 * state + 2 * size);
  // The limit.
  const Tensor from = zeros({numel}, setting.dtype, device);
  const Tensor to = zeros({numel}, setting.dtype, device);
  const double copy_us = benchmarks::median_us(device, repeats, [&] { copy_into(to, from); });
  const auto add = [&](const std::string& name, double bytes, const benchmarks::Work& work) {
    report.add({.op = name,
                .device = device,
                .dtype = setting.dtype,
                .m = 1,
                .n = numel,
                .us = benchmarks::median_us(device, repeats, work),
                .bytes = bytes * static_cast<double>(numel),
                .copy_us = copy_us});
  };
  const std::string kind = setting.master ? "adamw_master" : "adamw";
  add(kind, step_bytes, [&] { optimizer.step(); });
  add(kind + "_clip", step_bytes + size, [&] { optimizer.step({.max_grad_norm = 1}); });
  add("clip_grad_norm_", 3 * size, [&] { optim::clip_grad_norm_(parameters, 0.5); });
  report.add({.op = kind + "_clip_host",
              .device = device,
              .dtype = setting.dtype,
              .m = 1,
              .n = numel,
              .us = benchmarks::host_us(device, repeats, 5, [&] { optimizer.step({.max_grad_norm = 1}); })});
}

}  // namespace

int main(int argc, char** argv) {
  CommandLine command_line(
      "Times a step of AdamW for all parameters of a GPT-2, with clipping and without, and clipping alone.",
      "bench_adamw");
  std::string device_name = "auto", json;
  std::int64_t layers = 12, width = 768;
  int threads = 0, repeats = 50;
  command_line.add_option("--device", device_name, "auto, cpu or cuda").one_of({"auto", "cpu", "cuda"}).show_default();
  command_line.add_option("--layers", layers, "Blocks of the model").between(1, 1024).show_default();
  command_line.add_option("--width", width, "Width of the model").between(1, 65536).show_default();
  command_line.add_option("--threads", threads, "CPU threads; 0 uses every core").between(0, 1024);
  command_line.add_option("--repeats", repeats, "Number of runs per median").at_least(1).show_default();
  command_line.add_option("--json", json, "File for the results as lines of JSON");

  return command_line.run(argc, argv, [&] {
    if (threads > 0) {
      set_num_threads(threads);
    }
    benchmarks::Report report(json);
    for (const Setting setting : {Setting{bfloat16, true}, {bfloat16, false}, {float32, false}}) {
      measure(setting, device_named(device_name), layers, width, repeats, report);
    }
  });
}
