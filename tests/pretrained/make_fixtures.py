#!/usr/bin/env python3
"""Writes fixtures/: small random models as transformers saves them, and PyTorch's results for them. See README.md.

    python3 tests/pretrained/make_fixtures.py           # all
    python3 tests/pretrained/make_fixtures.py NAME …    # these models only
"""

import json
import os
import pathlib
import shutil
import sys

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")  # the same results on every CPU

import torch
import transformers
from safetensors.torch import save_file
from transformers import BertConfig, BertModel, Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel, GPT2Model
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from transformers import BertForPreTraining, BertForSequenceClassification, BertForTokenClassification
from transformers import DistilBertConfig, DistilBertForMaskedLM, DistilBertForSequenceClassification, DistilBertModel
from transformers import RobertaConfig, RobertaForMaskedLM, RobertaForTokenClassification, RobertaModel
from transformers import XLMRobertaConfig, XLMRobertaForSequenceClassification
from transformers import ModernBertConfig, ModernBertForMaskedLM, ModernBertForSequenceClassification
from transformers import ModernBertForTokenClassification, ModernBertModel
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers import Qwen3Config, Qwen3ForCausalLM, SmolLM3Config, SmolLM3ForCausalLM
from transformers import GraniteConfig, GraniteForCausalLM, Olmo2Config, Olmo2ForCausalLM, Phi3Config, Phi3ForCausalLM
from transformers import Starcoder2Config, Starcoder2ForCausalLM

FOLDER = pathlib.Path(__file__).parent / "fixtures"
BATCH, LENGTH = 2, 12
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
PLAIN = {"rope_type": "default", "rope_theta": 1000.0}
# The logits are beyond the original length with the first one, and end just with it with the second.
LONGROPE = {"rope_type": "longrope", "rope_theta": 1000.0, "original_max_position_embeddings": 8,
            "short_factor": [1.0, 1.125, 1.5, 2.25], "long_factor": [1.25, 3.0, 6.5, 8.0]}
LONGROPE_AT_END = {"rope_type": "longrope", "rope_theta": 500.0, "original_max_position_embeddings": 12, "factor": 3.0,
                   "short_factor": [1.0, 1.25, 1.75], "long_factor": [1.5, 2.75, 4.0], "attention_factor": 1.25}
GEMMA3 = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0}

GPT2 = dict(vocab_size=41, n_positions=16, n_embd=16, n_layer=2, n_head=2)
LLAMA = dict(vocab_size=43, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64)
SMALL = dict(vocab_size=29, hidden_size=16, intermediate_size=12, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=None)
TWO_HEADS = {**SMALL, "num_attention_heads": 2, "num_key_value_heads": 1}
BERT = dict(vocab_size=47, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=16)
ENCODER = dict(vocab_size=23, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12,
               max_position_embeddings=20)
