#pragma once

#include <mica/core/dispatch.h>
#include <mica/infer/sample.h>

namespace mica::kernels {

inline constexpr std::int64_t kMostDrawRows = 65535;
inline constexpr std::int64_t kMostDrawColumns = std::int64_t{1} << 18;

/// infer::sample() of checked, contiguous arguments.
struct DrawTokens {
  const Tensor& logits;
  const infer::SamplingOptions& options;
  const Tensor& uniforms;  // undefined: take the largest score
  const Tensor& seen;      // or undefined
  const Tensor& tokens;    // out
};
bool can_draw_tokens(Cuda);
void draw_tokens(Cuda, const DrawTokens& args);

}  // namespace mica::kernels
