#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <variant>

#include <mica/core/check.h>
#include <mica/core/copy.h>
#include <mica/io/detail/gguf_header.h>
#include <mica/io/detail/gguf_model.h>
#include <mica/io/detail/pretrained_files.h>
#include <mica/io/families/detail/family.h>
#include <mica/io/file.h>
#include <mica/io/gguf_tokenizer.h>
#include <mica/io/json.h>
#include <mica/io/pretrained.h>
#include <mica/nn/embedding.h>
#include <mica/nn/init.h>
#include <mica/nn/lora.h>
#include <mica/ops/view/view.h>

namespace mica::io {

namespace {

// Names.

std::string renamed(std::string name, const std::vector<Renaming>& renamings) {
  for (const Renaming& rule : renamings) {
    std::string_view from = rule.from;
    const bool at_begin = from.starts_with('^');
    from.remove_prefix(at_begin ? 1 : 0);
    const bool at_end = from.ends_with('$');
    from.remove_suffix(at_end ? 1 : 0);
    check(!from.empty(), "load_pretrained: the renaming \"{}\" to \"{}\" replaces nothing", rule.from, rule.to);
    const std::size_t at = at_end && name.ends_with(from) ? name.size() - from.size() : name.find(from);
    const bool fits = at != std::string::npos && (!at_begin || at == 0) && (!at_end || at + from.size() == name.size());
    if (fits) {
      name.replace(at, from.size(), rule.to);
    }
  }
  return name;
}

bool is_same(const Tensor& a, const Tensor& b) {
  return a.dtype() == b.dtype() && a.shape() == b.shape() &&
         std::memcmp(contiguous_data(a).raw_data(), contiguous_data(b).raw_data(), a.bytes()) == 0;
}

StateDict own_state(const detail::FileTensors& layout, bool tied_head, const StateDict& files,
                    const LoadOptions& options, const std::string& what) {
  std::vector<std::pair<std::string, Tensor>> tensors;
  bool lacks_prefix = true;
  for (const auto& [file_name, tensor] : files) {
    tensors.emplace_back(renamed(file_name, options.renamings), tensor);
    lacks_prefix = lacks_prefix && !tensors.back().first.starts_with(layout.own_prefix);
  }
  StateDict result;
  Tensor head;
  for (const auto& [file_name, tensor] : tensors) {
    const std::string name = layout.own_name(file_name, lacks_prefix);
    if (tied_head && name == detail::kHeadWeight) {
      head = tensor;
    }
    if (detail::ends_with_any(name, layout.obsolete) || (tied_head && name == detail::kHeadWeight)) {
      continue;
    }
    // A transposed view: load_state_dict copies tensors that are not contiguous.
    const Tensor value = layout.is_transposed(name, tensor) ? transpose(tensor, 0, 1) : tensor;
    const auto [at, is_new] = result.emplace(name, value);
    // Files may have tied tensors twice: BERT's cls.predictions.bias and cls.predictions.decoder.bias.
    check(is_new || is_same(value, at->second), "{}: two tensors of the files have the name \"{}\" in the model", what,
          name);
  }
  if (!head.defined()) {
    return result;
  }
  const auto [embedding, is_new] = result.try_emplace(std::string(layout.embedding), head);
  // Of two tied tensors, safetensors' save_model() writes one, which may be the head. transformers does not tie
  // different ones, whatever the configuration says.
  if (!is_new && !is_same(head, embedding->second)) {
    check(!options.strict,
          "{}: \"tie_word_embeddings\" says that the head is the embedding, but the files have another tensor \"{}\"",
          what, detail::kHeadWeight);
    if (options.differences != nullptr) {
      options.differences->unexpected.emplace_back(detail::kHeadWeight);
    }
  }
  return result;
}

// Models.

// Quantized matrices of a GGUF file, by their names in the model.
using Matrices = std::map<std::string, detail::GgufMatrix>;

Matrices own_matrices(const detail::FileTensors& layout, const Matrices& files, const LoadOptions& options,
                      const std::string& what) {
  Matrices result;
  for (const auto& [file_name, matrix] : files) {
    const std::string name = layout.own_name(renamed(file_name, options.renamings), false);
    check(result.emplace(name, matrix).second, "{}: two tensors of the files have the name \"{}\" in the model", what,
          name);
  }
  return result;
}

// Limits the memory that a damaged configuration can make us allocate. With strict = false, parameters may be missing,
// so the model may have up to 16 times the elements of the files.
void check_size(const PretrainedConfig& config, const StateDict& state, const Matrices& matrices, bool strict,
                const std::string& what) {
  std::int64_t elements = 0;
  for (const auto& [name, matrix] : matrices) {
    elements += matrix.bytes.size(0) * matrix.columns;
  }
  for (const auto& [name, tensor] : state) {
    elements += tensor.numel();
  }
  constexpr std::int64_t kSlack = 1 << 20;
  const std::int64_t most = strict ? elements : elements / 4 > INT64_MAX / 64 ? INT64_MAX : 16 * elements;
  const std::int64_t expected = parameter_count(config);
  check(expected <= std::max(most, kSlack),
        "{}: the model of {} has {} parameters, but the tensors of the files have {} elements", what,
        detail::kPretrainedConfig, expected, elements);
}

// Replaces weights by quantized ones of the same shape, and adds these to `state`.
class Packing {
 public:
  Packing(const Matrices& matrices, DType dtype, StateDict& state)
      : matrices_(matrices), dtype_(dtype), state_(state) {}

