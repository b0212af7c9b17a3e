#pragma once

#include <mica/core/dispatch.h>
#include <mica/ops/decode_attention/decode_attention.h>

namespace mica {

namespace detail {

/// Throws unless the members of `a` that describe the cache, the norms and the rotation match. The message starts with
/// `op`.
void check_cache(const char* op, const DecodeAttention& a);

}  // namespace detail

namespace kernels {

struct DecodeAttentionArgs {
  const DecodeAttention& problem;
  const Tensor& y;  // out
};
void decode_attention(Cuda, const DecodeAttentionArgs& args);

}  // namespace kernels

}  // namespace mica
