// Whole training steps of a GPT made of mica's modules: ms per step, tokens/s, share of the GPU's peak, memory. If
// started as several ranks, gradients are averaged over them.

#include <fmt/core.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "benchmarks/common/clock.h"
#include "benchmarks/common/memory.h"
#include "benchmarks/common/timer.h"
#include "examples/common/command_line.h"
#include <mica/autograd/early_accumulation.h>
#include <mica/autograd/grad_mode.h>
#include <mica/autograd/hooks.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/cuda_graph.h>
#include <mica/core/memory_stats.h>
#include <mica/core/parallel.h>
#include <mica/core/rng.h>
#include <mica/distributed/data_parallel.h>
#include <mica/distributed/sharded_adamw.h>
#include <mica/io/safetensors.h>
#include <mica/io/text.h>
#include <mica/nn/models/gpt.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/view/view.h>
#include <mica/optim/adamw.h>
#include <mica/optim/schedule.h>
#include <mica/profiler/profiler.h>

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
  std::string weights, save_weights, tokens, losses, json, trace;
  bool zero = false, reduce_float32 = false, phases = false;
  double bucket_mib = 25;
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
// Additional steps for --phases and --trace.
constexpr int kPhaseSteps = 7, kTracedSteps = 3;

// The batches of a training run: consecutive windows of T + 1 tokens, wrapping around at the end of the tokens, as in
// train_peers.py. Ranks take batches in turn.
class Batches {
 public:
  Batches(const Tensor& tokens, std::int64_t batch, std::int64_t context, const distributed::Group& group)
      : batch_(batch), at_(group.rank() * batch), step_(group.size() * batch) {
    check(tokens.dim() == 1 && tokens.dtype() == int32, "--tokens: expected int32 of one axis, got {} {}",
          tokens.dtype(), tokens.shape());
    const std::int64_t count = (tokens.numel() - 1) / context;
    check(count >= batch, "--tokens: expected more than {} tokens, a batch, got {}", batch * context, tokens.numel());
    inputs_ = reshape(slice(tokens, 0, 0, count * context), {count, context});
    targets_ = reshape(slice(tokens, 0, 1, count * context + 1), {count, context});
  }

  std::array<Tensor, 2> next() {
    if (at_ + batch_ > inputs_.size(0)) {
      at_ %= step_;
    }
    const std::int64_t begin = at_ + batch_ > inputs_.size(0) ? 0 : at_;
    at_ += step_;
    return {slice(inputs_, 0, begin, begin + batch_), slice(targets_, 0, begin, begin + batch_)};
  }

 private:
  std::int64_t batch_;
  std::int64_t at_, step_;
  Tensor inputs_, targets_;
};

// The number of parameters in matrix products: all but the position embedding. The token embedding counts, since it is
// also the head.
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

// The optimizer: AdamW on one rank, DataParallel with AdamW, or ShardedAdamW.
class Trainer {
 public:
  Trainer(const nn::GPT& gpt, const Options& o, const distributed::Group& group) : clip_(o.clip) {
    const auto groups = optim::AdamW::decay_matrices(
        gpt.parameters(), {.lr = o.lr, .betas = {0.9, 0.95}, .weight_decay = o.weight_decay});
    const auto bucket_bytes = static_cast<std::int64_t>(o.bucket_mib * (1 << 20));
    const std::optional<DType> reduce_dtype = o.reduce_float32 ? std::optional(float32) : std::nullopt;
    if (o.zero) {
      sharded_ = std::make_unique<distributed::ShardedAdamW>(
          groups, group,
          distributed::ShardingOptions{.bucket_bytes = bucket_bytes, .reduce_dtype = reduce_dtype, .overlap = true});
      return;
    }
    parallel_ = std::make_unique<distributed::DataParallel>(
        gpt, group, distributed::DataParallelOptions{.bucket_bytes = bucket_bytes, .reduce_dtype = reduce_dtype});
    whole_ = std::make_unique<optim::AdamW>(groups);
  }

  void zero_grad() { sharded_ ? sharded_->zero_grad() : whole_->zero_grad(); }
  void set_lr(double lr) { sharded_ ? sharded_->set_lr(lr) : whole_->set_lr(lr); }
  void step() {
    if (sharded_) {
      sharded_->step({.max_grad_norm = clip_});
    } else {
      parallel_->wait();
      whole_->step({.max_grad_norm = clip_});
    }
  }