  template <class Layer>
  void replace(Layer& layer, const std::string& name, const std::string& matrix_name) {
    const auto found = matrices_.find(matrix_name);
    const Tensor& weight = layer.weight;
    if (found == matrices_.end() || weight.dim() != 2 || weight.size(0) != found->second.bytes.size(0) ||
        weight.size(1) != found->second.columns) {
      return;
    }
    const auto [packed, is_new] = packed_.try_emplace(matrix_name);
    if (is_new) {
      packed->second = detail::packed(found->second);
    }
    layer.set_quantized(packed->second, dtype_);
    for (const auto& [part_name, part] : quantized_parts()) {
      if ((layer.quantized.*part).defined()) {
        state_.emplace(name + "." + part_name, (layer.quantized.*part).detach());
      }
    }
  }

  // Those that replaced nothing, as floats.
  void dequantize_others() const {
    for (const auto& [name, matrix] : matrices_) {
      if (!packed_.contains(name)) {
        state_.emplace(name, detail::dequantized(matrix, dtype_));
      }
    }
  }

 private:
  const Matrices& matrices_;
  DType dtype_;
  StateDict& state_;
  std::map<std::string, QuantizedWeight> packed_;
};

// Linear layers, and the embedding to which the head may be tied.
void keep_packed(nn::Module& model, const std::string& embedding, bool tied_head, Packing packing, StateDict& state) {
  for (const nn::AdaptedLayer& layer : nn::linear_layers(model)) {
    const std::string name = layer.name + ".weight";
    packing.replace(*layer.layer, layer.name, tied_head && name == detail::kHeadWeight ? embedding : name);
  }
  for (const nn::NamedModule& module : model.named_modules()) {
    if (module.type != nullptr && *module.type == typeid(nn::Embedding) && module.name + ".weight" == embedding) {
      auto& table = static_cast<nn::Embedding&>(*module.module);
      packing.replace(table, module.name, embedding);
      if (table.is_quantized()) {
        state.emplace(embedding, table.weight.detach());
      }
    }
  }
  packing.dequantize_others();
}

template <class Config>
PretrainedModel build(Config config, const StateDict& files, const Matrices& quantized, const LoadOptions& options,
                      const std::string& what) {
  const auto& family = detail::family_of(config);
  const bool tied_head = family.ties_head(config);
  if (options.differences != nullptr) {
    *options.differences = {};
  }
  const detail::FileTensors layout = family.files(config);
  StateDict state = own_state(layout, tied_head, files, options, what);
  Matrices matrices = own_matrices(layout, quantized, options, what);
  const std::vector<detail::FusedRows> fused = family.fused(config);
  detail::split_rows(
      fused, state, [](Tensor& tensor) -> Tensor& { return tensor; }, what);
  detail::split_rows(
      fused, matrices, [](detail::GgufMatrix& matrix) -> Tensor& { return matrix.bytes; }, what);
  for (const auto& [name, matrix] : matrices) {
    check(!state.contains(name), "{}: two tensors of the files have the name \"{}\" in the model", what, name);
  }
  if (family.adapt != nullptr) {
    family.adapt(config, state);
  }
  check_size(config, state, matrices, options.strict, what);
  // With strict, every parameter is loaded, so initializing them would be wasted work.
  std::optional<nn::init::Skip> skip;
  if (options.strict) {
    skip.emplace();
  }
  typename detail::ModelOf<Config, PretrainedModel>::type model(config);
  skip.reset();
  const Packing packing(matrices, options.dtype.value_or(float32), state);
  if (options.packed) {
    keep_packed(model, std::string(layout.embedding), tied_head, packing, state);
  } else {
    packing.dequantize_others();
  }
  if (options.differences != nullptr) {
    const StateDict own = model.state_dict();
    for (const auto& [name, tensor] : own) {
      if (!state.contains(name) && !(tied_head && name == detail::kHeadWeight)) {
        options.differences->missing.push_back(name);
      }
    }
    for (const auto& [name, tensor] : state) {
      if (!own.contains(name)) {
        options.differences->unexpected.push_back(name);
      }
    }
    std::sort(options.differences->unexpected.begin(), options.differences->unexpected.end());
  }
  try {
    model.load_state_dict(state, options.strict, true);
  } catch (const OutOfMemory&) {
    throw;
  } catch (const Error& error) {
    std::string_view problem = error.what();
    constexpr std::string_view kBefore = "load_state_dict: ";
    problem.remove_prefix(problem.starts_with(kBefore) ? kBefore.size() : 0);
    const bool has_other_head = !family.heads.empty() && problem.find("unexpected") != std::string_view::npos;
    fail("{}: {}{}{}", what, problem, has_other_head ? "; of heads, mica has " : "",
         has_other_head ? family.heads : "");
  }
  if (options.dtype.has_value()) {
    model.to(options.device, *options.dtype);
  } else {
    model.to(options.device);
  }
  model.eval();
  return model;
}

// Saving.

/// config.json for a model whose tensors have this dtype, with the other entries of `options.like`.
std::string config_text(const PretrainedConfig& model, DType dtype, const SaveOptions& options) {
  const JsonValue::Object own = config_entries(model);
  JsonValue::Object config = own;
  config["dtype"] = {fmt::format("{}", dtype)};
  config["torch_dtype"] = config["dtype"];  // the name that older versions read
  const std::string like_name = (options.like / detail::kPretrainedConfig).string();
  if (!options.like.empty()) {
    const JsonValue like = detail::read_config(detail::config_file(options.like));
    check(like.as<JsonValue::Object>() != nullptr, "save_pretrained: {} is not an object", like_name);
    for (const auto& [name, value] : *like.as<JsonValue::Object>()) {
      const auto at = config.find(name);
      if (at == config.end() || name.ends_with("_token_id")) {
        config[name] = value;
      }
    }
  }
  // The reader may refuse the model's own entries, and others could say something else: a window, say.
  const std::string what =
      options.like.empty() ? "save_pretrained: read again" : "save_pretrained: with the other entries of " + like_name;
  const JsonValue::Object read = config_entries(pretrained_config({config}, what));
  check(to_json({read}) == to_json({own}), "{}, the model would be another", what);
  return to_json({config});
}

void save_gguf_file(const std::filesystem::path& path, ConstModelReference model, const Tokenizer* tokenizer,
                    const GgufMetadata& more, const GgufSaveOptions& options) {
  model.visit([&](const auto& m) {
    const auto& family = detail::family_of(m.config);
    check(!family.gguf.architectures.empty(), "save_gguf: mica writes no GGUF files of {} models",
          family.types.front());
    GgufMetadata metadata = family.gguf.write(m.config);
    const auto architecture = std::get<std::string>(metadata.at("general.architecture"));
    const StateDict tensors = family.file_tensors(m.config, m.state_dict(), "save_gguf");
    metadata["tokenizer.ggml.model"] = std::string("none");  // llama.cpp refuses models without this key
    const GgufMetadata vocabulary = tokenizer == nullptr ? GgufMetadata{} : gguf_metadata(*tokenizer, m.config.vocab);
    for (const GgufMetadata* const entries : {&vocabulary, &more}) {
      for (const auto& [key, value] : *entries) {
        metadata.insert_or_assign(key, value);
      }
    }
    save_gguf(path, detail::gguf_tensors(m.config, architecture, tensors), metadata, options);
  });
}

}  // namespace

PretrainedConfig load_pretrained_config(const std::filesystem::path& folder) {
  if (detail::is_gguf(folder)) {
    return detail::load_gguf_config(folder, "load_pretrained: " + folder.string());
  }
  check_folder(folder, "load_pretrained");
  const std::filesystem::path path = detail::config_file(folder);
  return pretrained_config(detail::read_config(path), "load_pretrained: " + path.string());
}

StateDict load_pretrained_tensors(const std::filesystem::path& folder) {
  if (detail::is_gguf(folder)) {
    detail::GgufModel model = detail::load_gguf_model(folder, float32, "load_pretrained: " + folder.string());
    std::visit(
        [&](const auto& c) {
          for (const auto& [name, matrix] : model.matrices) {
            const Tensor tensor = detail::dequantized(matrix, float32);
            const bool transposed = detail::family_of(c).files(c).is_transposed(name, tensor);
            model.tensors.emplace(name, transposed ? transpose(tensor, 0, 1) : tensor);
          }
        },
        model.config);
    return model.tensors;
  }
  check_folder(folder, "load_pretrained");
  return detail::load_weights(folder);
}

PretrainedModel load_pretrained(const std::filesystem::path& folder, const LoadOptions& options) {
  check(!options.dtype.has_value() || is_floating(*options.dtype), "load_pretrained: expected a floating dtype, got {}",
        options.dtype.value_or(float32));
  if (detail::is_gguf(folder)) {
    const std::string what = "load_pretrained: " + folder.string();
    const detail::GgufModel model = detail::load_gguf_model(folder, options.dtype.value_or(float32), what);
    LoadOptions of_model = options;
    of_model.dtype = options.dtype.value_or(model.dtype);
    return std::visit([&](const auto& c) { return build(c, model.tensors, model.matrices, of_model, what); },
                      model.config);
  }
  const PretrainedConfig config = load_pretrained_config(folder);
  const StateDict files = load_pretrained_tensors(folder);
  const std::string what = "load_pretrained: " + folder.string();
  return std::visit([&](const auto& c) { return build(c, files, {}, options, what); }, config);
}

void save_pretrained(ConstModelReference model, const std::filesystem::path& folder, const SaveOptions& options) {
  check(options.shard_bytes > 0, "save_pretrained: expected shard_bytes above 0");
  model.visit([&](const auto& m) {
    const auto& family = detail::family_of(m.config);
    family.write(m.config);  // may throw, so before the tensors' errors
    const StateDict state = family.file_tensors(m.config, m.state_dict(), "save_pretrained");
    const std::string config = config_text(m.config, state.begin()->second.dtype(), options);
    detail::save_weights(folder, config, state, options.shard_bytes);
  });
}

void save_gguf(const std::filesystem::path& path, ConstModelReference model, const GgufMetadata& metadata,
               const GgufSaveOptions& options) {
  save_gguf_file(path, model, nullptr, metadata, options);
}
void save_gguf(const std::filesystem::path& path, ConstModelReference model, const Tokenizer& tokenizer,
               const GgufMetadata& metadata, const GgufSaveOptions& options) {
  save_gguf_file(path, model, &tokenizer, metadata, options);
}

}  // namespace mica::io
