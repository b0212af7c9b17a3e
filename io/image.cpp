#include <algorithm>
#include <utility>

#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/io/detail/image_codec.h>
#include <mica/io/detail/resample.h>
#include <mica/io/file.h>
#include <mica/io/image.h>

namespace mica::io {

/// An encoded file.
struct Image::File {
  std::vector<std::byte> bytes;
  std::string name;
  ImageOptions options;
};

namespace {

void check_options(const ImageOptions& options, const std::string& name, std::uint64_t bytes) {
  check(options.channels == 0 || options.channels == 1 || options.channels == 3,
        "ImageOptions: expected 0, 1 or 3 channels, got {}", options.channels);
  check(bytes <= options.max_bytes, "{}: expected an image file of at most {} bytes, got {}", name, options.max_bytes,
        bytes);
}

detail::ImageHeader header_of(detail::Bytes file, const std::string& name, const ImageOptions& options) {
  check_options(options, name, file.size());
  if (detail::is_png(file)) {
    return detail::png_header(file, name, options);
  }
  check(detail::is_jpeg(file), "{}: expected a PNG or JPEG file, got neither", name);
  return detail::jpeg_header(file, name, options);
}

// (H, W, C) in memory as (C, H, W).
Tensor channels_first(const Tensor& x) {
  const std::int64_t height = x.size(0), width = x.size(1), channels = x.size(2);
  return as_strided(x, {channels, height, width}, {1, width * channels, channels}, 0);
}

// The luma of ITU-R 601, as PIL computes it.
Tensor to_gray(const Tensor& pixels) {
  const std::int64_t count = pixels.size(0) * pixels.size(1), channels = pixels.size(2);
  Tensor gray = empty({pixels.size(0), pixels.size(1), 1}, uint8);
  const std::uint8_t* from = pixels.data<std::uint8_t>();
  std::uint8_t* const to = gray.data<std::uint8_t>();
  for (std::int64_t i = 0; i < count; ++i, from += channels) {
    to[i] = static_cast<std::uint8_t>((19595 * from[0] + 38470 * from[1] + 7471 * from[2] + 0x8000) >> 16);
  }
  return gray;
}

// Decodes at least the region, which will be resized to (height, width); with 0, it keeps its size.
detail::DecodedRegion decode(detail::Bytes file, const std::string& name, const ImageOptions& options,
                             const Region& region, std::int64_t height, std::int64_t width) {
  detail::DecodedRegion part;
  if (detail::is_png(file)) {
    part = {detail::decode_png(file, name, options), static_cast<double>(region.top), static_cast<double>(region.left),
            static_cast<double>(region.height), static_cast<double>(region.width)};
  } else {
    part = detail::decode_jpeg(file, name, options, region, height, width);
  }
  if (options.channels == 1 && part.pixels.size(2) > 1) {
    part.pixels = to_gray(part.pixels);
  }
  part.pixels = channels_first(part.pixels);
  return part;
}

}  // namespace

namespace detail {

void check_image_size(std::int64_t height, std::int64_t width, const std::string& name, const ImageOptions& options) {
  check(height >= 1 && width >= 1 && height <= options.max_pixels / width,
        "{}: expected an image of at most {} pixels, got {} × {}", name, options.max_pixels, height, width);
}

}  // namespace detail

Image::Image(const Tensor& pixels) {
  check(pixels.defined() && pixels.dim() == 3 && pixels.size(0) >= 1 && pixels.size(0) <= 4 && pixels.numel() > 0 &&
            (pixels.dtype() == uint8 || pixels.dtype() == float32) && pixels.device().is_cpu(),
        "Image: expected pixels of shape (C, H, W), uint8 or float32, on the CPU, with 1 to 4 channels, got {}",
        pixels.defined() ? fmt::format("{} of {} on {}", pixels.shape(), pixels.dtype(), pixels.device()) : "none");
  pixels_ = contiguous_data(pixels);
  channels_ = pixels.size(0);
  height_ = pixels.size(1);
  width_ = pixels.size(2);
}

Image::Image(std::vector<std::byte> file, std::string name, const ImageOptions& options) {
  const detail::ImageHeader header = header_of(file, name, options);
  height_ = header.height;
  width_ = header.width;
  channels_ = options.channels != 0 ? options.channels : header.channels;
  file_ = std::make_shared<const File>(File{std::move(file), std::move(name), options});
}

Image Image::read(const std::filesystem::path& path, const ImageOptions& options) {
  const InputFile file(path);
  check_options(options, path.string(), file.size());
  std::vector<std::byte> bytes(file.size());
  file.read(bytes.data(), bytes.size(), 0);
  return Image(std::move(bytes), path.string(), options);
}

Tensor Image::pixels() const { return file_ == nullptr ? pixels_ : crop({.height = height_, .width = width_}); }

Tensor Image::crop(const Region& region) const { return resize(region, region.height, region.width); }

Tensor Image::resize(std::int64_t height, std::int64_t width) const {
  return resize({.height = height_, .width = width_}, height, width);
}

Tensor Image::resize(const Region& region, std::int64_t height, std::int64_t width) const {
  check(region.top >= 0 && region.left >= 0 && region.height >= 1 && region.width >= 1 &&
            region.height <= height_ - region.top && region.width <= width_ - region.left,
        "Image: expected a region in an image of {} × {} pixels, got one of {} × {} at row {}, column {}", height_,
        width_, region.height, region.width, region.top, region.left);
  check(height >= 1 && width >= 1, "Image: expected a size of at least 1 × 1, got {} × {}", height, width);
  detail::DecodedRegion part{pixels_, static_cast<double>(region.top), static_cast<double>(region.left),
                             static_cast<double>(region.height), static_cast<double>(region.width)};
  if (file_ != nullptr) {
    const bool keeps_size = region.height == height && region.width == width;
    part = decode(file_->bytes, file_->name, file_->options, region, keeps_size ? 0 : height, keeps_size ? 0 : width);
  }
  return detail::resample(part.pixels, {part.top, part.left, part.height, part.width}, height, width);
}

Tensor decode_image(std::span<const std::byte> file, const ImageOptions& options, const std::string& name) {
  const detail::ImageHeader header = header_of(file, name, options);
  const Region whole{.height = header.height, .width = header.width};
  return contiguous_data(decode(file, name, options, whole, 0, 0).pixels);
}

Tensor read_image(const std::filesystem::path& path, const ImageOptions& options) {
  return Image::read(path, options).pixels();
}

std::vector<std::byte> encode_png(const Tensor& pixels) {
  const int dim = pixels.defined() ? pixels.dim() : 0;
  const std::int64_t channels = dim == 3 ? pixels.size(0) : 1;
  check((dim == 2 || dim == 3) && pixels.numel() > 0 && channels <= 4 &&
            (pixels.dtype() == uint8 || pixels.dtype() == float32),
        "encode_png: expected pixels of shape (H, W) or (C, H, W), uint8 or float32, with 1 to 4 channels, got {}",
        pixels.defined() ? fmt::format("{} of {}", pixels.shape(), pixels.dtype()) : "none");
  const std::int64_t height = pixels.size(-2), width = pixels.size(-1);
  check(height <= INT32_MAX && width <= INT32_MAX, "encode_png: expected at most 2³¹ − 1 rows and columns, got {} × {}",
        height, width);
  const std::vector<float> values = to_vector<float>(pixels);
  const float scale = pixels.dtype() == float32 ? 255.0f : 1.0f;
  std::vector<std::uint8_t> rows(values.size());
  for (std::int64_t c = 0; c < channels; ++c) {
    for (std::int64_t i = 0; i < height * width; ++i) {
      const float value = values[static_cast<std::size_t>(c * height * width + i)] * scale;
      // A NaN becomes 0.
      rows[static_cast<std::size_t>(i * channels + c)] =
          static_cast<std::uint8_t>(value >= 0 ? std::min(value, 255.0f) + 0.5f : 0.0f);
    }
  }
  return detail::encode_png(rows.data(), {height, width, static_cast<int>(channels)});
}

void write_png(const std::filesystem::path& path, const Tensor& pixels) {
  const std::vector<std::byte> bytes = encode_png(pixels);
  AtomicFile file(path);
  file.write(bytes.data(), bytes.size());
  file.commit();
}

}  // namespace mica::io