MODERNBERT = dict(vocab_size=23, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12,
                  local_attention=6, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
DISTILBERT = dict(vocab_size=23, dim=8, n_layers=2, n_heads=2, hidden_dim=12, max_position_embeddings=16)

# name: (class, configuration, largest shard)
MODELS = {
    "gpt2": (GPT2LMHeadModel, GPT2Config(**GPT2), None),
    "gpt2_gelu_sharded": (GPT2LMHeadModel, GPT2Config(**GPT2, activation_function="gelu", layer_norm_epsilon=1e-3),
                          "12KB"),
    "gpt2_base": (GPT2Model, GPT2Config(**{**GPT2, "n_embd": 24, "n_head": 3}), None),
    "llama3": (LlamaForCausalLM, LlamaConfig(**LLAMA, rope_parameters=LLAMA3), "12KB"),
    "llama_dynamic": (LlamaForCausalLM, LlamaConfig(**{**LLAMA, "max_position_embeddings": 8}, attention_bias=True,
                                                    mlp_bias=True, head_dim=6, rope_parameters=DYNAMIC), None),
    "llama_longrope": (LlamaForCausalLM, LlamaConfig(**LLAMA, head_dim=8, rope_parameters=LONGROPE), None),
    "mistral_longrope": (MistralForCausalLM, MistralConfig(**LLAMA, head_dim=6, sliding_window=None,
                                                           rope_parameters=LONGROPE_AT_END), None),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config(**{**LLAMA, "num_hidden_layers": 3}, no_rope_layer_interval=2,
                                                  pad_token_id=None, bos_token_id=1, eos_token_id=2), None),
    "smollm": (LlamaForCausalLM, LlamaConfig(**{**LLAMA, "hidden_size": 24, "num_attention_heads": 6},
                                             rms_norm_eps=1e-5, tie_word_embeddings=True, rope_parameters=PLAIN), None),
    "mistral": (MistralForCausalLM, MistralConfig(**LLAMA, head_dim=6, sliding_window=None, rope_parameters=PLAIN), None),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**LLAMA, tie_word_embeddings=True, rope_parameters=YARN), None),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**LLAMA, head_dim=8, tie_word_embeddings=True, rope_parameters=LINEAR),
              None),
    "mistral_window": (MistralForCausalLM, MistralConfig(**LLAMA, sliding_window=5, rope_parameters=PLAIN), None),
    "qwen2_window": (Qwen2ForCausalLM, Qwen2Config(**{**LLAMA, "num_hidden_layers": 3}, use_sliding_window=True,
                                                   sliding_window=4, max_window_layers=1, rope_parameters=PLAIN), None),
    "gemma2_window": (Gemma2ForCausalLM, Gemma2Config(**LLAMA, head_dim=8, sliding_window=5, query_pre_attn_scalar=12,
                                                      attn_logit_softcapping=2.0, final_logit_softcapping=4.0,
                                                      rope_parameters=PLAIN), None),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig(**LLAMA, head_dim=8, sliding_window=5,
                                                   query_pre_attn_scalar=12, rope_parameters=GEMMA3,
                                                   layer_types=["sliding_attention", "full_attention"]), None),
    # No text is longer than the window.
    "gemma2": (Gemma2ForCausalLM, Gemma2Config(**LLAMA, head_dim=8, sliding_window=16, query_pre_attn_scalar=12,
                                               attn_logit_softcapping=2.0, final_logit_softcapping=4.0,
                                               rope_parameters=PLAIN), None),
    "phi3": (Phi3ForCausalLM, Phi3Config(**SMALL, sliding_window=5, rope_parameters=PLAIN), None),
    # Within the original length, which the generated texts outgrow.
    "phi3_longrope": (Phi3ForCausalLM, Phi3Config(**{**TWO_HEADS, "num_key_value_heads": 2}, rms_norm_eps=1e-3,
                                                  original_max_position_embeddings=16, sliding_window=40,
                                                  rope_parameters={**LONGROPE, "attention_factor": 1.5}), "9KB"),
    "phi4_mini": (Phi3ForCausalLM, Phi3Config(**TWO_HEADS, tie_word_embeddings=True,
                                              original_max_position_embeddings=8, rope_parameters={
                                                  **LONGROPE, "partial_rotary_factor": 0.75,
                                                  "short_factor": [1.0, 1.25, 1.75], "long_factor": [1.5, 2.75, 4.0]}),
                  None),
    "granite": (GraniteForCausalLM, GraniteConfig(**SMALL, tie_word_embeddings=True, embedding_multiplier=12.0,
                                                  residual_multiplier=0.22, attention_multiplier=0.3,
                                                  logits_scaling=3, rope_parameters=PLAIN), None),
    "granite_biases": (GraniteForCausalLM, GraniteConfig(**SMALL, head_dim=6, attention_bias=True, mlp_bias=True,
                                                         embedding_multiplier=0.7, residual_multiplier=1.3,
                                                         attention_multiplier=0.5, logits_scaling=0.4,
                                                         rope_parameters=LINEAR), "9KB"),
    "granite_ones": (GraniteForCausalLM, GraniteConfig(**TWO_HEADS, rope_parameters=YARN), None),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config(**{**SMALL, "num_key_value_heads": None}, rope_parameters=PLAIN), None),
    "olmo2_biases": (Olmo2ForCausalLM, Olmo2Config(**TWO_HEADS, attention_bias=True, tie_word_embeddings=True,
                                                   rms_norm_eps=1e-3, rope_parameters=LINEAR), "9KB"),
    "olmo2_narrow": (Olmo2ForCausalLM, Olmo2Config(**SMALL, head_dim=6, rope_parameters=YARN), None),
    "starcoder2": (Starcoder2ForCausalLM, Starcoder2Config(**SMALL, sliding_window=5, rope_parameters=PLAIN), None),
    "starcoder2_plain": (Starcoder2ForCausalLM, Starcoder2Config(**TWO_HEADS, use_bias=False, norm_epsilon=1e-3,
                                                                 tie_word_embeddings=False, rope_parameters=LINEAR),
                         "9KB"),
    "starcoder2_wide": (Starcoder2ForCausalLM, Starcoder2Config(**SMALL, head_dim=6, sliding_window=3,
                                                                rope_parameters=YARN), None),
    "bert": (BertModel, BertConfig(**BERT), None),
    "bert_tanh_sharded": (BertModel, BertConfig(**BERT, hidden_act="gelu_new", type_vocab_size=3), "12KB"),
    "bert_no_pooler": (BertModel, BertConfig(**{**BERT, "hidden_size": 24, "num_attention_heads": 3},
                                             layer_norm_eps=1e-5), None),
    "bert_pretraining": (BertForPreTraining, BertConfig(**ENCODER), None),
    "bert_sequence": (BertForSequenceClassification, BertConfig(**ENCODER, num_labels=1, hidden_act="gelu_new"), None),
    "bert_tokens": (BertForTokenClassification, BertConfig(**ENCODER, num_labels=5, type_vocab_size=1), None),
    "roberta": (RobertaModel, RobertaConfig(**ENCODER, pad_token_id=3, layer_norm_eps=1e-5), None),
    # Its head has exact GELU whatever the layers have.
    "roberta_masked": (RobertaForMaskedLM, RobertaConfig(**ENCODER, hidden_act="relu"), None),
    "roberta_tokens": (RobertaForTokenClassification, RobertaConfig(**ENCODER, num_labels=3), None),
    "xlm_roberta_sequence": (XLMRobertaForSequenceClassification,
                             XLMRobertaConfig(**ENCODER, num_labels=3, type_vocab_size=1), None),
    "distilbert": (DistilBertModel, DistilBertConfig(**DISTILBERT), None),
    "distilbert_masked": (DistilBertForMaskedLM, DistilBertConfig(**DISTILBERT, activation="relu"), None),
    "distilbert_sequence": (DistilBertForSequenceClassification, DistilBertConfig(**DISTILBERT), None),
    "modern_bert": (ModernBertModel, ModernBertConfig(**{**MODERNBERT, "num_hidden_layers": 3}), None),
    "modern_bert_masked": (ModernBertForMaskedLM, ModernBertConfig(**MODERNBERT), None),
    "modern_bert_tokens": (ModernBertForTokenClassification,
                           ModernBertConfig(**MODERNBERT, num_labels=3, classifier_activation="gelu_new"), None),
    "modern_bert_sequence": (ModernBertForSequenceClassification,
                             ModernBertConfig(**MODERNBERT, num_labels=3, classifier_pooling="mean", norm_bias=True,
                                              attention_bias=True, mlp_bias=True, classifier_bias=True, norm_eps=1e-3,
                                              layer_types=["sliding_attention", "full_attention"],
                                              hidden_activation="gelu_pytorch_tanh", rope_parameters=GEMMA3), None),
}

