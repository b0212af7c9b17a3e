#!/usr/bin/env python3
"""Runs finetune on small random models that transformers wrote, and checks that PEFT loads the adapters and computes the
loss that finetune reports. See README.md.

    python3 tests/pretrained/check_finetune.py build/bin/finetune
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

import torch
from peft import PeftModel
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config

TOKENIZER = pathlib.Path(__file__).parent.parent / "tokenizer/fixtures/qwen/tokenizer.json"
END = "<|endoftext|>"
SMALL = dict(vocab_size=640, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2)
MODELS = {
    "llama": LlamaConfig(**SMALL),
    "qwen2": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "gpt2": GPT2Config(vocab_size=640, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2,
                       resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
}


def validation_loss(model, tokenizer, lines):
    total, count = 0.0, 0
    for line in lines:
        prompt = tokenizer.encode(line["prompt"], add_special_tokens=False).ids
        answer = tokenizer.encode(line["completion"], add_special_tokens=False).ids + [tokenizer.token_to_id(END)]
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1:-1]
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum").item()
        count += len(answer)
    return total / count


def check(name, config, folder, options):
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    base.save_pretrained(folder / name)
    shutil.copy(TOKENIZER, folder / name)
    (folder / name / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    lines = [{"prompt": f"{i % 7} and {i % 5}", "completion": f" make {i % 7 + i % 5}"} for i in range(40)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = subprocess.run([pathlib.Path(sys.argv[1]).resolve(), "--model", name, "--data", "sums.jsonl", "--out", f"{name}.adapter",
                          *"--device cpu --dtype float32 --validation 0.2 --steps 40 --batch 8 --lr 0.01".split(),
                          *options], cwd=folder, check=True, capture_output=True, text=True).stdout
    before, after = (float(re.search(words + r"([0-9.]+)", out)[1])
                     for words in ["before training: ", "best validation loss "])
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    python_before = validation_loss(base, tokenizer, lines[4::5])
    model = PeftModel.from_pretrained(base, folder / f"{name}.adapter").eval()
    python_after = validation_loss(model, tokenizer, lines[4::5])
    print(f"{name} {' '.join(options)}: loss {before:.4f} to {after:.4f}; PEFT: {python_before:.4f} to {python_after:.4f}")
    # With quantized weights, the adapter was trained on a base model that differs slightly from PEFT's.
    tolerance = 0.2 if options else 2e-4
    return abs(before - python_before) < tolerance and abs(after - python_after) < tolerance and after < before - 1


with tempfile.TemporaryDirectory() as folder, torch.no_grad():
    results = [check(name, config, pathlib.Path(folder), options)
               for name, config in MODELS.items() for options in ([], ["--quantize", "8"])]
print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
sys.exit(not all(results))
