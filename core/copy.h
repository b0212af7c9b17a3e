#pragma once

#include <mica/core/tensor.h>

namespace mica {

// The moves that everything else is built on. None is recorded by autograd; ops/view and ops/cast are.

/// Writes src into dst element by element, converting dtype and crossing devices where they differ. Shapes must be
/// equal; any strides. Does not count as a write in place: for filling new tensors.
void copy_into(const Tensor& dst, const Tensor& src);

/// x itself if row-major without gaps, else such a copy. No history.
Tensor contiguous_data(const Tensor& x);

/// Writes `value`, converted to the tensor's dtype, everywhere. Does not count as a write in place.
void fill_data(const Tensor& x, double value);

/// dst += src, for equal shapes, dtypes and devices. Does not count as a write in place.
void add_into(const Tensor& dst, const Tensor& src);

}  // namespace mica