  std::size_t state_bytes() const {
    if (sharded_) {
      return sharded_->state_bytes();
    }
    std::size_t bytes = 0;
    for (const auto& [name, tensor] : whole_->state_dict()) {
      bytes += name.ends_with(".step") ? 0 : tensor.bytes();
    }
    return bytes;
  }

 private:
  double clip_;
  std::unique_ptr<distributed::DataParallel> parallel_;
  std::unique_ptr<optim::AdamW> whole_;
  std::unique_ptr<distributed::ShardedAdamW> sharded_;
};

// For step_model.py: when forward ends, when each parameter's gradient is complete, when backward ends and when the
// step ends, in ms; medians over steps of one rank. Gradients are complete as early as in DataParallel.
std::string measure_phases(const nn::GPT& gpt, Trainer& trainer, Device device, const Tensor& inputs,
                           const Tensor& targets) {
  const Tensors parameters = gpt.parameters();
  const autograd::EarlyAccumulation early(parameters);
  const auto timeline = on_device(device, [](auto on) { return benchmarks::timeline(on); });
  std::vector<std::size_t> order;
  std::vector<autograd::HookHandle> hooks;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    hooks.push_back(parameters[i].register_post_accumulate_grad_hook([&, i](const Tensor&) {
      timeline->mark();
      order.push_back(i);
    }));
  }
  // The host does not wait between the steps, so that the GPU never waits for the host.
  for (int step = 0; step < kPhaseSteps; ++step) {
    order.clear();
    trainer.zero_grad();
    timeline->mark();
    const Tensor loss = gpt.loss(inputs, targets);
    timeline->mark();
    loss.backward();
    timeline->mark();
    trainer.step();
    timeline->mark();
  }
  for (autograd::HookHandle& hook : hooks) {
    hook.remove();
  }
  const std::vector<double> ms = timeline->take_ms();
  const std::size_t marks = ms.size() / kPhaseSteps;
  const auto median_of = [&](std::size_t mark) {
    std::vector<double> values;
    for (std::size_t step = 1; step < kPhaseSteps; ++step) {
      values.push_back(ms[step * marks + mark] - ms[step * marks]);
    }
    return benchmarks::median(values);
  };
  std::string arrivals;
  for (std::size_t k = 0; k < order.size(); ++k) {
    arrivals +=
        fmt::format("{}[{}, {}, {:.4f}]", k == 0 ? "" : ", ", order[k], parameters[order[k]].numel(), median_of(2 + k));
  }
  return fmt::format(R"(, "phases": {{"forward": {:.4f}, "backward": {:.4f}, "step": {:.4f}, "arrivals": [{}]}})",
                     median_of(1), median_of(marks - 2), median_of(marks - 1), arrivals);
}

// Gathers a number from each rank.
std::vector<double> of_all_ranks(const distributed::Group& group, double own, Device device) {
  const Tensor all = empty({group.size()}, float64, device);
  group.all_gather(from_data(std::vector<double>{own}, {1}, device), all);
  return to_vector<double>(all);
}

std::string json_list(const std::vector<double>& values) {
  std::string text;
  for (const double value : values) {
    text += fmt::format("{}{:.8g}", text.empty() ? "" : ", ", value);
  }
  return "[" + text + "]";
}

