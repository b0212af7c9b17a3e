// Turns lines of text into vectors with an encoder, and writes them as a NumPy file.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "examples/common/command_line.h"
#include "examples/common/ranks.h"
#include <mica/autograd/grad_mode.h>
#include <mica/core/creation.h>
#include <mica/core/parallel.h>
#include <mica/io/file.h>
#include <mica/io/npy.h>
#include <mica/io/pretrained.h>
#include <mica/io/sentence_settings.h>
#include <mica/io/tokenizer.h>
#include <mica/nn/pooling.h>
#include <mica/nn/quantized_linear.h>
#include <mica/ops/distance/distance.h>
#include <mica/ops/join/join.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/view/view.h>
#include <mica/train/progress_bar.h>

namespace {

using mica::Tensor;
using mica::nn::Pooling;

constexpr std::array<std::pair<const char*, Pooling>, 6> kPoolings{{
    {"mean", Pooling::mean},
    {"cls", Pooling::first},
    {"last", Pooling::last},
    {"max", Pooling::max},
    {"mean-sqrt-length", Pooling::mean_sqrt_length},
    {"weighted-mean", Pooling::weighted_mean},
}};

struct Settings {
  std::string model, input = "-", out;
  std::optional<std::string> text, prompt, normalize;
  std::string pooling, device = "auto", dtype, precision = "bfloat16x2";
  std::int64_t batch = 64;
  std::optional<std::int64_t> max_length;
  bool quantize = false;
  int threads = 0;
};

// Reads a file, or stdin for "-", in parts of some thousand lines, so that the memory does not grow with the file.
class LineReader {
 public:
  explicit LineReader(const std::string& path)
      : name_(path == "-" ? "stdin" : path), file_(path == "-" ? stdin : std::fopen(path.c_str(), "rb")) {
    if (file_ == nullptr) {
      report();
    }
  }
  ~LineReader() {
    std::free(line_);
    if (file_ != nullptr && file_ != stdin) {
      std::fclose(file_);
    }
  }
  LineReader(const LineReader&) = delete;
  LineReader& operator=(const LineReader&) = delete;

  // The next lines, without line ends; none at the end of the file.
  std::vector<std::string> next() {
    constexpr std::size_t kLines = 1 << 14, kBytes = std::size_t{1} << 24;
    std::vector<std::string> lines;
    for (std::size_t bytes = 0; lines.size() < kLines && bytes < kBytes;) {
      errno = 0;
      const ssize_t length = getline(&line_, &capacity_, file_);
      if (length < 0) {
        if (std::feof(file_) == 0) {
          report();
        }
        break;
      }
      std::string_view line(line_, static_cast<std::size_t>(length));
      if (line.ends_with('\n')) {
        line.remove_suffix(line.ends_with("\r\n") ? 2 : 1);
      }
      bytes += line.size();
      lines.emplace_back(line);
    }
    return lines;
  }

 private:
  [[noreturn]] void report() const { mica::fail("cannot read {}: {}", name_, mica::io::error_text(errno)); }

  std::string name_;
  std::FILE* file_;
  char* line_ = nullptr;
  std::size_t capacity_ = 0;
};

template <class Model>
constexpr bool is_encoder = requires(const Model& model) {
  model.config.head;  // an nn::EncoderHead, perhaps none
};

// The vectors of texts.
class Embedder {
 public:
  Embedder(mica::io::PretrainedModel& model, mica::io::Tokenizer tokenizer, const mica::io::SentenceSettings& sentence,
           const Settings& settings, mica::Device device)
      : model_(model),
        tokenizer_(std::move(tokenizer)),
        sentence_(sentence),
        batch_(static_cast<std::size_t>(settings.batch)),
        device_(device) {
    std::visit(
        [&]<class Model>(const Model& m) {
          if constexpr (is_encoder<Model>) {
            width_ = m.config.width * static_cast<std::int64_t>(sentence.pooling.size());
            max_length_ = std::min(sentence.max_length.value_or(m.config.context), m.config.context);
            mica::check(!settings.max_length || *settings.max_length <= m.config.context,
                        "--max-length: expected at most {}, the model's context, got {}", m.config.context,
                        settings.max_length.value_or(0));
          } else {
            mica::fail("{} is not an encoder", settings.model);
          }
        },
        model);
    max_length_ = settings.max_length.value_or(max_length_);
  }

  std::int64_t width() const { return width_; }

