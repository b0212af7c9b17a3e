#pragma once

#include <cstdint>
#include <vector>

#include <mica/core/tensor.h>
#include <mica/ops/decode/decode.h>

namespace mica {

// A decoder's step of one sequence in one kernel, for autograd::NoGrad. See README.md beside this file.

/// A pre-norm block of a decoder, as nn::LlamaBlock is one, and its part of the cache:
///
///     x ← x + o(attention(q(y), k(y), v(y)))     y = rms_norm(x, input_norm)
///     x ← x + down(silu(gate(y)) · up(y))        y = rms_norm(x, post_norm)
struct DecoderLayer {
  Tensor input_norm{}, post_norm{};  ///< (width)
  DecodeWeight q{}, k{}, v{}, o{}, gate{}, up{}, down{};
  Tensor q_norm{}, k_norm{};  ///< as in DecodeAttention, (D)
  Tensor keys{}, values{};    ///< (1, Hkv, C, D)
};

/// The step: x through all layers, a norm and the head.
struct DecoderStep {
  Tensor x{};          ///< (1, width): the new position's embedding; or undefined, with these two:
  Tensor token{};      ///< one int64: the new position's token. Out of range, x is NaN, as embedding()'s
  Tensor embedding{};  ///< (vocab, width): rows x
  std::vector<DecoderLayer> layers{};  ///< at least 1
  Tensor norm{};                       ///< (width), before the head
  DecodeWeight head{};                 ///< of width columns
  double eps = 1e-6;                   ///< of all norms
  std::int64_t heads = 1;              ///< H, of the queries
  std::vector<float> frequencies{};    ///< these three as in DecodeAttention
  double rotary_scale = 1;
  Tensor length{};
  bool adds_to_length = false;  ///< adds 1 to `length` at the end
  Tensor next_token{};  ///< one int64, or undefined; out: the token of the largest logit, as draw_tokens() takes
                        ///< it with temperature 0. May be `token`, for a step that goes on with its own result.
  std::int64_t* tokens_on_host = nullptr;  ///< or two in pinned memory: next_token is also put into number length mod 2
  Tensor scratch{};  ///< int64 on the device, at least decoder_step_scratch(): zeros before the first step, and then
                     ///< left alone between steps. Steps that share it have the same sizes, and must not run at the
                     ///< same time.
};

/// Whether decoder_step() computes that step. It needs CUDA with compute capability 9.0, float16 or bfloat16, and one
/// sequence without padding. Weights are all floating, or all of 4 or all of 8 bits with groups of one size. There are
/// up to 64 layers, of widths that the kernel can split, with heads 64 or 128 wide, and the embedding, if there is
/// one, has the norm's dtype. Does not look at x, the tokens, length and scratch.
bool has_decoder_step(const DecoderStep& step);

/// The number of elements of `scratch`.
std::int64_t decoder_step_scratch(const DecoderStep& step);

/// The logits of the next token, (1, outputs of the head). Appends keys and values to the caches, as
/// decode_attention(). The same as a chain of decode_linear() and decode_attention(), which round at the same places
/// but add in another order.
///
/// Throws Error unless has_decoder_step(), or if x or the token, length or scratch does not match.
Tensor decoder_step(const DecoderStep& step);

}  // namespace mica
