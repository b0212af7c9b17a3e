#pragma once

#include <cstdint>

#include <mica/core/tensor.h>

namespace mica::io::detail {

/// A rectangle in an image, in pixels; the upper left corner of pixel (y, x) is at (y, x).
struct Box {
  double top, left, height, width;
};

/// Resizes the part of `image` in the box to (C, height, width), contiguous: see Image::resize(). The image is uint8 or
/// float32 of shape (C, H, W), row-major, or stored as (H, W, C). Pixels outside of the box are not used.
Tensor resample(const Tensor& image, const Box& box, std::int64_t height, std::int64_t width);

}  // namespace mica::io::detail
