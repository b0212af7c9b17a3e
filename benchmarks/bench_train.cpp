// Whole training steps of a GPT, from mica's modules: ms per step, tokens/s, share of the GPU's peak, memory.

#include <fmt/core.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "benchmarks/common/clock.h"
#include "benchmarks/common/memory.h"
#include "benchmarks/common/timer.h"
#include "examples/common/command_line.h"
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/cuda/graph.h>
#include <mica/core/parallel.h>
#include <mica/core/rng.h>
#include <mica/io/safetensors.h>
#include <mica/io/text.h>
#include <mica/nn/gpt.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/view/view.h>
#include <mica/optim/adamw.h>
#include <mica/optim/schedule.h>

using namespace mica;

namespace {

struct Options {
  nn::GPTConfig model;
  std::int64_t batch = 0;
  std::string device = "auto", dtype = "bfloat16";
  int steps = 50, warmup = 10, lr_warmup = 0, threads = 0;
  bool tf32 = false, graph = false;
  std::string tune;
  double lr = 3e-4, weight_decay = 0.1, clip = 1;
  double peak_tflops = 989;
  std::string weights, save_weights, tokens, losses, json;
};

struct Preset {
  nn::GPTConfig model;
  std::int64_t batch;
};

const std::map<std::string, Preset> presets = {
    {"gpt2-124m", {nn::gpt2_config("124m"), 32}},
    {"gpt2-350m", {nn::gpt2_config("350m"), 16}},
    {"gpt2-774m", {nn::gpt2_config("774m"), 16}},
    {"gpt2-1558m", {nn::gpt2_config("1558m"), 16}},
    {"character", {{.vocab = 65, .context = 256, .layers = 6, .heads = 6, .width = 384, .bias = false}, 64}},
};

// Steps before the capture.
constexpr int kPlainSteps = 3;

// The batches of a training run: consecutive windows of T + 1 tokens, wrapping around at the end of the tokens. The
// same as in train_peers.py.
class Batches {
 public:
  Batches(const Tensor& tokens, std::int64_t batch, std::int64_t context) : batch_(batch), context_(context) {
    check(tokens.dim() == 1 && tokens.dtype() == int32, "--tokens: expected int32 of one axis, got {} {}",
          tokens.dtype(), tokens.shape());
    const std::int64_t count = (tokens.numel() - 1) / context;
    check(count >= batch, "--tokens: expected more than {} tokens, a batch, got {}", batch * context, tokens.numel());
    inputs_ = reshape(slice(tokens, 0, 0, count * context), {count, context});
    targets_ = reshape(slice(tokens, 0, 1, count * context + 1), {count, context});
  }

  std::array<Tensor, 2> next() {
    if (at_ + batch_ > inputs_.size(0)) {
      at_ = 0;
    }
    const std::int64_t begin = at_;
    at_ += batch_;
    return {slice(inputs_, 0, begin, at_), slice(targets_, 0, begin, at_)};
  }

