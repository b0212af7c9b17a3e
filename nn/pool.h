#pragma once

#include <mica/nn/module.h>
#include <mica/ops/pool/pool.h>

namespace mica::nn {

// Pooling as modules: see ops/pool/pool.h.

namespace detail {

/// Calls kPool(x, size, options).
template <class Self, class Options, Tensor (*kPool)(const Tensor&, const PerAxis&, const Options&)>
class WindowPool : public Module {
 public:
  explicit WindowPool(const PerAxis& size, const Options& options = {}) : size(size), options(options) {}
  Tensor operator()(const Tensor& x) const {
    return nn::call(static_cast<const Self&>(*this), x, [&](const Tensor& x) { return kPool(x, size, options); });
  }

  PerAxis size;
  Options options;
};

/// Calls kPool(x, size).
template <class Self, Tensor (*kPool)(const Tensor&, const PerAxis&)>
class AdaptivePool : public Module {
 public:
  explicit AdaptivePool(const PerAxis& size) : size(size) {}
  Tensor operator()(const Tensor& x) const {
    return nn::call(static_cast<const Self&>(*this), x, [&](const Tensor& x) { return kPool(x, size); });
  }

  PerAxis size;  ///< of the result's spatial axes
};

}  // namespace detail

struct MaxPool1d : detail::WindowPool<MaxPool1d, MaxPoolOptions, max_pool1d> {
  using WindowPool::WindowPool;
};
struct MaxPool2d : detail::WindowPool<MaxPool2d, MaxPoolOptions, max_pool2d> {
  using WindowPool::WindowPool;
};
struct MaxPool3d : detail::WindowPool<MaxPool3d, MaxPoolOptions, max_pool3d> {
  using WindowPool::WindowPool;
};

struct AvgPool1d : detail::WindowPool<AvgPool1d, AvgPoolOptions, avg_pool1d> {
  using WindowPool::WindowPool;
};
struct AvgPool2d : detail::WindowPool<AvgPool2d, AvgPoolOptions, avg_pool2d> {
  using WindowPool::WindowPool;
};
struct AvgPool3d : detail::WindowPool<AvgPool3d, AvgPoolOptions, avg_pool3d> {
  using WindowPool::WindowPool;
};

struct AdaptiveAvgPool1d : detail::AdaptivePool<AdaptiveAvgPool1d, adaptive_avg_pool1d> {
  using AdaptivePool::AdaptivePool;
};
struct AdaptiveAvgPool2d : detail::AdaptivePool<AdaptiveAvgPool2d, adaptive_avg_pool2d> {
  using AdaptivePool::AdaptivePool;
};
struct AdaptiveAvgPool3d : detail::AdaptivePool<AdaptiveAvgPool3d, adaptive_avg_pool3d> {
  using AdaptivePool::AdaptivePool;
};

struct AdaptiveMaxPool1d : detail::AdaptivePool<AdaptiveMaxPool1d, adaptive_max_pool1d> {
  using AdaptivePool::AdaptivePool;
};
struct AdaptiveMaxPool2d : detail::AdaptivePool<AdaptiveMaxPool2d, adaptive_max_pool2d> {
  using AdaptivePool::AdaptivePool;
};
struct AdaptiveMaxPool3d : detail::AdaptivePool<AdaptiveMaxPool3d, adaptive_max_pool3d> {
  using AdaptivePool::AdaptivePool;
};

}  // namespace mica::nn
