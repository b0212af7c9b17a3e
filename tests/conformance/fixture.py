"""Writes fixture files: tensors, and a JSON text that describes the calls."""

import hashlib
import json
import math
import struct

import torch

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL",
}  # safetensors' names of the dtypes that mica has

MICA_NAMES = {
    torch.float64: "float64", torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16",
    torch.int64: "int64", torch.int32: "int32", torch.uint8: "uint8", torch.bool: "bool",
}


def seed(*what):
    """Seeds PyTorch's generator from the arguments alone."""
    torch.manual_seed(int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:7], "little"))


def plain(value):
    """A keyword argument as JSON; numbers that JSON lacks become text."""
    if isinstance(value, torch.dtype):
        return MICA_NAMES[value]
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def described(error):
    return f"{type(error).__name__}: {str(error).splitlines()[0]}"


class Fixture:
    """The cases of one op, and the skipped samples with their reasons."""

    def __init__(self):
        self.tensors = {}
        self.cases = []
        self.skipped = []

    def add(self, case, **tensors):
        """`case` is a dictionary for the test; tensors=[...] become the file's "<case>.tensors0" and so on."""
        number = len(self.cases)
        for kind, values in tensors.items():
            for i, tensor in enumerate(values):
                if tensor is not None:
                    self.tensors[f"{number}.{kind}{i}"] = tensor.detach().clone(memory_format=torch.contiguous_format)
        self.cases.append(plain(case))

    def skip(self, sample, reason):
        self.skipped.append({"sample": sample, "reason": reason})

    def write(self, path):
        """A safetensors file; the same content gives the same bytes."""
        about = {"torch": torch.__version__.split("+")[0], "cases": self.cases, "skipped": self.skipped}
        header = {"__metadata__": {"conformance": json.dumps(about, separators=(",", ":"), allow_nan=False)}}
        data = bytearray()
        # Longest elements first, so that all are aligned.
        for name, tensor in sorted(self.tensors.items(), key=lambda item: -item[1].element_size()):
            begin = len(data)
            data += bytes(tensor.reshape(-1).view(torch.uint8).tolist())
            header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape),
                            "data_offsets": [begin, len(data)]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        path.write_bytes(struct.pack("<Q", len(text)) + text + data)
