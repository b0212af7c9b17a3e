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
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from make_fixtures import FOLDER, outputs_of

ADAPTERS = FOLDER.parent / "adapters"
STEPS, RATE = 100, 2e-3
# Adapters with random values in all that is trained: the model and what LoraConfig is told.
FEATURES = {
    "patterns": ("qwen2", dict(target_modules=["q_proj", "k_proj", "down_proj"], r=4, lora_alpha=6, bias="lora_only",
                               rank_pattern={"model.layers.0.self_attn.q_proj": 2, r"layers\.1.*down_proj": 3},
                               alpha_pattern={"k_proj": 5}, use_rslora=True)),
    "dora": ("llama3", dict(target_modules=["o_proj", "up_proj", "lm_head"], r=3, lora_alpha=4, use_dora=True,
                            modules_to_save=["embed_tokens", "model.norm"])),
    "biases": ("gpt2", dict(target_modules=["c_attn", "mlp.c_proj"], r=2, lora_alpha=3, use_dora=True, bias="all",
                            modules_to_save=["ln_f", "mlp.c_fc"], fan_in_fan_out=True)),
    # mica has these layers in parts, each with a lora_A of its own, so only the first loss is the same.
    "phi": ("phi3", dict(target_modules=["qkv_proj", "gate_up_proj", "o_proj"], r=3, lora_alpha=4, use_dora=True)),
}
FEATURE_STEPS = 20
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


def train(model, data, rate, steps=STEPS):
    """The loss before each step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate, weight_decay=0.01)
    losses = []
    for _ in range(steps):
        loss = loss_of(model, data)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def random_adapter(name):
    """A model with an adapter of FEATURES, and the name of its base model."""
    base_name, options = FEATURES[name]
    torch.manual_seed(sum(name.encode()))
    base = AutoModelForCausalLM.from_pretrained(FOLDER / base_name, attn_implementation="eager").eval()
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **options)).eval()
    with torch.no_grad():
        for _, parameter in sorted((n, p) for n, p in model.named_parameters() if p.requires_grad):
            parameter += 0.1 * torch.randn_like(parameter)
    return model, base_name


def write_features(names):
    for name in names:
        model, base_name = random_adapter(name)
        save(model, ADAPTERS / name, base_name)
        data = load_file(FOLDER / base_name / "expected.safetensors")
        model.to(torch.float64)
        losses = train(model, data, RATE, FEATURE_STEPS)
        with torch.no_grad():
            loss = loss_of(model, data)
        about = {"base": base_name, "learning_rate": RATE, "losses": losses, "trained_loss": loss.item()}
        (ADAPTERS / name / "losses.json").write_text(json.dumps(about) + "\n")


def write_classifier():
    """An adapter of an encoder, whose head is trained as a whole."""
    name = "xlm_roberta_sequence"
    torch.manual_seed(sum(name.encode()))
    base = AutoModelForSequenceClassification.from_pretrained(FOLDER / name, attn_implementation="eager").eval()
    model = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value"], r=2)).eval()
    with torch.no_grad():
        for _, parameter in sorted((n, p) for n, p in model.named_parameters() if p.requires_grad):
            parameter += 0.3 * torch.randn_like(parameter)
    save(model, ADAPTERS / "classifier", name)
    with torch.no_grad():
        logits = outputs_of(model, load_file(FOLDER / name / "expected.safetensors"))[0]["logits"]
    (ADAPTERS / "classifier" / "logits.json").write_text(json.dumps(logits.flatten().tolist()) + "\n")


def main():
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["features"]:  # only those with random values, or some of them
        write_features(sys.argv[2:] or FEATURES)
        return write_classifier()
    shutil.rmtree(ADAPTERS, ignore_errors=True)
    write_features(FEATURES)
    write_classifier()
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
