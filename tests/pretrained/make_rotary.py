#!/usr/bin/env python3
"""Writes fixtures/rotary.json: what transformers makes of the rotary entries of a config.json: frequencies by length,
and the scale of the result.

    python3 tests/pretrained/make_rotary.py
"""

import copy
import json

import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.smollm3.modeling_smollm3 import SmolLM3RotaryEmbedding

from make_fixtures import FOLDER

SHAPE = {"model_type": "llama", "vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
         "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
SHORT, LONG = [1, 1.05, 1.1, 1.3, 1.6, 2, 2.5, 3], [1, 1.5, 2.25, 4, 7.5, 12, 20, 31.5]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG,
            "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}

# name: (entries, lengths)
CASES = {
    "none": ({}, [1]),
    "theta": ({"rope_theta": 500000.0}, [1]),
    "theta, and a null": ({"rope_theta": 250000, "rope_scaling": None, "rope_parameters": None}, [1]),
    "default with a theta of its own": ({"rope_theta": 3.0, "rope_parameters": {"rope_theta": 1e6}}, [1]),
    "an empty rope_scaling": ({"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 3.0}}, [1]),
    "rope_scaling before rope_parameters": ({
        "rope_theta": 777.0, "rope_scaling": {"rope_type": "linear", "factor": 5.0},
        "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 99.0}}, [1]),
    "SmolLM 3": ({"model_type": "smollm3", "pad_token_id": 0}, [1]),
    "SmolLM 3 with a theta": ({"model_type": "smollm3", "pad_token_id": 0, "rope_theta": 5e6}, [1]),
    "linear": ({"rope_scaling": {"type": "linear", "factor": 2.5}}, [1, 100]),
    "rope_type before type": ({"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2.5}}, [1]),
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, [1, 64, 65, 200]),
    "dynamic, whose original length does not count": ({
        "original_max_position_embeddings": 16, "rope_scaling": {
            "type": "dynamic", "factor": 1.0, "original_max_position_embeddings": 16}}, [17, 64, 65, 128]),
    "llama3": ({"head_dim": 64, "rope_theta": 500000.0, "rope_scaling": LLAMA3}, [1]),
    "llama3, outer original length": ({"head_dim": 64, "rope_theta": 500000.0, "rope_scaling": LLAMA3,
                                       "original_max_position_embeddings": 1024}, [1]),
    "llama3, no original length": ({"head_dim": 64, "max_position_embeddings": 300, "rope_parameters": {
        key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"}}, [1]),
    "Qwen 2.5's yarn": ({"head_dim": 128, "max_position_embeddings": 32768, "rope_theta": 1e6, "rope_scaling": {
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}, [1]),
    "yarn without a factor": ({"max_position_embeddings": 512, "rope_parameters": YARN | {"factor": None}}, [1]),
    "yarn, outer original length": ({"original_max_position_embeddings": 20, "rope_parameters": YARN}, [1]),
    "yarn, attention factor": ({"rope_parameters": YARN | {"attention_factor": 0.75, "mscale": 2.0,
                                                           "mscale_all_dim": 1.0}}, [1]),
    "yarn, mscale": ({"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.5}}, [1]),
    "yarn, mscale alone": ({"rope_parameters": YARN | {"mscale": 0.7}}, [1]),
    "yarn, mscale 0": ({"rope_parameters": YARN | {"mscale": 0, "mscale_all_dim": 1.0}}, [1]),
    "yarn, betas": ({"rope_parameters": YARN | {"beta_fast": 4.5, "beta_slow": 0.5}}, [1]),
    "yarn, betas 0": ({"rope_parameters": YARN | {"beta_fast": 0, "beta_slow": 0}}, [1]),
    "yarn, not truncated": ({"rope_parameters": YARN | {"truncate": False}}, [1]),
    "yarn by less than 1": ({"rope_parameters": YARN | {"factor": 0.5}}, [1]),
    "longrope": ({"rope_parameters": LONGROPE}, [1, 16, 17, 64, 100]),
    "longrope, older": ({"rope_theta": 5000.0, "rope_scaling": {
        "type": "longrope", **{key: value for key, value in LONGROPE.items() if key != "rope_type"}}}, [16, 17]),
    "longrope by a factor": ({"rope_parameters": LONGROPE | {"factor": 32.0}}, [16, 17]),
    "longrope by 1": ({"rope_parameters": LONGROPE | {"factor": 1.0}}, [16, 17]),
    "longrope, attention factor": ({"rope_parameters": LONGROPE | {"factor": 4.0, "attention_factor": 1.19}}, [17]),
    "longrope, outer original length": ({"original_max_position_embeddings": 32, "rope_scaling": LONGROPE},
                                        [17, 32, 33]),
    "longrope, no original length": ({"rope_parameters": {
        key: value for key, value in LONGROPE.items() if key != "original_max_position_embeddings"}}, [64, 65]),
}


def expected(entries, lengths):
    config = AutoConfig.for_model(**copy.deepcopy(SHAPE | entries))
    results = []
    for length in lengths:
        kind = SmolLM3RotaryEmbedding if config.model_type == "smollm3" else LlamaRotaryEmbedding
        embedding = kind(config)
        embedding(torch.zeros(1), torch.arange(length)[None])
        results.append({"length": length, "frequencies": embedding.inv_freq.tolist()})
    return {"lengths": results, "scale": float(embedding.attention_scaling)}


def main():
    cases = [{"name": name, "config": SHAPE | entries, **expected(entries, lengths)}
             for name, (entries, lengths) in CASES.items()]
    (FOLDER / "rotary.json").write_text(",\n".join(json.dumps(case) for case in cases).join(["[\n", "\n]\n"]))


if __name__ == "__main__":
    main()
