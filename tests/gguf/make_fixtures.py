#!/usr/bin/env python3
"""Writes fixtures/ with llama.cpp's package `gguf`. The tests compare mica's files with these, byte for byte.

    pip install gguf==0.19.0
    python tests/gguf/make_fixtures.py

With a folder, only writes many random blocks there, and has a test read them:

    python tests/gguf/make_fixtures.py /tmp/blocks && MICA_GGUF_BLOCKS=/tmp/blocks build/bin/mica_tests --gtest_filter=Gguf.Blocks*
"""

import sys

from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGML_QUANT_VERSION, GGMLQuantizationType as Type, GGUFValueType as Value, GGUFWriter
from gguf.quants import dequantize, quantize

HERE = Path(__file__).parent / "fixtures"


def write(name, tensors, metadata=(), folder=HERE):
    """Tensors as (array, type) by name."""
    writer = GGUFWriter(Path(folder) / name, "mica")  # adds general.architecture, which is first in alphabetical order
    for key, value, kind, item in metadata:
        writer.add_key_value(key, value, kind, item)
    for tensor_name in sorted(tensors):
        array, kind = tensors[tensor_name]
        writer.add_tensor(tensor_name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def matrices():
    random = np.random.default_rng(1)
    x = random.standard_normal((6, 64)).astype(np.float32)
    x[0, :32] = 0
    x[1] = np.arange(64) - 32  # ties, which round away from zero
    x[2] = np.where(np.arange(64) % 2, 1, -1)  # two elements of the largest magnitude
    x[3] *= 1e-7  # a scale that float16 cannot hold exactly
    x[4] *= 1e4
    x[5] = np.round(x[5] * 8) / 16
    return {"a.weight": x, "b.weight": random.standard_normal((2, 3, 32)).astype(np.float32) ** 3,
            "bias": random.standard_normal(5).astype(np.float32), "odd.weight": random.standard_normal((2, 33)).astype(np.float32)}


# Types that mica reads; Q8_K, which no model file has, is missing in the package.
READ = (Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_NL,
        Type.IQ4_XS, Type.MXFP4)
# Where a block has its float16 numbers.
HALVES = {Type.Q4_0: (0,), Type.Q4_1: (0, 2), Type.Q5_0: (0,), Type.Q5_1: (0, 2), Type.Q8_0: (0,), Type.Q2_K: (80, 82),
          Type.Q3_K: (108,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,), Type.IQ4_NL: (0,), Type.IQ4_XS: (0,),
          Type.MXFP4: ()}


def random_blocks(kind, count, random):
    """Blocks of random bits, as rows of 256 elements, whose float16 numbers are finite and of either sign."""
    elements, size = GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (count * (256 // elements), size), dtype=np.uint8)
    for at in HALVES[kind]:
        half = random.standard_normal(len(blocks)) * 10.0 ** random.integers(-6, 3, len(blocks))
        blocks[:, at:at + 2] = half.astype(np.float16).view(np.uint8).reshape(-1, 2)
    if kind == Type.MXFP4:
        blocks[:, 0] = random.integers(0, 255, len(blocks))  # also the exponents 0 and 1, which are subnormal
        blocks[:2, 0] = (0, 1)
    return blocks.reshape(count, -1)


def write_random(name, count, seed, folder=HERE):
    """Random blocks of all types, and their values in another file."""
    random = np.random.default_rng(seed)
    stored, read = {}, {}
    for kind in READ:
        blocks = random_blocks(kind, count, random)
        stored[kind.name.lower()] = (blocks, kind)
        read[kind.name.lower()] = (dequantize(blocks, kind), Type.F32)
    write(name + ".gguf", stored, folder=folder)
    write(name + "_values.gguf", read, folder=folder)


def write_split():
    """A model in three files, as llama-gguf-split writes it; the first file has no tensors."""
    source = matrices()
    for part, names in enumerate(((), ("a.weight", "bias"), ("b.weight", "odd.weight"))):
        own = [("split.count", 3, Value.UINT16, None), ("split.no", part, Value.UINT16, None),
               ("split.tensors.count", len(source), Value.INT32, None)]
        more = [("general.name", "three files", Value.STRING, None)] if part == 0 else []
        write(f"split-{part + 1:05}-of-00003.gguf", {name: (source[name], Type.F32) for name in names}, more + own)


def main():
    HERE.mkdir(exist_ok=True)
    values = np.linspace(-3, 3, 15, dtype=np.float32).reshape(3, 5)
    write("every_type.gguf", {
        "bf16": (quantize(values, Type.BF16), Type.BF16),
        "f16": (values.astype(np.float16), Type.F16),
        "f32": (values, Type.F32),
        "f64": (values.astype(np.float64), Type.F64),
        "four.axes": (np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4), Type.F32),
        "i32": (np.arange(-3, 4, dtype=np.int32), Type.I32),
        "i64": (np.array([2**62, -1], dtype=np.int64), Type.I64),
    }, [
        ("general.name", "naïve 漢字", Value.STRING, None),
        ("list.bool", [True, False], Value.ARRAY, Value.BOOL),
        ("list.f32", [0.5, -1.5], Value.ARRAY, Value.FLOAT32),
        ("list.i32", [1, -2, 3], Value.ARRAY, Value.INT32),
        ("list.string", ["a", "", "bc"], Value.ARRAY, Value.STRING),
        ("value.bool", True, Value.BOOL, None),
        ("value.f32", 0.25, Value.FLOAT32, None),
        ("value.f64", 0.1, Value.FLOAT64, None),
        ("value.i16", -3, Value.INT16, None),
        ("value.i32", -4, Value.INT32, None),
        ("value.i64", -5, Value.INT64, None),
        ("value.i8", -6, Value.INT8, None),
        ("value.u16", 3, Value.UINT16, None),
        ("value.u32", 4, Value.UINT32, None),
        ("value.u64", 2**63, Value.UINT64, None),
        ("value.u8", 6, Value.UINT8, None),
    ])

    source = matrices()
    write("source.gguf", {name: (array, Type.F32) for name, array in source.items()})
    version = [("general.quantization_version", GGML_QUANT_VERSION, Value.UINT32, None)]
    for kind in (Type.Q8_0, Type.Q4_0):
        stored, read = {}, {}
        for name, array in source.items():
            if array.ndim > 1 and array.shape[-1] % 32 == 0:
                stored[name] = (quantize(array, kind), kind)
                read[name] = (dequantize(stored[name][0], kind), Type.F32)
            else:
                stored[name] = read[name] = (array, Type.F32)
        write(f"{kind.name.lower()}.gguf", stored, version)
        write(f"{kind.name.lower()}_values.gguf", read)
    write_random("blocks", 2, 2)
    write_split()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
        write_random("blocks", 2000, 3, sys.argv[1])
    else:
        main()
