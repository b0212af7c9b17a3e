"""mica's own product of matrices beside cuBLAS, in one process: tiled_matmul (through libmica_bench.so) and torch.matmul,
each alone and with leaky_relu.

    python3 benchmarks/tiled_matmul_peers.py --library build/cuda/lib/libmica_bench.so --out benchmarks/results

Timed and checked as layer_norm_peers.py does it; TFLOP/s counts 2·M·N·K. Transposed operands are stored so: b^T is
(N, K) in memory, as the weight of a linear layer.
"""

import argparse
import ctypes
import json
import pathlib
import sys

import torch
import torch.nn.functional as F

from layer_norm_peers import CODES, DTYPES, Clock, pointers, relative_error

# dtype, M, N, K, which operands are stored transposed
SHAPES = [("bfloat16", 4096, 4096, 4096, stored) for stored in ("", "b", "a", "ab")] + [
    ("float16", 4096, 4096, 4096, ""), ("bfloat16", 8192, 8192, 8192, ""), ("bfloat16", 2048, 2048, 2048, ""),
    ("bfloat16", 1024, 1024, 1024, ""), ("bfloat16", 512, 512, 512, ""), ("bfloat16", 32768, 768, 3072, "b"),
    ("bfloat16", 32768, 3072, 768, "b"), ("bfloat16", 32768, 768, 768, "b"), ("bfloat16", 64, 4096, 4096, "b"),
    ("bfloat16", 4095, 4095, 4095, ""), ("bfloat16", 1000, 1001, 1003, ""), ("float32", 2048, 2048, 2048, "")]


class Library:
    """mica's kernel: raw pointers in, raw pointers out."""

    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        self.lib.mica_bench_error.restype = ctypes.c_char_p
        p, i64, i32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self.lib.mica_tiled_matmul.argtypes = [p] * 3 + [i64] * 5 + [i32] * 4 + [p]

    def tiled_matmul(self, a, b, c, activation):
        arguments = [*c.shape, a.shape[1]]
        transposed = [x.stride(0) == 1 for x in (a, b)]
        leading = [x.stride(1 if t else 0) for x, t in zip((a, b), transposed)]
        if self.lib.mica_tiled_matmul(*pointers(a, b, c), *arguments, *leading, *transposed, activation,
                                      CODES[c.dtype], torch.cuda.current_stream().cuda_stream) != 0:
            raise RuntimeError(self.lib.mica_bench_error().decode())
        return c


def matrix(kind, rows, columns, transposed):
    if transposed:
        return matrix(kind, columns, rows, False).t()
    return torch.randn(rows, columns, device="cuda", dtype=torch.float32).to(kind)


def measure(dtype, m, n, k, stored, library, clock):
    kind = DTYPES[dtype]
    a, b = matrix(kind, m, k, "a" in stored), matrix(kind, k, n, "b" in stored)
    c = torch.empty(m, n, device="cuda", dtype=kind)
    exact = a.double() @ b.double()
    runs = {
        "mica": (0, lambda: library.tiled_matmul(a, b, c, 0)),
        "torch": (0, lambda: torch.matmul(a, b, out=c)),
        "mica, leaky_relu": (1, lambda: library.tiled_matmul(a, b, c, 1)),
        "torch, leaky_relu": (1, lambda: F.leaky_relu(a @ b, 0.01)),
    }
    for name, (activation, run) in runs.items():
        c.fill_(float("nan"))
        error = relative_error(run(), F.leaky_relu(exact, 0.01) if activation else exact)
        us = clock.median_us(run)
        yield {"dtype": dtype, "m": m, "n": n, "k": k, "stored_transposed": stored, "by": name, "us": round(us, 2),
               "tflops": round(2e-6 * m * n * k / us, 1), "relative_error": error,
               "correct": error < (2e-5 if dtype == "float32" else 2e-2)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True, help="path of libmica_bench.so")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("benchmarks/results"))
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=50)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("tiled_matmul_peers: no CUDA device")

    library = Library(args.library)
    clock = Clock(args.warmup, args.repeats)
    torch.manual_seed(1)
    args.out.mkdir(parents=True, exist_ok=True)
    wrong = 0
    with open(args.out / "tiled_matmul.jsonl", "w") as log:
        for shape in SHAPES:
            for row in measure(*shape, library, clock):
                row["device"] = torch.cuda.get_device_name()
                row["torch"] = torch.__version__
                wrong += row["by"].startswith("mica") and not row["correct"]
                print(json.dumps(row), file=log, flush=True)
                print(f"{row['dtype']:9} {row['m']:6} x {row['n']:5} x {row['k']:5} {row['stored_transposed']:3}"
                      f"{row['by']:18}{row['us']:9.2f} us {row['tflops']:7.1f} TFLOP/s"
                      f"{'' if row['correct'] else '  WRONG'}", flush=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
