#pragma once

#include <mica/core/dispatch.h>
#include <mica/infer/sample.h>

namespace mica::kernels {

inline constexpr std::int64_t kMostSampleRows = 65535;
inline constexpr std::int64_t kMostSampleColumns = std::int64_t{1} << 18;

/// infer::sample() of checked, contiguous arguments, on a GPU with clusters.
struct SampleTokens {
  const Tensor& logits;
  const infer::SamplingOptions& options;
  const Tensor& uniforms;  // undefined: take the largest score
  const Tensor& seen;      // or undefined
  const Tensor& tokens;    // out
};
void sample_tokens(Cuda, const SampleTokens& args);

}  // namespace mica::kernels
