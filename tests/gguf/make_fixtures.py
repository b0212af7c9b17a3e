#!/usr/bin/env python3
"""Writes fixtures/ with llama.cpp's package `gguf`. The tests compare mica's files with these, byte for byte.

    pip install gguf==0.19.0
    python tests/gguf/make_fixtures.py
"""

from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_VERSION, GGMLQuantizationType as Type, GGUFValueType as Value, GGUFWriter
from gguf.quants import dequantize, quantize

HERE = Path(__file__).parent / "fixtures"


def write(name, tensors, metadata=()):
    """Tensors as (array, type) by name."""
    writer = GGUFWriter(HERE / name, "mica")  # adds general.architecture, which is first in alphabetical order
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


if __name__ == "__main__":
    main()
