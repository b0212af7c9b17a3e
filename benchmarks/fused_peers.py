"""Gated activations, RMSNorm, softmax and residual + LayerNorm compared with their peers, in one process: mica (through
libmica_bench.so), PyTorch and torch.compile, with a device-to-device copy of a tensor of the result's size as the
limit.

    python3 benchmarks/fused_peers.py --library build/cuda/lib/libmica_bench.so --out benchmarks/results

Timed and checked as in layer_norm_peers.py. GB/s counts the minimum memory traffic: 3·M·N·size forward and 5·M·N·size
backward for a gated activation, 2·M·N·size and 3·M·N·size for RMSNorm and softmax, 4·M·N·size each way for residual +
LayerNorm. PyTorch's backward is autograd's, from the saved tensors of its forward.
"""

import torch
import torch.nn.functional as F

import gpu_peers
from gpu_peers import CODES, DOUBLE, DTYPES, INT, INT64, POINTER, checked_runs, pointers, random

EPS = 1e-6

GATED = [("bfloat16", 16384, 11008), ("bfloat16", 8192, 14336), ("bfloat16", 4096, 4096), ("bfloat16", 4096, 11007),
         ("float16", 16384, 11008), ("float32", 16384, 5504)]
ROWS = [("bfloat16", 65536, 768), ("bfloat16", 16384, 4096), ("bfloat16", 8192, 8192), ("bfloat16", 4096, 12288),
        ("bfloat16", 4096, 16384), ("bfloat16", 524288, 128), ("float16", 4096, 4096), ("float32", 131072, 512),
        ("float32", 16384, 4096), ("float32", 1024, 66679)]

ADDED = [("bfloat16", 65536, 768), ("bfloat16", 16384, 4096), ("bfloat16", 8192, 8192), ("float16", 4096, 1024),
         ("float32", 131072, 512), ("float32", 16384, 4096)]


FUNCTIONS = {
    "mica_swiglu_forward": [POINTER] * 3 + [INT64] * 3 + [INT],
    "mica_swiglu_backward": [POINTER] * 5 + [INT64] * 3 + [INT],
    "mica_geglu_forward": [POINTER] * 3 + [INT64] * 3 + [INT] * 2,
    "mica_geglu_backward": [POINTER] * 5 + [INT64] * 3 + [INT] * 2,
    "mica_rms_norm_forward": [POINTER] * 4 + [INT64] * 2 + [DOUBLE, INT, INT],
    "mica_rms_norm_backward": [POINTER] * 6 + [INT64] * 2 + [INT] * 2,
    "mica_softmax_forward": [POINTER] * 2 + [INT64] * 2 + [INT],
    "mica_softmax_backward": [POINTER] * 3 + [INT64] * 2 + [INT],
    "mica_add_layer_norm_forward": [POINTER] * 8 + [INT64] * 2 + [DOUBLE, INT, INT],
    "mica_add_layer_norm_backward": [POINTER] * 9 + [INT64] * 2 + [INT] * 2}


class Gated:
    """One of swiglu, geglu and geglu with tanh, on two tensors or on the halves of one."""

    moved = {"forward": 3, "backward": 5}

    def __init__(self, op, halves, dtype, m, n):
        self.name = op + ("_halves" if halves else "")
        self.op, self.halves, self.m, self.n = op, halves, m, n
        kind = DTYPES[dtype]
        self.inputs = [random(kind, m, 2 * n)] if halves else [random(kind, m, n), random(kind, m, n)]
        self.gradients = [torch.empty_like(x) for x in self.inputs]
        self.dy = random(kind, m, n)
        self.y = torch.empty_like(self.dy)
        self.outputs = [self.y, *self.gradients]
        mode = {"swiglu": [], "geglu": [0], "geglu_tanh": [1]}[op]
        self.sizes = [m, n, 2 * n if halves else n, *mode, CODES[kind]]
        self.symbol = "mica_" + op.removesuffix("_tanh")

    def halves_of(self, tensors):
        return tensors[0].chunk(2, -1) if self.halves else tensors

    def mica(self, library, which):
        if which == "forward":
            arguments = [*pointers(*self.halves_of(self.inputs), self.y), *self.sizes]
            results = (self.y,)
        else:
            arguments = [*pointers(self.dy, *self.halves_of(self.inputs), *self.halves_of(self.gradients)), *self.sizes]
            results = tuple(self.gradients)

        def run():
            library.call(f"{self.symbol}_{which}", *arguments)
            return results
        return run

    def formula(self, *inputs):
        gate, up = self.halves_of(inputs)
        if self.op == "swiglu":
            return F.silu(gate) * up
        return F.gelu(gate, approximate="tanh" if self.op == "geglu_tanh" else "none") * up