ENCODERS = {"bert", "roberta", "xlm-roberta", "distilbert", "modernbert"}


def randomize(model):
    """Sets random weights about as large as those of a trained model, with biases and norms that have an effect."""
    for name, parameter in model.named_parameters():
        is_norm = parameter.dim() == 1 and "bias" not in name
        parameter.data = torch.randn(parameter.shape) * (0.3 if parameter.dim() == 1 else 0.1) + (1 if is_norm else 0)


def inputs_for(kind, config):
    data = {"tokens": torch.randint(1, config.vocab_size, (BATCH, LENGTH))}
    if config.model_type not in ENCODERS:
        data["targets"] = torch.randint(0, config.vocab_size, (BATCH, LENGTH))
        data["targets"][1, -3:] = -100
        return data
    visible = torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 5]])
    # PyTorch gives no gradient to the embedding of padding. RoBERTa does not count such tokens.
    padding = config.pad_token_id
    tokens = data["tokens"] - (data["tokens"] <= padding).long()
    data |= {"visible": visible, "tokens": torch.where(visible, tokens, padding)}
    if getattr(config, "type_vocab_size", 0) > 0:
        data["types"] = torch.randint(0, config.type_vocab_size, (BATCH, LENGTH))
    if kind.__name__.endswith("Model"):
        data["weights"] = torch.randn(BATCH, LENGTH, config.hidden_size)
        data["pooled_weights"] = torch.randn(BATCH, config.hidden_size)
    elif kind.__name__.endswith("SequenceClassification"):
        one = config.num_labels == 1
        data["labels"] = torch.randn(BATCH) if one else torch.randint(0, config.num_labels, (BATCH,))
    else:
        labels = config.num_labels if kind.__name__.endswith("TokenClassification") else config.vocab_size
        data["labels"] = torch.where(visible, torch.randint(0, labels, (BATCH, LENGTH)), -100)
    if kind.__name__.endswith("PreTraining"):
        data["next_sentence_labels"] = torch.randint(0, 2, (BATCH,))
    return data