 private:
  std::int64_t batch_, context_;
  std::int64_t at_ = 0;
  Tensor inputs_, targets_;
};

// Parameters of matrix products: all but the position embedding. The token embedding counts, as the head multiplies
// by it.
std::int64_t product_parameters(const nn::GPT& gpt) {
  std::int64_t count = -gpt.wpe.weight.numel();
  for (const Tensor& parameter : gpt.parameters()) {
    count += parameter.numel();
  }
  return count;
}

DType dtype_named(const std::string& name) {
  return name == "float32" ? float32 : name == "float16" ? float16 : bfloat16;
}

void measure(const Options& o) {
  const Device device = device_named(o.device);
  check(!o.graph || device.is_cuda(), "--graph: expected a GPU");
  if (o.threads > 0) {
    set_num_threads(o.threads);
  }
  if (o.tf32) {
    set_float32_matmul_precision(MatmulPrecision::tf32);
  }
  if (!o.tune.empty()) {
    set_matmul_tuning(MatmulTuning::timed);
    if (std::filesystem::exists(o.tune)) {
      set_matmul_algorithms(io::read_text(o.tune), device);
    }
  }
  manual_seed(1);
  nn::GPT gpt(o.model);
  if (!o.weights.empty()) {
    gpt.load_state_dict(io::load(o.weights));
  }
  if (!o.save_weights.empty()) {
    io::save(o.save_weights, gpt.state_dict());
  }
  gpt.to(device, dtype_named(o.dtype));
  const Tensor tokens = o.tokens.empty() ? randint(0, o.model.vocab, {4 * o.batch * o.model.context + 1}, int32)
                                         : io::load(o.tokens).at("tokens");
  Batches batches(tokens.to(device), o.batch, o.model.context);

  const Tensors parameters = gpt.parameters();
  optim::AdamW optimizer(
      optim::AdamW::decay_matrices(parameters, {.lr = o.lr, .betas = {0.9, 0.95}, .weight_decay = o.weight_decay}));
  const Tensor inputs = empty({o.batch, o.model.context}, int32, device), targets = empty_like(inputs);
  const Tensor losses = empty({o.warmup + o.steps}, float32, device);
  Tensor loss;
  const auto compute = [&] {
    optimizer.zero_grad();
    loss = gpt.loss(inputs, targets);
    loss.backward();
    optimizer.step({.max_grad_norm = o.clip});
    loss = loss.detach();
  };
  cuda::Graph graph;
  const optim::CosineSchedule warm_up{.peak = o.lr, .floor = o.lr, .warmup = o.lr_warmup, .total = o.lr_warmup};
  std::int64_t steps_done = 0;
  const auto step = [&] {
    optimizer.set_lr(steps_done < o.lr_warmup ? warm_up.lr(steps_done) : o.lr);
    const auto [next_inputs, next_targets] = batches.next();
    copy_into(inputs, next_inputs);
    copy_into(targets, next_targets);
    if (!graph.empty()) {
      graph.replay();
    } else {
      compute();
    }
    copy_into(select(losses, 0, steps_done++), loss);
  };
  for (int i = 0; i < o.warmup; ++i) {
    if (o.graph && i == kPlainSteps) {
      graph = cuda::capture(compute, device);
    }
    step();
  }
  on_device(device, [](auto on) { benchmarks::reset_peak_memory(on); });
  benchmarks::ClockMeter clock(device);
  clock.start();
  const std::vector<double> times =
      on_device(device, [&](auto on) { return benchmarks::step_times_ms(on, o.steps, step); });
  clock.stop();
  const auto peak = on_device(device, [](auto on) { return benchmarks::peak_memory(on); });

  const double ms = benchmarks::median(times);
  const auto count = static_cast<double>(o.batch * o.model.context);
  const auto attention = static_cast<double>(12 * o.model.layers * o.model.width * o.model.context);
  const double tflops = (6.0 * static_cast<double>(product_parameters(gpt)) + attention) * count / ms * 1e-9;
  const std::vector<double> values = to_vector<double>(losses);
  const double mhz = clock.mhz();
  put(fmt::format(
      "{:.2f} ms a step, {:.0f} tokens/s, {:.1f} TFLOP/s ({:.1f} % of {}), peak {:.2f} GiB, loss {:.4f}{}\n", ms,
      count / ms * 1e3, tflops, 100 * tflops / o.peak_tflops, o.peak_tflops, static_cast<double>(peak) / (1 << 30),
      values.back(), mhz > 0 ? fmt::format(", multiprocessors at {:.0f} MHz", mhz) : ""));
  if (!o.tune.empty()) {
    std::ofstream file(o.tune);
    file << matmul_algorithms(device);
    check(file.good(), "cannot write {}", o.tune);
  }
  if (!o.losses.empty()) {
    io::save(o.losses, {{"losses", from_data(values, {static_cast<std::int64_t>(values.size())})}});
  }
  if (!o.json.empty()) {
    std::ofstream file(o.json);
    file << fmt::format(
        R"({{"layers": {}, "heads": {}, "width": {}, "vocab": {}, "batch": {}, "context": {}, "dtype": "{}", )"
        R"("ms": {:.4f}, "tokens_per_s": {:.0f}, "tflops": {:.2f}, "peak_bytes": {}, "loss": {:.6f}, "sm_mhz": {:.0f}}})"
        "\n",
        o.model.layers, o.model.heads, o.model.width, o.model.vocab, o.batch, o.model.context, o.dtype, ms,
        count / ms * 1e3, tflops, peak, values.back(), mhz);
    check(file.good(), "cannot write {}", o.json);
  }
}

}  // namespace

