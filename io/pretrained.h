#pragma once

// Models in the folders of Hugging Face's transformers: config.json, and weights in safetensors files.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <mica/io/gguf.h>
#include <mica/io/pretrained_config.h>
#include <mica/io/tokenizer.h>
#include <mica/nn/state_dict.h>

namespace mica::io {

/// Replaces `from` by `to` once in the names of a file's tensors that contain it. "^" at the beginning of `from` and
/// "$" at its end stand for the beginning and the end of a name: {"^backbone.", "model."}.
struct Renaming {
  std::string from;
  std::string to;
};

/// What a load with strict = false has passed over, sorted.
struct LoadDifferences {
  std::vector<std::string> missing;     ///< parameters that no file has: they start as in a new model
  std::vector<std::string> unexpected;  ///< tensors that the model does not have
};

struct LoadOptions {
  Device device = Device::cpu();
  std::optional<DType> dtype{};            ///< convert to it; without one, tensors keep the files' dtypes
  bool strict = true;                      ///< refuse files that lack tensors of the model or have others
  std::vector<Renaming> renamings{};       ///< applied in order to each name in the files, before names are looked at
  LoadDifferences* differences = nullptr;  ///< filled if not null
};

/// Any of the models that a folder may have.
using PretrainedModel = std::variant<nn::GPT, nn::Llama, nn::Bert>;

/// Reads a model from a folder with config.json and either model.safetensors or shards with
/// model.safetensors.index.json. model_type gpt2 gives an nn::GPT; llama, mistral, qwen2 and qwen3 an nn::Llama; bert
/// an nn::Bert, without a pooler if the files have none. The model is in evaluation mode: call train() to train it.
///
/// On the CPU and in the files' dtypes, parameters are the mapped files themselves, read when they are first used; see
/// load_mapped() in safetensors.h for what this means for the files. Only GPT-2's linear weights, which its files store
/// transposed, are copied. Otherwise each tensor is converted once, from the mapped file.
///
/// Names may lack the prefix of the whole model ("transformer.", "model.") or have that of a larger one ("bert."). Old
/// files' attention masks and rotary tables are passed over, and so is a head's weight that the configuration ties to
/// the embedding.
///
/// The path may also be a file that ends in .gguf, of llama.cpp, with an nn::Llama of the architecture llama, qwen2 or
/// qwen3, or an nn::GPT of gpt2. All parameters get options.dtype, or else the dtype of the embedding (float32 if it is
/// quantized).
///
/// Throws an Error that names the file and what is wrong with it, or lists all tensors that are missing, unexpected or
/// of another shape. Before memory is allocated for a model, its size by config.json is compared with the files'.
PretrainedModel load_pretrained(const std::filesystem::path& folder, const LoadOptions& options = {});

/// The same for a known class, load_pretrained<nn::Llama>(folder). Throws if the folder has another.
template <class Model>
Model load_pretrained(const std::filesystem::path& folder, const LoadOptions& options = {});

/// The configuration alone.
PretrainedConfig load_pretrained_config(const std::filesystem::path& folder);

/// All tensors of a folder's safetensors files under the files' names, mapped.
StateDict load_pretrained_tensors(const std::filesystem::path& folder);

struct SaveOptions {
  /// Files are at most this large, as far as single tensors allow; several get an index.
  std::uint64_t shard_bytes = std::uint64_t{5} << 30;
  /// A folder whose config.json's other entries, such as the ids of special tokens, are kept.
  std::filesystem::path like{};
};

/// Writes config.json and the weights as transformers' from_pretrained() and load_pretrained() read them, and creates
/// the folder if needed. Each file is replaced only when it is complete, config.json last; then the weights of an
/// earlier save in other files (one, or the shards of its index) are removed. A model may be saved to the folder that
/// it was loaded from.
void save_pretrained(const nn::GPT& model, const std::filesystem::path& folder, const SaveOptions& options = {});
void save_pretrained(const nn::Llama& model, const std::filesystem::path& folder, const SaveOptions& options = {});
void save_pretrained(const nn::Bert& model, const std::filesystem::path& folder, const SaveOptions& options = {});
void save_pretrained(const PretrainedModel& model, const std::filesystem::path& folder,
                     const SaveOptions& options = {});

/// Writes a GGUF file with llama.cpp's names and metadata of the model; load_pretrained() reads it. `metadata` is added
/// and replaces entries with the same keys. Without a tokenizer in it, llama.cpp takes numbers of tokens alone. Throws
/// an Error for what llama.cpp does not have: dynamic scaling of rotary embeddings, a GPT without biases or with exact
/// GELU.
void save_gguf(const std::filesystem::path& path, const nn::Llama& model, const GgufMetadata& metadata = {},
               const GgufSaveOptions& options = {.matrices = {}, .vectors = GgufType::f32});
void save_gguf(const std::filesystem::path& path, const nn::GPT& model, const GgufMetadata& metadata = {},
               const GgufSaveOptions& options = {.matrices = {}, .vectors = GgufType::f32});

/// The same with a tokenizer, which Tokenizer::load() reads: see gguf_metadata() in io/gguf.h for the errors.
void save_gguf(const std::filesystem::path& path, const nn::Llama& model, const Tokenizer& tokenizer,
               const GgufMetadata& metadata = {},
               const GgufSaveOptions& options = {.matrices = {}, .vectors = GgufType::f32});
void save_gguf(const std::filesystem::path& path, const nn::GPT& model, const Tokenizer& tokenizer,
               const GgufMetadata& metadata = {},
               const GgufSaveOptions& options = {.matrices = {}, .vectors = GgufType::f32});

template <class Model>
Model load_pretrained(const std::filesystem::path& folder, const LoadOptions& options) {
  PretrainedModel model = load_pretrained(folder, options);
  check(std::holds_alternative<Model>(model), "load_pretrained: {} has a model of another class", folder.string());
  return std::get<Model>(std::move(model));
}

}  // namespace mica::io
