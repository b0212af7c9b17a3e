#!/usr/bin/env python3
"""Checks that transformers loads models that mica saved, and computes the same results. See README.md.

    python3 tests/pretrained/check_saved.py FOLDER
"""

import json
import os
import pathlib
import sys

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

import torch
import transformers
from safetensors.torch import load_file

from make_fixtures import FOLDER, outputs_of


def computed(folder, name):
    """The results of transformers with a folder's model, and its complaints when loading it."""
    kind = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
    extra = {"add_pooling_layer": False} if name == "bert_no_pooler" else {}
    model, about = kind.from_pretrained(folder, output_loading_info=True, attn_implementation="eager", **extra)
    results, loss = outputs_of(model.eval(), load_file(FOLDER / name / "expected.safetensors"))
    return results | {"loss": loss}, [f"{key} {about[key]}" for key in about if key != "error_msgs" and about[key]]


def main():
    failed = 0
    folders = sorted(path.parent for path in pathlib.Path(sys.argv[1]).glob("*/*/config.json"))
    for folder in folders:
        name = folder.parent.name
        results, names = computed(folder, name)
        # Computed again, since the fixtures' results have the bits of another machine.
        original, _ = computed(FOLDER / name, name)
        error = max((value - original[key]).abs().max() for key, value in results.items())
        failed += error > 0 or len(names) > 0
        print(f"{folder}: largest difference {error:.3g}{''.join(f', {text}' for text in names)}")
    print(f"{len(folders) - failed} passed, {failed} failed")
    return failed > 0 or not folders


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
