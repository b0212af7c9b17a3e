"""Writes models.json: what torchvision's and timm's models compute with weights that values() determines.

    python3 -m venv /tmp/venv && /tmp/venv/bin/pip install torch torchvision timm
    /tmp/venv/bin/python tests/vision/make_fixtures.py

tests/nn/vision_models_test.cpp computes the same weights, so that none are stored.
"""

import json
import math
import pathlib

import numpy as np
import timm
import torch
import torchvision


def values(count, seed):
    """`count` numbers in [-0.5, 0.5), a hash of their index and the seed."""
    x = np.arange(count, dtype=np.uint32) + np.uint32(seed * 0x9E3779B9 & 0xFFFFFFFF)
    for _ in range(2):
        x ^= x >> np.uint32(16)
        x *= np.uint32(0x045D9F3B)
    x ^= x >> np.uint32(16)
    return torch.from_numpy(x.astype(np.float64) / 2**32 - 0.5)


def set_weights(model):
    for seed, (name, tensor) in enumerate(model.state_dict().items()):
        if not tensor.is_floating_point():
            continue
        v = values(tensor.numel(), seed).reshape(tensor.shape)
        if name.endswith("running_var"):
            v = 1 + v
        elif tensor.dim() >= 2 and tensor.shape[0] > 1:
            v = v * math.sqrt(24 / (tensor.numel() / tensor.shape[0]))
        elif name.endswith("weight"):
            v = 1 + v / 4
        else:
            v = v / 4
        tensor.copy_(v)


def summary(tensor):
    """The norm and eight elements."""
    flat = tensor.flatten()
    places = [(i * (flat.numel() - 1)) // 7 for i in range(8)]
    return [flat.norm().item()] + flat[places].tolist()


def case(name, model, size, batch, training):
    torch.manual_seed(0)
    model = model.double()
    with torch.no_grad():
        set_weights(model)
    model.train(training)
    images = values(batch * 3 * size * size, 1000).reshape(batch, 3, size, size) * 4
    images.requires_grad_(True)
    logits = model(images)
    direction = values(logits.numel(), 2000).reshape(logits.shape)
    (logits * direction).sum().backward()
    result = {"tensors": {n: list(t.shape) for n, t in model.state_dict().items()}, "size": size, "batch": batch, "training": training, "logits": logits.flatten().tolist(),
              "images": summary(images.grad)}
    result["gradients"] = {n: summary(p.grad) for n, p in model.named_parameters()}
    if training:
        result["buffers"] = {n: summary(b) for n, b in model.named_buffers() if b.is_floating_point()}
    print(name, len(result["gradients"]))
    return name, result


def rounded(x):
    if isinstance(x, float):
        return float(f"{x:.7g}")
    if isinstance(x, list):
        return [rounded(v) for v in x]
    if isinstance(x, dict):
        return {k: rounded(v) for k, v in x.items()}
    return x


cases = dict([
    case("resnet18", torchvision.models.resnet18(num_classes=7), 64, 3, True),
    case("resnet34", torchvision.models.resnet34(num_classes=7), 33, 2, False),
    case("resnet50", torchvision.models.resnet50(num_classes=7), 64, 3, True),
    case("resnet50_timm", timm.create_model("resnet50", num_classes=7), 40, 2, False),
    case("vit", torchvision.models.VisionTransformer(image_size=32, patch_size=8, num_layers=3, num_heads=3,
                                                     hidden_dim=48, mlp_dim=96, num_classes=7), 32, 2, True),
    case("vit_timm", timm.models.vision_transformer.VisionTransformer(
        img_size=24, patch_size=8, embed_dim=48, depth=2, num_heads=4, num_classes=7), 24, 2, True),
])
path = pathlib.Path(__file__).parent / "models.json"
path.write_text(json.dumps(rounded(cases), separators=(",", ":")) + "\n")
