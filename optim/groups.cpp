#include <algorithm>

#include <mica/nn/detail/name_pattern.h>
#include <mica/optim/groups.h>

namespace mica::optim {

std::vector<Tensors> group_by_name(const nn::NamedTensors& parameters,
                                   const std::vector<std::vector<std::string>>& patterns) {
  std::vector<Tensors> groups(patterns.size() + 1);
  for (const auto& named : parameters) {
    const auto has_match = [&](const std::vector<std::string>& entry) {
      return std::any_of(entry.begin(), entry.end(),
                         [&](const std::string& p) { return nn::detail::matches(named.first, p); });
    };
    const auto entry = std::find_if(patterns.begin(), patterns.end(), has_match);
    groups[static_cast<std::size_t>(entry - patterns.begin())].push_back(named.second);
  }
  for (const std::vector<std::string>& entry : patterns) {
    for (const std::string& pattern : entry) {
      check(std::any_of(parameters.begin(), parameters.end(),
                        [&](const auto& named) { return nn::detail::matches(named.first, pattern); }),
            "group_by_name: no parameter's name matches {}", pattern);
    }
  }
  return groups;
}

}  // namespace mica::optim