class RMSNorm:
    moved = {"forward": 2, "backward": 3}
    name = "rms_norm"

    def __init__(self, dtype, m, n):
        self.m, self.n = m, n
        kind = DTYPES[dtype]
        self.inputs = [random(kind, m, n), random(kind, n)]
        self.gradients = [torch.empty_like(x) for x in self.inputs]
        self.dy = random(kind, m, n)
        self.y = torch.empty_like(self.dy)
        self.outputs = [self.y, *self.gradients]
        self.rstd = torch.cat([(x.float().square().mean(1) + EPS).rsqrt() for x in self.inputs[0].split(4096)])
        self.codes = [CODES[kind], CODES[kind]]

    def mica(self, library, which):
        x, weight = self.inputs
        if which == "forward":
            arguments = [*pointers(x, weight, self.y, self.rstd), self.m, self.n, EPS, *self.codes]
            results = (self.y,)
        else:
            arguments = [*pointers(self.dy, x, weight, self.rstd, *self.gradients), self.m, self.n, *self.codes]
            results = tuple(self.gradients)

        def run():
            library.call(f"mica_rms_norm_{which}", *arguments)
            return results
        return run

    def formula(self, x, weight):
        return F.rms_norm(x, (self.n,), weight, EPS)


class Softmax:
    moved = {"forward": 2, "backward": 3}
    name = "softmax"

    def __init__(self, dtype, m, n):
        self.m, self.n = m, n
        kind = DTYPES[dtype]
        self.inputs = [random(kind, m, n)]
        self.gradients = [torch.empty_like(self.inputs[0])]
        self.dy = random(kind, m, n)
        self.y = torch.empty_like(self.dy)
        self.kept = torch.softmax(self.inputs[0], 1)
        self.outputs = [self.y, *self.gradients]
        self.code = CODES[kind]

    def mica(self, library, which):
        if which == "forward":
            arguments = [*pointers(*self.inputs, self.y), self.m, self.n, self.code]
            results = (self.y,)
        else:
            arguments = [*pointers(self.dy, self.kept, *self.gradients), self.m, self.n, self.code]
            results = tuple(self.gradients)

        def run():
            library.call(f"mica_softmax_{which}", *arguments)
            return results
        return run

    def formula(self, x):
        return torch.softmax(x, 1)


class AddLayerNorm:
    moved = {"forward": 4, "backward": 4}
    name = "add_layer_norm"

    def __init__(self, dtype, m, n):
        self.m, self.n = m, n
        kind = DTYPES[dtype]
        self.inputs = [random(kind, m, n), random(kind, m, n), random(kind, n), random(kind, n)]
        self.dsum, self.dy = random(kind, m, n), random(kind, m, n)
        self.sum, self.y, self.dx = (torch.empty_like(self.dy) for _ in range(3))
        self.dweight, self.dbias = (torch.empty_like(self.inputs[2]) for _ in range(2))
        self.mean, self.rstd = (torch.empty(n, m, dtype=torch.float32, device="cuda") for n in (2, 1))
        self.outputs = [self.dx, self.dweight, self.dbias]
        self.codes = [CODES[kind], CODES[kind]]

    def mica(self, library, which):
        x, residual, weight, bias = self.inputs
        forward = [*pointers(x, residual, weight, bias, self.sum, self.y, self.mean, self.rstd), self.m, self.n, EPS,
                   *self.codes]
        backward = [*pointers(self.dsum, self.dy, self.sum, weight, self.mean, self.rstd, self.dx, self.dweight,
                              self.dbias), self.m, self.n, *self.codes]
        library.call("mica_add_layer_norm_forward", *forward)  # needed by backward
        if which == "forward":
            for t in (self.sum, self.y):
                t.fill_(float("nan"))
        arguments = forward if which == "forward" else backward
        results = (self.sum, self.y) if which == "forward" else (self.dx, self.dx, self.dweight, self.dbias)

        def run():
            library.call(f"mica_add_layer_norm_{which}", *arguments)
            return results
        return run

    def formula(self, x, residual, weight, bias):
        s = x + residual
        return s, F.layer_norm(s, (self.n,), weight, bias, EPS)


