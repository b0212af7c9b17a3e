#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <utility>

#include <mica/core/check.h>
#include <mica/core/creation.h>
#include <mica/core/parallel.h>
#include <mica/io/transforms.h>

namespace mica::io {

namespace {

/// Pixels (C, H, W), row-major.
template <class T>
struct Plane {
  T* data;
  std::int64_t channels, height, width;

  std::int64_t size() const { return height * width; }
  T* row(std::int64_t c, std::int64_t y) const { return data + (c * height + y) * width; }
};

template <class T>
Plane<T> plane_of(const Tensor& x) {
  return {x.data<T>(), x.size(0), x.size(1), x.size(2)};
}

/// Calls f with the pixels as uint8 or as float.
template <class F>
void on_pixels(const Tensor& x, F f) {
  x.dtype() == uint8 ? f(plane_of<std::uint8_t>(x)) : f(plane_of<float>(x));
}

Tensor checked(const char* name, const Tensor& pixels) {
  const Tensor x = Image(pixels).pixels();  // checks them
  check(x.size(0) == 1 || x.size(0) == 3, "{}: expected pixels with 1 or 3 channels, got {}", name, x.shape());
  return x;
}

/// The largest value of T, and a value rounded to T and clamped.
template <class T>
constexpr float kWhite = std::is_same_v<T, float> ? 1.0f : 255.0f;
template <class T>
T to_pixel(float value) {
  value = std::min(std::max(value, 0.0f), kWhite<T>);
  return static_cast<T>(std::is_same_v<T, float> ? value : value + 0.5f);
}

// The luma of ITU-R 601, with torchvision's digits.
float luma(float red, float green, float blue) { return 0.2989f * red + 0.587f * green + 0.114f * blue; }

template <class T>
float gray_at(const Plane<T>& x, std::int64_t i) {
  const auto at = [&](std::int64_t c) { return static_cast<float>(x.data[c * x.size() + i]); };
  return x.channels == 1 ? at(0) : luma(at(0), at(1), at(2));
}

/// factor · x + (1 − factor) · other(i), for each pixel i of each channel.
template <class T, class F>
void blend(const Plane<T>& x, float factor, T* to, F other) {
  for (std::int64_t c = 0; c < x.channels; ++c) {
    for (std::int64_t i = 0; i < x.size(); ++i) {
      const std::int64_t at = c * x.size() + i;
      to[at] = to_pixel<T>(factor * static_cast<float>(x.data[at]) + (1 - factor) * other(i));
    }
  }
}

template <class F>
Tensor blended(const char* name, const Tensor& pixels, double factor, F other) {
  check(factor >= 0 && std::isfinite(factor), "{}: expected a factor of at least 0, got {}", name, factor);
  const Tensor x = checked(name, pixels);
  Tensor result = empty_like(x);
  on_pixels(x, [&]<class T>(const Plane<T>& from) {
    blend(from, static_cast<float>(factor), result.data<T>(), other(from));
  });
  return result;
}

// Shifts the hue of a color in [0, 1].
void shift_hue(float (&rgb)[3], float shift) {
  const float high = std::max({rgb[0], rgb[1], rgb[2]}), low = std::min({rgb[0], rgb[1], rgb[2]}), range = high - low;
  if (range == 0) {
    return;
  }
  const float sector = high == rgb[0]   ? (rgb[1] - rgb[2]) / range
                       : high == rgb[1] ? 2 + (rgb[2] - rgb[0]) / range
                                        : 4 + (rgb[0] - rgb[1]) / range;
  const float hue = sector + 6 * shift;
  // Each channel is a trapezoid over the circle of hues.
  for (int c = 0; c < 3; ++c) {
    float distance = hue - 2.0f * static_cast<float>(c);
    distance = std::abs(distance - 6 * std::round(distance / 6));
    rgb[c] = low + range * std::min(std::max(2 - distance, 0.0f), 1.0f);
  }
}

template <class T>
void rotate(const Plane<T>& x, double degrees, double fill, T* to) {
  const double angle = degrees * (3.14159265358979323846 / 180), c = std::cos(angle), s = std::sin(angle);
  const double middle_y = static_cast<double>(x.height) / 2, middle_x = static_cast<double>(x.width) / 2;
  for (std::int64_t y = 0; y < x.height; ++y) {
    for (std::int64_t column = 0; column < x.width; ++column) {
      const double dx = static_cast<double>(column) + 0.5 - middle_x, dy = static_cast<double>(y) + 0.5 - middle_y;
      const double from_x = c * dx - s * dy + middle_x - 0.5, from_y = s * dx + c * dy + middle_y - 0.5;
      const double left = std::floor(from_x), top = std::floor(from_y);
      for (std::int64_t channel = 0; channel < x.channels; ++channel) {
        double sum = 0;
        for (int corner = 0; corner < 4; ++corner) {
          const double at_x = left + (corner & 1), at_y = top + (corner >> 1);
          const bool inside =
              at_x >= 0 && at_x < static_cast<double>(x.width) && at_y >= 0 && at_y < static_cast<double>(x.height);
          const double weight = (1 - std::abs(from_x - at_x)) * (1 - std::abs(from_y - at_y));
          sum += weight * (inside ? static_cast<double>(x.row(
                                        channel, static_cast<std::int64_t>(at_y))[static_cast<std::int64_t>(at_x)])
                                  : fill);
        }
        to[(channel * x.height + y) * x.width + column] = to_pixel<T>(static_cast<float>(sum));
      }
    }
  }
}

// A rectangle with a random share of the area of an image and a random ratio of width to height; none if ten attempts
// do not fit in it.
std::optional<Region> random_region(const Image& x, const std::array<double, 2>& area,
                                    const std::array<double, 2>& ratio, SampleRandom& random) {
  check(0 < area[0] && area[0] <= area[1] && 0 < ratio[0] && ratio[0] <= ratio[1] && std::isfinite(area[1] + ratio[1]),
        "RandomResizedCrop, RandomErasing: expected positive ranges of area and ratio, got [{}, {}] and [{}, {}]",
        area[0], area[1], ratio[0], ratio[1]);
  const double pixels = static_cast<double>(x.height()) * static_cast<double>(x.width());
  for (int attempt = 0; attempt < 10; ++attempt) {
    const double size = pixels * random.uniform(area[0], area[1]);
    const double shape = std::exp(random.uniform(std::log(ratio[0]), std::log(ratio[1])));
    const double width = std::round(std::sqrt(size * shape)), height = std::round(std::sqrt(size / shape));
    if (width >= 1 && height >= 1 && width <= static_cast<double>(x.width()) &&
        height <= static_cast<double>(x.height())) {
      Region region{.height = static_cast<std::int64_t>(height), .width = static_cast<std::int64_t>(width)};
      region.top = random.below(x.height() - region.height + 1);
      region.left = random.below(x.width() - region.width + 1);
      return region;
    }
  }
  return std::nullopt;
}

// The largest part in the middle whose ratio of width to height is in the range.
Region middle_region(const Image& x, const std::array<double, 2>& ratio) {
  const auto height = static_cast<double>(x.height()), width = static_cast<double>(x.width());
  Region region{.height = x.height(), .width = x.width()};
  if (width < ratio[0] * height) {
    region.height = std::max<std::int64_t>(1, std::llround(width / ratio[0]));
  } else if (width > ratio[1] * height) {
    region.width = std::max<std::int64_t>(1, std::llround(height * ratio[1]));
  }
  region.top = (x.height() - region.height) / 2;
  region.left = (x.width() - region.width) / 2;
  return region;
}

void check_fits(const char* name, const Image& x, std::int64_t height, std::int64_t width) {
  check(height >= 1 && width >= 1 && height <= x.height() && width <= x.width(),
        "{}: expected an image of at least {} × {} pixels, got {} × {}", name, height, width, x.height(), x.width());
}

}  // namespace

ImageTransform in_order(std::vector<ImageTransform> transforms) {
  return [transforms = std::move(transforms)](const Image& x, SampleRandom& random) {
    Image result = x;
    for (const ImageTransform& transform : transforms) {
      result = transform(result, random);
    }
    return result;
  };
}

Image Resize::operator()(const Image& x, SampleRandom&) const {
  if (width != 0) {
    return Image(x.resize(height, width));
  }
  const std::int64_t shorter = std::min(x.height(), x.width()), longer = std::max(x.height(), x.width());
  check(height >= 1 && height <= INT32_MAX, "Resize: expected a size of at least 1, got {}", height);
  const std::int64_t other = height * longer / shorter;
  return Image(x.height() < x.width() ? x.resize(height, other) : x.resize(other, height));
}

Image CenterCrop::operator()(const Image& x, SampleRandom&) const {
  check_fits("CenterCrop", x, height, width);
  // Half of an odd difference is rounded to even, as Python rounds it.
  const auto middle = [](std::int64_t all, std::int64_t part) {
    return static_cast<std::int64_t>(std::nearbyint(static_cast<double>(all - part) / 2));
  };
  return Image(x.crop({middle(x.height(), height), middle(x.width(), width), height, width}));
}

Image Pad::operator()(const Image& x, SampleRandom&) const {
  check(padding >= 0 && padding <= INT32_MAX, "Pad: expected a padding of at least 0, got {}", padding);
  const Tensor pixels = x.pixels();
  const Tensor result = full({x.channels(), x.height() + 2 * padding, x.width() + 2 * padding}, fill, pixels.dtype());
  on_pixels(pixels, [&]<class T>(const Plane<T>& from) {
    const auto to = plane_of<T>(result);
    for (std::int64_t c = 0; c < from.channels; ++c) {
      for (std::int64_t y = 0; y < from.height; ++y) {
        std::copy_n(from.row(c, y), from.width, to.row(c, y + padding) + padding);
      }
    }
  });
  return Image(result);
}

Image RandomCrop::operator()(const Image& x, SampleRandom& random) const {
  const Image padded = padding == 0 ? x : Pad{padding}(x, random);
  check_fits("RandomCrop", padded, height, width);
  const std::int64_t top = random.below(padded.height() - height + 1), left = random.below(padded.width() - width + 1);
  return Image(padded.crop({top, left, height, width}));
}

Image RandomResizedCrop::operator()(const Image& x, SampleRandom& random) const {
  const std::optional<Region> region = random_region(x, area, ratio, random);
  return Image(x.resize(region ? *region : middle_region(x, ratio), height, width));
}

Image RandomFlip::operator()(const Image& x, SampleRandom& random) const {
  if (!random.chance(probability)) {
    return x;
  }
  const Tensor pixels = x.pixels(), result = empty_like(pixels);
  on_pixels(pixels, [&]<class T>(const Plane<T>& from) {
    const auto to = plane_of<T>(result);
    for (std::int64_t c = 0; c < from.channels; ++c) {
      for (std::int64_t y = 0; y < from.height; ++y) {
        const T* const row = from.row(c, vertical ? from.height - 1 - y : y);
        vertical ? std::copy_n(row, from.width, to.row(c, y)) : std::reverse_copy(row, row + from.width, to.row(c, y));
      }
    }
  });
  return Image(result);
}

Image RandomRotation::operator()(const Image& x, SampleRandom& random) const {
  return Image(rotate(x.pixels(), random.uniform(-degrees, degrees), fill));
}

Image ColorJitter::operator()(const Image& x, SampleRandom& random) const {
  check(brightness >= 0 && contrast >= 0 && saturation >= 0 && hue >= 0 && hue <= 0.5,
        "ColorJitter: expected numbers of at least 0, and a hue of at most 0.5, got {}, {}, {} and {}", brightness,
        contrast, saturation, hue);
  using Adjust = Tensor (*)(const Tensor&, double);
  struct Step {
    Adjust adjust;
    double amount, number;
  };
  const auto factor = [&](double range) { return random.uniform(std::max(0.0, 1 - range), 1 + range); };
  std::array<Step, 4> steps{
      Step{adjust_brightness, brightness, factor(brightness)}, Step{adjust_contrast, contrast, factor(contrast)},
      Step{adjust_saturation, saturation, factor(saturation)}, Step{adjust_hue, hue, random.uniform(-hue, hue)}};
  for (std::size_t i = steps.size() - 1; i > 0; --i) {
    std::swap(steps[i], steps[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(i) + 1))]);
  }
  Tensor pixels = x.pixels();
  for (const Step& step : steps) {
    if (step.amount > 0) {
      pixels = step.adjust(pixels, step.number);
    }
  }
  return Image(pixels);
}

