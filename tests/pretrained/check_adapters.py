#!/usr/bin/env python3
"""Checks that PEFT loads the adapters that mica saved, and computes mica's loss at the end of training, or mica's features
with them. See README.md.

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
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from make_adapters import ADAPTERS, FEATURES, TARGETS, loss_of
from make_fixtures import FOLDER, outputs_of


def main():
    failed = 0
    for name in (*TARGETS, *FEATURES):
        base_name = FEATURES[name][0] if name in FEATURES else name
        base = AutoModelForCausalLM.from_pretrained(FOLDER / base_name, attn_implementation="eager").eval()
        model = PeftModel.from_pretrained(base, pathlib.Path(sys.argv[1]) / name).eval()
        data = load_file(FOLDER / base_name / "expected.safetensors")
        loss = loss_of(model, data).item()
        expected = json.loads((ADAPTERS / name / "losses.json").read_text())["trained_loss"]
        print(f"{name}: loss {loss:.4f}, by PEFT's own training {expected:.4f}")
        failed += abs(loss - expected) > 0.01
    folder = pathlib.Path(sys.argv[1]) / "bert"
    model = PeftModel.from_pretrained(AutoModel.from_pretrained(FOLDER / "bert").eval(), folder).eval()
    data = load_file(FOLDER / "bert" / "expected.safetensors")
    pooled = model(input_ids=data["tokens"], attention_mask=data["visible"].long(),
                   token_type_ids=data["types"]).pooler_output
    error = (pooled - load_file(folder / "pooled.safetensors")["pooled"]).abs().max().item()
    print(f"bert: features differ by {error:.2g}")
    failed += error > 1e-5
    name = "xlm_roberta_sequence"
    base = AutoModelForSequenceClassification.from_pretrained(FOLDER / name, attn_implementation="eager").eval()
    model = PeftModel.from_pretrained(base, pathlib.Path(sys.argv[1]) / "classifier").eval()
    logits = outputs_of(model, load_file(FOLDER / name / "expected.safetensors"))[0]["logits"]
    expected = torch.tensor(json.loads((ADAPTERS / "classifier" / "logits.json").read_text()))
    error = (logits.flatten() - expected).abs().max().item()
    print(f"classifier: logits differ by {error:.2g}")
    failed += error > 1e-5
    print(f"{len(TARGETS) + len(FEATURES) + 2 - failed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