  // A row for each text, in their order.
  std::vector<float> operator()(std::span<const std::string> texts) const {
    const auto tokens = tokenizer_.encode_batch(texts, {.max_length = max_length_});
    // Texts of the same length share a batch, so that there is no padding, which takes time, and no mask, with which
    // attention is slower. Only a batch that would be too small to be fast gets shorter texts, too.
    constexpr std::size_t kLeastTokens = 256;
    std::vector<std::size_t> order(texts.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return tokens[a].size() > tokens[b].size(); });
    std::vector<float> result(texts.size() * static_cast<std::size_t>(width_));
    mica::ProgressTask progress("embedding", static_cast<std::int64_t>(texts.size()));
    for (std::size_t first = 0, last = 0; first < order.size(); first = last) {
      const std::size_t length = tokens[order[first]].size();
      while (last < order.size() && last - first < batch_ &&
             (tokens[order[last]].size() == length || (last - first) * length < kLeastTokens)) {
        ++last;
      }
      const std::span<const std::size_t> some = std::span(order).subspan(first, last - first);
      const std::vector<float> rows = to_vector<float>(vectors(tokens, some));
      for (std::size_t i = 0; i < some.size(); ++i) {
        std::copy_n(rows.begin() + static_cast<std::ptrdiff_t>(i * width_), width_,
                    result.begin() + static_cast<std::ptrdiff_t>(some[i] * width_));
      }
      progress.advance(static_cast<std::int64_t>(some.size()));
    }
    return result;
  }

 private:
  Tensor vectors(const std::vector<std::vector<std::int64_t>>& tokens, std::span<const std::size_t> rows) const {
    const std::size_t length = std::max<std::size_t>(tokens[rows.front()].size(), 1);
    std::vector<std::int64_t> padded(rows.size() * length, tokenizer_.pad_token().value_or(0));
    std::vector<std::int64_t> is_text(rows.size() * length, 0);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const std::vector<std::int64_t>& own = tokens[rows[i]];
      std::copy(own.begin(), own.end(), padded.begin() + static_cast<std::ptrdiff_t>(i * length));
      std::fill_n(is_text.begin() + static_cast<std::ptrdiff_t>(i * length), own.size(), 1);
    }
    const mica::Shape shape{static_cast<std::int64_t>(rows.size()), static_cast<std::int64_t>(length)};
    const Tensor batch = mica::from_data<std::int64_t>(padded, shape, device_);
    const bool is_padded = tokens[rows.back()].size() < length;
    const Tensor visible = is_padded ? mica::from_data<std::int64_t>(is_text, shape, device_) : Tensor{};
    const Tensor features = std::visit(
        [&]<class Model>(const Model& model) {
          if constexpr (is_encoder<Model>) {
            return model(batch, visible).to(mica::float32);
          } else {
            return Tensor{};
          }
        },
        model_);
    mica::Tensors parts;
    for (const Pooling pooling : sentence_.pooling) {
      parts.push_back(mica::nn::pool_tokens(features, visible, pooling));
    }
    const Tensor result = parts.size() == 1 ? parts[0] : mica::cat(parts, 1);
    return sentence_.normalize ? mica::normalize(result) : result;
  }

  const mica::io::PretrainedModel& model_;
  mica::io::Tokenizer tokenizer_;
  const mica::io::SentenceSettings& sentence_;
  std::size_t batch_;
  mica::Device device_;
  std::int64_t width_ = 0, max_length_ = 0;
};

// The text before each line: that of --prompt, else the model's default.
std::string prompt_of(const Settings& settings, const mica::io::SentenceSettings& sentence) {
  const std::optional<std::string>& name = settings.prompt ? settings.prompt : sentence.default_prompt;
  if (!name || name->empty()) {
    return "";
  }
  const auto found = sentence.prompts.find(*name);
  if (found == sentence.prompts.end()) {
    std::string names;
    for (const auto& [own, text] : sentence.prompts) {
      names += (names.empty() ? "" : ", ") + own;
    }
    throw UsageError(fmt::format("--prompt: the model has {}, got {}", names.empty() ? "no prompts" : names, *name));
  }
  return found->second;
}

mica::MatmulPrecision precision_named(const std::string& name) {
  return name == "float32" ? mica::MatmulPrecision::float32
         : name == "tf32"  ? mica::MatmulPrecision::tf32
                           : mica::MatmulPrecision::bfloat16x2;
}

