#include <algorithm>
#include <string_view>

#include <mica/optim/groups.h>

namespace mica::optim {

namespace {

bool matches(std::string_view name, std::string_view pattern) {
  // After a mismatch the last * takes one more character; earlier ones never need to.
  std::size_t n = 0, p = 0;
  std::size_t star = std::string_view::npos, after_star = 0;
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      after_star = n;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == name[n])) {
      ++n;
      ++p;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      n = ++after_star;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', p) == std::string_view::npos;
}

}  // namespace

std::vector<Tensors> group_by_name(const nn::NamedTensors& parameters,
                                   const std::vector<std::vector<std::string>>& patterns) {
  std::vector<Tensors> groups(patterns.size() + 1);
  for (const auto& [name, parameter] : parameters) {
    const auto has_match = [&](const std::vector<std::string>& entry) {
      return std::any_of(entry.begin(), entry.end(), [&](const std::string& p) { return matches(name, p); });
    };
    const auto entry = std::find_if(patterns.begin(), patterns.end(), has_match);
    groups[static_cast<std::size_t>(entry - patterns.begin())].push_back(parameter);
  }
  for (const std::vector<std::string>& entry : patterns) {
    for (const std::string& pattern : entry) {
      check(std::any_of(parameters.begin(), parameters.end(),
                        [&](const auto& named) { return matches(named.first, pattern); }),
            "group_by_name: no parameter's name matches {}", pattern);
    }
  }
  return groups;
}

}  // namespace mica::optim
