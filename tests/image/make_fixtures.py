"""Writes tests/image/fixtures: small PNG and JPEG files, and what PIL and torchvision make of them.

    python3 tests/image/make_fixtures.py
"""

import pathlib
import warnings

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F

warnings.simplefilter("ignore")
FOLDER = pathlib.Path(__file__).parent / "fixtures"
HEIGHT, WIDTH = 36, 52


def picture():
    """Waves, an edge and a little noise: smooth parts and sharp ones."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH].astype(np.float64)
    noise = np.random.default_rng(1).normal(0, 6, (HEIGHT, WIDTH, 3))
    waves = np.stack([np.sin(x / 7) + np.cos(y / 9), np.sin((x + y) / 11), np.cos(x / 5 - y / 6)], -1)
    edge = np.where((x - 30) ** 2 + (y - 17) ** 2 < 90, 60, 0)[..., None]
    return Image.fromarray(np.clip(120 + 50 * waves + edge + noise, 0, 255).astype(np.uint8))


def tensor_of(image):
    return F.pil_to_tensor(image).contiguous()


def files(rgb):
    """Each file's name, the image it has, and options of PIL's save()."""
    alpha = Image.fromarray((np.arange(WIDTH * HEIGHT) % 256).astype(np.uint8).reshape(HEIGHT, WIDTH))
    rgba, gray_alpha = rgb.convert("RGBA"), rgb.convert("LA")
    rgba.putalpha(alpha)
    gray_alpha.putalpha(alpha)
    gray = rgb.convert("L")
    return {
        "rgb.png": (rgb, {}),
        "gray.png": (gray, {}),
        "bits.png": (gray.convert("1"), {}),
        "palette.png": (rgb.quantize(13), {}),
        "rgba.png": (rgba, {}),
        "gray_alpha.png": (gray_alpha, {}),
        "full.jpg": (rgb, {"quality": 90, "subsampling": 0}),
        "half.jpg": (rgb, {"quality": 85, "subsampling": 2}),
        "progressive.jpg": (rgb, {"quality": 85, "subsampling": 2, "progressive": True}),
        "gray.jpg": (gray, {"quality": 85}),
        "cmyk.jpg": (rgb.convert("CMYK"), {"quality": 90}),
    }


def main():
    FOLDER.mkdir(exist_ok=True)
    tensors = {}
    for name, (image, options) in files(picture()).items():
        image.save(FOLDER / name, **options)
        read = Image.open(FOLDER / name)
        tensors[f"{name}.rgb"] = tensor_of(read.convert("RGB"))
        if not name.startswith("cmyk"):
            tensors[f"{name}.gray"] = tensor_of(read.convert("L"))

    image = Image.open(FOLDER / "rgb.png")
    pixels = tensor_of(image)
    real = pixels[:, 10:26, 20:40].to(torch.float32) / 255
    tensors["resize.17x30"] = tensor_of(F.resize(image, [17, 30]))
    tensors["resize.51x60"] = tensor_of(F.resize(image, [51, 60]))
    tensors["resize.4x5"] = tensor_of(F.resize(image, [4, 5]))
    tensors["shorter.15"] = tensor_of(F.resize(image, 15))
    tensors["crop.resize"] = tensor_of(F.resized_crop(image, 7, 11, 21, 30, [16, 20]))
    tensors["center.21x30"] = tensor_of(F.center_crop(image, [21, 30]))
    bilinear = InterpolationMode.BILINEAR
    tensors["rotate.30"] = F.rotate(real, 30, interpolation=bilinear)
    tensors["rotate.-90"] = F.rotate(real[:, :, :16], -90, interpolation=bilinear)
    tensors["brightness.1.3"] = F.adjust_brightness(real, 1.3)
    tensors["contrast.0.6"] = F.adjust_contrast(real, 0.6)
    tensors["saturation.1.7"] = F.adjust_saturation(real, 1.7)
    tensors["saturation.0.0"] = F.adjust_saturation(real, 0.0)
    tensors["hue.0.2"] = F.adjust_hue(real, 0.2)
    tensors["hue.-0.4"] = F.adjust_hue(real, -0.4)
    tensors["normalize"] = F.normalize(real, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    halves = {name: t.to(torch.float16).contiguous() for name, t in tensors.items() if t.dtype == torch.float32}
    save_file({**tensors, **halves}, FOLDER / "expected.safetensors")


if __name__ == "__main__":
    main()
