#include <type_traits>

#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/decode/detail/draw_kernels.h>
#include <mica/ops/decode/draw.h>

namespace mica {

bool has_draw_kernel(const Tensor& logits) {
  const bool fits = logits.dim() == 2 && logits.size(0) >= 1 && logits.size(0) <= 65535 && logits.size(1) >= 1 &&
                    logits.size(1) <= kernels::kMostDrawColumns;
  return fits && is_floating(logits.dtype()) && logits.dtype() != float64 && on_device(logits.device(), [](auto kind) {
           if constexpr (std::is_same_v<decltype(kind), Cuda>) {
             return kernels::can_draw_tokens(kind);
           } else {
             return false;
           }
         });
}

Tensor draw_tokens(const Tensor& logits, const DrawOptions& options, const Tensor& uniforms, const Tensor& seen) {
  check(has_draw_kernel(logits), "draw_tokens: there is no kernel for logits {} {} on {}", logits.dtype(),
        logits.shape(), logits.device());
  const std::int64_t rows = logits.size(0);
  const bool draws = options.temperature != 0 && options.top_k != 1;
  check(!draws || (uniforms.defined() && uniforms.shape() == Shape{rows, 1} && uniforms.dtype() == float64 &&
                   uniforms.device() == logits.device() && uniforms.is_contiguous()),
        "draw_tokens: expected uniforms of shape {} and float64 on {}", Shape{rows, 1}, logits.device());
  check(!seen.defined() ||
            (seen.shape() == logits.shape() && seen.dtype() == boolean && seen.device() == logits.device()),
        "draw_tokens: expected seen of shape {} and bool on {}", logits.shape(), logits.device());
  const Tensor ready = contiguous_data(logits);
  const Tensor ready_seen = seen.defined() && options.repetition_penalty != 1 ? contiguous_data(seen) : Tensor{};
  const Tensor tokens = empty({rows}, int64, logits.device());
  const kernels::DrawTokens args{.logits = ready,
                                 .options = options,
                                 .uniforms = draws ? uniforms : Tensor{},
                                 .seen = ready_seen,
                                 .tokens = tokens};
  on_device(logits.device(), [&](auto kind) {
    if constexpr (std::is_same_v<decltype(kind), Cuda>) {
      kernels::draw_tokens(kind, args);
    }
  });
  return tokens;
}

}  // namespace mica
