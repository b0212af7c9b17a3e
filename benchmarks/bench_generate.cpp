// Text generation by a Llama with random weights or those of a file: the time of the prompt and of each step after it,
// and the rate at which steps read the weights.

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "benchmarks/common/timer.h"
#include "examples/common/command_line.h"
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/parallel.h>
#include <mica/core/rng.h>
#include <mica/infer/generate.h>
#include <mica/io/pretrained.h>
#include <mica/nn/quantized_linear.h>

using namespace mica;

namespace {

using Clock = std::chrono::steady_clock;
using Tokens = std::vector<std::int64_t>;

struct Options {
  // Half a billion parameters, with the architecture of Llama 3.
  nn::LlamaConfig model{.vocab = 128256,
                        .layers = 24,
                        .heads = 16,
                        .key_heads = 4,
                        .head_width = 64,
                        .width = 1024,
                        .hidden = 4096,
                        .rotary = {.theta = 500000}};
  std::string device = "auto", dtype = "bfloat16", file, json;
  std::int64_t batch = 1, prompt = 16, tokens = 256, prefill = 2048;
  int bits = 16, threads = 0, repeats = 3;
  bool no_graph = false, exact = false;
  double temperature = 0, peak_tflops = 989;
};

DType dtype_named(const std::string& name) {
  return name == "float32" ? float32 : name == "float16" ? float16 : bfloat16;
}

// The bytes of weights that a step reads: all but the embedding, from which it reads only one row, unless the embedding
// is also the head.
double bytes_of_step(const nn::Llama& llama) {
  double bytes = 0;
  for (const auto& list : {llama.named_parameters(), llama.named_buffers()}) {
    for (const auto& [name, tensor] : list) {
      const bool counts = name != "model.embed_tokens.weight" || !llama.lm_head.is_quantized();
      bytes += counts ? static_cast<double>(tensor.numel()) * static_cast<double>(size_of(tensor.dtype())) : 0;
    }
  }
  return bytes;
}

struct StepTime {  // microseconds
  double mean;
  double least;  // minimum over steps, for machines with other load
  double cpu;    // mean time on the CPU, of all threads
};

// Times steps from the end of the first third to the last token, which excludes the prompt, the capture, and everything
// that is done only once.
StepTime step_time(nn::Llama& llama, const Options& o) {
  const std::vector<Tokens> prompts(static_cast<std::size_t>(o.batch), Tokens(static_cast<std::size_t>(o.prompt), 5));
  const std::int64_t skipped = o.tokens / 3;
  std::int64_t seen = 0;
  Clock::time_point begin, end;
  std::clock_t cpu_begin = 0, cpu_end = 0;
  double least = std::numeric_limits<double>::infinity();
  const auto us_between = [](Clock::time_point from, Clock::time_point to) {
    return std::chrono::duration<double, std::micro>(to - from).count();
  };
  infer::generate(llama, prompts,
                  {.count = o.tokens,
                   .sampling = {.temperature = o.temperature},
                   .on_token =
                       [&](std::size_t prompt, std::int64_t) {
                         if (prompt > 0) {
                           return true;
                         }
                         const Clock::time_point now = Clock::now();
                         ++seen;
                         if (seen == skipped) {
                           begin = now;
                           cpu_begin = std::clock();
                         } else if (seen > skipped) {
                           least = std::min(least, us_between(end, now));
                         }
                         end = now;
                         cpu_end = std::clock();
                         return true;
                       },
                   .round_activations = !o.exact,
                   .cuda_graph = !o.no_graph});
  const auto timed = static_cast<double>(o.tokens - skipped);
  return {.mean = us_between(begin, end) / timed,
          .least = least,
          .cpu = 1e6 * static_cast<double>(cpu_end - cpu_begin) / CLOCKS_PER_SEC / timed};
}

struct PromptTimes {
  std::vector<double> wall;  // milliseconds
  double cpu;                // mean
};

PromptTimes prefill_ms(const nn::Llama& llama, const Options& o, Device device) {
  const Tensor tokens = randint(0, o.model.vocab, {o.batch, o.prefill}, int64).to(device);
  infer::LlamaDecoder decoder(llama, {.batch = o.batch});
  const auto work = [&] { decoder.prefill(tokens); };
  const int count = device.is_cuda() ? 10 : 3;
  std::clock_t cpu = 0;
  const auto timed_work = [&] {
    const std::clock_t begin = std::clock();
    work();
    cpu = std::clock() - begin;  // of the last one
  };
  PromptTimes times{};
  times.wall = on_device(device, [&](auto on) { return benchmarks::times_us(on, count, timed_work); });
  times.cpu = 1e3 * static_cast<double>(cpu) / CLOCKS_PER_SEC;
  for (double& time : times.wall) {
    time /= 1e3;
  }
  return times;
}

// GB/s of a copy of 512 MiB: bytes read and written.
double copy_rate(Device device) {
  const Tensor from = zeros({std::int64_t{1} << 29}, uint8, device), to = empty_like(from);
  const double us = benchmarks::median_us(device, device.is_cuda() ? 20 : 3, [&] { copy_into(to, from); });
  return 2.0 * static_cast<double>(from.numel()) / us / 1e3;
}

nn::Llama model_of(const Options& o, Device device) {
  if (!o.file.empty()) {
    return io::load_pretrained<nn::Llama>(o.file, {.device = device, .dtype = dtype_named(o.dtype)});
  }
  nn::Llama llama(o.model);
  llama.to(device, dtype_named(o.dtype));
  return llama;
}

void measure(Options o) {
  const Device device = device_named(o.device);
  if (o.threads > 0) {
    set_num_threads(o.threads);
  }
  manual_seed(1);
  nn::Llama llama = model_of(o, device);
  llama.eval();
  o.model = llama.config;
  // Products use each weight for each token; attention uses half of the keys on average.
  const double products = bytes_of_step(llama) / static_cast<double>(size_of(dtype_named(o.dtype))) -
                          static_cast<double>(o.model.vocab * o.model.width);
  const auto length = static_cast<double>(o.prefill);
  const double flops =
      static_cast<double>(o.batch) *
      (2 * products * length +
       2.0 * static_cast<double>(o.model.layers * o.model.heads * o.model.head_width) * length * length);
  if (o.bits != 16 && o.file.empty()) {
    nn::quantize(llama, {.bits = o.bits});
  }
  const PromptTimes prefills = o.prefill > 0 ? prefill_ms(llama, o, device) : PromptTimes{{0}, 0};
  const double prefill = benchmarks::median(prefills.wall);
  const double least_prefill = *std::min_element(prefills.wall.begin(), prefills.wall.end());
  std::vector<double> steps;
  double least = std::numeric_limits<double>::infinity(), cpu = least;
  for (int i = 0; i < o.repeats; ++i) {
    const StepTime time = step_time(llama, o);
    steps.push_back(time.mean);
    least = std::min(least, time.least);
    cpu = std::min(cpu, time.cpu);
  }
  const double us = benchmarks::median(steps);
  const double rate = bytes_of_step(llama) / us / 1e3;
  const double copy = copy_rate(device);
  const double tflops = prefill > 0 ? flops / prefill / 1e9 : 0;
  put(
      fmt::format("{} bits, batch {}: {:.1f} us a step (least {:.1f}), {:.0f} tokens/s, weights at {:.0f} GB/s ({:.2f} "
                  "of a copy's {:.0f}); "
                  "prompt of {}: {:.2f} ms (least {:.2f}), {:.1f} TFLOP/s ({:.1f} % of {})\n",
                  o.bits, o.batch, us, least, static_cast<double>(o.batch) / us * 1e6, rate, rate / copy, copy,
                  o.prefill, prefill, least_prefill, tflops, 100 * tflops / o.peak_tflops, o.peak_tflops));
  if (!o.json.empty()) {
    std::ofstream file(o.json, std::ios::app);
    file << fmt::format(
        R"({{"who": "mica", "device": "{}", "dtype": "{}", "bits": {}, "batch": {}, "step_us": {:.2f}, "least_us": {:.2f}, "cpu_us": {:.2f}, )"
        R"("weights_gb_s": {:.0f}, "copy_gb_s": {:.0f}, "prompt": {}, "prefill_ms": {:.3f}, )"
        R"("least_prefill_ms": {:.3f}, "cpu_prefill_ms": {:.3f}, "prefill_tflops": {:.1f}}})"
        "\n",
        device, o.dtype, o.bits, o.batch, us, least, cpu, rate, copy, o.prefill, prefill, least_prefill, prefills.cpu,
        tflops);
    check(file.good(), "cannot write {}", o.json);
  }
}

}  // namespace