void measure(const Options& o) {
  const distributed::Group group = distributed::world();
  const Device device = device_named(o.device);
  const DeviceGuard guard(device);
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
  const Tensor tokens = o.tokens.empty()
                            ? randint(0, o.model.vocab, {4 * group.size() * o.batch * o.model.context + 1}, int32)
                            : io::load(o.tokens).at("tokens");
  Batches batches(tokens.to(device), o.batch, o.model.context, group);

  Trainer trainer(gpt, o, group);
  const Tensor inputs = empty({o.batch, o.model.context}, int32, device), targets = empty_like(inputs);
  const Tensor losses = empty({o.warmup + o.steps}, float32, device);
  Tensor loss;
  const auto compute = [&] {
    trainer.zero_grad();
    loss = gpt.loss(inputs, targets);
    loss.backward();
    trainer.step();
    loss = loss.detach();
  };
  cuda::Graph graph;
  const optim::CosineSchedule warm_up{.peak = o.lr, .floor = o.lr, .warmup = o.lr_warmup, .total = o.lr_warmup};
  std::int64_t steps_done = 0;
  const auto step = [&] {
    trainer.set_lr(steps_done < o.lr_warmup ? warm_up.lr(steps_done) : o.lr);
    const auto [next_inputs, next_targets] = batches.next();
    copy_into(inputs, next_inputs);
    copy_into(targets, next_targets);
    if (!graph.empty()) {
      graph.replay();
    } else {
      compute();
    }
    if (steps_done < losses.numel()) {
      copy_into(select(losses, 0, steps_done), loss);
    }
    ++steps_done;
  };
  for (int i = 0; i < o.warmup; ++i) {
    if (o.graph && i == kPlainSteps) {
      graph = cuda::capture(compute, device);
    }
    step();
  }
  on_device(device, [](auto on) { benchmarks::reset_peak_memory(on); });
  reset_peak_memory(device);
  benchmarks::ClockMeter clock(device);
  clock.start();
  const std::vector<double> times =
      on_device(device, [&](auto on) { return benchmarks::step_times_ms(on, o.steps, step); });
  clock.stop();
  const auto peak = on_device(device, [](auto on) { return benchmarks::peak_memory(on); });
  const MemoryStats memory = memory_stats(device);

  // Ranks wait for each other in each step, so rank 0's times represent all ranks.
  const double ms = benchmarks::median(times);
  const double mean_ms = std::accumulate(times.begin(), times.end(), 0.0) / static_cast<double>(times.size());
  const std::vector<double> all_ms = of_all_ranks(group, ms, device);
  const std::vector<double> all_mhz = of_all_ranks(group, clock.mhz(), device);
  const std::vector<double> all_peaks = of_all_ranks(group, static_cast<double>(peak), device);
  const std::vector<double> all_tensor_peaks = of_all_ranks(group, static_cast<double>(memory.peak), device);
  const std::vector<double> all_states = of_all_ranks(group, static_cast<double>(trainer.state_bytes()), device);
  if (!o.trace.empty()) {
    Profiler profiler({.device = device.is_cuda()});
    for (int i = 0; i < kTracedSteps; ++i) {
      step();
      profiler.step();
    }
    profiler.stop();
    if (group.rank() == 0) {
      profiler.write_trace(o.trace);
      put(profiler.table(12));
    }
  }
  const std::string phases = o.phases ? measure_phases(gpt, trainer, device, inputs, targets) : "";
  if (group.rank() != 0) {
    return;
  }
  const auto count = static_cast<double>(o.batch * o.model.context * group.size());
  const auto attention = static_cast<double>(12 * o.model.layers * o.model.width * o.model.context);
  const double tflops =
      (6.0 * static_cast<double>(product_parameters(gpt)) + attention) * count / ms * 1e-9 / group.size();  // per GPU
  const std::vector<double> values = to_vector<double>(losses);
  const double mhz = clock.mhz();
  put(fmt::format(
      "{}{:.2f} ms a step, {:.0f} tokens/s, {:.1f} TFLOP/s ({:.1f} % of {}), peak {:.2f} GiB, loss {:.4f}{}\n",
      group.size() > 1 ? fmt::format("{} ranks, {}: ", group.size(), o.zero ? "zero" : "data parallel") : "", ms,
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
        R"("ms": {:.4f}, "tokens_per_s": {:.0f}, "tflops": {:.2f}, "peak_bytes": {}, "loss": {:.6f}, "sm_mhz": {:.0f}, )"
        R"("mean_ms": {:.4f}, "graph": {}, "ranks": {}, "parallel": "{}", "reduce_float32": {}, "bucket_mib": {:g}, )"
        R"("ms_of_ranks": {}, "mhz_of_ranks": {}, "pool_peak_of_ranks": {}, "tensor_peak_of_ranks": {}, )"
        R"("tensors_bytes": {}, "states_of_ranks": {}{}}})"
        "\n",
        o.model.layers, o.model.heads, o.model.width, o.model.vocab, o.batch, o.model.context, o.dtype, ms,
        count / ms * 1e3, tflops, peak, values.back(), mhz, mean_ms, o.graph, group.size(), o.zero ? "zero" : "data",
        o.reduce_float32, o.bucket_mib, json_list(all_ms), json_list(all_mhz), json_list(all_peaks),
        json_list(all_tensor_peaks), memory.allocated, json_list(all_states), phases);
    check(file.good(), "cannot write {}", o.json);
  }
}

}  // namespace

