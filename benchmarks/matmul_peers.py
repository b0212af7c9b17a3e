"""Linear layers with activations compared with PyTorch's, in one process: mica (through libmica_bench.so), PyTorch's
F.linear followed by the activation, and torch.compile of the two.

    python3 benchmarks/matmul_peers.py --library build/cuda/lib/libmica_bench.so --out benchmarks/results

Timed and checked as in layer_norm_peers.py. TFLOP/s counts 2·M·N·K operations forward and 4·M·N·K backward, which
computes dx, dweight and dbias. `training` is a forward that also saves what backward needs in addition to y: the
arguments of gelu. PyTorch always saves them. tf32 is float32 with TF32 enabled on both sides.
"""

import contextlib

import torch
import torch.nn.functional as F

import gpu_peers
from gpu_peers import CODES, DTYPES, INT, INT64, POINTER, checked_runs, pointers

# (M, K, N)
SHAPES = [(32768, 768, 3072), (32768, 3072, 768), (4096, 4096, 4096), (8192, 4096, 11008), (1, 8192, 8192),
          (512, 1024, 4096)]
# Default shapes for each dtype: few if products take long or take as long as those of another dtype.
KINDS = {"bfloat16": range(6), "float16": [2], "tf32": [0, 2, 5], "float32": [4, 5]}
ACTIVATIONS = {"none": lambda z: z, "relu": F.relu, "leaky_relu": F.leaky_relu, "gelu": F.gelu,
               "gelu_tanh": lambda z: F.gelu(z, approximate="tanh")}
TOLERANCE = {"float32": 5e-6, "tf32": 2e-3, "float16": 2e-3, "bfloat16": 1.5e-2}
# Tolerance of gradients at a kink: rounding may move a sum near 0 to the other side.
KINK_TOLERANCE = {"float32": 5e-3, "tf32": 5e-2, "float16": 5e-3, "bfloat16": 1.5e-2}


FUNCTIONS = {
    "mica_linear_forward": [POINTER] * 5 + [INT64] * 3 + [INT] * 3,
    "mica_linear_backward": [POINTER] * 8 + [INT64] * 3 + [INT] * 3}


class Case:
    """One layer: its inputs, and outputs initialized with NaN."""

    def __init__(self, kind, activation, m, k, n):
        self.kind, self.activation, self.m, self.k, self.n = kind, activation, m, k, n
        dtype = DTYPES.get(kind, torch.float32)

        def random(*shape, scale=1.0):
            return (torch.randn(shape, device="cuda") * scale).to(dtype)
        self.inputs = [random(m, k), random(n, k, scale=k ** -0.5), random(n)]
        self.dy = random(m, n)
        self.y, self.saved, self.dz = (torch.empty_like(self.dy) for _ in range(3))
        self.gradients = [torch.empty_like(t) for t in self.inputs]
        self.sizes = [m, k, n, list(ACTIVATIONS).index(activation), int(kind == "tf32"), CODES[dtype]]
        self.keeps_sums = activation.startswith("gelu")

    def passes(self):
        return ["forward", *(["training"] if self.keeps_sums else []), "backward"]

    def formula(self, x, weight, bias):
        return ACTIVATIONS[self.activation](F.linear(x, weight, bias))

    def tolerance(self, which):
        has_kink = which == "backward" and self.activation in ("relu", "leaky_relu")
        return (KINK_TOLERANCE if has_kink else TOLERANCE)[self.kind]

    def poison(self):
        for t in (self.y, self.saved, self.dz, *self.gradients):
            t.fill_(float("nan"))

    def reference(self, which):
        leaves = [t.double().requires_grad_(which == "backward") for t in self.inputs]
        y = self.formula(*leaves)
        return torch.autograd.grad(y, leaves, self.dy.double()) if which == "backward" else (y,)


def mica_run(case, library, which):
    saved = case.saved if case.keeps_sums and which != "forward" else None
    forward = [*pointers(*case.inputs, case.y, saved), *case.sizes]
    if which != "backward":
        def run():
            library.call("mica_linear_forward", *forward)
            return (case.y,)
        return run
    library.call("mica_linear_forward", *forward)
    x, weight, _ = case.inputs
    kept = case.saved if case.keeps_sums else case.y
    backward = [*pointers(case.dy, x, weight, kept, case.dz, *case.gradients), *case.sizes]

    def run():
        library.call("mica_linear_backward", *backward)
        return case.gradients
    return run


def torch_run(case, which, compiled):
    """PyTorch's forward, or the backward of an earlier forward."""
    torch._dynamo.reset()
    formula = torch.compile(case.formula, dynamic=False) if compiled else case.formula
    if which != "backward":
        return lambda: (formula(*case.inputs),)
    leaves = [t.detach().requires_grad_() for t in case.inputs]
    y = formula(*leaves)
    return lambda: torch.autograd.grad(y, leaves, case.dy, retain_graph=True)


def contestants(case, which, library, peers):
    yield "mica", lambda: mica_run(case, library, which)
    for peer in peers:
        yield peer, lambda: torch_run(case, which, peer == "torch.compile")


@contextlib.contextmanager
def precision(kind):
    torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
    yield
    torch.backends.cuda.matmul.allow_tf32 = False


def measure(case, library, peers, clock):
    for which in case.passes():
        expected = case.reference(which)
        with precision(case.kind):
            runs = checked_runs(contestants(case, which, library, peers), case.poison, expected)
            del expected
            torch.cuda.empty_cache()
            for name, run, error in runs:
                us = clock.median_us(run)
                operations = (4 if which == "backward" else 2) * case.m * case.n * case.k
                yield {"op": f"linear_{which}", "dtype": case.kind, "activation": case.activation, "m": case.m,
                       "k": case.k, "n": case.n, "by": name, "us": round(us, 2),
                       "tflops": round(operations / us / 1e6, 1), "relative_error": error,
                       "correct": error < case.tolerance(which)}


def add_options(parser):
    parser.add_argument("--dtypes", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--activations", nargs="*", choices=list(ACTIVATIONS),
                        default=["none", "relu", "leaky_relu", "gelu_tanh"])
    parser.add_argument("--peers", nargs="*", choices=["torch", "torch.compile"], default=["torch"])
    parser.add_argument("--shapes", nargs="*", type=int, choices=range(len(SHAPES)), help="indices into SHAPES")
    parser.add_argument("--step", type=int, default=1, help="run every STEP-th shape of a dtype")


def rows(args, library, clock):
    for kind in args.dtypes:
        for m, k, n in (SHAPES[i] for i in list(args.shapes or KINDS[kind])[::args.step]):
            for activation in args.activations:
                torch.cuda.empty_cache()
                yield from measure(Case(kind, activation, m, k, n), library, args.peers, clock)


def describe(row):
    return (f"{row['op']:16} {row['dtype']:9} {row['activation']:10} {row['m']:6} x {row['k']:5} x {row['n']:<6}"
            f" {row['by']:14}{row['us']:9.2f} us {row['tflops']:7.1f} TFLOP/s  error {row['relative_error']:.1e}")


if __name__ == "__main__":
    gpu_peers.main(__doc__, "matmul", add_options, FUNCTIONS, rows, describe)
