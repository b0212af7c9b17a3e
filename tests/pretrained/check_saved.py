#!/usr/bin/env python3
"""Checks that transformers loads what mica saved, and computes the same. See README.md.

    python3 tests/pretrained/check_saved.py FOLDER
"""

import os
import pathlib
import sys

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM

from make_fixtures import FOLDER, outputs_of


def main():
    failed = 0
    folders = sorted(path.parent for path in pathlib.Path(sys.argv[1]).glob("*/*/config.json"))
    for folder in folders:
        name = folder.parent.name
        kind = AutoModel if name.startswith("bert") else AutoModelForCausalLM
        extra = {"add_pooling_layer": False} if name == "bert_no_pooler" else {}
        model, about = kind.from_pretrained(folder, output_loading_info=True, attn_implementation="eager", **extra)
        model.eval()
        expected = load_file(FOLDER / name / "expected.safetensors")
        results, loss = outputs_of(model, expected)
        errors = [(value - expected[f"float32.{key}"]).abs().max() for key, value in results.items()]
        errors.append((loss - expected["float32.loss"]).abs())
        names = [key for key in about if key != "error_msgs" and about[key]]
        good = max(errors) == 0 and not names
        failed += not good
        print(f"{folder}: largest difference {max(errors):.3g}{''.join(f', {key} {about[key]}' for key in names)}")
    print(f"{len(folders) - failed} passed, {failed} failed")
    return failed > 0 or not folders


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