int main(int argc, char** argv) {
  CommandLine command_line("Times text generation by a Llama.", "bench_generate");
  Options o;
  command_line.add_option("--model", o.file, "GGUF file or folder; default: random weights of the shape below");
  command_line.add_option("--layers", o.model.layers).at_least(1).show_default();
  command_line.add_option("--heads", o.model.heads).at_least(1).show_default();
  command_line.add_option("--key-heads", o.model.key_heads).at_least(1).show_default();
  command_line.add_option("--head-width", o.model.head_width).at_least(2).show_default();
  command_line.add_option("--width", o.model.width).at_least(1).show_default();
  command_line.add_option("--hidden", o.model.hidden).at_least(1).show_default();
  command_line.add_option("--vocab", o.model.vocab).at_least(16).show_default();
  command_line.add_option("--batch", o.batch, "Sequences").at_least(1).show_default();
  command_line.add_option("--prompt", o.prompt, "Tokens of the prompt before the steps").at_least(1).show_default();
  command_line.add_option("--tokens", o.tokens, "Number of steps; the first third is not timed")
      .at_least(3)
      .show_default();
  command_line.add_option("--prefill", o.prefill, "Tokens of the timed prompt; 0: none").at_least(0).show_default();
  command_line.add_option("--bits", o.bits, "Bits of the linear layers' weights: 16 (not quantized), 8 or 4")
      .between(4, 16)
      .show_default();
  command_line.add_option("--temperature", o.temperature).at_least(0).show_default();
  command_line.add_option("--device", o.device).one_of({"auto", "cpu", "cuda"}).show_default();
  command_line.add_option("--dtype", o.dtype).one_of({"float32", "float16", "bfloat16"}).show_default();
  command_line.add_flag("--no-graph", o.no_graph, "Launch the kernels of a step one by one");
  command_line.add_flag("--exact", o.exact, "On the CPU, do not round activations to 8 bits");
  command_line.add_option("--threads", o.threads, "CPU threads; 0 uses every core").between(0, 1024);
  command_line.add_option("--repeats", o.repeats, "Number of texts per median").at_least(1).show_default();
  command_line.add_option("--peak", o.peak_tflops, "Peak TFLOP/s of the GPU").positive().show_default();
  command_line.add_option("--json", o.json, "File to which the result is appended as a line of JSON");
  return command_line.run(argc, argv, [&] { measure(o); });
}
