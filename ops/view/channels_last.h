#pragma once

#include <mica/core/channels_last.h>

namespace mica {

/// x itself if it is_channels_last(), else a copy that is. contiguous() goes back. Differentiable any number of times.
/// Throws Error unless x has 4 or 5 axes.
Tensor channels_last(const Tensor& x);

}  // namespace mica