int main(int argc, char** argv) {
  CommandLine command_line("Times training steps of a GPT: forward, loss, backward, clipping, AdamW.", "bench_train");
  Options o;
  std::string model = "gpt2-124m";
  bool bias = true;
  command_line.add_option("--model", model, "The model; the sizes below override its own")
      .one_of({"gpt2-124m", "gpt2-350m", "gpt2-774m", "gpt2-1558m", "character"})
      .show_default();
  command_line.add_option("--layers", o.model.layers).at_least(0);
  command_line.add_option("--heads", o.model.heads).at_least(1);
  command_line.add_option("--width", o.model.width).at_least(1);
  command_line.add_option("--vocab", o.model.vocab).at_least(1);
  command_line.add_option("--context", o.model.context).at_least(1);
  command_line.add_option("--batch", o.batch).at_least(1);
  command_line.add_option("--bias", bias, "0: linear layers and norms without biases");
  command_line.add_option("--dropout", o.model.dropout).between(0, 0.99);
  command_line.add_flag("--checkpoint", o.model.checkpoint, "Recompute the activations of each block in backward");
  command_line.add_option("--device", o.device).one_of({"auto", "cpu", "cuda"}).show_default();
  command_line.add_option("--dtype", o.dtype).one_of({"float32", "float16", "bfloat16"}).show_default();
  command_line.add_flag("--graph", o.graph,
                        "Replay the steps from a CUDA graph, after a few plain ones of the warm-up");
  command_line.add_flag("--tf32", o.tf32, "Use TF32 for float32 matrix products on a GPU");
  command_line.add_option("--tune", o.tune,
                          "Time the algorithms of products, but for those in this file, and keep them all in it");
  command_line.add_option("--threads", o.threads, "CPU threads; 0 uses every core").between(0, 1024);
  command_line.add_option("--lr", o.lr).positive().show_default();
  command_line.add_option("--lr-warmup", o.lr_warmup, "Warm-up steps of the learning rate").at_least(0);
  command_line.add_option("--weight-decay", o.weight_decay).between(0, 1).show_default();
  command_line.add_option("--clip", o.clip, "Maximum gradient norm").positive().show_default();
  command_line.add_option("--warmup", o.warmup, "Steps before the timed ones").at_least(0).show_default();
  command_line.add_option("--steps", o.steps, "Number of timed steps, of which the median is taken")
      .at_least(1)
      .show_default();
  command_line.add_option("--peak", o.peak_tflops, "Peak TFLOP/s of the GPU").positive().show_default();
  command_line.add_option("--weights", o.weights, "safetensors file with the initial weights");
  command_line.add_option("--save-weights", o.save_weights, "safetensors file to which the initial weights are saved");
  command_line.add_option("--tokens", o.tokens, "safetensors file with int32 \"tokens\" (N); default: random tokens");
  command_line.add_option("--losses", o.losses, "safetensors file for the losses of all steps");
  command_line.add_option("--json", o.json, "File for the result as a line of JSON");
  command_line.add_flag("--zero", o.zero, "With several ranks, use the sharded optimizer instead of DataParallel");
  command_line.add_flag("--reduce-float32", o.reduce_float32, "With several ranks, sum 16-bit gradients in float32");
  command_line.add_option("--bucket-mib", o.bucket_mib, "With several ranks, the size of a bucket")
      .positive()
      .show_default();
  command_line.add_flag("--phases", o.phases,
                        "One rank: --json also gets the moments at which backward has each gradient");
  command_line.add_option("--trace", o.trace, "File for the profiler's trace of a few more steps of rank 0");

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
    if (o.phases && (distributed::world().size() > 1 || o.graph)) {
      throw UsageError("--phases: expected one rank, and no --graph");
    }
    if (o.graph && !o.trace.empty()) {
      throw UsageError("--trace: expected no --graph, whose kernels belong to no op");
    }
    measure(o);
  });
}