Image Normalize::operator()(const Image& x, SampleRandom&) const {
  const auto channels = static_cast<std::size_t>(x.channels());
  for (const std::vector<double>* const list : {&mean, &deviation}) {
    check(list->size() == 1 || list->size() == channels,
          "Normalize: expected one mean and deviation, or one for each of {} channels, got {} and {}", channels,
          mean.size(), deviation.size());
  }
  const Tensor pixels = x.pixels(), result = empty(pixels.shape());
  on_pixels(pixels, [&]<class T>(const Plane<T>& from) {
    for (std::size_t c = 0; c < channels; ++c) {
      const double divisor = deviation[deviation.size() == 1 ? 0 : c];
      check(divisor > 0, "Normalize: expected positive deviations, got {}", divisor);
      const auto scale = static_cast<float>(1 / (double{kWhite<T>} * divisor));
      const auto offset = static_cast<float>(-mean[mean.size() == 1 ? 0 : c] / divisor);
      const T* const row = from.row(static_cast<std::int64_t>(c), 0);
      const std::int64_t count = from.size();
      float* const to = result.data<float>() + static_cast<std::int64_t>(c) * count;
      MICA_INDEPENDENT
      for (std::int64_t i = 0; i < count; ++i) {
        to[i] = static_cast<float>(row[i]) * scale + offset;
      }
    }
  });
  return Image(result);
}

