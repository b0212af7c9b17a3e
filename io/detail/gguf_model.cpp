#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numbers>
#include <span>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include <mica/core/check.h>
#include <mica/core/creation.h>
#include <mica/core/progress.h>
#include <mica/io/detail/gguf_entries.h>
#include <mica/io/detail/gguf_header.h>
#include <mica/io/detail/gguf_model.h>
#include <mica/io/json.h>
#include <mica/io/pretrained_config.h>
#include <mica/ops/view/view.h>

// Names: gguf-py/gguf/constants.py and tensor_mapping.py of https://github.com/ggml-org/llama.cpp. The program that
// converts to GGUF: convert_hf_to_gguf.py there.

namespace mica::io::detail {

namespace {

constexpr const char* kHead = "output.weight";
constexpr const char* kEmbedding = "token_embd.weight";
// The divisors of the rotary frequencies: llama.cpp's metadata cannot describe Llama 3.1's scaling.
constexpr const char* kFrequencyDivisors = "rope_freqs.weight";
// Of longrope. llama.cpp chooses between them by the size of its context, not by the length of the text.
constexpr std::array<const char*, 2> kLongropeFactors{"rope_factors_long.weight", "rope_factors_short.weight"};

using Names = std::pair<std::string_view, std::string_view>;  // the name in a GGUF file, and Hugging Face's

/// The names of a family's tensors. Names in blocks are without the block's prefix, and without ".weight" or ".bias".
struct Naming {
  Names block;
  std::span<const Names> outside, inside;
};

constexpr std::array<Names, 3> kLlamaOutside{{
    {kEmbedding, "model.embed_tokens.weight"},
    {"output_norm.weight", "model.norm.weight"},
    {kHead, "lm_head.weight"},
}};
constexpr std::array<Names, 11> kLlamaInside{{
    {"attn_norm", "input_layernorm"},
    {"attn_q", "self_attn.q_proj"},
    {"attn_k", "self_attn.k_proj"},
    {"attn_v", "self_attn.v_proj"},
    {"attn_output", "self_attn.o_proj"},
    {"attn_q_norm", "self_attn.q_norm"},
    {"attn_k_norm", "self_attn.k_norm"},
    {"ffn_norm", "post_attention_layernorm"},
    {"ffn_gate", "mlp.gate_proj"},
    {"ffn_up", "mlp.up_proj"},
    {"ffn_down", "mlp.down_proj"},
}};
constexpr Naming kLlama{{"blk.", "model.layers."}, kLlamaOutside, kLlamaInside};

constexpr std::array<Names, 4> kGptOutside{{
    {kEmbedding, "transformer.wte.weight"},
    {"position_embd.weight", "transformer.wpe.weight"},
    {"output_norm.weight", "transformer.ln_f.weight"},
    {"output_norm.bias", "transformer.ln_f.bias"},
}};
constexpr std::array<Names, 6> kGptInside{{
    {"attn_norm", "ln_1"},
    {"attn_qkv", "attn.c_attn"},
    {"attn_output", "attn.c_proj"},
    {"ffn_norm", "ln_2"},
    {"ffn_up", "mlp.c_fc"},
    {"ffn_down", "mlp.c_proj"},
}};
constexpr Naming kGpt{{"blk.", "transformer.h."}, kGptOutside, kGptInside};

/// The name in the other naming; the same name if it has none.
std::string translated(const Naming& naming, const std::string& name, std::string_view Names::*from,
                       std::string_view Names::*to) {
  for (const Names& names : naming.outside) {
    if (name == names.*from) {
      return std::string(names.*to);
    }
  }
  const Names& prefixes = naming.block;
  if (!name.starts_with(prefixes.*from)) {
    return name;
  }
  const std::size_t number = (prefixes.*from).size();
  const std::size_t dot = name.find('.', number), end = name.rfind('.');
  if (dot == std::string::npos || end <= dot) {
    return name;
  }
  const std::string_view inside = std::string_view(name).substr(dot + 1, end - dot - 1);
  for (const Names& names : naming.inside) {
    if (inside == names.*from) {
      return fmt::format("{}{}.{}{}", prefixes.*to, name.substr(number, dot - number), names.*to, name.substr(end));
    }
  }
  return name;
}

/// Values of the metadata. Most keys begin with the architecture.
class ModelEntries : public GgufEntries {
 public:
  ModelEntries(const GgufMetadata& metadata, std::string what) : GgufEntries(metadata, std::move(what)) {
    prefix_ = text("general.architecture") + ".";
  }