def encoded(model, data):
    extra = {"token_type_ids": data["types"]} if "types" in data else {}
    if "next_sentence_labels" in data:
        extra["next_sentence_label"] = data["next_sentence_labels"]
    if "labels" in data:
        extra["labels"] = data["labels"]
    out = model(data["tokens"], attention_mask=data["visible"].long(), **extra)
    if "next_sentence_labels" in data:
        return {"logits": out.prediction_logits, "next_sentence": out.seq_relationship_logits}, out.loss
    if "labels" in data:
        return {"logits": out.logits}, out.loss
    features = out.last_hidden_state
    # The features of padding are arbitrary, so they do not count.
    loss = (features * data["weights"] * data["visible"][..., None]).to(features.dtype).sum()
    results = {"features": features}
    if getattr(model, "pooler", None) is not None:
        results["pooled"] = out.pooler_output
        loss = loss + (out.pooler_output * data["pooled_weights"].to(features.dtype)).sum()
    return results, loss


def outputs_of(model, data):
    """The model's logits or features, and the loss."""
    if model.config.model_type in ENCODERS:
        return encoded(model, data)
    features = model(data["tokens"])
    logits = features.logits if hasattr(features, "logits") else features.last_hidden_state @ model.wte.weight.T
    loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), data["targets"].flatten())
    return {"logits": logits}, loss


def make(name, kind, config, shard):
    torch.manual_seed(sum(name.encode()))
    model = kind(config, add_pooling_layer=False) if name == "bert_no_pooler" else kind(config)
    randomize(model)
    model.eval()  # no dropout
    folder = FOLDER / name
    model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    data = inputs_for(kind, config)
    expected = dict(data)
    for label in ("float32", "bfloat16"):
        if label == "bfloat16":
            # Only weights are rounded to bfloat16; everything is computed in float32. PyTorch's bfloat16 arithmetic differs
            # from this by up to 2%.
            model.to(torch.bfloat16).to(torch.float32)
        model.zero_grad()
        results, loss = outputs_of(model, data)
        loss.backward()
        expected |= {f"{label}.{key}": value.clone() for key, value in results.items()}
        expected[f"{label}.loss"] = loss
        expected |= {f"{label}.grad.{key}": p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    # The file's name must be one that no reader of the folder takes for weights.
    save_file({key: value.detach().contiguous() for key, value in expected.items()}, folder / "expected.safetensors")
    for extra in folder.iterdir():
        if extra.suffix not in (".json", ".safetensors") or extra.name == "generation_config.json":
            extra.unlink()


def make_decoded():
    """A model in bfloat16 with sizes for which mica has decode kernels, and the logits after each of its last tokens.

    They are computed in float32, with the weights rounded to bfloat16.
    """
    sequences, length, last = 12, 28, 17
    torch.manual_seed(64)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=192, hidden_size=128, intermediate_size=192, num_hidden_layers=2,
                                         num_attention_heads=2, num_key_value_heads=1, head_dim=64,
                                         tie_word_embeddings=True, rope_parameters=PLAIN)).eval()
    randomize(model)
    folder = FOLDER / "llama_decoded"
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    tokens = torch.randint(0, 192, (sequences, length))
    with torch.no_grad():
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        logits = model(tokens).logits[:, -last:].contiguous()
    save_file({"tokens": tokens, "logits": logits}, folder / "expected.safetensors")


def main(names):
    torch.set_num_threads(1)
    if not names:
        shutil.rmtree(FOLDER, ignore_errors=True)
        make_decoded()
    for name in names or MODELS:
        kind, config, shard = MODELS[name]
        config._attn_implementation = "eager"
        make(name, kind, config, shard)
    if names:
        return
    about = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}
    (FOLDER / "versions.json").write_text(json.dumps(about) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
