#pragma once

#include <cstdint>

#include <mica/infer/decoder.h>
#include <mica/infer/kernels/detail/decoder_step.h>
#include <mica/nn/models/llama.h>

namespace mica::infer {

/// A decoder for nn::Llama. On CUDA, in 16 bits, it has kernels of its own (infer/kernels). The constructor decides
/// which ones it uses:
///
/// - for steps, five kernels for each layer or, for a single text, one for all layers, if has_decoder_step(). There are
///   none for adapters, for rotary frequencies that depend on the length, for widths of heads that
///   mica::decode_attention() does not support, and for what sets OLMo 2, Granite and Phi 4 mini apart: norms after
///   each part or of whole queries, scales, and partial rotation;
/// - for prompts, on a GPU of compute capability 9.0, kernels for many rows. There are none for quantized weights, and
///   for a prompt that is longer than the window.
///
/// Everything else is computed by the model itself, as by ComposedDecoder. The results differ by rounding only.
///
/// With RotaryConfig::recompute, the decoder keeps the tokens. The call in which the longest text outgrows the original
/// context computes all texts again, so that no key has the short factors.
class LlamaDecoder final : public Decoder {
 public:
  explicit LlamaDecoder(const nn::Llama& llama, const DecoderOptions& options = {});

  bool replace(const Tensor& tokens, std::int64_t* on_host = nullptr) override;

 private:
  enum class Steps { by_model, by_layers, in_one_kernel };

  Tensor read(const Tensor& tokens) override;
  Tensor by_model_or_again(const Tensor& tokens);
  Tensor by_layers(const Tensor& tokens);
  Tensor attend(std::size_t layer, const Tensor& x, std::int64_t count, const Tensor& rotations,
                bool ready_early) const;
  void use_cache();  // takes its tensors again, since its memory may have moved
  Tensor in_one_kernel(const Tensor& token, const Tensor& next_token = {}, std::int64_t* on_host = nullptr);

  const nn::Llama& llama_;
  Steps steps_ = Steps::by_model;
  bool prompts_by_layers_ = false;
  DecoderStep step_;  // the weights, and what in_one_kernel() needs
  Tensor text_;       // the tokens so far, while by_model_or_again() may need them
};

}  // namespace mica::infer
