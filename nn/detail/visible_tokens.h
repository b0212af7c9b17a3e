#pragma once

#include <cstdint>

#include <mica/core/check.h>
#include <mica/core/tensor.h>
#include <mica/ops/elementwise/compare.h>

namespace mica::nn::detail {

/// A mask of the tokens (B, T), bool or integers, as bool. Errors begin with `op`.
inline Tensor visible_tokens(const char* op, const Tensor& visible, std::int64_t batch, std::int64_t length) {
  check(visible.dim() == 2 && visible.size(0) == batch && visible.size(1) == length,
        "{}: expected visible of shape [{}, {}], got {}", op, batch, length, visible.shape());
  check(!is_floating(visible.dtype()), "{}: expected visible of bool or integers, got {}", op, visible.dtype());
  return visible.dtype() == boolean ? visible : visible != 0;
}

}  // namespace mica::nn::detail
