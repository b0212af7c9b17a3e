// The speed of the convolutions of a network, forward and by both gradients. conv_peers.py compares it with PyTorch's.

#include <fmt/core.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include "benchmarks/common/timer.h"
#include "examples/common/command_line.h"
#include <mica/core/channels_last.h>
#include <mica/core/creation.h>
#include <mica/core/parallel.h>
#include <mica/ops/conv/conv.h>
#include <mica/ops/conv/detail/conv_kernels.h>
#include <mica/ops/view/channels_last.h>

using namespace mica;

namespace {

struct Layer {
  std::int64_t in, out, filter, stride, size;  // of the square input
  int count;                                   // in the network
  std::int64_t groups = 1;
};

std::vector<Layer> layers_of(const std::string& network) {
  if (network == "resnet18") {
    return {{3, 64, 7, 2, 224, 1},   {64, 64, 3, 1, 56, 4},   {64, 128, 3, 2, 56, 1},  {128, 128, 3, 1, 28, 3},
            {64, 128, 1, 2, 56, 1},  {128, 256, 3, 2, 28, 1}, {256, 256, 3, 1, 14, 3}, {128, 256, 1, 2, 28, 1},
            {256, 512, 3, 2, 14, 1}, {512, 512, 3, 1, 7, 3},  {256, 512, 1, 2, 14, 1}};
  }
  if (network == "resnet50") {
    std::vector<Layer> layers{{3, 64, 7, 2, 224, 1}};
    std::int64_t in = 64, size = 56;
    const int blocks[] = {3, 4, 6, 3};
    for (int stage = 0; stage < 4; ++stage) {
      const std::int64_t width = std::int64_t{64} << stage, stride = stage == 0 ? 1 : 2;
      layers.push_back({in, width, 1, 1, size, 1});
      layers.push_back({width, width, 3, stride, size, 1});
      layers.push_back({in, 4 * width, 1, stride, size, 1});
      size /= stride;
      layers.push_back({width, 4 * width, 1, 1, size, blocks[stage]});
      layers.push_back({4 * width, width, 1, 1, size, blocks[stage] - 1});
      layers.push_back({width, width, 3, 1, size, blocks[stage] - 1});
      in = 4 * width;
    }
    return layers;
  }
  if (network == "depthwise") {
    return {{32, 32, 3, 1, 112, 1, 32},
            {96, 96, 3, 2, 112, 1, 96},
            {384, 384, 3, 1, 14, 4, 384},
            {96, 96, 7, 1, 56, 3, 96}};
  }
  return {{1, 32, 3, 1, 28, 1}, {32, 32, 3, 1, 28, 1}, {32, 64, 3, 1, 14, 2}};  // a CNN for Fashion-MNIST
}

struct Options {
  std::string network = "resnet18", dtype = "float32", device = "cpu", json;
  std::int64_t batch = 16;
  int threads = 2, repeats = 5;
  bool tune = false;
};

void measure(const Options& options) {
  const Device device = options.device == "cpu" ? Device::cpu() : Device::cuda();
  const DType dtype = options.dtype == "float32" ? float32 : options.dtype == "bfloat16" ? bfloat16 : float16;
  set_num_threads(options.threads);
  set_matmul_tuning(options.tune ? MatmulTuning::timed : MatmulTuning::heuristic);
  std::ofstream json(options.json);
  double totals[3] = {};
  fmt::print("{:>24}  count  forward  by input  by weight, us\n", "layer");
  for (const Layer& l : layers_of(options.network)) {
    const std::int64_t padding = l.filter / 2, size = (l.size + 2 * padding - l.filter) / l.stride + 1;
    kernels::Convolution args{.geometry = {.x = {options.batch, l.in, l.size, l.size},
                                           .weight = {l.out, l.in / l.groups, l.filter, l.filter},
                                           .y = {options.batch, l.out, size, size},
                                           .stride = {l.stride, l.stride},
                                           .dilation = {1, 1},
                                           .padding = {padding, padding},
                                           .groups = l.groups},
                              .result = kernels::ConvPart::y,
                              .x = {},
                              .weight = {},
                              .y = {}};
    const auto drawn = [&](const Shape& shape) {
      const Tensor x = randn(shape, dtype, device);
      return device.is_cuda() ? channels_last(x) : x;
    };
    const kernels::ConvGeometry& g = args.geometry;
    args.x = drawn(g.x), args.weight = drawn(g.weight), args.y = drawn(g.y);
    double us[3] = {};
    const kernels::ConvPart parts[] = {kernels::ConvPart::y, kernels::ConvPart::x, kernels::ConvPart::weight};
    for (int i = 0; i < 3; ++i) {
      args.result = parts[i];
      if (i == 1 && l.in <= 3) {
        continue;  // the images have no gradient
      }
      const auto times = on_device(device, [&](auto on) {
        return benchmarks::times_us(on, options.repeats, [&] { kernels::convolve(on, args); });
      });
      us[i] = *std::min_element(times.begin(), times.end());
      totals[i] += us[i] * l.count;
    }
    const std::string name = fmt::format("{}x{}x{}/{} of {}", l.out, l.in / l.groups, l.filter, l.stride, l.size);
    fmt::print("{:>24}  {:>5}  {:>7.0f}  {:>8.0f}  {:>9.0f}\n", name, l.count, us[0], us[1], us[2]);
    json
        << fmt::format(
               R"({{"name": "{}", "in": {}, "out": {}, "filter": {}, "stride": {}, "size": {}, "count": {}, "groups": {}, )"
               R"("us": [{}, {}, {}]}})",
               name, l.in, l.out, l.filter, l.stride, l.size, l.count, l.groups, us[0], us[1], us[2])
        << "\n";
  }
  fmt::print("{:>24}         {:>7.0f}  {:>8.0f}  {:>9.0f}\n", "all", totals[0], totals[1], totals[2]);
}

}  // namespace

int main(int argc, char** argv) {
  CommandLine command_line("Times the convolutions of a network, forward and by both gradients.", "bench_conv");
  Options options;
  command_line.add_option("--network", options.network, "Whose layers")
      .one_of({"resnet18", "resnet50", "fashion", "depthwise"})
      .show_default();
  command_line.add_option("--dtype", options.dtype).one_of({"float32", "bfloat16", "float16"}).show_default();
  command_line.add_option("--device", options.device).one_of({"cpu", "cuda"}).show_default();
  command_line.add_option("--batch", options.batch, "Images").at_least(1).show_default();
  command_line.add_option("--threads", options.threads).at_least(1).show_default();
  command_line.add_option("--repeats", options.repeats, "Runs, of which the fastest counts").at_least(1).show_default();
  command_line.add_flag("--tune", options.tune, "Measure cuDNN's candidates at the first use of each product");
  command_line.add_option("--json", options.json, "File for the results, as lines of JSON");
  return command_line.run(argc, argv, [&] { measure(options); });
}
