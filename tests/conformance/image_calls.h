#pragma once

// The calls of ops on images: see calls.h.

#include <functional>
#include <string>
#include <vector>

#include "fixture.h"
#include <mica/mica.h>

namespace mica::conformance {

/// The tensors after the first one by position; those that a case lacks are undefined.
inline Tensors optional_tensors(const Case& c, const Tensors& x) {
  Tensors result;
  std::size_t next = 1;
  for (const Json& has : c.attributes["has"]) {
    result.push_back(has.get<bool>() ? x.at(next++) : Tensor{});
  }
  return result;
}

template <class Options>
void set_stride(Options& options, const Json& a) {
  if (a.contains("stride")) {
    options.stride = PerAxis(dims(a["stride"]));
  }
}

inline Tensors with_indices(const MaxPoolResult& result, const Json& a) {
  return a["indices"].get<bool>() ? Tensors{result.values, result.indices} : Tensors{result.values};
}

inline Tensors call_max_pool(const Case& c, const Tensors& x, Device) {
  const Json& a = c.attributes;
  MaxPoolOptions options{
      .padding = dims(a["padding"]), .dilation = dims(a["dilation"]), .ceil_mode = a["ceil_mode"].get<bool>()};
  set_stride(options, a);
  return with_indices(max_pool_with_indices(x.at(0), a["axes"], dims(a["size"]), options), a);
}

inline Tensors call_avg_pool(const Case& c, const Tensors& x, Device) {
  const Json& a = c.attributes;
  AvgPoolOptions options{.padding = dims(a["padding"]),
                         .ceil_mode = a["ceil_mode"].get<bool>(),
                         .count_include_pad = a["count_include_pad"].get<bool>()};
  set_stride(options, a);
  if (a.contains("divisor")) {
    options.divisor_override = a["divisor"].get<std::int64_t>();
  }
  const auto pools = {avg_pool1d, avg_pool2d, avg_pool3d};
  return {pools.begin()[a["axes"].get<int>() - 1](x.at(0), dims(a["size"]), options)};
}

inline Tensors call_adaptive_avg_pool(const Case& c, const Tensors& x, Device) {
  const auto pools = {adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d};
  return {pools.begin()[c.attributes["axes"].get<int>() - 1](x.at(0), dims(c.attributes["size"]))};
}

inline Tensors call_adaptive_max_pool(const Case& c, const Tensors& x, Device) {
  const Json& a = c.attributes;
  return with_indices(adaptive_max_pool_with_indices(x.at(0), a["axes"], dims(a["size"])), a);
}

inline Tensors call_max_unpool(const Case& c, const Tensors& x, Device) {
  const auto pools = {max_unpool1d, max_unpool2d, max_unpool3d};
  const Json& a = c.attributes;
  return {pools.begin()[a["axes"].get<int>() - 1](x.at(0), x.at(1), dims(a["output_size"]))};
}

inline Tensors call_batch_norm(const Case& c, const Tensors& x, Device) {
  const Tensors given = optional_tensors(c, x);
  const BatchNormOptions options{.running_mean = given[2].defined() ? clone(given[2]) : Tensor{},
                                 .running_var = given[3].defined() ? clone(given[3]) : Tensor{},
                                 .training = c.attributes["training"].get<bool>(),
                                 .momentum = number(c.attributes["momentum"]),
                                 .eps = number(c.attributes["eps"])};
  return {batch_norm(x.at(0), given[0], given[1], options)};
}

inline Tensors call_group_norm(const Case& c, const Tensors& x, Device) {
  const Tensors given = optional_tensors(c, x);
  return {group_norm(x.at(0), c.attributes["groups"], given[0], given[1], number(c.attributes["eps"]))};
}

inline Tensors call_instance_norm(const Case& c, const Tensors& x, Device) {
  const Tensors given = optional_tensors(c, x);
  return {instance_norm(x.at(0), given[0], given[1], number(c.attributes["eps"]))};
}

inline Interpolation interpolation_named(const std::string& name) {
  return name == "nearest"         ? Interpolation::nearest
         : name == "nearest-exact" ? Interpolation::nearest_exact
         : name == "bicubic"       ? Interpolation::cubic
         : name == "area"          ? Interpolation::area
                                   : Interpolation::linear;
}

inline Tensors call_interpolate(const Case& c, const Tensors& x, Device) {
  const Json& a = c.attributes;
  InterpolateOptions options{.mode = interpolation_named(a["mode"]),
                             .align_corners = a["align_corners"].get<bool>(),
                             .recompute_scale_factor = a["recompute"].get<bool>()};
  if (a.contains("size")) {
    options.size = PerAxis(dims(a["size"]));
  }
  for (const Json& factor : a.value("scale_factor", Json::array())) {
    options.scale_factor.push_back(number(factor));
  }
  return {interpolate(x.at(0), options)};
}

inline Tensors call_unfold(const Case& c, const Tensors& x, Device) {
  const Json& a = c.attributes;
  const UnfoldOptions options{
      .dilation = dims(a["dilation"]), .padding = dims(a["padding"]), .stride = dims(a["stride"])};
  return {unfold(x.at(0), dims(a["size"]), options)};
}

inline Tensors call_grid_sample(const Case& c, const Tensors& x, Device) {
  const Json& a = c.attributes;
  const std::string padding = a["padding"];
  return {grid_sample(x.at(0), x.at(1),
                      {.mode = interpolation_named(a["mode"]),
                       .padding = padding == "zeros"    ? SamplePadding::zeros
                                  : padding == "border" ? SamplePadding::border
                                                        : SamplePadding::reflection,
                       .align_corners = a["align_corners"].get<bool>()})};
}

}  // namespace mica::conformance
