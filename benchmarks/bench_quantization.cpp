// The loss of a Llama with weights of few bits, for the formats that mica quantizes to and for those of GGUF files.

#include <fmt/core.h>

#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "examples/common/command_line.h"
#include <mica/autograd/grad_mode.h>
#include <mica/core/creation.h>
#include <mica/core/rng.h>
#include <mica/io/file.h>
#include <mica/io/pretrained.h>
#include <mica/nn/lora.h>
#include <mica/nn/quantized_linear.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/reduce/reduce.h>
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
  std::string model, data;
  std::int64_t tokens = 768, skip = 0;
  bool noise = false;
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

  const auto loaded = [&] {
    nn::Llama model = io::load_pretrained<nn::Llama>(s.model, {.dtype = float32, .packed = false});
    manual_seed(1);
    for (const auto& [name, parameter] : model.named_parameters()) {
      if (s.noise && parameter.dim() == 2) {
        add_noise(parameter);
      }
    }
    return model;
  };
  const auto report = [&](const std::string& name, nn::Llama& model) {
    fmt::print("{:44} {:7.4f} {:6.2f}\n", name, model.loss(tokens, targets).item(), bits_of(model));
    std::fflush(stdout);
  };
  fmt::print("{:44} {:>7} {:>6}\n", "", "loss", "bits");
  nn::Llama exact = loaded();
  report("float32", exact);
  using Scheme = QuantizationScheme;
  for (const auto& [name, options, head] : {std::tuple{"4 bits", QuantizeOptions{}, 8},
                                            {"4 bits, groups of 32", {.group_size = 32}, 8},
                                            {"4 bits, head in 4", {}, 4},
                                            {"4 bits, zero rounded", {.scheme = Scheme::asymmetric}, 8},
                                            {"4 bits, zero rounded, head in 4", {.scheme = Scheme::asymmetric}, 4},
                                            {"8 bits", {.bits = 8}, 8}}) {
    nn::Llama model = loaded();
    nn::quantize(model, options, head);
    report(name, model);
  }
  const std::filesystem::path file = std::filesystem::temp_directory_path() / "mica_bench_quantization.gguf";
  for (const auto& [name, type, head] : {std::tuple{"GGUF Q4_0, head in Q8_0", io::GgufType::q4_0, io::GgufType::q8_0},
                                         {"GGUF Q4_K, head in Q6_K", io::GgufType::q4_k, io::GgufType::q6_k}}) {
    const std::map<std::string, io::GgufType> types{{"token_embd.weight", head}, {"output.weight", head}};
    io::save_gguf(file, exact, {}, {.matrices = type, .vectors = io::GgufType::f32, .types = types});
    nn::Llama model = io::load_pretrained<nn::Llama>(file, {.dtype = float32});
    report(name, model);
  }
  std::filesystem::remove(file);
}

}  // namespace

int main(int argc, char** argv) {
  CommandLine command_line("Prints the loss of a Llama with weights of few bits.", "bench_quantization");
  Settings s;
  command_line.add_option("--model", s.model, "Folder or GGUF file with the model and its tokenizer").required();
  command_line.add_option("--data", s.data, "Text").required();
  command_line.add_option("--tokens", s.tokens, "Number of tokens of the text").at_least(1);
  command_line.add_option("--skip", s.skip, "Bytes of the text to skip").at_least(0);
  command_line.add_flag("--noise", s.noise, "Take the weights of a file of 4 bits off their grid");
  return command_line.run(argc, argv, [&] { run(s); });
}
