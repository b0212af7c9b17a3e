#pragma once

// What io has to know of a family of models: a value for each class of models.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <mica/core/state_dict.h>
#include <mica/io/families/detail/config_entries.h>
#include <mica/io/families/detail/file_tensors.h>
#include <mica/io/families/detail/fused_rows.h>
#include <mica/io/families/detail/gguf_source.h>
#include <mica/io/families/table.h>
#include <mica/io/gguf.h>
#include <mica/io/json.h>

namespace mica::io::detail {

/// How the files of llama.cpp store models of the family.
template <class Config>
struct GgufFamily {
  Texts architectures{};  ///< general.architecture; empty: the family has no such files
  /// Names in a GGUF file, and in the files of transformers: the prefixes of blocks, whole names outside of blocks, and
  /// those inside without the block's prefix and without ".weight" or ".bias". Tensors without a second name belong to
  /// the configuration.
  Names block{};
  std::span<const Names> outside{}, inside{};
  /// Names inside blocks that one architecture has, or has instead of those in `inside`.
  struct Own {
    std::string_view architecture;
    std::span<const Names> inside;
  };
  std::span<const Own> own{};

  Config (*read)(const GgufSource& source) = nullptr;
  /// Throws if llama.cpp has no such model. Without the tokenizer.
  GgufMetadata (*write)(const Config& config) = nullptr;
  /// Converts the elements of a tensor of transformers with this name to those of GGUF (`to_gguf`), or back. Null: they
  /// are the same. Matrices that transformers transposes come as they are in state_dict().
  Tensor (*converted)(const Config& config, std::string_view architecture, std::string_view name, const Tensor& tensor,
                      bool to_gguf) = nullptr;
  /// Tensors that belong to the configuration; or null.
  StateDict (*config_tensors)(const Config& config) = nullptr;
};

template <class Model>
struct ModelFamily {
  using Config = decltype(Model::config);

  // config.json.
  Texts types{};  ///< model_type
  Config (*read)(const ConfigEntries& entries, const std::string& type) = nullptr;
  /// Throws if transformers has no such model.
  JsonValue::Object (*write)(const Config& config) = nullptr;
  /// The number of elements of the parameters; tied ones count once.
  std::int64_t (*parameter_count)(const Config& config) = nullptr;

  // The files' tensors.
  FileTensors tensors{};
  FileTensors (*tensors_of)(const Config& config) = nullptr;  ///< if they depend on the configuration; or null
  bool (*has_tied_head)(const Config& config) = nullptr;      ///< null: there is no head
  std::vector<FusedRows> (*fused_rows)(const Config& config) = nullptr;   ///< of the files' layers; or null
  void (*adapt)(Config& config, const StateDict& own_tensors) = nullptr;  ///< to the tensors that there are; or null

  std::string_view heads{};  ///< for errors: those of an encoder; empty for other models

  std::string_view adapter_task{};  ///< PEFT's task_type
  GgufFamily<Config> gguf{};

  FileTensors files(const Config& config) const { return tensors_of == nullptr ? tensors : tensors_of(config); }
  bool ties_head(const Config& config) const { return has_tied_head != nullptr && has_tied_head(config); }
  std::vector<FusedRows> fused(const Config& config) const {
    return fused_rows == nullptr ? std::vector<FusedRows>{} : fused_rows(config);
  }
  /// A state_dict(), or what belongs to its tensors, as the files have it: FileTensors::of_files(), with fused rows.
  StateDict file_tensors(const Config& config, const StateDict& own, const char* op) const {
    StateDict result = files(config).of_files(own, ties_head(config), op);
    join_rows(fused(config), result);
    return result;
  }
};

template <class Config, class Models>
struct ModelOf;
template <class Config, class First, class... Others>
struct ModelOf<Config, std::variant<First, Others...>>
    : std::conditional_t<std::is_same_v<Config, decltype(First::config)>, std::type_identity<First>,
                         ModelOf<Config, std::variant<Others...>>> {};

/// The family of a configuration.
template <class Config>
const auto& family_of(const Config&) {
  return family<typename ModelOf<Config, PretrainedModel>::type>();
}

/// Calls f(family) for each family until it returns true. Returns whether one did.
template <class F>
bool any_family(const F& f) {
  return [&]<class... Models>(std::type_identity<std::variant<Models...>>) {
    return (f(family<Models>()) || ...);
  }(std::type_identity<PretrainedModel>{});
}

}  // namespace mica::io::detail