int main(int argc, char** argv) {
  CommandLine command_line("Times training steps of a GPT: forward, loss, backward, clipping, AdamW.", "bench_train");
  Options o;
  std::string model = "gpt2-124m";
  bool bias = true;
  command_line.add_option("--model", model, "The sizes below change it")
      .one_of({"gpt2-124m", "gpt2-350m", "gpt2-774m", "gpt2-1558m", "character"})
      .show_default();
  command_line.add_option("--layers", o.model.layers).at_least(0);
  command_line.add_option("--heads", o.model.heads).at_least(1);
  command_line.add_option("--width", o.model.width).at_least(1);
  command_line.add_option("--vocab", o.model.vocab).at_least(1);
  command_line.add_option("--context", o.model.context).at_least(1);
  command_line.add_option("--batch", o.batch).at_least(1);
  command_line.add_option("--bias", bias, "0: linear layers and norms without");
  command_line.add_option("--dropout", o.model.dropout).between(0, 0.99);
  command_line.add_flag("--checkpoint", o.model.checkpoint, "Compute the inside of each block again in backward");
  command_line.add_option("--device", o.device).one_of({"auto", "cpu", "cuda"}).show_default();
  command_line.add_option("--dtype", o.dtype).one_of({"float32", "float16", "bfloat16"}).show_default();
  command_line.add_flag("--graph", o.graph,
                        "Replay the steps from a CUDA graph, after a few plain ones of the warm-up");
  command_line.add_flag("--tf32", o.tf32, "Multiply float32 on a GPU with fewer digits");
  command_line.add_option("--tune", o.tune,
                          "Time the algorithms of products, but for those in this file, and keep them all in it");
  command_line.add_option("--threads", o.threads, "CPU threads; 0 for as many as there are cores").between(0, 1024);
  command_line.add_option("--lr", o.lr).positive().show_default();
  command_line.add_option("--lr-warmup", o.lr_warmup, "Steps until the learning rate is reached").at_least(0);
  command_line.add_option("--weight-decay", o.weight_decay).between(0, 1).show_default();
  command_line.add_option("--clip", o.clip, "The most that the gradients' norm may be").positive().show_default();
  command_line.add_option("--warmup", o.warmup, "Steps that are not timed").at_least(0).show_default();
  command_line.add_option("--steps", o.steps, "Steps that a median is taken of").at_least(1).show_default();
  command_line.add_option("--peak", o.peak_tflops, "TFLOP/s of the GPU").positive().show_default();
  command_line.add_option("--weights", o.weights, "safetensors file to start from");
  command_line.add_option("--save-weights", o.save_weights, "safetensors file for what it starts from");
  command_line.add_option("--tokens", o.tokens, "safetensors file with int32 \"tokens\" (N); without it, random ones");
  command_line.add_option("--losses", o.losses, "safetensors file for the losses of all steps");
  command_line.add_option("--json", o.json, "File for the result as a line of JSON");

  return command_line.run(argc, argv, [&] {
    const Preset& preset = presets.at(model);
    const auto unless_given = [&](const char* option, auto& value, auto from_preset) {
      if (!command_line.given(option)) {
        value = from_preset;
      }
    };
    unless_given("--layers", o.model.layers, preset.model.layers);
    unless_given("--heads", o.model.heads, preset.model.heads);
    unless_given("--width", o.model.width, preset.model.width);
    unless_given("--vocab", o.model.vocab, preset.model.vocab);
    unless_given("--context", o.model.context, preset.model.context);
    unless_given("--batch", o.batch, preset.batch);
    o.model.bias = command_line.given("--bias") ? bias : preset.model.bias;
    if (o.graph && o.warmup <= kPlainSteps) {
      throw UsageError(fmt::format("--graph: expected --warmup of more than {}, got {}", kPlainSteps, o.warmup));
    }
    measure(o);
  });
}
