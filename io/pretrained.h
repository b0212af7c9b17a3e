#pragma once

// Models in the format of Hugging Face's transformers: a folder with config.json, and weights in safetensors files.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <mica/core/state_dict.h>
#include <mica/io/families/table.h>
#include <mica/io/gguf.h>
#include <mica/io/pretrained_config.h>
#include <mica/io/tokenizer.h>

namespace mica::io {

/// Replaces the first `from` by `to` in the names of a file's tensors. "^" at the beginning of `from` and "$" at its
/// end stand for the beginning and the end of a name: {"^backbone.", "model."}.
struct Renaming {
  std::string from;
  std::string to;
};

using nn::LoadDifferences;

struct LoadOptions {
  Device device = Device::cpu();
  std::optional<DType> dtype{};       ///< of the parameters; nullopt: tensors keep the files' dtypes
  bool strict = true;                 ///< throw if tensors are missing in the files or unknown to the model
  std::vector<Renaming> renamings{};  ///< applied in order to each name in the files, before it is matched
  /// Filled with sorted names if not null. Parameters that no file has are initialized as in a new model.
  LoadDifferences* differences = nullptr;
  /// Of a GGUF file: linear layers and the token embedding whose weights are quantized in the file stay so, with the
  /// same values (Linear::set_quantized). Such a model generates text and can be trained with adapters, but cannot be
  /// saved, and its weights cannot be trained; `dtype` is that of the other parameters and of the activations. With
  /// false, all weights are converted to `dtype`.
  bool packed = true;
};

/// Reads a model from a folder with config.json and either model.safetensors or shards with
/// model.safetensors.index.json. model_type gpt2 gives an nn::GPT; llama, mistral, qwen2, qwen3, smollm3,
/// phi3, granite and olmo2 an nn::Llama; starcoder2 an nn::Starcoder; gemma2 and gemma3_text an nn::Gemma; bert,
/// roberta, xlm-roberta and distilbert an nn::Bert; modernbert an nn::ModernBert. Encoders have the pooler and the head
/// that the files have. The model is in evaluation mode: call train() to train it.
///
/// On the CPU and in the files' dtypes, parameters refer to the mapped files, which are read when they are first used;
/// see load_mapped() in safetensors.h for what this means for the files. Only GPT-2's linear weights, which its files
/// store transposed, are copied. Tensors that hold the rows of several weights (Phi 3) are split into views. On other
/// devices or in other dtypes, each tensor is converted once, from the mapped file.
///
/// Names may lack the model's prefix ("transformer.", "model.") or have that of a larger model ("bert."). Only the
/// attention masks, rotary tables and numbers of positions (position_ids) in old files are ignored. If the
/// configuration ties the head to the embedding, the files may have the weight of either; if they have both, its bits
/// must be the same.
///
/// The path may also be a .gguf file of llama.cpp. The architectures llama, qwen2, qwen3, phi3, granite and olmo2 give
/// an nn::Llama, starcoder2 an nn::Starcoder, gemma2 an nn::Gemma, gpt2 an nn::GPT. All parameters get options.dtype
/// or, without it, the dtype of the embedding (float32 if it is quantized). Quantized weights stay quantized unless
/// options.packed is false.
///
/// Throws an Error that names the file and the problem, or lists all tensors that are missing, unexpected or of another
/// shape. Before memory is allocated for a model, its size according to config.json is compared with the files' size.
PretrainedModel load_pretrained(const std::filesystem::path& folder, const LoadOptions& options = {});

/// The same for a known class: load_pretrained<nn::Llama>(folder). Throws if the folder has a model of another class.
template <class Model>
Model load_pretrained(const std::filesystem::path& folder, const LoadOptions& options = {});

/// Reads config.json only.
PretrainedConfig load_pretrained_config(const std::filesystem::path& folder);

/// All tensors of a folder's safetensors files under the files' names, mapped.
StateDict load_pretrained_tensors(const std::filesystem::path& folder);

struct SaveOptions {
  /// Maximum size of a file, unless a single tensor is larger. Several files get an index.
  std::uint64_t shard_bytes = std::uint64_t{5} << 30;
  /// A folder whose config.json provides the entries that mica does not write itself, such as the ids of special
  /// tokens. Throws an Error if they would change what the model computes.
  std::filesystem::path like{};
};

/// Writes config.json and the weights so that transformers' from_pretrained() and load_pretrained() can read them.
/// Creates the folder if needed. A model may be saved to the folder that it was loaded from; while it is written, both
/// need space. Then the weight files of the earlier save (model.safetensors, or the shards in its index) are removed.
///
/// However the process ends, load_pretrained() finds the old model or the new one, whole, and the next save removes
/// what is left of an unfinished one. The same holds for other programs, unless the configuration has changed and the
/// process was killed between two renames: they then find the new weights with the old config.json. Throws an Error
/// before anything is written if a layer has an adapter or a quantized weight, if transformers or load_pretrained()
/// could not read the model, or if another thread or process is saving to the folder.
void save_pretrained(ConstModelReference model, const std::filesystem::path& folder, const SaveOptions& options = {});

/// Writes a GGUF file with llama.cpp's names and metadata of the model; load_pretrained() reads it. `metadata` is added
/// and replaces entries with the same keys. Unless it contains a tokenizer, llama.cpp accepts token ids only. Throws an
/// Error for what llama.cpp does not support: dynamic or longrope scaling of rotary embeddings (the latter but for Phi
/// 3), layers without rotary embeddings, an OLMo 2 with biases, a StarCoder 2 with a window, a GPT without biases or
/// with exact GELU, a Gemma without caps or with another query_scale than Google's, an encoder. Adapters and quantized
/// weights are errors as well: let `options` quantize.
void save_gguf(const std::filesystem::path& path, ConstModelReference model, const GgufMetadata& metadata = {},
               const GgufSaveOptions& options = {.matrices = {}, .vectors = GgufType::f32});

/// The same with a tokenizer, which Tokenizer::load() reads: see gguf_metadata() in io/gguf_tokenizer.h for the errors.
void save_gguf(const std::filesystem::path& path, ConstModelReference model, const Tokenizer& tokenizer,
               const GgufMetadata& metadata = {},
               const GgufSaveOptions& options = {.matrices = {}, .vectors = GgufType::f32});

template <class Model>
Model load_pretrained(const std::filesystem::path& folder, const LoadOptions& options) {
  PretrainedModel model = load_pretrained(folder, options);
  check(std::holds_alternative<Model>(model), "load_pretrained: {} has a model of another class", folder.string());
  return std::get<Model>(std::move(model));
}

}  // namespace mica::io
