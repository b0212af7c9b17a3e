#pragma once

// Tensors of the files that hold the rows of several of a model's tensors, one below the other.

#include <fmt/format.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <mica/core/check.h>
#include <mica/core/state_dict.h>
#include <mica/ops/view/view.h>

namespace mica::io::detail {

/// The weight and bias of one layer in the files are those of several layers of the model.
struct FusedRows {
  std::string_view layer;                                        ///< in the files: "self_attn.qkv_proj"
  std::vector<std::pair<std::string_view, std::int64_t>> parts;  ///< in the model, and their numbers of rows
};

/// The places of a layer in a name, "model.layers.0." and ".weight" of "model.layers.0.self_attn.qkv_proj.weight"; both
/// are empty if the name is not that of a parameter of the layer.
std::pair<std::string, std::string> around_layer(std::string_view name, std::string_view layer);

/// Replaces the fused ones among `entries`, by names as in the model, by views of their rows. rows(entry) is the tensor
/// that has the rows. Throws an Error that begins with `what` if there are more or fewer rows, or if the files have a
/// part, too.
template <class Entry, class F>
void split_rows(const std::vector<FusedRows>& fused, std::map<std::string, Entry>& entries, const F& rows,
                const std::string& what) {
  for (const FusedRows& f : fused) {
    std::int64_t total = 0;
    for (const auto& [part, count] : f.parts) {
      total += count;
    }
    for (auto at = entries.begin(); at != entries.end();) {
      const auto [before, after] = around_layer(at->first, f.layer);
      if (after.empty()) {
        ++at;
        continue;
      }
      Entry whole = at->second;
      const Tensor all = rows(whole);
      check(all.dim() >= 1 && all.size(0) == total, "{}: expected \"{}\" to have {} rows, got shape {}", what,
            at->first, total, all.shape());
      at = entries.erase(at);
      std::int64_t begin = 0;
      for (const auto& [part, count] : f.parts) {
        rows(whole) = slice(all, 0, begin, begin + count);
        begin += count;
        const std::string name = fmt::format("{}{}{}", before, part, after);
        check(entries.emplace(name, whole).second, "{}: two tensors of the files have the name \"{}\" in the model",
              what, name);
      }
    }
  }
}

/// The reverse, for the tensors of a whole model.
void join_rows(const std::vector<FusedRows>& fused, StateDict& tensors);

}  // namespace mica::io::detail
