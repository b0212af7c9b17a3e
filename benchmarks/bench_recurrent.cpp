// The speed of a recurrent layer, forward and in a training step. recurrent_peers.py compares it with PyTorch's.

#include <fmt/core.h>

#include <fstream>
#include <string>

#include "benchmarks/common/timer.h"
#include "examples/common/command_line.h"
#include <mica/core/creation.h>
#include <mica/core/cuda_graph.h>
#include <mica/core/parallel.h>
#include <mica/nn/recurrent.h>

using namespace mica;

namespace {

struct Options {
  std::string kind = "lstm", dtype = "float32", device = "cpu", json;
  std::int64_t batch = 32, steps = 128, width = 512, layers = 1;
  int threads = 2, repeats = 10;
  bool graph = false;
};

template <class Layer>
void measure_layer(const Options& options, Layer layer) {
  const Device device = options.device == "cpu" ? Device::cpu() : Device::cuda();
  const DType dtype = options.dtype == "float32" ? float32 : bfloat16;
  layer.to(device, dtype);
  const Tensor x = randn({options.steps, options.batch, options.width}, dtype, device).requires_grad_();
  const Tensor dy = randn(x.shape(), dtype, device);
  const benchmarks::Work forward = [&] { layer(x); };
  const benchmarks::Work step = [&] {
    layer.zero_grad();
    x.set_grad({});
    layer(x).y.backward(dy);
  };
  double us[2] = {};
  for (const int i : {0, 1}) {
    const benchmarks::Work& work = i == 0 ? forward : step;
    if (options.graph) {
      work();
      const cuda::Graph graph = cuda::capture(work);
      us[i] = benchmarks::median_us(device, options.repeats, [&] { graph.replay(); });
    } else {
      us[i] = benchmarks::median_us(device, options.repeats, work);
    }
  }
  fmt::print("{} of width {}: forward {:.0f} us, step {:.0f} us\n", options.kind, options.width, us[0], us[1]);
  std::ofstream(options.json) << fmt::format(R"({{"forward_us": {}, "step_us": {}}})", us[0], us[1]) << "\n";
}

void measure(const Options& options) {
  set_num_threads(options.threads);
  const nn::RecurrentLayersOptions layers{.layers = options.layers};
  if (options.kind == "lstm") {
    measure_layer(options, nn::LSTM{options.width, options.width, layers});
  } else if (options.kind == "gru") {
    measure_layer(options, nn::GRU{options.width, options.width, layers});
  } else {
    measure_layer(options, nn::RNN{options.width, options.width, layers});
  }
}

}  // namespace

int main(int argc, char** argv) {
  CommandLine command_line("Times a recurrent layer, forward and in a training step.", "bench_recurrent");
  Options options;
  command_line.add_option("--kind", options.kind).one_of({"lstm", "gru", "rnn"}).show_default();
  command_line.add_option("--dtype", options.dtype).one_of({"float32", "bfloat16"}).show_default();
  command_line.add_option("--device", options.device).one_of({"cpu", "cuda"}).show_default();
  command_line.add_option("--batch", options.batch, "Sequences").at_least(1).show_default();
  command_line.add_option("--steps", options.steps, "Steps of a sequence").at_least(1).show_default();
  command_line.add_option("--width", options.width, "Width of the inputs and of the state").at_least(1).show_default();
  command_line.add_option("--layers", options.layers).at_least(1).show_default();
  command_line.add_option("--threads", options.threads).at_least(1).show_default();
  command_line.add_option("--repeats", options.repeats, "Runs, of which the median counts").at_least(1).show_default();
  command_line.add_flag("--graph", options.graph, "Replay a CUDA graph");
  command_line.add_option("--json", options.json, "File for the result, as a line of JSON");
  return command_line.run(argc, argv, [&] { measure(options); });
}