Image RandomErasing::operator()(const Image& x, SampleRandom& random) const {
  if (!random.chance(probability)) {
    return x;
  }
  const std::optional<Region> region = random_region(x, area, ratio, random);
  if (!region) {
    return x;
  }
  const Tensor pixels = x.pixels(), result = empty_like(pixels), value = full({1}, fill, pixels.dtype());
  on_pixels(pixels, [&]<class T>(const Plane<T>& from) {
    const auto to = plane_of<T>(result);
    std::copy_n(from.data, from.channels * from.size(), to.data);
    for (std::int64_t c = 0; c < from.channels; ++c) {
      for (std::int64_t y = region->top; y < region->top + region->height; ++y) {
        std::fill_n(to.row(c, y) + region->left, region->width, *value.data<T>());
      }
    }
  });
  return Image(result);
}

Tensor rotate(const Tensor& pixels, double degrees, double fill) {
  check(std::isfinite(degrees), "rotate: expected a finite angle, got {}", degrees);
  const Tensor x = Image(pixels).pixels();
  Tensor result = empty_like(x);
  on_pixels(x, [&]<class T>(const Plane<T>& from) { rotate(from, degrees, fill, result.data<T>()); });
  return result;
}

Tensor adjust_brightness(const Tensor& pixels, double factor) {
  return blended("adjust_brightness", pixels, factor, [](const auto&) { return [](std::int64_t) { return 0.0f; }; });
}

