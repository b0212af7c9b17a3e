#pragma once

// Changes of images, most of them at random, to train on more than the data set has. A transform is anything that maps
// an Image and random numbers to an Image, so those below and lambdas go together:
//
//     const io::ImageTransform augment = io::in_order({io::RandomResizedCrop{224}, io::RandomFlip{},
//                                                      io::Normalize{{0.485, 0.456, 0.406}, {0.229, 0.224, 0.225}}});
//
// Names and meanings are torchvision's. Transforms keep the dtype, uint8 or float32, except where they say otherwise.

#include <array>
#include <cstdint>
#include <functional>
#include <vector>

#include <mica/io/image.h>
#include <mica/io/sample_random.h>

namespace mica::io {

using ImageTransform = std::function<Image(const Image&, SampleRandom&)>;

/// Applies transforms one after the other.
ImageTransform in_order(std::vector<ImageTransform> transforms);

// Sizes and positions. A transform to a square of side `height` needs no width.

/// To the given size or, with width 0, so that the shorter side becomes `height`; see Image::resize().
struct Resize {
  std::int64_t height, width = 0;
  Image operator()(const Image& x, SampleRandom& random) const;
};

/// The middle of the image. Throws an Error if the image is smaller.
struct CenterCrop {
  std::int64_t height, width = height;
  Image operator()(const Image& x, SampleRandom& random) const;
};

/// `padding` rows and columns of the value `fill` on each side; uint8 values are in [0, 255].
struct Pad {
  std::int64_t padding;
  double fill = 0;
  Image operator()(const Image& x, SampleRandom& random) const;
};

/// Any part of that size, after padding. Throws an Error if the image is smaller.
struct RandomCrop {
  std::int64_t height, width = height, padding = 0;
  Image operator()(const Image& x, SampleRandom& random) const;
};

/// A part with a random share of the area and a random ratio of width to height, uniform in its logarithm; resized. If
/// ten attempts give no part that fits in the image, it is the largest one in the middle whose ratio is allowed.
struct RandomResizedCrop {
  std::int64_t height, width = height;
  std::array<double, 2> area{0.08, 1}, ratio{3.0 / 4, 4.0 / 3};
  Image operator()(const Image& x, SampleRandom& random) const;
};

/// Mirrors left and right or, if `vertical`, top and bottom.
struct RandomFlip {
  double probability = 0.5;
  bool vertical = false;
  Image operator()(const Image& x, SampleRandom& random) const;
};

/// By a uniform angle in [−degrees, degrees]; see rotate().
struct RandomRotation {
  double degrees, fill = 0;
  Image operator()(const Image& x, SampleRandom& random) const;
};

// Colors.

/// Changes brightness, contrast and saturation by uniform factors in [max(0, 1 − x), 1 + x], and the hue by a uniform
/// number in [−hue, hue], in a random order. Images with one channel have no saturation and no hue.
struct ColorJitter {
  double brightness = 0, contrast = 0, saturation = 0, hue = 0;
  Image operator()(const Image& x, SampleRandom& random) const;
};

/// float32 (x / 255 for uint8), and then (x − mean) / deviation for each channel. One mean is for all channels.
struct Normalize {
  std::vector<double> mean{0}, deviation{1};
  Image operator()(const Image& x, SampleRandom& random) const;
};

/// Overwrites a rectangle with a random share of the area and a random ratio of width to height (Zhong et al. 2017,
/// arXiv:1708.04896) by `fill`. If ten attempts give none that fits in the image, it stays as it is.
struct RandomErasing {
  double probability = 0.5;
  std::array<double, 2> area{0.02, 0.33}, ratio{0.3, 3.3};
  double fill = 0;
  Image operator()(const Image& x, SampleRandom& random) const;
};

// The same with given numbers, for pixels (C, H, W) of uint8 or float32 on the CPU. Each returns a new tensor. Values
// of float32 are in [0, 1], and adjusted ones are clamped to it.

/// Counterclockwise around the middle, bilinearly. What comes from outside of the image has the value `fill`.
Tensor rotate(const Tensor& pixels, double degrees, double fill = 0);
Tensor adjust_brightness(const Tensor& pixels, double factor);  ///< 0: black
Tensor adjust_contrast(const Tensor& pixels, double factor);    ///< 0: the mean gray
Tensor adjust_saturation(const Tensor& pixels, double factor);  ///< 0: gray
/// Shifts the hue by a part of the circle of colors, in [−0.5, 0.5].
Tensor adjust_hue(const Tensor& pixels, double shift);

}  // namespace mica::io
