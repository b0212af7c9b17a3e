// The loss of a Llama with weights of few bits, for the formats that mica quantizes to and for those of GGUF files.
// "KL" is the divergence of the predicted distributions from those of float32, which varies less with the text and the
// rounding than the loss does. "steps" is the loss of a decoder that reads one token at a time, and "rounded" the same
// with activations of 8 bits.

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "examples/common/command_line.h"
#include <mica/autograd/grad_mode.h>
#include <mica/core/creation.h>
#include <mica/core/rng.h>
#include <mica/infer/llama_decoder.h>
#include <mica/io/file.h>
#include <mica/io/pretrained.h>
#include <mica/nn/clone.h>
#include <mica/nn/lora.h>
#include <mica/nn/quantized_linear.h>
#include <mica/ops/cross_entropy/cross_entropy.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/index/index.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/softmax/softmax.h>
#include <mica/ops/view/view.h>

using namespace mica;

namespace {

/// Adds noise of a step of 4 bits in groups of 32, from −½ to ½. A file of 4 bits has weights on a grid, on which
/// rounding again to the same groups would cost nothing.
void add_noise(const Tensor& weight) {
  const Tensor groups = reshape(weight.detach(), {weight.numel() / 32, 32});
  const Tensor step = (amax(groups, {1}, true) - amin(groups, {1}, true)) / 15;
  weight.set_data(reshape(groups + (rand(groups.shape()) - 0.5) * step, weight.shape()));
}

/// Bits a weight of the linear layers, with scales and zeros.
double bits_of(nn::Llama& model) {
  double bits = 0, weights = 0;
  for (const auto& [name, layer] : nn::linear_layers(model)) {
    weights += static_cast<double>(layer->in_features() * layer->out_features());
    if (!layer->is_quantized()) {
      bits += 8.0 * static_cast<double>(layer->weight.bytes());
      continue;
    }
    for (const auto& [part_name, part] : quantized_parts()) {
      const Tensor& tensor = layer->quantized.*part;
      // Scales of float32 are counted as 16 bits, which they have in a model of 16 bits.
      bits += !tensor.defined() ? 0.0 : 8.0 * static_cast<double>(tensor.bytes()) / (tensor.dtype() == float32 ? 2 : 1);
    }
  }
  return bits / weights;
}

struct Settings {
  std::string model, data, only;
  std::int64_t tokens = 768, skip = 0, seeds = 1, steps = 0;
  bool noise = false;
};

double loss_of_steps(const nn::Llama& model, const Tensor& tokens, const Tensor& targets, std::int64_t count,
                     bool rounds) {
  infer::LlamaDecoder decoder(model, {.round_activations = rounds});
  double sum = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const Tensor token = slice(tokens, 1, i, i + 1);
    const Tensor logits = i == 0 ? decoder.prefill(token) : decoder.step(select(token, 1, 0));
    sum += cross_entropy(logits, select(slice(targets, 1, i, i + 1), 1, 0)).item();
  }
  return sum / static_cast<double>(count);
}

/// Sums of the results of one format over the seeds.
struct Result {
  double bits = 0, loss = 0, square = 0, divergence = 0, steps = 0, rounded = 0;
};

