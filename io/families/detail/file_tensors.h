#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include <mica/core/state_dict.h>

namespace mica::io::detail {

/// The name of a head's weight in state_dict(), in all families.
inline constexpr std::string_view kHeadWeight = "lm_head.weight";

using Texts = std::span<const std::string_view>;
/// Pairs of a name in a file and the name that replaces it.
using Names = std::pair<std::string_view, std::string_view>;

inline bool ends_with_any(std::string_view name, Texts endings) {
  return std::any_of(endings.begin(), endings.end(), [&](std::string_view ending) { return name.ends_with(ending); });
}

/// How the tensors in the files of transformers differ from those of the model's state_dict().
struct FileTensors {
  std::string_view prefix{};        ///< of the names in the files, which files of a part of the model lack
  std::string_view outer_prefix{};  ///< of the names in the files of larger models
  Texts unprefixed{};               ///< beginnings of names in state_dict() that never have a prefix: those of heads
  std::string_view own_prefix{};    ///< of the names in state_dict(), which files of a part of the model lack
  std::string_view embedding{};     ///< the parameter to which a head may be tied
  Texts transposed{};               ///< endings of names of matrices that are stored as (in, out)
  Texts obsolete{};                 ///< endings of names of buffers in old files, which models now compute themselves
  /// Parts of names in the files, and in state_dict(), which replace each other one after the other: those that begin
  /// with a dot anywhere in the name, others at its beginning.
  std::span<const Names> names{};
  std::span<const Names> old_names{};  ///< others, which are only read

  bool is_transposed(std::string_view name, const Tensor& tensor) const {
    return tensor.dim() == 2 && ends_with_any(name, transposed);
  }
  /// The name in state_dict() of a tensor in a file. `lacks_prefix`: no name in the file has own_prefix.
  std::string own_name(std::string name, bool lacks_prefix) const;
  /// The name in a file of a tensor in state_dict().
  std::string file_name(const std::string& own_name) const;
  /// The tensors of a state_dict() as the files have them. Throws an Error that begins with `op` if a layer has an
  /// adapter or a quantized weight, which files cannot have.
  StateDict of_files(const StateDict& own, bool tied_head, const char* op) const;
};

}  // namespace mica::io::detail
