#include <mica/nn/detail/name_pattern.h>

namespace mica::nn::detail {

bool matches(std::string_view name, std::string_view pattern) {
  // After a mismatch the last * matches one more character; earlier ones never need to.
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

}  // namespace mica::nn::detail
