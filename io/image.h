#pragma once

// Images: PNG and JPEG files, and pixels. JPEG needs libjpeg-turbo and PNG libpng when mica is built (MICA_JPEG,
// MICA_PNG); without them, such files are an Error that says so.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <mica/core/tensor.h>

namespace mica::io {

struct ImageOptions {
  /// 3: RGB, and what the file has in gray or with alpha is converted (alpha is dropped). 1: gray. 0: as in the file,
  /// which is gray, gray with alpha, RGB or RGB with alpha: 1 to 4.
  int channels = 3;
  /// Larger images and files are an Error before memory is allocated for them.
  std::int64_t max_pixels = std::int64_t{1} << 27;
  std::uint64_t max_bytes = std::uint64_t{1} << 28;
};

/// A rectangle of pixels.
struct Region {
  std::int64_t top = 0, left = 0, height = 0, width = 0;
};

/// An image: pixels, or an encoded file whose pixels are decoded when they are asked for. So a part of a JPEG file, or
/// a smaller version of it, can be had without decoding all of it. Copies share the contents.
class Image {
 public:
  /// Pixels (C, H, W), uint8 in [0, 255] or float32 in [0, 1], on the CPU, C in [1, 4]. Copied if they are not
  /// row-major.
  explicit Image(const Tensor& pixels);
  /// The contents of a PNG or JPEG file. Reads the header only. `name` is for errors.
  explicit Image(std::vector<std::byte> file, std::string name = "the image", const ImageOptions& options = {});
  /// Throws an Error that names the file if it cannot be read, is neither PNG nor JPEG, or is too large.
  static Image read(const std::filesystem::path& path, const ImageOptions& options = {});

  std::int64_t height() const { return height_; }
  std::int64_t width() const { return width_; }
  std::int64_t channels() const { return channels_; }

  /// All pixels, (C, H, W). A file's are uint8 and decoded at each call. Throws an Error that names the file if it is
  /// truncated or damaged. The orientation in Exif data is not applied, as in PIL.
  Tensor pixels() const;
  /// The pixels of a region, (C, height, width): what is cut off may not be decoded. Throws unless the region lies in
  /// the image and is not empty.
  Tensor crop(const Region& region) const;
  /// A region, resized to (C, height, width) by a triangle filter as wide as a pixel of the coarser of the two grids:
  /// what PIL and torchvision call bilinear with antialias; for uint8, within 1 of PIL. A JPEG file of which less than
  /// half of the resolution is needed is decoded at a half, a quarter or an eighth of it, which is several times as
  /// fast and changes pixels slightly.
  Tensor resize(const Region& region, std::int64_t height, std::int64_t width) const;
  Tensor resize(std::int64_t height, std::int64_t width) const;

 private:
  struct File;

  std::shared_ptr<const File> file_;  // null if there are pixels
  Tensor pixels_;
  std::int64_t height_ = 0, width_ = 0, channels_ = 0;
};

/// The pixels of a PNG or JPEG file, uint8 (C, H, W).
Tensor read_image(const std::filesystem::path& path, const ImageOptions& options = {});
/// The same from the contents of a file. `name` is for errors.
Tensor decode_image(std::span<const std::byte> file, const ImageOptions& options = {},
                    const std::string& name = "the image");

/// The contents of a PNG file. `pixels` is uint8 or float32 in [0, 1], which is rounded to 8 bits, of shape (H, W) or
/// (C, H, W): gray, gray with alpha, RGB or RGB with alpha. On any device.
std::vector<std::byte> encode_png(const Tensor& pixels);
/// Writes a PNG file, or replaces it.
void write_png(const std::filesystem::path& path, const Tensor& pixels);

}  // namespace mica::io
