#!/usr/bin/env python3
"""Checks that PEFT loads the adapters that mica saved, and that they give the loss that training ended with. See README.md.

    python3 tests/pretrained/check_adapters.py FOLDER
"""

import json
import os
import pathlib
import sys

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from make_adapters import ADAPTERS, TARGETS
from make_fixtures import FOLDER


def main():
    failed = 0
    for name in TARGETS:
        base = AutoModelForCausalLM.from_pretrained(FOLDER / name, attn_implementation="eager").eval()
        model = PeftModel.from_pretrained(base, pathlib.Path(sys.argv[1]) / name).eval()
        data = load_file(FOLDER / name / "expected.safetensors")
        logits = model(data["tokens"]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), data["targets"].flatten()).item()
        expected = json.loads((ADAPTERS / name / "losses.json").read_text())["trained_loss"]
        print(f"{name}: loss {loss:.4f}, by PEFT's own training {expected:.4f}")
        failed += abs(loss - expected) > 0.01
    print(f"{len(TARGETS) - failed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
