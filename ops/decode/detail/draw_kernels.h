#pragma once

#include <mica/core/dispatch.h>
#include <mica/ops/decode/draw.h>

namespace mica::kernels {

inline constexpr std::int64_t kMostDrawColumns = std::int64_t{1} << 18;

/// draw_tokens() of checked, contiguous arguments.
struct DrawTokens {
  const Tensor& logits;
  const DrawOptions& options;
  const Tensor& uniforms;  // undefined: take the largest score
  const Tensor& seen;      // or undefined
  const Tensor& tokens;    // out
};
bool can_draw_tokens(Cuda);
void draw_tokens(Cuda, const DrawTokens& args);

}  // namespace mica::kernels
