#pragma once

#include <cstdint>

#include <mica/nn/module.h>
#include <mica/ops/sample/sample.h>

namespace mica::nn {

// Resampling of images as modules: see ops/sample/sample.h.

struct Upsample : Module {
  explicit Upsample(const InterpolateOptions& options) : options(options) {}
  Tensor operator()(const Tensor& x) const {
    return call(*this, x, [&](const Tensor& x) { return interpolate(x, options); });
  }

  InterpolateOptions options;
};

struct Unfold : Module {
  explicit Unfold(const PerAxis& size, const UnfoldOptions& options = {}) : size(size), options(options) {}
  Tensor operator()(const Tensor& x) const {
    return call(*this, x, [&](const Tensor& x) { return unfold(x, size, options); });
  }

  PerAxis size;
  UnfoldOptions options;
};

struct Fold : Module {
  Fold(const PerAxis& output_size, const PerAxis& size, const UnfoldOptions& options = {})
      : output_size(output_size), size(size), options(options) {}
  Tensor operator()(const Tensor& x) const {
    return call(*this, x, [&](const Tensor& x) { return fold(x, output_size, size, options); });
  }

  PerAxis output_size;
  PerAxis size;
  UnfoldOptions options;
};

struct PixelShuffle : Module {
  explicit PixelShuffle(std::int64_t factor) : factor(factor) {}
  Tensor operator()(const Tensor& x) const {
    return call(*this, x, [&](const Tensor& x) { return pixel_shuffle(x, factor); });
  }

  std::int64_t factor;
};

struct PixelUnshuffle : Module {
  explicit PixelUnshuffle(std::int64_t factor) : factor(factor) {}
  Tensor operator()(const Tensor& x) const {
    return call(*this, x, [&](const Tensor& x) { return pixel_unshuffle(x, factor); });
  }

  std::int64_t factor;
};

}  // namespace mica::nn
