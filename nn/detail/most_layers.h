#pragma once

#include <cstdint>

namespace mica::nn::detail {

/// The most layers of a model. More would fill the memory one by one before an allocation fails.
inline constexpr std::int64_t kMostLayers = 4096;

}  // namespace mica::nn::detail
