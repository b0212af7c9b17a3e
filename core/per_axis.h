#pragma once

#include <concepts>
#include <cstdint>
#include <initializer_list>

#include <mica/core/shape.h>

namespace mica {

/// A number for each spatial axis, or one for all of them: `2`, or `{1, 2}`.
struct PerAxis : Dims {
  template <std::integral I>
  PerAxis(I all) : Dims{static_cast<std::int64_t>(all)} {}
  PerAxis(std::initializer_list<std::int64_t> values) : Dims(values) {}
  PerAxis(const Dims& values) : Dims(values) {}
};

}  // namespace mica