Tensor adjust_contrast(const Tensor& pixels, double factor) {
  return blended("adjust_contrast", pixels, factor, [](const auto& x) {
    double sum = 0;
    for (std::int64_t i = 0; i < x.size(); ++i) {
      sum += gray_at(x, i);
    }
    const auto mean = static_cast<float>(sum / static_cast<double>(x.size()));
    return [mean](std::int64_t) { return mean; };
  });
}

Tensor adjust_saturation(const Tensor& pixels, double factor) {
  return blended("adjust_saturation", pixels, factor,
                 [](const auto& x) { return [x](std::int64_t i) { return gray_at(x, i); }; });
}

Tensor adjust_hue(const Tensor& pixels, double shift) {
  check(shift >= -0.5 && shift <= 0.5, "adjust_hue: expected a shift in [-0.5, 0.5], got {}", shift);
  const Tensor x = checked("adjust_hue", pixels);
  Tensor result = empty_like(x);
  on_pixels(x, [&]<class T>(const Plane<T>& from) {
    T* const to = result.data<T>();
    for (std::int64_t i = 0; i < from.size(); ++i) {
      float rgb[3];
      for (int c = 0; c < 3; ++c) {
        rgb[c] = static_cast<float>(from.data[(c % from.channels) * from.size() + i]) / kWhite<T>;
      }
      shift_hue(rgb, static_cast<float>(shift));
      for (std::int64_t c = 0; c < from.channels; ++c) {
        to[c * from.size() + i] = to_pixel<T>(rgb[c] * kWhite<T>);
      }
    }
  });
  return result;
}

}  // namespace mica::io