void run(const Settings& s) {
  const autograd::NoGrad no_grad;
  const io::Tokenizer tokenizer = io::Tokenizer::load(s.model);
  const io::MappedFile text(s.data);
  const auto size = std::min<std::size_t>(text.bytes().size() - static_cast<std::size_t>(s.skip),
                                          static_cast<std::size_t>(8 * (s.tokens + 1)));
  const std::vector<std::int64_t> ids =
      tokenizer.encode(std::string(reinterpret_cast<const char*>(text.bytes().data()) + s.skip, size));
  check(static_cast<std::int64_t>(ids.size()) > s.tokens, "bench_quantization: expected more text");
  const Tensor all = from_data(std::vector<std::int64_t>(ids.begin(), ids.begin() + s.tokens + 1), {1, s.tokens + 1});
  const Tensor tokens = slice(all, 1, 0, s.tokens), targets = slice(all, 1, 1, s.tokens + 1);

  std::vector<std::pair<std::string, Result>> results;
  Tensor exact_predictions;  // log probabilities (tokens, vocab) of float32
  const auto is_wanted = [&](const std::string& name) { return name.find(s.only) != std::string::npos; };
  const auto add = [&](const std::string& name, nn::Llama& model) {
    auto at = std::find_if(results.begin(), results.end(), [&](const auto& each) { return each.first == name; });
    if (at == results.end()) {
      at = results.insert(at, {name, {}});
    }
    const Tensor predictions = log_softmax(select(model(tokens), 0, 0), 1);
    const double loss = -mean(gather(predictions, 1, reshape(targets, {s.tokens, 1}))).item();
    if (name == "float32") {
      exact_predictions = predictions;
    }
    at->second.divergence +=
        sum(exp(exact_predictions) * (exact_predictions - predictions)).item() / static_cast<double>(s.tokens);
    at->second.bits = bits_of(model);
    at->second.loss += loss;
    at->second.square += loss * loss;
    if (s.steps > 0 && name != "float32") {
      at->second.steps += loss_of_steps(model, tokens, targets, s.steps, false);
      at->second.rounded += loss_of_steps(model, tokens, targets, s.steps, true);
    }
    fmt::print(stderr, "{:32} {:.4f}\n", name, loss);
  };
  const std::filesystem::path file = std::filesystem::temp_directory_path() / "mica_bench_quantization.gguf";
  for (std::int64_t seed = 1; seed <= s.seeds; ++seed) {
    manual_seed(static_cast<std::uint64_t>(seed));
    nn::Llama exact = io::load_pretrained<nn::Llama>(s.model, {.dtype = float32, .packed = false});
    for (const auto& [name, parameter] : exact.named_parameters()) {
      if (s.noise && parameter.dim() == 2) {
        add_noise(parameter);
      }
    }
    add("float32", exact);
    using Scheme = QuantizationScheme;
    const auto add_quantized = [&](const std::string& name, const auto& quantize) {
      if (is_wanted(name)) {
        nn::Llama model = nn::clone(exact);
        quantize(model);
        add(name, model);
      }
    };
    add_quantized("4 bits, on the CPU", [](nn::Llama& model) { nn::quantize(model, 4); });
    for (const auto& [name, options, head] : {std::tuple{"4 bits, on a GPU", QuantizeOptions{}, 8},
                                              {"head in 4", {}, 4},
                                              {"groups of 32", {.group_size = 32}, 8},
                                              {"zero rounded", {.scheme = Scheme::asymmetric}, 8},
                                              {"8 bits", {.bits = 8}, 8}}) {
      add_quantized(name,
                    [&, options = options, head = head](nn::Llama& model) { nn::quantize(model, options, head); });
    }
    for (const auto& [name, type, head] :
         {std::tuple{"GGUF Q4_0, head in Q8_0", io::GgufType::q4_0, io::GgufType::q8_0},
          {"GGUF Q8_0", io::GgufType::q8_0, io::GgufType::q8_0}}) {
      if (!is_wanted(name)) {
        continue;
      }
      const std::map<std::string, io::GgufType> types{{"token_embd.weight", head}, {"output.weight", head}};
      io::save_gguf(file, exact, {}, {.matrices = type, .vectors = io::GgufType::f32, .types = types});
      nn::Llama model = io::load_pretrained<nn::Llama>(file, {.dtype = float32});
      add(name, model);
    }
  }
  std::filesystem::remove(file);
  fmt::print("{:32} {:>6} {:>8} {:>10} {:>8}{}\n", "", "bits", "loss", "deviation", "KL",
             s.steps > 0 ? "    steps  rounded" : "");
  const auto count = static_cast<double>(s.seeds);
  for (const auto& [name, r] : results) {
    const double mean = r.loss / count;
    fmt::print("{:32} {:6.2f} {:8.4f} {:10.4f} {:8.4f}", name, r.bits, mean,
               std::sqrt(std::max(0.0, r.square / count - mean * mean)), r.divergence / count);
    fmt::print("{}\n", s.steps > 0 ? fmt::format(" {:8.4f} {:8.4f}", r.steps / count, r.rounded / count) : "");
  }
}

}  // namespace

int main(int argc, char** argv) {
  CommandLine command_line("Prints the loss of a Llama with weights of few bits.", "bench_quantization");
  Settings s;
  command_line.add_option("--model", s.model, "Folder or GGUF file with the model and its tokenizer").required();
  command_line.add_option("--data", s.data, "Text").required();
  command_line.add_option("--tokens", s.tokens, "Number of tokens of the text").at_least(1);
  command_line.add_option("--skip", s.skip, "Bytes of the text to skip").at_least(0);
  command_line.add_option("--seeds", s.seeds, "Number of times, with other noise; results are means").at_least(1);
  command_line.add_option("--steps", s.steps, "Number of tokens that are also read one at a time").at_least(0);
  command_line.add_option("--only", s.only, "Only formats whose name contains this");
  command_line.add_flag("--noise", s.noise, "Take the weights of a file of 4 bits off their grid");
  return command_line.run(argc, argv, [&] { run(s); });
}
