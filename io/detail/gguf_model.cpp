#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include <mica/core/check.h>
#include <mica/core/progress.h>
#include <mica/io/detail/gguf_header.h>
#include <mica/io/detail/gguf_model.h>
#include <mica/io/families/detail/family.h>
#include <mica/ops/view/view.h>

// Names: gguf-py/gguf/constants.py and tensor_mapping.py of https://github.com/ggml-org/llama.cpp. The program that
// converts to GGUF: convert_hf_to_gguf.py there.

namespace mica::io::detail {

namespace {

/// The name in the other naming; the same name if it has none.
template <class Config>
std::string translated(const GgufFamily<Config>& naming, std::string_view architecture, const std::string& name,
                       std::string_view Names::*from, std::string_view Names::*to) {
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
  std::vector<std::span<const Names>> lists;
  for (const auto& own : naming.own) {
    if (own.architecture == architecture) {
      lists.push_back(own.inside);
    }
  }
  lists.push_back(naming.inside);
  for (const std::span<const Names> list : lists) {
    for (const Names& names : list) {
      if (inside == names.*from) {
        return fmt::format("{}{}.{}{}", prefixes.*to, name.substr(number, dot - number), names.*to, name.substr(end));
      }
    }
  }
  return name;
}

PretrainedConfig config_of(const GgufSource& source) {
  const std::string architecture = source.architecture();
  std::optional<PretrainedConfig> config;
  std::string known;
  any_family([&](const auto& family) {
    for (const std::string_view name : family.gguf.architectures) {
      known += fmt::format("{}{}", known.empty() ? "" : ", ", name);
      if (name == architecture) {
        config = family.gguf.read(source);
      }
    }
    return config.has_value();
  });
  check(config.has_value(), "{}: expected a model of one of the architectures {}, got \"{}\"", source.what(), known,
        architecture);
  return *std::move(config);
}

bool is_same(const Tensor& a, const Tensor& b) {
  return a.dtype() == b.dtype() && a.shape() == b.shape() && std::memcmp(a.raw_data(), b.raw_data(), a.bytes()) == 0;
}
bool is_same(const GgufMatrix& a, const GgufMatrix& b) { return a.type == b.type && is_same(a.bytes, b.bytes); }

/// Some conversions of models with a tied head store the embedding a second time, as the head. Removes the head.
template <class Map>
void remove_tied_head(Map& tensors, bool has_embedding, const std::string& what) {
  const auto head = tensors.find(std::string(kGgufHead)), embedding = tensors.find(std::string(kGgufEmbedding));
  if (head == tensors.end()) {
    return;
  }
  check(!has_embedding || (embedding != tensors.end() && is_same(head->second, embedding->second)),
        "{}: \"{}\" is not \"{}\", which is the head of the model", what, kGgufHead, kGgufEmbedding);
  tensors.erase(head);
}

/// A tensor's elements as the other format stores them.
template <class Model>
Tensor in_other_format(const ModelFamily<Model>& family, const typename ModelFamily<Model>::Config& config,
                       std::string_view architecture, const std::string& hugging_face_name, const Tensor& tensor,
                       bool to_gguf) {
  if (family.tensors.is_transposed(hugging_face_name, tensor)) {  // only in the files of transformers
    return transpose(tensor, 0, 1);
  }
  return family.gguf.converted == nullptr
             ? tensor
             : family.gguf.converted(config, architecture, hugging_face_name, tensor, to_gguf);
}

/// The tensors under Hugging Face's names.
template <class Config>
StateDict hugging_face_tensors(const Config& config, const std::string& architecture, const StateDict& tensors,
                               const std::filesystem::path& path, const std::string& what) {
  const auto& family = family_of(config);
  std::int64_t total = 0;
  for (const auto& [file_name, tensor] : tensors) {
    total += static_cast<std::int64_t>(tensor.bytes());
  }
  // Reordering rows reads them from the file.
  ProgressTask progress("converting " + path.filename().string(), total);
  StateDict result;
  for (const auto& [file_name, tensor] : tensors) {
    const std::string name = translated(family.gguf, architecture, file_name, &Names::first, &Names::second);
    check(
        name.empty() || result.emplace(name, in_other_format(family, config, architecture, name, tensor, false)).second,
        "{}: two tensors have the name \"{}\" in the model", what, name);
    progress.advance(static_cast<std::int64_t>(tensor.bytes()));
  }
  return result;
}

/// The quantized matrices under Hugging Face's names, with its order of the rows.
template <class Config>
std::map<std::string, GgufMatrix> hugging_face_matrices(const Config& config, const std::string& architecture,
                                                        const std::map<std::string, GgufMatrix>& matrices,
                                                        const std::string& what) {
  const auto& family = family_of(config);
  std::map<std::string, GgufMatrix> result;
  for (auto [file_name, matrix] : matrices) {
    const std::string name = translated(family.gguf, architecture, file_name, &Names::first, &Names::second);
    if (!name.empty() && family.gguf.converted != nullptr) {
      matrix.bytes = family.gguf.converted(config, architecture, name, matrix.bytes, false);
    }
    check(name.empty() || result.emplace(name, matrix).second, "{}: two tensors have the name \"{}\" in the model",
          what, name);
  }
  return result;
}

}  // namespace

PretrainedConfig load_gguf_config(const std::filesystem::path& path, const std::string& what) {
  const GgufFiles files(path);
  return config_of(GgufSource(files, what));
}

GgufModel load_gguf_model(const std::filesystem::path& path, DType dequantized, const std::string& what) {
  const GgufFiles files(path);
  const GgufSource source(files, what);
  GgufModel model{.config = config_of(source), .tensors = {}, .matrices = {}, .dtype = dequantized};
  std::map<std::string, GgufMatrix> matrices;
  StateDict tensors = read_gguf_tensors(files, {.dequantized = dequantized, .mapped = true}, &matrices);
  const auto embedding = tensors.find(kGgufEmbedding);
  if (embedding != tensors.end()) {
    model.dtype = embedding->second.dtype();
  }
  std::visit(
      [&](const auto& config) {
        if (family_of(config).ties_head(config)) {
          const bool has_embedding = tensors.contains(kGgufEmbedding) || matrices.contains(kGgufEmbedding);
          remove_tied_head(tensors, has_embedding, what);
          remove_tied_head(matrices, has_embedding, what);
        }
        model.tensors = hugging_face_tensors(config, source.architecture(), tensors, path, what);
        model.matrices = hugging_face_matrices(config, source.architecture(), matrices, what);
        for (const auto& [name, matrix] : model.matrices) {
          check(!model.tensors.contains(name), "{}: two tensors have the name \"{}\" in the model", what, name);
        }
      },
      model.config);
  return model;
}

StateDict gguf_tensors(const PretrainedConfig& config, const std::string& architecture, const StateDict& tensors) {
  return std::visit(
      [&](const auto& c) {
        const auto& family = family_of(c);
        StateDict result;
        for (const auto& [name, tensor] : tensors) {
          result.emplace(translated(family.gguf, architecture, name, &Names::second, &Names::first),
                         in_other_format(family, c, architecture, name, tensor, true));
        }
        if (family.gguf.config_tensors != nullptr) {
          result.merge(family.gguf.config_tensors(c));
        }
        return result;
      },
      config);
}

}  // namespace mica::io::detail
