#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <mica/nn/pooling.h>

namespace mica::io {

/// How a model makes one vector of a text, from the files that the Python package sentence-transformers writes beside
/// the weights. See docs/pretrained.md.
struct SentenceSettings {
  std::filesystem::path model;                          ///< the folder with config.json, the weights and the tokenizer
  std::vector<nn::Pooling> pooling{nn::Pooling::mean};  ///< of several, the vectors are joined
  bool normalize = false;                               ///< to vectors of length 1: mica::normalize(vectors)
  std::optional<std::int64_t> max_length{};             ///< of a text in tokens: EncodeOptions::max_length
  std::map<std::string, std::string> prompts{};         ///< by name: texts to put before each text
  std::optional<std::string> default_prompt{};          ///< the name of the prompt to use if none is asked for
};

/// Reads modules.json, the configuration of its modules (Transformer, Pooling and Normalize are supported),
/// config_sentence_transformers.json, and the model_max_length of tokenizer_config.json. Files that a folder lacks
/// change nothing: a plain encoder gives means without normalization, as in sentence-transformers. Throws an Error that
/// names the file and the entry for what is not supported.
SentenceSettings load_sentence_settings(const std::filesystem::path& folder);

}  // namespace mica::io