void embed(const Settings& settings) {
  mica::set_float32_matmul_precision(precision_named(settings.precision));
  const mica::Device device = device_named(settings.device);
  mica::io::check_folder(settings.model, "load");
  mica::io::SentenceSettings sentence = mica::io::load_sentence_settings(settings.model);
  for (const auto& [name, pooling] : kPoolings) {
    if (settings.pooling == name) {
      sentence.pooling = {pooling};
    }
  }
  if (settings.normalize) {
    sentence.normalize = *settings.normalize == "yes";
  }
  const std::string prompt = prompt_of(settings, sentence);
  mica::check(mica::io::Tokenizer::is_in(sentence.model), "{} has no tokenizer", sentence.model.string());
  mica::io::Tokenizer tokenizer = mica::io::Tokenizer::load(sentence.model);
  std::optional<mica::DType> dtype;
  if (!settings.dtype.empty()) {
    dtype = dtype_named(settings.dtype, device);
  }
  mica::io::PretrainedModel model = mica::io::load_pretrained(sentence.model, {.device = device, .dtype = dtype});
  if (settings.quantize) {
    std::visit([](auto& m) { mica::nn::quantize(m, {.bits = 8}); }, model);
  }
  const Embedder embedder(model, std::move(tokenizer), sentence, settings, device);

  std::optional<LineReader> reader;
  if (!settings.text) {
    reader.emplace(settings.input);
  }
  mica::io::NpyWriter file(settings.out, embedder.width());
  const auto add = [&](std::vector<std::string> lines) {
    for (std::string& line : lines) {
      line.insert(0, prompt);
    }
    file.append(embedder(lines));
  };
  if (settings.text) {
    add({*settings.text});
  } else {
    for (std::vector<std::string> lines = reader->next(); !lines.empty(); lines = reader->next()) {
      add(std::move(lines));
    }
  }
  file.commit();
  put(fmt::format("{} vectors of {} elements in {}\n", file.rows(), embedder.width(), settings.out));
}

}  // namespace

int main(int argc, char** argv) {
  CommandLine command_line(
      "Turns lines of text into vectors with an encoder, such as a model of sentence-transformers, and writes them as "
      "a NumPy file.",
      "embed");
  Settings settings;
  std::vector<std::string> poolings;
  for (const auto& [name, pooling] : kPoolings) {
    poolings.emplace_back(name);
  }
  command_line.add_option("--model", settings.model, "Folder with config.json, a tokenizer and perhaps modules.json")
      .required();
  command_line.add_option("--input", settings.input, "File of texts, one a line; -: stdin").show_default();
  command_line.add_option("--text", settings.text, "A single text instead of a file");
  command_line.add_option("--out", settings.out, "The .npy file: float32, a row for each line, in their order")
      .required();
  command_line.add_option("--prompt", settings.prompt,
                          "Name of one of the model's prompts, which is put before each text (default: the model's)");
  command_line
      .add_option("--pooling", settings.pooling, "How a text's tokens become one vector (default: as the model says)")
      .one_of(poolings);
  command_line
      .add_option("--normalize", settings.normalize, "yes or no: make vectors of length 1 (default: as the model says)")
      .one_of({"yes", "no"});
  command_line.add_option("--max-length", settings.max_length,
                          "Tokens of a text, special ones included; the rest is cut off (default: as the model says)");
  command_line.add_option("--batch", settings.batch, "Texts that are computed together")
      .between(1, 65536)
      .show_default();
  command_line.add_option("--device", settings.device, "auto, cpu or cuda")
      .one_of({"auto", "cpu", "cuda"})
      .show_default();
  command_line.add_option("--dtype", settings.dtype, "float32, bfloat16 or float16 (default: as in the model's files)")
      .one_of({"float32", "bfloat16", "float16"});
  command_line
      .add_option("--precision", settings.precision,
                  "Of products of float32: bfloat16x2, 16 bits but only on CPUs with AMX, where it is twice as fast; "
                  "float32; tf32, 10 bits but only on GPUs")
      .one_of({"float32", "tf32", "bfloat16x2"})
      .show_default();
  command_line.add_flag("--quantize", settings.quantize, "Quantize the linear layers' weights to 8 bits when loading");
  command_line.add_option("--threads", settings.threads, "CPU threads; 0 uses every core").between(0, 1024);

  return command_line.run(argc, argv, [&] {
    refuse_ranks("embed");
    if (settings.text && command_line.given("--input")) {
      throw UsageError("--text and --input exclude each other");
    }
    const mica::train::ProgressBar progress;
    const mica::autograd::InferenceMode no_gradients;
    if (settings.threads > 0) {
      mica::set_num_threads(settings.threads);
    }
    embed(settings);
  });
}
