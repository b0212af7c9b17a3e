// Whole training steps of a ResNet, or its forward pass: ms and images/s. resnet_peers.py compares it with PyTorch.

#include <fmt/core.h>

#include <optional>
#include <string>
#include <vector>

#include "benchmarks/common/timer.h"
#include "examples/common/command_line.h"
#include <mica/autograd/autocast.h>
#include <mica/autograd/grad_mode.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/cuda_graph.h>
#include <mica/core/memory_stats.h>
#include <mica/core/parallel.h>
#include <mica/core/rng.h>
#include <mica/nn/models/resnet.h>
#include <mica/ops/cross_entropy/cross_entropy.h>
#include <mica/optim/sgd.h>
#include <mica/profiler/profiler.h>

using namespace mica;

namespace {

struct Options {
  nn::ResNetConfig model{.depth = 50};
  std::int64_t batch = 128, size = 224;
  std::string device = "auto", dtype = "bfloat16", trace;
  int steps = 30, warmup = 10, threads = 0;
  bool graph = false, forward = false;
};

// Steps before the capture.
constexpr int kPlainSteps = 3;

void measure(const Options& o) {
  const Device device = device_named(o.device);
  const DeviceGuard guard(device);
  check(!o.graph || device.is_cuda(), "--graph: expected a GPU");
  if (o.threads > 0) {
    set_num_threads(o.threads);
  }
  manual_seed(1);
  nn::ResNet model(o.model);
  model.to(device);
  model.train(!o.forward);
  optim::SGD optimizer(model.parameters(), {.lr = 0.01, .momentum = 0.9, .weight_decay = 5e-5});
  const Tensor images = randn({o.batch, o.model.channels, o.size, o.size}).to(device);
  const Tensor labels = randint(0, o.model.classes, {o.batch}).to(device);
  const auto logits = [&] {
    std::optional<autograd::Autocast> autocast;
    if (o.dtype != "float32") {
      autocast.emplace(o.dtype == "float16" ? float16 : bfloat16);
    }
    return model(images);
  };
  Tensor loss = zeros({});
  const auto compute = [&] {
    if (o.forward) {
      const autograd::NoGrad no_grad;
      loss = logits();
      return;
    }
    optimizer.zero_grad();
    loss = cross_entropy(logits(), labels);
    loss.backward();
    optimizer.step();
    loss = loss.detach();
  };
  cuda::Graph graph;
  const auto step = [&] { graph.empty() ? compute() : graph.replay(); };
  for (int i = 0; i < o.warmup; ++i) {
    if (o.graph && i == kPlainSteps) {
      graph = cuda::capture(compute, device);
    }
    step();
  }
  reset_peak_memory(device);
  const double ms =
      benchmarks::median(on_device(device, [&](auto on) { return benchmarks::step_times_ms(on, o.steps, step); }));
  put(fmt::format("ResNet-{}, {} {}×{}×{}×{}: {:.3f} ms {}, {:.0f} images/s, {:.2f} GiB, loss {:.4f}\n", o.model.depth,
                  o.dtype, o.batch, o.model.channels, o.size, o.size, ms, o.forward ? "forward" : "a step",
                  static_cast<double>(o.batch) / ms * 1e3, static_cast<double>(memory_stats(device).peak) / (1 << 30),
                  o.forward ? 0 : loss.item()));
  if (!o.trace.empty()) {
    Profiler profiler({.device = device.is_cuda()});
    for (int i = 0; i < 3; ++i) {
      compute();
      profiler.step();
    }
    profiler.stop();
    profiler.write_trace(o.trace);
    put(profiler.table(40));
  }
}

}  // namespace

int main(int argc, char** argv) {
  CommandLine command_line("Times a ResNet: forward, loss, backward, SGD with momentum.", "bench_resnet");
  Options o;
  command_line.add_option("--depth", o.model.depth, "18, 34, 50, 101 or 152").show_default();
  command_line.add_option("--batch", o.batch).at_least(1).show_default();
  command_line.add_option("--size", o.size, "Height and width of the images").at_least(1).show_default();
  command_line.add_option("--channels", o.model.channels).at_least(1).show_default();
  command_line.add_option("--classes", o.model.classes).at_least(1).show_default();
  command_line.add_flag("--small-images", o.model.small_images, "The first layer for images of about 32×32");
  command_line.add_option("--device", o.device).one_of({"auto", "cpu", "cuda"}).show_default();
  command_line.add_option("--dtype", o.dtype, "Of products; parameters are float32")
      .one_of({"float32", "float16", "bfloat16"})
      .show_default();
  command_line.add_flag("--forward", o.forward, "Only the forward pass, in evaluation mode");
  command_line.add_flag("--graph", o.graph, "Replay the steps from a CUDA graph");
  command_line.add_option("--threads", o.threads, "CPU threads; 0 uses every core").between(0, 1024);
  command_line.add_option("--warmup", o.warmup, "Steps before the timed ones").at_least(0).show_default();
  command_line.add_option("--steps", o.steps, "Number of timed steps, of which the median is taken")
      .at_least(1)
      .show_default();
  command_line.add_option("--trace", o.trace, "File for the profiler's trace of three more steps");
  return command_line.run(argc, argv, [&] {
    if (o.graph && o.warmup <= kPlainSteps) {
      throw UsageError(fmt::format("--graph: expected --warmup of more than {}, got {}", kPlainSteps, o.warmup));
    }
    measure(o);
  });
}
