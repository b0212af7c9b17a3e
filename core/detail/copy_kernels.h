#pragma once

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>

namespace mica::kernels {

/// dst = src, converted to dst's dtype; equal shapes, any strides, both on the device.
void copy(Cpu, const Tensor& dst, const Tensor& src);
void copy(Cuda, const Tensor& dst, const Tensor& src);

/// dst[i] = src[i] for contiguous tensors on the device. All of dst have one dtype and all of src have one; the two are
/// equal, or one is float32 and the other a 16-bit float.
void copy_many(Cuda, const Tensors& dst, const Tensors& src);

/// x = value everywhere.
void fill(Cpu, const Tensor& x, double value);
void fill(Cuda, const Tensor& x, double value);

/// x[i] = start + i · step, rounded once, for a contiguous vector of float64 or int64.
void fill_sequence(Cpu, const Tensor& x, double start, double step);
void fill_sequence(Cuda, const Tensor& x, double start, double step);

/// dst += src; equal shapes and dtypes, any strides.
void add_into(Cpu, const Tensor& dst, const Tensor& src);
void add_into(Cuda, const Tensor& dst, const Tensor& src);

}  // namespace mica::kernels
