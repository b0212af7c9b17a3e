#pragma once

#include <string_view>

namespace mica::nn::detail {

/// Whether a whole name matches a pattern, in which * stands for any characters and ? for one.
bool matches(std::string_view name, std::string_view pattern);

}  // namespace mica::nn::detail
