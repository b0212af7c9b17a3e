#!/usr/bin/env python3
"""Compares mica's losses over 100 steps with PEFT's, at several learning rates, and two runs of PEFT. See README.md.

Fails if mica's and PEFT's differ by more than 0.01 at the learning rate of the test Adapter.TrainsAsPeft. At higher rates,
rounding errors of float32 grow from step to step, until even two runs of PEFT differ by more.

    python3 tests/pretrained/compare_losses.py FOLDER
"""

import json
import os
import pathlib
import sys

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

import peft
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from make_adapters import ADAPTERS, RATE, TARGETS, train
from make_fixtures import FOLDER


def losses_of_peft(name, dtype, rate, attention="eager"):
    base = AutoModelForCausalLM.from_pretrained(FOLDER / name, attn_implementation=attention).eval()
    model = PeftModel.from_pretrained(base, ADAPTERS / name / "start", is_trainable=True).eval().to(dtype)
    return train(model, load_file(FOLDER / name / "expected.safetensors"), rate)


def main():
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}")
    print("largest difference of the loss over 100 steps of AdamW, by learning rate:")
    farthest = 0
    for name in TARGETS:
        mica = json.loads((pathlib.Path(sys.argv[1]) / name / "losses.json").read_text())
        for rate in (0.01, 0.005, 0.002):
            reference = losses_of_peft(name, torch.float64, rate)
            single = losses_of_peft(name, torch.float32, rate)
            other = losses_of_peft(name, torch.float32, rate, "sdpa")
            pairs = [("mica's float64 from PEFT's float64", mica[f"float64 {rate}"], reference),
                     ("mica's float32 from PEFT's float64", mica[f"float32 {rate}"], reference),
                     ("PEFT's float32 from PEFT's float64", single, reference),
                     ("PEFT's float32 (sdpa) from PEFT's float32 (eager)", other, single)]
            print(f"{name}, {rate}: loss {reference[0]:.4f} to {reference[-1]:.4f}")
            for what, a, b in pairs:
                difference = max(abs(x - y) for x, y in zip(a, b, strict=True))
                print(f"  {what}: {difference:.2g}")
                if rate == RATE and a in mica.values():
                    farthest = max(farthest, difference)
    print(f"at {RATE}, the rate of the test, mica's losses are at most {farthest:.2g} from PEFT's in float64")
    return farthest > 0.01


if __name__ == "__main__":
    sys.exit(main())
