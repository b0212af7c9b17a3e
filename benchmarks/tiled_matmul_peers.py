"""mica's own matrix product compared with cuBLAS, in one process: tiled_matmul (through libmica_bench.so) and
torch.matmul, each alone and with leaky_relu.

    python3 benchmarks/tiled_matmul_peers.py --library build/cuda/lib/libmica_bench.so --out benchmarks/results

Timed and checked as in layer_norm_peers.py; TFLOP/s counts 2·M·N·K. Transposed operands are stored transposed: b^T is
(N, K) in memory, like the weight of a linear layer.
"""

import torch
import torch.nn.functional as F

import gpu_peers
from gpu_peers import CODES, DTYPES, INT, INT64, POINTER, pointers, random, relative_error

# dtype, M, N, K, which operands are stored transposed
SHAPES = [("bfloat16", 4096, 4096, 4096, stored) for stored in ("", "b", "a", "ab")] + [
    ("float16", 4096, 4096, 4096, ""), ("bfloat16", 8192, 8192, 8192, ""), ("bfloat16", 2048, 2048, 2048, ""),
    ("bfloat16", 1024, 1024, 1024, ""), ("bfloat16", 512, 512, 512, ""), ("bfloat16", 32768, 768, 3072, "b"),
    ("bfloat16", 32768, 3072, 768, "b"), ("bfloat16", 32768, 768, 768, "b"), ("bfloat16", 64, 4096, 4096, "b"),
    ("bfloat16", 4095, 4095, 4095, ""), ("bfloat16", 1000, 1001, 1003, ""), ("float32", 2048, 2048, 2048, "")]


FUNCTIONS = {"mica_tiled_matmul": [POINTER] * 3 + [INT64] * 5 + [INT] * 4}


def tiled_matmul(library, a, b, c, activation):
    transposed = [x.stride(0) == 1 for x in (a, b)]
    leading = [x.stride(1 if t else 0) for x, t in zip((a, b), transposed)]
    library.call("mica_tiled_matmul", *pointers(a, b, c), *c.shape, a.shape[1], *leading, *transposed, activation,
                 CODES[c.dtype])
    return c


def matrix(kind, rows, columns, transposed):
    if transposed:
        return matrix(kind, columns, rows, False).t()
    return random(kind, rows, columns)


def measure(dtype, m, n, k, stored, library, peers, clock):
    kind = DTYPES[dtype]
    a, b = matrix(kind, m, k, "a" in stored), matrix(kind, k, n, "b" in stored)
    c = torch.empty(m, n, device="cuda", dtype=kind)
    exact = a.double() @ b.double()
    runs = {
        "mica": (0, lambda: tiled_matmul(library, a, b, c, 0)),
        "torch": (0, lambda: torch.matmul(a, b, out=c)),
        "mica, leaky_relu": (1, lambda: tiled_matmul(library, a, b, c, 1)),
        "torch, leaky_relu": (1, lambda: F.leaky_relu(a @ b, 0.01)),
    }
    for name, (activation, run) in runs.items():
        if not peers and name.startswith("torch"):
            continue
        c.fill_(float("nan"))
        error = relative_error(run(), F.leaky_relu(exact, 0.01) if activation else exact)
        us = clock.median_us(run)
        yield {"dtype": dtype, "m": m, "n": n, "k": k, "stored_transposed": stored, "by": name, "us": round(us, 2),
               "tflops": round(2e-6 * m * n * k / us, 1), "relative_error": error,
               "correct": error < (2e-5 if dtype == "float32" else 2e-2)}


def add_options(parser):
    parser.add_argument("--peers", nargs="*", choices=["torch"], default=["torch"])
    parser.add_argument("--step", type=int, default=1, help="run every STEP-th shape")


def rows(args, library, clock):
    for shape in SHAPES[::args.step]:
        yield from measure(*shape, library, args.peers, clock)


def describe(row):
    return (f"{row['dtype']:9} {row['m']:6} x {row['n']:5} x {row['k']:5} {row['stored_transposed']:3}{row['by']:18}"
            f"{row['us']:9.2f} us {row['tflops']:7.1f} TFLOP/s")


if __name__ == "__main__":
    gpu_peers.main(__doc__, "tiled_matmul", add_options, FUNCTIONS, rows, describe)
