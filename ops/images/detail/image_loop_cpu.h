#pragma once

#include <algorithm>

#include <mica/core/dispatch.h>
#include <mica/core/parallel.h>
#include <mica/ops/images/detail/image_loop.h>

namespace mica::images {

/// See image_loop.h.
template <class Body>
void for_images(Cpu, const char*, const Grid& grid, const Body& body, std::int64_t work, bool) {
  constexpr int kPack = 16;
  const std::int64_t rows = grid.outer * grid.sizes[0] * grid.sizes[1];
  const std::int64_t in_row = grid.sizes[2] * grid.inner * std::max<std::int64_t>(work, 1);
  const auto run = [&]<int V>(std::integral_constant<int, V>) {
    parallel_for(rows, std::max<std::int64_t>(16'384 / in_row, 1), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        Place p{.outer = row / grid.sizes[1] / grid.sizes[0],
                .at = {static_cast<int>(row / grid.sizes[1] % grid.sizes[0]), static_cast<int>(row % grid.sizes[1]), 0},
                .inner = 0};
        for (p.at[2] = 0; p.at[2] < grid.sizes[2]; ++p.at[2]) {
          for (p.inner = 0; p.inner < grid.inner; p.inner += V) {
            body.template compute<V>(p);
          }
        }
      }
    });
  };
  grid.inner % kPack == 0 ? run(std::integral_constant<int, kPack>{}) : run(std::integral_constant<int, 1>{});
}

}  // namespace mica::images
