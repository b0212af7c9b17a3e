#!/usr/bin/env python3
"""Writes adapters/: LoRA adapters that PEFT saved before and after it trained them on models in fixtures/. See README.md.

    python3 tests/pretrained/make_adapters.py
"""

import json
import os
import shutil
import sys

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")  # the same results on every CPU

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from make_fixtures import FOLDER

ADAPTERS = FOLDER.parent / "adapters"
STEPS, RATE = 100, 2e-3
TARGETS = {"gpt2": ["c_attn", "mlp.c_proj"], "llama3": ["q_proj", "v_proj", "down_proj"]}


def save(model, folder, name):
    model.save_pretrained(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = name  # not this machine's path
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "README.md").unlink(missing_ok=True)


def loss_of(model, data):
    logits = model(data["tokens"]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), data["targets"].flatten())


def train(model, data, rate):
    """The loss before each step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate, weight_decay=0.01)
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model, data)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def main():
    torch.set_num_threads(1)
    shutil.rmtree(ADAPTERS, ignore_errors=True)
    for name, targets in TARGETS.items():
        torch.manual_seed(sum(name.encode()))
        base = AutoModelForCausalLM.from_pretrained(FOLDER / name, attn_implementation="eager").eval()
        model = get_peft_model(base, LoraConfig(r=4, lora_alpha=12, target_modules=targets, task_type="CAUSAL_LM",
                                                fan_in_fan_out=name == "gpt2"))
        model.eval()  # no dropout
        save(model, ADAPTERS / name / "start", name)
        model.to(torch.float64)  # Adam divides by the gradient's size, so that rounding grows from step to step
        data = load_file(FOLDER / name / "expected.safetensors")
        losses = train(model, data, RATE)
        model.to(torch.float32)
        save(model, ADAPTERS / name / "trained", name)
        model.to(torch.float64)
        with torch.no_grad():
            loss = loss_of(model, data)
        about = {"learning_rate": RATE, "weight_decay": 0.01, "losses": losses, "trained_loss": loss.item()}
        (ADAPTERS / name / "losses.json").write_text(json.dumps(about) + "\n")


if __name__ == "__main__":
    sys.exit(main())
