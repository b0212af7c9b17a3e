#!/usr/bin/env python3
"""Writes small random models of transformers to fixtures/models/ as llama.cpp's conversion would, with PyTorch's logits.

    pip install gguf==0.19.0 transformers torch
    python tests/gguf/make_models.py

Names of tensors are those of the package `gguf`; the order of the rows of q and k is that of convert_hf_to_gguf.py. The
metadata "test.tokens" and "test.logits" are an input and its logits.
"""

import math
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers

HERE = Path(__file__).parent / "fixtures/models"
SIZES = dict(vocab_size=13, max_position_embeddings=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             hidden_size=16, intermediate_size=24, rms_norm_eps=1e-5)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192, "rope_theta": 500000.0}


def permute(weights, heads):
    """Reorders the rows of each head from halves to neighboring pairs."""
    return weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def llama3_divisors(head_width, rope):
    divisors = []
    for frequency in 1.0 / rope["rope_theta"] ** (np.arange(0, head_width, 2) / head_width):
        turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
        smooth = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        smooth = min(max(smooth, 0), 1)
        divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, dtype=np.float32)


def write(name, config, kind=None):
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
            if kind is not None:  # round to values that the file can represent
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(parameter.numpy(), kind), kind)
                                                 if parameter.dim() == 2 else parameter.numpy()))
        tokens = torch.randint(0, config.vocab_size, (1, 9))
        logits = model(tokens).logits
    arch = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3,
            "gemma2": gguf.MODEL_ARCH.GEMMA2, "phi3": gguf.MODEL_ARCH.PHI3, "granite": gguf.MODEL_ARCH.GRANITE,
            "olmo2": gguf.MODEL_ARCH.OLMO2, "starcoder2": gguf.MODEL_ARCH.STARCODER2}[config.model_type]
    writer = gguf.GGUFWriter(HERE / name, gguf.MODEL_ARCH_NAMES[arch])
    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if config.model_type == "starcoder2":
        writer.add_layer_norm_eps(config.norm_epsilon)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    if head_width != config.hidden_size // config.num_attention_heads:
        writer.add_key_length(head_width)
        writer.add_value_length(head_width)
    writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1) * head_width))
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "phi3":
        original = config.original_max_position_embeddings
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(
            math.sqrt(1 + math.log(config.max_position_embeddings / original) / math.log(original)))
        writer.add_sliding_window(config.sliding_window or 0)
    if config.model_type == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    writer.add_array("test.tokens", tokens[0].tolist())
    writer.add_array("test.logits", logits.flatten().tolist())
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(head_width, rope))
    if config.model_type == "phi3":
        for kind_of_factor in ("long", "short"):
            writer.add_tensor(f"rope_factors_{kind_of_factor}.weight",
                              np.array(rope[f"{kind_of_factor}_factor"], dtype=np.float32))
    for hf_name, tensor in model.state_dict().items():
        if hf_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = tensor.float().numpy()
        if config.model_type in ("llama", "granite") and (".q_proj." in hf_name or ".k_proj." in hf_name):
            data = permute(data, config.num_attention_heads if ".q_proj." in hf_name else config.num_key_value_heads)
        if config.model_type == "gemma2" and hf_name.endswith("norm.weight"):
            data = data + 1
        own = kind if kind is not None and data.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(names.get_name(hf_name, try_suffixes=(".weight", ".bias")), gguf.quants.quantize(data, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    write("llama3.gguf", transformers.LlamaConfig(**SIZES, head_dim=16, rope_parameters=LLAMA3, tie_word_embeddings=False))
    write("llama_bias.gguf", transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
          rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}), gguf.GGMLQuantizationType.BF16)
    wide = dict(SIZES, hidden_size=32, intermediate_size=32)
    write("qwen2.gguf", transformers.Qwen2Config(**wide, tie_word_embeddings=True), gguf.GGMLQuantizationType.Q8_0)
    write("gemma2.gguf", transformers.Gemma2Config(**SIZES, head_dim=6, query_pre_attn_scalar=6, sliding_window=9,
          attn_logit_softcapping=2.0, final_logit_softcapping=4.0))
    # After 8 tokens, the long factors count.
    longrope = {"rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.25, 1.75], "long_factor": [1.5, 2.75, 4.0]}
    tokens = dict(bos_token_id=1, eos_token_id=2, pad_token_id=None)
    write("phi3.gguf", transformers.Phi3Config(**wide, **tokens, sliding_window=6, original_max_position_embeddings=8,
          tie_word_embeddings=True, rope_parameters=longrope), gguf.GGMLQuantizationType.Q8_0)
    write("granite.gguf", transformers.GraniteConfig(**SIZES, **tokens, attention_bias=True, mlp_bias=True,
          tie_word_embeddings=True, embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.25,
          logits_scaling=2.0), gguf.GGMLQuantizationType.BF16)
    write("olmo2.gguf", transformers.Olmo2Config(**SIZES, **tokens), gguf.GGMLQuantizationType.BF16)
    sizes = {key: value for key, value in SIZES.items() if key != "rms_norm_eps"}
    write("starcoder2.gguf", transformers.Starcoder2Config(**sizes, **tokens, rope_parameters=dict(
          rope_type="linear", factor=4.0, rope_theta=1000.0)), gguf.GGMLQuantizationType.BF16)
    write("qwen3.gguf", transformers.Qwen3Config(**SIZES, head_dim=6, tie_word_embeddings=False))
