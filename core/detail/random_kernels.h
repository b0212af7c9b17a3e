#pragma once

#include <mica/core/dispatch.h>
#include <mica/core/rng.h>
#include <mica/core/tensor.h>

namespace mica::kernels {

/// Fill x, row-major and of a floating dtype, from the Philox stream at `key`: element i is a function of (key, i)
/// alone. Uniform numbers have the same bits on both devices.
void fill_uniform(Cpu, const Tensor& x, PhiloxKey key);
void fill_uniform(Cuda, const Tensor& x, PhiloxKey key);
void fill_normal(Cpu, const Tensor& x, PhiloxKey key);
void fill_normal(Cuda, const Tensor& x, PhiloxKey key);
/// Fills x, row-major and of an integer dtype, with integers in [low, low + range).
void fill_integers(Cpu, const Tensor& x, PhiloxKey key, std::int64_t low, std::uint64_t range);
void fill_integers(Cuda, const Tensor& x, PhiloxKey key, std::int64_t low, std::uint64_t range);

/// Writes seed and offset of `key` into `state`, two int64 elements, in the order of the current stream.
void store_key(Cuda, const Tensor& state, PhiloxKey key);

}  // namespace mica::kernels
