#pragma once

#include <cstdint>
#include <vector>

#include <mica/core/tensor.h>
#include <mica/infer/kernels/detail/decode_linear.h>

namespace mica::infer {

// One step of text generation for one sequence, all layers in a single kernel, without gradients. See
// infer/kernels/README.md.

/// The weights of a pre-norm decoder block, such as nn::LlamaBlock, and its keys and values in the cache:
///
///     x ← x + o(attention(q(y), k(y), v(y)))     y = rms_norm(x, input_norm)
///     x ← x + down(silu(gate(y)) · up(y))        y = rms_norm(x, post_norm)
struct DecoderLayer {
  Tensor input_norm{}, post_norm{};  ///< (width)
  DecodeWeight q{}, k{}, v{}, o{}, gate{}, up{}, down{};
  Tensor q_norm{}, k_norm{};  ///< (D), as in DecodeAttention
  Tensor keys{}, values{};    ///< (1, Hkv, C, D), contiguous
};

/// The arguments of decoder_step(): an input vector, the layers, a norm and the head. The input is either `x`, or the
/// row of `embedding` that `token` selects. All floating tensors have the dtype of `norm`.
struct DecoderStep {
  Tensor x{};                          ///< (1, width): the new position's embedding; undefined if `token` is given
  Tensor token{};                      ///< one int64: the new position's token; if it is out of range, x is NaN
  Tensor embedding{};                  ///< (vocab, width); needed with `token`
  std::vector<DecoderLayer> layers{};  ///< 1 to 64
  Tensor norm{};                       ///< (width): the weight of the RMS norm before the head
  DecodeWeight head{};                 ///< from width to the vocabulary's logits
  double eps = 1e-6;                   ///< of all norms
  std::int64_t heads = 1;              ///< H, the number of query heads
  std::vector<float> frequencies{};    ///< as in DecodeAttention
  double rotary_scale = 1;             ///< as in DecodeAttention
  Tensor length{};                     ///< as in DecodeAttention
  bool adds_to_length = false;         ///< whether the step increments `length` at its end
  Tensor next_token{};  ///< output, one int64 or undefined: the token of the largest logit, as sample() chooses it
                        ///< at temperature 0. May be the same tensor as `token`: the next step then continues with
                        ///< this step's token.
  std::int64_t* tokens_on_host = nullptr;  ///< output, null or two int64 in pinned memory: the next token is also
                                           ///< written to element length % 2
  Tensor scratch{};  ///< int64, contiguous, at least decoder_step_scratch() elements: zeros before the first step, and
                     ///< written by nothing else between steps. Steps may share it if their sizes are equal and they do
                     ///< not run at the same time.
};

/// Whether decoder_step() supports a step. It needs a GPU of compute capability 9.0, float16 or bfloat16, and one
/// sequence without padding. Weights are all floating, or all quantized with the same number of bits (4 or 8) and the
/// same group size. There are at most 64 layers with heads 64 or 128 wide, and their widths must be divisible among the
/// kernel's thread blocks. Does not look at x, the tokens, length and scratch.
bool has_decoder_step(const DecoderStep& step);

/// The number of elements that `scratch` must have.
std::int64_t decoder_step_scratch(const DecoderStep& step);

/// The logits of the next token, (1, outputs of the head), of the norm's dtype. Appends keys and values to the caches
/// like decode_attention(). A chain of decode_linear() and decode_attention() computes the same and rounds at the same
/// points, but adds in another order.
///
/// Requires has_decoder_step(), which it does not check again. Throws Error if gradients are recorded, or if x or the
/// token, length, next_token or scratch does not match.
Tensor decoder_step(const DecoderStep& step);

}  // namespace mica::infer
