#!/usr/bin/env python3
"""Writes fixtures/*/generated.json: how transformers continues prompts with the models that make_fixtures.py wrote.

    python3 tests/pretrained/make_generated.py          # all
    python3 tests/pretrained/make_generated.py NAME …   # these models only
"""

import json
import os
import sys

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")  # the same results on every CPU

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from make_fixtures import FOLDER

PROMPT_LENGTHS = (1, 3, 6)
SMALL_TYPES = ("phi3", "granite", "olmo2", "starcoder2")
PENALTY = 20.0  # so that the texts do not repeat one token


def new_tokens(config):
    return 64 if config.model_type in SMALL_TYPES else 10


def generated(model, prompt, **options):
    config = GenerationConfig(do_sample=False, max_new_tokens=new_tokens(model.config), pad_token_id=0,
                              eos_token_id=None, **options)
    tokens = torch.tensor([prompt])
    return model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=config)[0, len(prompt):]


def generated_in_batch(path, prompts):
    """All prompts at once, padded in front: the longest one sets the frequencies of all. Tokens and logits of each."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    model.generation_config.bos_token_id = model.generation_config.eos_token_id = None
    config = GenerationConfig(do_sample=False, max_new_tokens=new_tokens(model.config), pad_token_id=0,
                              eos_token_id=None, return_dict_in_generate=True, output_logits=True)
    longest = max(len(prompt) for prompt in prompts)
    tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(tokens, attention_mask=mask, generation_config=config)
    logits = torch.stack(out.logits, 1).flatten(1)
    return [{"tokens": text[longest:].tolist()} if model.config.model_type in SMALL_TYPES else
            {"tokens": text[longest:].tolist(), "logits": [round(float(x), 7) for x in of_text]}
            for text, of_text in zip(out.sequences, logits)]


def main(names):
    torch.set_num_threads(1)
    for path in sorted(FOLDER.glob("*/config.json")):
        name = path.parent.name
        if name.startswith("bert") or name == "llama_decoded" or (names and name not in names):
            continue
        torch.manual_seed(sum(path.parent.name.encode()))
        results = []
        for length in PROMPT_LENGTHS:
            # A new model for each prompt, since with dynamic scaling it keeps the longest length of all calls.
            model = AutoModelForCausalLM.from_pretrained(path.parent, attn_implementation="eager").eval()
            prompt = torch.randint(1, model.config.vocab_size, (length,)).tolist()
            model.generation_config.bos_token_id = model.generation_config.eos_token_id = None
            greedy = generated(model, prompt).tolist()
            model = AutoModelForCausalLM.from_pretrained(path.parent, attn_implementation="eager").eval()
            model.generation_config.bos_token_id = model.generation_config.eos_token_id = None
            penalized = generated(model, prompt, repetition_penalty=PENALTY).tolist()
            results.append({"prompt": prompt, "greedy": greedy, "penalized": penalized})
        results = {"penalty": PENALTY, "texts": results}
        rotary = getattr(model.config, "rope_parameters", None) or {}
        if rotary.get("rope_type") in ("dynamic", "longrope"):
            results["batch"] = generated_in_batch(path.parent, [text["prompt"] for text in results["texts"]])
        (path.parent / "generated.json").write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    with torch.no_grad():
        main(sys.argv[1:])
