#!/usr/bin/env python3
"""Compares the time per image of mica's loading and augmenting of JPEG files with torchvision's, for one thread.

    pip install torch torchvision
    cmake -B build -DMICA_BENCHMARKS=ON && cmake --build build --target bench_images
    python benchmarks/image_peers.py [--images 200] [--work /tmp/images]

It makes JPEG files of 500 × 375 and 1600 × 1200 pixels, of about the bytes per pixel of photographs (quality 90, 4:2:0).
Both read them, crop and resize them at random to 224 × 224, flip, and normalize them. torchvision is measured with PIL,
as its ImageFolder reads files, and with tensors and its v2 transforms. The CPU time counts, the least of three passes.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision import io, transforms
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

MEAN, DEVIATION = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def photograph(width, height, generator):
    """Noise of all scales, with less of it in fine ones, as in photographs."""
    picture = np.zeros((height, width, 3))
    for scale in (1, 2, 4, 8, 16, 32, 64, 128):
        noise = generator.normal(0, 1, (height // scale + 2, width // scale + 2, 3))
        large = [Image.fromarray(noise[..., c].astype(np.float32)).resize((width, height), Image.BICUBIC) for c in range(3)]
        picture += np.stack([np.asarray(x) for x in large], -1) * (14 * scale**0.3)
    return Image.fromarray(np.clip(picture + 120, 0, 255).astype(np.uint8))


def make_images(folder, width, height, count):
    generator = np.random.default_rng(1)
    (folder / "photographs").mkdir(parents=True, exist_ok=True)
    for i in range(count):
        path = folder / "photographs" / f"{i:04}.jpg"
        if not path.exists():
            photograph(width, height, generator).save(path, quality=90)


def measure(data):
    least = float("inf")
    for _ in range(3):
        before = time.process_time()
        for i in range(len(data)):
            image, _ = data[i]
            assert image.shape == (3, 224, 224)
        least = min(least, time.process_time() - before)
    return 1e3 * least / len(data)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--work", type=Path, default=Path("/tmp/images"))
    parser.add_argument("--program", default="build/bin/bench_images")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pil = transforms.Compose([transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor(),
                              transforms.Normalize(MEAN, DEVIATION)])
    tensors = v2.Compose([v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip(),
                          v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, DEVIATION)])
    for width, height in ((500, 375), (1600, 1200)):
        folder = arguments.work / f"{width}x{height}"
        make_images(folder, width, height, max(1, arguments.images * 500 // width))
        files = [f.stat().st_size for f in (folder / "photographs").iterdir()]
        print(f"{width} × {height}: {len(files)} files of {sum(files) / len(files) / 1000:.0f} kB")
        command = [arguments.program, "--folder", str(folder)]
        print(" mica:", subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip())
        print(f" torchvision, PIL: {measure(ImageFolder(folder, pil)):.3f} ms of CPU time per image")
        data = ImageFolder(folder, tensors, loader=lambda path: io.decode_image(path, mode="RGB"))
        print(f" torchvision, tensors: {measure(data):.3f} ms of CPU time per image", flush=True)


if __name__ == "__main__":
    sys.exit(main())
