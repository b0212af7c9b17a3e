#pragma once

#include <cstdint>
#include <vector>

#include <mica/ops/quantized/quantized.h>

namespace mica::testing_support {

// The formats of quantized weights that tests iterate over.
inline const std::vector<int> kBits = {8, 4, 2, 1};
inline const std::vector<std::int64_t> kGroupSizes = {32, 64, 128, kWholeColumn};

}  // namespace mica::testing_support
