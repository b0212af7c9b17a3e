#pragma once

#include <algorithm>

#include <mica/core/cuda/elementwise.cuh>
#include <mica/core/cuda/launch.h>
#include <mica/core/dispatch.h>
#include <mica/ops/images/detail/image_loop.h>

namespace mica::images {

/// The sizes of a grid, for divisions.
struct GridDivisors {
  cuda::Divisor packs;  // of inner elements
  cuda::Divisor sizes[3];
};

template <class Body, int V>
__global__ void __launch_bounds__(cuda::kElementwiseThreads)
    image_kernel(Body body, GridDivisors grid, std::uint32_t units, std::int64_t first_image) {
  const std::uint32_t unit = blockIdx.x * cuda::kElementwiseThreads + threadIdx.x;
  if (unit >= units) {
    return;
  }
  Place p;
  std::uint32_t rest = grid.packs.quotient(unit);
  p.inner = static_cast<std::int64_t>(unit - rest * grid.packs.divisor) * V;
#pragma unroll
  for (int axis = 2; axis >= 0; --axis) {
    const std::uint32_t next = grid.sizes[axis].quotient(rest);
    p.at[axis] = static_cast<int>(rest - next * grid.sizes[axis].divisor);
    rest = next;
  }
  p.outer = first_image + rest;
  body.template compute<V>(p);
}

/// See image_loop.h.
template <class Body>
void for_images(Cuda, const char* name, const Grid& grid, const Body& body, std::int64_t, bool aligned) {
  using T = typename Body::Element;
  constexpr int kPack = sizeof(T) < 8 ? 16 / sizeof(T) : 1;
  const auto run = [&]<int V>(std::integral_constant<int, V>) {
    GridDivisors divisors{.packs = cuda::Divisor(static_cast<std::uint32_t>(grid.inner / V)), .sizes = {}};
    for (int axis = 0; axis < 3; ++axis) {
      divisors.sizes[axis] = cuda::Divisor(static_cast<std::uint32_t>(grid.sizes[axis]));
    }
    const std::int64_t in_image = grid.plane() * (grid.inner / V);
    check(in_image <= INT32_MAX, "{}: expected images of fewer than 2^31 elements, got {}", name, in_image * V);
    const std::int64_t at_once = std::max<std::int64_t>(INT32_MAX / in_image, 1);  // images
    for (std::int64_t image = 0; image < grid.outer; image += at_once) {
      const auto units = static_cast<std::uint32_t>(std::min(at_once, grid.outer - image) * in_image);
      cuda::Launch(cuda::elementwise_blocks(units), cuda::kElementwiseThreads)
          .run(image_kernel<Body, V>, name, body, divisors, units, image);
    }
  };
  if constexpr (kPack > 1) {
    if (aligned && grid.inner % kPack == 0) {
      run(std::integral_constant<int, kPack>{});
      return;
    }
  }
  run(std::integral_constant<int, 1>{});
}

}  // namespace mica::images
