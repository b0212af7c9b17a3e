#pragma once

// What libpng and libjpeg-turbo do for io/image.cpp. `name` is of the file, for errors.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <mica/core/tensor.h>
#include <mica/io/image.h>

namespace mica::io::detail {

using Bytes = std::span<const std::byte>;

/// The size of an image, and the channels that it is decoded to.
struct ImageHeader {
  std::int64_t height, width;
  int channels;
};

/// A region of an image, decoded.
struct DecodedRegion {
  Tensor pixels;                    // (H, W, C), uint8
  double top, left, height, width;  // the region, in pixels of `pixels`
};

bool is_png(Bytes file);
ImageHeader png_header(Bytes file, const std::string& name, const ImageOptions& options);
Tensor decode_png(Bytes file, const std::string& name, const ImageOptions& options);  // (H, W, C)
std::vector<std::byte> encode_png(const std::uint8_t* pixels, const ImageHeader& size);

bool is_jpeg(Bytes file);
ImageHeader jpeg_header(Bytes file, const std::string& name, const ImageOptions& options);
/// Decodes at least the region. It will be resized to (height, width), so a lower resolution may be decoded; with 0, it
/// is not.
DecodedRegion decode_jpeg(Bytes file, const std::string& name, const ImageOptions& options, const Region& region,
                          std::int64_t height, std::int64_t width);

/// Throws if the image is larger than the options allow.
void check_image_size(std::int64_t height, std::int64_t width, const std::string& name, const ImageOptions& options);

}  // namespace mica::io::detail
