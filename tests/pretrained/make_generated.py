#!/usr/bin/env python3
"""Writes fixtures/*/generated.json: how transformers goes on with prompts, from the models that make_fixtures.py wrote.

    python3 tests/pretrained/make_generated.py
"""

import json
import os
import sys

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")  # the same results on every CPU

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from make_fixtures import FOLDER

PROMPT_LENGTHS = (1, 3, 6)
NEW_TOKENS = 10
PENALTY = 20.0  # so that the texts do not repeat one token


def generated(model, prompt, **options):
    config = GenerationConfig(do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0, eos_token_id=None, **options)
    tokens = torch.tensor([prompt])
    return model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=config)[0, len(prompt):]


def main():
    torch.set_num_threads(1)
    for path in sorted(FOLDER.glob("*/config.json")):
        if path.parent.name.startswith("bert"):
            continue
        torch.manual_seed(sum(path.parent.name.encode()))
        results = []
        for length in PROMPT_LENGTHS:
            # Dynamic scaling keeps its longest length from one call to the next.
            model = AutoModelForCausalLM.from_pretrained(path.parent, attn_implementation="eager").eval()
            prompt = torch.randint(1, model.config.vocab_size, (length,)).tolist()
            model.generation_config.bos_token_id = model.generation_config.eos_token_id = None
            greedy = generated(model, prompt).tolist()
            model = AutoModelForCausalLM.from_pretrained(path.parent, attn_implementation="eager").eval()
            model.generation_config.bos_token_id = model.generation_config.eos_token_id = None
            penalized = generated(model, prompt, repetition_penalty=PENALTY).tolist()
            results.append({"prompt": prompt, "greedy": greedy, "penalized": penalized})
        (path.parent / "generated.json").write_text(json.dumps({"penalty": PENALTY, "texts": results}) + "\n")


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
