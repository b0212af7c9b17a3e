#include <mica/io/families/detail/fused_rows.h>
#include <mica/ops/join/join.h>

namespace mica::io::detail {

std::pair<std::string, std::string> around_layer(std::string_view name, std::string_view layer) {
  const std::size_t at = name.find("." + std::string(layer) + ".");
  if (at == std::string_view::npos) {
    return {};
  }
  return {std::string(name.substr(0, at + 1)), std::string(name.substr(at + 1 + layer.size()))};
}

void join_rows(const std::vector<FusedRows>& fused, StateDict& tensors) {
  for (const FusedRows& f : fused) {
    const std::string first(f.parts.front().first);
    for (auto at = tensors.begin(); at != tensors.end();) {
      const auto [before, after] = around_layer(at->first, first);
      if (after.empty()) {
        ++at;
        continue;
      }
      Tensors rows;
      for (const auto& [part, count] : f.parts) {
        const std::string name = before + std::string(part) + after;
        rows.push_back(tensors.at(name));
        if (part != first) {
          tensors.erase(name);
        }
      }
      at = tensors.erase(at);
      tensors.emplace(before + std::string(f.layer) + after, cat(rows, 0));
    }
  }
}

}  // namespace mica::io::detail
