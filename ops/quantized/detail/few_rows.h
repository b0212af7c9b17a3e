#pragma once

// Products of few rows with a quantized weight on the CPU. Most of their time is spent reading the packed weight.

#include <mica/ops/quantized/detail/quantized_kernels.h>

namespace mica::kernels {

/// Writes row_factor · line[c] · factors[c] to elements at + c of `output`, for c < count. `factors` may be null.
template <class S>
using WriteLine = void (*)(const S* line, S row_factor, const S* factors, std::int64_t count, void* output,
                           std::int64_t at);

inline constexpr std::int64_t kFewQuantizedRows = 8;

/// Whether the CPU has instructions for products of bytes, so that quantized_few_rows() may round x.
bool has_integer_products();

/// quantized_matmul_forward() for up to kFewQuantizedRows rows, with sums in float32 whose order depends only on K and
/// the group size. Rounds x if args.rounds_x and has_integer_products().
void quantized_few_rows(const QuantizedMatmulForward& args, WriteLine<float> write);

}  // namespace mica::kernels