def results_of(case, *inputs):
    results = case.formula(*inputs)
    return results if isinstance(results, tuple) else (results,)


def gradients_of(case):
    return (case.dsum, case.dy) if isinstance(case, AddLayerNorm) else (case.dy,)


def torch_run(case, which, compiled):
    """PyTorch's forward, or the backward of an earlier forward."""
    torch._dynamo.reset()
    def plain(*inputs):
        return results_of(case, *inputs)
    formula = torch.compile(plain, dynamic=False) if compiled else plain
    if which == "forward":
        return lambda: formula(*case.inputs)
    leaves = [x.detach().requires_grad_() for x in case.inputs]
    results = formula(*leaves)
    return lambda: torch.autograd.grad(results, leaves, gradients_of(case), retain_graph=True)


def reference(case, which):
    leaves = [x.double().requires_grad_(which == "backward") for x in case.inputs]
    results = results_of(case, *leaves)
    if which == "forward":
        return results
    return torch.autograd.grad(results, leaves, [t.double() for t in gradients_of(case)])


def contestants(case, which, library, peers):
    yield "mica", lambda: case.mica(library, which)
    for peer in peers:
        yield peer, lambda: torch_run(case, which, peer == "torch.compile")


def poison(tensors):
    for t in tensors:
        t.fill_(float("nan"))


def measure(case, dtype, library, peers, clock):
    bytes_once = case.y.numel() * case.y.element_size()
    copy_us = clock.median_us(lambda: case.y.copy_(case.dy))
    tolerance = 2e-5 if dtype == "float32" else 2e-2
    for which, passes in case.moved.items():
        runs = checked_runs(contestants(case, which, library, peers), lambda: poison(case.outputs),
                            reference(case, which))
        torch.cuda.empty_cache()
        for name, run, error in runs:
            us = clock.median_us(run)
            yield {"op": f"{case.name}_{which}", "dtype": dtype, "m": case.m, "n": case.n, "by": name,
                   "us": round(us, 2), "gb_per_s": round(passes * bytes_once / us / 1e3, 1),
                   "copy_us": round(copy_us, 2), "copy_gb_per_s": round(2 * bytes_once / copy_us / 1e3, 1),
                   "ratio_to_copy": round(passes * copy_us / (2 * us), 3), "relative_error": error,
                   "correct": error < tolerance}


def cases(ops, step):
    for op in ("swiglu", "geglu", "geglu_tanh"):
        for halves in (False, True):
            for shape in GATED[::step] if op in ops else []:
                yield shape[0], lambda: Gated(op, halves, *shape)
    for shape in ROWS[::step] if "rms_norm" in ops else []:
        yield shape[0], lambda: RMSNorm(*shape)
    for shape in ROWS[::step] if "softmax" in ops else []:
        yield shape[0], lambda: Softmax(*shape)
    for shape in ADDED[::step] if "add_layer_norm" in ops else []:
        yield shape[0], lambda: AddLayerNorm(*shape)


def add_options(parser):
    names = ["swiglu", "geglu", "geglu_tanh", "rms_norm", "softmax", "add_layer_norm"]
    parser.add_argument("--ops", nargs="*", choices=names, default=names)
    parser.add_argument("--peers", nargs="*", choices=["torch", "torch.compile"], default=["torch", "torch.compile"])
    parser.add_argument("--step", type=int, default=1, help="run every STEP-th shape of an op")


def rows(args, library, clock):
    for dtype, make in cases(args.ops, args.step):
        torch.cuda.empty_cache()
        yield from measure(make(), dtype, library, args.peers, clock)


def describe(row):
    return (f"{row['op']:26} {row['dtype']:9} {row['m']:7} x {row['n']:<6} {row['by']:14}{row['us']:9.2f} us"
            f" {row['gb_per_s']:7.0f} GB/s  {row['ratio_to_copy']:.3f} of copy")


if __name__ == "__main__":
    gpu_peers.main(__doc__, "fused", add_options, FUNCTIONS, rows, describe)
