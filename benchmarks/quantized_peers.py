"""Matrix products with quantized weights compared with their peers, in one process: mica's quantized_matmul (through
libmica_bench.so), PyTorch's product with a 16-bit weight, and its kernel for 4-bit weights.

    python3 benchmarks/quantized_peers.py --library build/cuda/lib/libmica_bench.so --out benchmarks/results

Timed as in layer_norm_peers.py, including scratch memory and every launch. Each result is checked against a float64
product with the dequantized weight. GB/s counts one read or write of integers, scales, zeros, x and y. PyTorch's kernel
packs its weight in its own layout, ahead of time.
"""

import sys

import torch

import gpu_peers
from gpu_peers import CODES, DTYPES, INT, INT64, POINTER, pointers, relative_error

ROWS = [1, 4, 16, 64, 256, 1024]
SHAPES = [(8192, 8192), (4096, 11008), (11008, 4096)]  # (K, N)
MODE = 3  # (q - zero) * scale
WHOLE_COLUMN = -1


FUNCTIONS = {"mica_quantized_matmul": [POINTER] * 5 + [INT64] * 3 + [INT, INT64, INT, INT]}


def packed(integers, bits):
    """int32 (K * bits / 32, N): adjacent rows of K share a word, the first in the lowest bits."""
    per_word = 32 // bits
    k, n = integers.shape
    parts = integers.to(torch.int64).view(k // per_word, per_word, n)
    words = sum(parts[:, i] << (bits * i) for i in range(per_word))
    return (words - ((words >> 31) << 32)).to(torch.int32)


class Weight:
    """Random integers of a format, and the dequantized weight."""

    def __init__(self, k, n, bits, group, kind):
        self.k, self.n, self.bits, self.group = k, n, bits, group
        rows = k if group == WHOLE_COLUMN else group
        self.integers = torch.randint(0, 1 << bits, (k, n), dtype=torch.uint8, device="cuda")
        self.packed = packed(self.integers, bits)
        self.scale = (torch.rand(k // rows, n, device="cuda") * 0.01 + 0.01).to(kind)
        self.zero = torch.randint(0, 1 << bits, (k // rows, n), device="cuda").to(kind)
        wide = [t.double().repeat_interleave(rows, 0) for t in (self.zero, self.scale)]
        self.values = (self.integers.double() - wide[0]) * wide[1]
        self.bytes = sum(t.numel() * t.element_size() for t in (self.packed, self.scale, self.zero))


def mica_run(library, weight, x, y):
    arguments = [*pointers(x, weight.packed, weight.scale, weight.zero, y), x.shape[0], weight.n, weight.k, weight.bits,
                 weight.group, MODE, CODES[x.dtype]]

    def run():
        library.call("mica_quantized_matmul", *arguments)
        return y
    return run


def int4_run(weight, x):
    """PyTorch's kernel: (q - 8) * scale + zero in bfloat16, with groups. None if it does not support the format."""
    if weight.bits != 4 or weight.group == WHOLE_COLUMN or x.dtype != torch.bfloat16:
        return None
    try:
        columns = weight.integers.t().contiguous()
        pairs = (columns[:, ::2] << 4 | columns[:, 1::2]).contiguous()
        tiles = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
        zero = ((8 - weight.zero.float()) * weight.scale.float()).to(x.dtype)
        factors = torch.stack([weight.scale, zero], 2).contiguous()  # (groups, N, 2)

        def run():
            return torch.ops.aten._weight_int4pack_mm(x, tiles, weight.group, factors)
        run()
        return run
    except RuntimeError as error:
        print("torch's int4 kernel:", str(error).splitlines()[0], file=sys.stderr)
        return None


def measure(library, weight, m, kind, clock, peers):
    x = torch.randn(m, weight.k, device="cuda").to(kind)
    y = torch.full((m, weight.n), float("nan"), device="cuda", dtype=kind)
    expected = x.double() @ weight.values
    contestants = {"mica": mica_run(library, weight, x, y)}
    if "torch" in peers:
        wide = weight.values.to(kind)
        contestants["torch"] = lambda: torch.matmul(x, wide)
    if "torch int4" in peers:
        contestants["torch int4"] = int4_run(weight, x)
    for name, run in contestants.items():
        if run is None:
            continue
        error = relative_error(run(), expected)
        us = clock.median_us(run)
        moved = weight.bytes + 2 * (x.numel() + y.numel())
        if name == "torch":
            moved = 2 * (weight.k * weight.n + x.numel() + y.numel())
        yield {"op": "quantized_matmul", "dtype": str(kind).removeprefix("torch."), "m": m, "n": weight.n,
               "k": weight.k, "bits": 16 if name == "torch" else weight.bits, "group": weight.group, "by": name,
               "us": round(us, 2), "gb_per_s": round(moved / us / 1e3, 1),
               "tflop_per_s": round(2e-6 * m * weight.k * weight.n / us, 1), "relative_error": error,
               "correct": error < 1e-2}


def add_options(parser):
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS, help="values of M")
    parser.add_argument("--bits", type=int, nargs="*", default=[8, 4, 2, 1])
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="run the first SHAPES shapes")
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="bfloat16")
    parser.add_argument("--peers", nargs="*", choices=["torch", "torch int4"], default=["torch", "torch int4"])
    parser.add_argument("--step", type=int, default=1, help="run every STEP-th format of a shape")


def rows(args, library, clock):
    for k, n in SHAPES[:args.shapes]:
        formats = [(bits, 64) for bits in args.bits] + [(4, 128), (4, WHOLE_COLUMN)]
        if (k, n) != SHAPES[0]:
            formats = [(4, 64)]
        for bits, group in formats[::args.step]:
            torch.cuda.empty_cache()
            weight = Weight(k, n, bits, group, DTYPES[args.dtype])
            for m in args.rows:
                peers = args.peers if (bits, group) == (4, 64) else []
                yield from measure(library, weight, m, DTYPES[args.dtype], clock, peers)


def describe(row):
    return (f"M {row['m']:5}  {row['k']:6} x {row['n']:<6} {row['bits']:2} bits, group {row['group']:3}  {row['by']:11}"
            f"{row['us']:9.2f} us {row['gb_per_s']:6.0f} GB/s {row['tflop_per_s']:6.1f} TFLOP/s"
            f"  error {row['relative_error']:.1e}")


if __name__ == "__main__":
    gpu_peers.main(__doc__, "quantized", add_options, FUNCTIONS, rows, describe)