  std::string architecture() const { return prefix_.substr(0, prefix_.size() - 1); }
  std::string key(const char* name) const { return prefix_ + name; }

  std::int64_t count(const char* name) const { return needed(key(name), integer(key(name))); }

  /// Throws if the value is not `expected`, since mica's models cannot compute anything else.
  void require(const std::string& key, double expected) const {
    const std::optional<double> value = number(key);
    check(!value || *value == expected, "{}: mica's models need \"{}\" to be {}, got {}", what(), key, expected,
          value.value_or(0));
  }

 private:
  std::string prefix_;
};

const GgufTensor* find(const GgufHeader& header, std::string_view name) {
  const auto at =
      std::find_if(header.tensors.begin(), header.tensors.end(), [&](const GgufTensor& t) { return t.name == name; });
  return at == header.tensors.end() ? nullptr : &*at;
}

JsonValue::Object rotary_entries(const ModelEntries& entries, const std::string& what) {
  JsonValue::Object rotary{{"rope_theta", {entries.number(entries.key("rope.freq_base")).value_or(10000)}}};
  // As llama.cpp reads them: the type is linear if it is missing, the factor has an older name, too, and 0 stands
  // for 1.
  std::string type = "linear";
  if (entries.has(entries.key("rope.scaling.type"))) {
    type = entries.text(entries.key("rope.scaling.type"));
  }
  check(type == "none" || type == "linear" || type == "yarn",
        "{}: expected \"{}\" to be none, linear or yarn, got \"{}\"", what, entries.key("rope.scaling.type"), type);
  std::optional<double> factor = entries.number(entries.key("rope.scaling.factor"));
  if (!factor) {
    factor = entries.number(entries.key("rope.scale_linear"));
  }
  if (factor.value_or(0) == 0) {
    factor = 1;
  }
  if (type == "linear" && *factor == 1) {
    type = "none";
  }
  rotary["rope_type"] = {type == "none" ? "default" : type};
  if (type != "none") {
    rotary["factor"] = {*factor};
    if (const auto original = entries.integer(entries.key("rope.scaling.original_context_length"))) {
      rotary["original_max_position_embeddings"] = {*original};
    }
  }
  return rotary;
}

/// Llama 3.1 and later: the parameters that give these divisors. The models differ only in the factor, which is the
/// divisor of the lowest frequencies.
nn::RotaryConfig with_divisors(nn::RotaryConfig rotary, std::int64_t head_width, const std::vector<float>& divisors,
                               const std::string& what) {
  const std::vector<float> plain = nn::rotary_frequencies(head_width, rotary);
  check(rotary.scaling == nn::RotaryScaling::none && divisors.size() == plain.size(),
        "{}: \"{}\" has {} elements for {} frequencies, or the metadata ask for another scaling, too", what,
        kFrequencyDivisors, divisors.size(), plain.size());
  rotary.low_frequency_factor = 1;
  rotary.high_frequency_factor = 4;
  rotary.original_context = 8192;
  // The turns of the lowest frequency. In a narrow head, even that frequency may be divided by less than the factor, or
  // not at all.
  const double turns = static_cast<double>(rotary.original_context) * plain.back() / (2 * std::numbers::pi);
  const double kept = std::clamp((turns - 1) / (4 - 1), 0.0, 1.0);
  rotary.scaling = nn::RotaryScaling::llama3;
  rotary.factor = kept < 1 ? (1 - kept) / (1 / static_cast<double>(divisors.back()) - kept) : 1;
  bool same = rotary.factor > 0 && std::isfinite(rotary.factor);
  if (same) {
    const std::vector<float> scaled = nn::rotary_frequencies(head_width, rotary);
    for (std::size_t i = 0; i < plain.size(); ++i) {
      same = same && std::abs(plain[i] / divisors[i] - scaled[i]) <= 1e-4 * scaled[i];
    }
  }
  check(same, "{}: \"{}\" is not Llama 3's scaling of an original context of 8192", what, kFrequencyDivisors);
  return rotary;
}

nn::GPTConfig gguf_gpt_config(const ModelEntries& entries, std::int64_t vocabulary) {
  const JsonValue::Object json{{"model_type", {"gpt2"}},
                               {"vocab_size", {vocabulary}},
                               {"n_positions", {entries.count("context_length")}},
                               {"n_layer", {entries.count("block_count")}},
                               {"n_head", {entries.count("attention.head_count")}},
                               {"n_embd", {entries.count("embedding_length")}},
                               {"n_inner", {entries.count("feed_forward_length")}},
                               {"layer_norm_epsilon",
                                {entries.needed(entries.key("attention.layer_norm_epsilon"),
                                                entries.number(entries.key("attention.layer_norm_epsilon")))}},
                               {"resid_pdrop", {0.0}},
                               {"embd_pdrop", {0.0}},
                               {"attn_pdrop", {0.0}}};
  return std::get<nn::GPTConfig>(pretrained_config({json}, entries.what() + ": as a config.json"));
}

nn::LlamaConfig gguf_llama_config(const ModelEntries& entries, const InputFile& file, const GgufHeader& header,
                                  std::int64_t vocabulary) {
  const std::string& what = entries.what();
  const std::string architecture = entries.architecture();
  for (const char* const name : {"expert_count", "attention.sliding_window", "attention.scale", "attention.clamp_kqv",
                                 "attention.max_alibi_bias", "attn_logit_softcapping", "final_logit_softcapping",
                                 "rope.scaling.yarn_log_multiplier"}) {
    entries.require(entries.key(name), 0);
  }
  for (const char* const name :
       {"embedding_scale", "residual_scale", "logit_scale", "rope.scaling.attn_factor", "rope.scaling.yarn_ext_factor",
        "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_slow"}) {
    entries.require(entries.key(name), 1);
  }
  entries.require(entries.key("rope.scaling.yarn_beta_fast"), 32);
  const bool* const causal = entries.find<bool>(entries.key("attention.causal"), "a truth value");
  check(causal == nullptr || *causal, "{}: mica's models need \"{}\" to be true", what,
        entries.key("attention.causal"));
  for (const char* const name : kLongropeFactors) {
    check(find(header, name) == nullptr, "{}: it has \"{}\", and mica reads longrope scaling from config.json only",
          what, name);
  }
  const std::int64_t width = entries.count("embedding_length"), heads = entries.count("attention.head_count");
  JsonValue::Object json{
      {"model_type", {architecture}},
      {"vocab_size", {vocabulary}},
      {"max_position_embeddings", {entries.count("context_length")}},
      {"num_hidden_layers", {entries.count("block_count")}},
      {"num_attention_heads", {heads}},
      {"num_key_value_heads", {entries.integer(entries.key("attention.head_count_kv")).value_or(heads)}},
      {"hidden_size", {width}},
      {"intermediate_size", {entries.count("feed_forward_length")}},
      {"hidden_act", {"silu"}},
      {"rms_norm_eps",
       {entries.needed(entries.key("attention.layer_norm_rms_epsilon"),
                       entries.number(entries.key("attention.layer_norm_rms_epsilon")))}},
      {"tie_word_embeddings", {find(header, kHead) == nullptr}},
      {"attention_bias", {architecture != "qwen2" && find(header, "blk.0.attn_q.bias") != nullptr}},
      {"mlp_bias", {find(header, "blk.0.ffn_gate.bias") != nullptr}},
      {"rope_parameters", {rotary_entries(entries, what)}}};
  if (const auto head_width = entries.integer(entries.key("attention.key_length"))) {
    json["head_dim"] = {*head_width};
    entries.require(entries.key("attention.value_length"), static_cast<double>(*head_width));
  } else if (heads > 0 && width % heads == 0) {
    json["head_dim"] = {width / heads};
  }
  const PretrainedConfig parsed = pretrained_config({json}, what + ": as a config.json");
  nn::LlamaConfig config = std::get<nn::LlamaConfig>(parsed);
  entries.require(entries.key("rope.dimension_count"), static_cast<double>(config.head_width));
  if (const GgufTensor* const divisors = find(header, kFrequencyDivisors)) {
    check(divisors->type == GgufType::f32 && divisors->bytes <= 4 * static_cast<std::uint64_t>(config.head_width),
          "{}: expected \"{}\" to be float32 and as long as half a head", what, kFrequencyDivisors);
    std::vector<float> values(divisors->bytes / 4);
    file.read(values.data(), divisors->bytes, divisors->begin);
    config.rotary = with_divisors(config.rotary, config.head_width, values, what);
  }
  return config;
}

PretrainedConfig config_of(const InputFile& file, const GgufHeader& header, const std::string& what) {
  const ModelEntries entries(header.metadata, what);
  const std::string architecture = entries.architecture();
  check(architecture == "llama" || architecture == "qwen2" || architecture == "qwen3" || architecture == "gpt2",
        "{}: expected a model of the architecture llama, qwen2, qwen3 or gpt2, got \"{}\"", what, architecture);
  const GgufTensor* const embedding = find(header, kEmbedding);
  check(embedding != nullptr && embedding->shape.size() == 2, "{}: it has no matrix \"{}\"", what, kEmbedding);
  if (architecture == "gpt2") {
    return gguf_gpt_config(entries, embedding->shape[0]);
  }
  return gguf_llama_config(entries, file, header, embedding->shape[0]);
}

/// For the architecture llama, llama.cpp rotates neighboring elements of a head, (0, 1), (2, 3), …, while Hugging Face
/// rotates elements half a head apart. So the conversion reorders the rows of q and k. Qwen's rows keep their order.
bool has_reordered_rows(std::string_view architecture, std::string_view hugging_face_name) {
  return architecture == "llama" && (hugging_face_name.find(".q_proj.") != std::string::npos ||
                                     hugging_face_name.find(".k_proj.") != std::string::npos);
}

/// Reorders rows from pairs (heads, D/2, 2) to halves (heads, 2, D/2) or, with `to_pairs`, back.
Tensor reordered(const Tensor& x, std::int64_t heads, bool to_pairs) {
  if (x.dim() < 1 || x.dim() > 2 || x.size(0) % (2 * heads) != 0) {
    return x;  // no model has such a tensor; its shape is rejected later
  }
  const std::int64_t half = x.size(0) / heads / 2, columns = x.dim() == 2 ? x.size(1) : 1;
  const Shape apart = to_pairs ? Shape{heads, 2, half, columns} : Shape{heads, half, 2, columns};
  return reshape(transpose(reshape(x, apart), 1, 2), x.shape());
}

std::string architecture_of(const nn::LlamaConfig& c) {
  return c.qk_norm ? "qwen3" : c.qkv_bias && !c.output_bias ? "qwen2" : "llama";
}

std::int64_t heads_of(const nn::LlamaConfig& c, const std::string& name) {
  return name.find(".k_proj.") != std::string::npos ? c.key_heads : c.heads;
}

/// Hugging Face stores GPT-2's linear weights transposed; llama.cpp does not.
bool is_transposed(const std::string& hugging_face_name, const Tensor& tensor) {
  return tensor.dim() == 2 && hugging_face_name.find(".c_") != std::string::npos;
}

/// Converts the name and layout of a GGUF tensor to Hugging Face's.
GgufParameter hugging_face_parameter(const PretrainedConfig& config, const std::string& architecture,
                                     const std::string& name, const Tensor& tensor) {
  const auto* const llama = std::get_if<nn::LlamaConfig>(&config);
  const std::string own = translated(llama != nullptr ? kLlama : kGpt, name, &Names::first, &Names::second);
  if (llama != nullptr) {
    return {own, has_reordered_rows(architecture, own) ? reordered(tensor, heads_of(*llama, own), false) : tensor};
  }
  return {own, is_transposed(own, tensor) ? transpose(tensor, 0, 1) : tensor};
}

/// Some conversions of GPT-2 store the embedding a second time, as the head.
void check_tied_head(const StateDict& tensors, const std::string& what) {
  const auto head = tensors.find(kHead), embedding = tensors.find(kEmbedding);
  if (head == tensors.end() || embedding == tensors.end()) {
    return;
  }
  const Tensor &a = head->second, &b = embedding->second;
  check(a.dtype() == b.dtype() && a.shape() == b.shape() && std::memcmp(a.raw_data(), b.raw_data(), a.bytes()) == 0,
        "{}: \"{}\" is not \"{}\", which is the head of mica's GPT", what, kHead, kEmbedding);
}

}  // namespace

PretrainedConfig load_gguf_config(const std::filesystem::path& path, const std::string& what) {
  const InputFile file(path);
  return config_of(file, read_gguf_header(file), what);
}

GgufModel load_gguf_model(const std::filesystem::path& path, DType dequantized, const std::string& what) {
  const InputFile file(path);
  const GgufHeader header = read_gguf_header(file);
  GgufModel model{.config = config_of(file, header, what), .tensors = {}, .dtype = float32};
  const std::string architecture = ModelEntries(header.metadata, what).architecture();
  StateDict tensors = read_gguf_tensors(file, header, {.dequantized = dequantized, .mapped = true});
  tensors.erase(kFrequencyDivisors);
  if (std::holds_alternative<nn::GPTConfig>(model.config)) {
    check_tied_head(tensors, what);
    tensors.erase(kHead);
  }
  std::int64_t total = 0;
  for (const auto& [file_name, tensor] : tensors) {
    total += static_cast<std::int64_t>(tensor.bytes());
  }
  // Reordering rows reads them from the file.
  ProgressTask progress("converting " + path.filename().string(), total);
  for (const auto& [file_name, tensor] : tensors) {
    if (file_name == kEmbedding) {
      model.dtype = tensor.dtype();
    }
    const auto [name, value] = hugging_face_parameter(model.config, architecture, file_name, tensor);
    check(model.tensors.emplace(name, value).second, "{}: two tensors have the name \"{}\" in the model", what, name);
    progress.advance(static_cast<std::int64_t>(tensor.bytes()));
  }
  return model;
}

GgufParameter gguf_parameter(const nn::LlamaConfig& config, const std::string& name, const Tensor& tensor) {
  const bool is_reordered = has_reordered_rows(architecture_of(config), name);
  return {.name = translated(kLlama, name, &Names::second, &Names::first),
          .tensor = is_reordered ? reordered(tensor, heads_of(config, name), true) : tensor};
}

GgufParameter gguf_parameter(const nn::GPTConfig&, const std::string& name, const Tensor& tensor) {
  return {.name = translated(kGpt, name, &Names::second, &Names::first),
          .tensor = is_transposed(name, tensor) ? transpose(tensor, 0, 1) : tensor};
}

GgufMetadata gguf_metadata(const nn::GPTConfig& c) {
  check(c.bias && c.gelu == GeluApproximation::tanh,
        "save_gguf: llama.cpp's GPT-2 has biases and the tanh approximation of GELU");
  const auto count = [](std::int64_t n) { return static_cast<std::uint32_t>(n); };
  return {{"general.architecture", std::string("gpt2")},
          {"gpt2.vocab_size", count(c.vocab)},
          {"gpt2.context_length", count(c.context)},
          {"gpt2.block_count", count(c.layers)},
          {"gpt2.embedding_length", count(c.width)},
          {"gpt2.feed_forward_length", count(4 * c.width)},
          {"gpt2.attention.head_count", count(c.heads)},
          {"gpt2.attention.layer_norm_epsilon", static_cast<float>(c.norm_eps)}};
}

GgufMetadata gguf_metadata(const nn::LlamaConfig& c) {
  using nn::RotaryScaling;
  const std::string architecture = architecture_of(c);
  check(c.rotary.scaling != RotaryScaling::dynamic, "save_gguf: llama.cpp has no dynamic scaling of rotary embeddings");
  check(
      c.rotary.scaling != RotaryScaling::longrope,
      "save_gguf: llama.cpp chooses longrope's factors by the size of its context, and not by the length of the text");
  check(std::find(c.rotated_layers.begin(), c.rotated_layers.end(), false) == c.rotated_layers.end(),
        "save_gguf: the architecture llama has rotary embeddings in all layers");
  const nn::RotaryConfig usual{.scaling = RotaryScaling::yarn, .factor = c.rotary.factor};
  check(c.rotary.scaling != RotaryScaling::yarn ||
            (c.rotary.beta_fast == usual.beta_fast && c.rotary.beta_slow == usual.beta_slow && c.rotary.truncate &&
             nn::rotary_scale(c.rotary) == nn::rotary_scale(usual)),
        "save_gguf: expected yarn scaling with its usual parameters: beta_fast 32, beta_slow 1, truncate, and no "
        "attention "
        "factor");
  check(c.rotary.scaling != RotaryScaling::llama3 ||
            (c.rotary.low_frequency_factor == 1 && c.rotary.high_frequency_factor == 4 &&
             c.rotary.original_context == 8192),
        "save_gguf: expected Llama 3's scaling with its usual parameters 1, 4 and 8192");
  const auto key = [&](const char* name) { return architecture + "." + name; };
  const auto count = [](std::int64_t n) { return static_cast<std::uint32_t>(n); };
  const std::int64_t head_width = c.head_width > 0 ? c.head_width : c.width / c.heads;
  GgufMetadata metadata{{"general.architecture", architecture},
                        {key("vocab_size"), count(c.vocab)},
                        {key("context_length"), count(c.context)},
                        {key("block_count"), count(c.layers)},
                        {key("embedding_length"), count(c.width)},
                        {key("feed_forward_length"), count(c.hidden)},
                        {key("attention.head_count"), count(c.heads)},
                        {key("attention.head_count_kv"), count(c.key_heads)},
                        {key("attention.key_length"), count(head_width)},
                        {key("attention.value_length"), count(head_width)},
                        {key("attention.layer_norm_rms_epsilon"), static_cast<float>(c.norm_eps)},
                        {key("rope.dimension_count"), count(head_width)},
                        {key("rope.freq_base"), static_cast<float>(c.rotary.theta)}};
  if (c.rotary.scaling == RotaryScaling::linear || c.rotary.scaling == RotaryScaling::yarn) {
    const bool is_yarn = c.rotary.scaling == RotaryScaling::yarn;
    metadata[key("rope.scaling.type")] = std::string(is_yarn ? "yarn" : "linear");
    metadata[key("rope.scaling.factor")] = static_cast<float>(c.rotary.factor);
    if (is_yarn) {
      metadata[key("rope.scaling.original_context_length")] = count(c.rotary.original_context);
    }
  }
  return metadata;
}

std::optional<GgufParameter> gguf_frequency_divisors(const nn::LlamaConfig& c) {
  if (c.rotary.scaling != nn::RotaryScaling::llama3) {
    return std::nullopt;
  }
  const std::int64_t head_width = c.head_width > 0 ? c.head_width : c.width / c.heads;
  nn::RotaryConfig plain = c.rotary;
  plain.scaling = nn::RotaryScaling::none;
  std::vector<float> divisors = nn::rotary_frequencies(head_width, plain);
  const std::vector<float> scaled = nn::rotary_frequencies(head_width, c.rotary);
  for (std::size_t i = 0; i < divisors.size(); ++i) {
    divisors[i] /= scaled[i];
  }
  return GgufParameter{kFrequencyDivisors, from_data(divisors, {head_width / 2})};
}

}  // namespace mica::io::detail
