"""LayerNorm compared with its peers, in one process: mica (through libmica_bench.so), PyTorch, torch.compile and a
Triton kernel, with a device-to-device copy of the same tensor as the limit.

    python3 benchmarks/layer_norm_peers.py --library build/cuda/lib/libmica_bench.so --out benchmarks/results

Every result is checked against float64 before it is timed. A time is the median of --repeats runs after --warmup, each
on new random inputs and after a write of 256 MiB that flushes the L2 cache; it includes both stages of backward and
every allocation of scratch. GB/s counts the minimum memory traffic: 2·M·N·size forward, 3·M·N·size backward. Needs a
CUDA build of PyTorch; Triton and matplotlib are optional.
"""

import json
import statistics
import sys
import time

import torch

import gpu_peers
import peers
from gpu_peers import CODES, DOUBLE, DTYPES, INT, INT64, POINTER, Clock, pointers, relative_error

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

EPS = 1e-5

SWEEP = [("float16", 4096, n) for n in range(1024, 15873, 512)]
SHAPES = {
    "sweep": SWEEP + [("bfloat16", m, n) for _, m, n in SWEEP],
    "large": [("float32", 131072, 512), ("float32", 10000, 10000), ("float32", 4096, 16384),
              ("bfloat16", 65536, 768), ("bfloat16", 16384, 4096), ("bfloat16", 8192, 16384)],
    "parameters": [("float32", 32, 32), ("float32", 256, 128), ("float32", 1024, 1024), ("float32", 3136, 768),
                   ("float32", 6272, 3072), ("float32", 4096, 16384)],
    "wide": [("float32", 1024, 123479), ("float32", 2048, 66679), ("bfloat16", 1024, 262144),
             ("float32", 67, 123479)],
    "narrow": [("float32", 70000, 64), ("float32", 131072, 128)],
    "small": [("float32", 256, 128), ("float32", 512, 1024), ("float32", 32, 32)],
}


# ------------------------------------------------------------------------------------------------- the implementations

class Mica:
    """mica's kernels, called with raw pointers."""

    name = "mica"

    def __init__(self, path):
        self.library = gpu_peers.Library(path, {
            "mica_layer_norm_forward": [POINTER] * 6 + [INT64, INT64, DOUBLE, INT, INT],
            "mica_layer_norm_backward": [POINTER] * 8 + [INT64, INT64, INT, INT]})

    def forward(self, case):
        def run():
            self.library.call("mica_layer_norm_forward", *pointers(case.x, case.weight, case.bias, case.y, case.mean,
                                                                  case.rstd), *case.sizes, EPS, *case.codes)
            return case.y
        return run

    def backward(self, case):
        def run():
            self.library.call("mica_layer_norm_backward", *pointers(case.dy, case.x, case.weight, case.mean, case.rstd,
                                                                   case.dx, case.dweight, case.dbias), *case.sizes,
                      *case.codes)
            return case.dx, case.dweight, case.dbias
        return run

    def backward_parameters(self, case):
        def run():
            self.library.call("mica_layer_norm_backward", *pointers(case.dy, case.x, case.weight, case.mean, case.rstd,
                                                                   None, case.dweight, case.dbias), *case.sizes,
                      *case.codes)
            return case.dweight, case.dbias
        return run


class Torch:
    name = "torch"

    def forward(self, case):
        return lambda: torch.ops.aten.native_layer_norm(case.x, [case.n], case.weight, case.bias, EPS)[0]

    def backward(self, case, mask=(True, True, True)):
        def run():
            result = torch.ops.aten.native_layer_norm_backward(case.dy, case.x, [case.n], case.mean[0, :, None],
                                                               case.rstd[:, None], case.weight, case.bias, list(mask))
            return tuple(r for r, wanted in zip(result, mask) if wanted)
        return run

    def backward_parameters(self, case):
        return self.backward(case, (False, True, True))


class Compiled:
    """torch.compile of the plain formula and of its gradient, compiled for each shape."""

    name = "torch.compile"

    def forward(self, case):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x, w, b: torch.nn.functional.layer_norm(x, (x.shape[-1],), w, b, EPS), dynamic=False)
        return lambda: compiled(case.x, case.weight, case.bias)

    def backward(self, case):
        def gradient(dy, x, weight, mean, rstd):
            x_hat = (x.float() - mean[:, None]) * rstd[:, None]
            dy = dy.float()
            g = dy * weight.float()
            dx = rstd[:, None] * (g - g.mean(1, keepdim=True) - x_hat * (g * x_hat).mean(1, keepdim=True))
            return dx.to(x.dtype), (dy * x_hat).sum(0).to(weight.dtype), dy.sum(0).to(weight.dtype)
        torch._dynamo.reset()
        compiled = torch.compile(gradient, dynamic=False)
        return lambda: compiled(case.dy, case.x, case.weight, case.mean[0], case.rstd)


if triton is not None:

    @triton.jit
    def forward_kernel(x_ptr, w_ptr, b_ptr, y_ptr, n, eps, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, n, BLOCK):
            at = start + tl.arange(0, BLOCK)
            total += tl.load(x_ptr + row * n + at, mask=at < n, other=0.0).to(tl.float32)
        mean = tl.sum(total, 0) / n
        squares = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, n, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * n + at, mask=at < n, other=0.0).to(tl.float32)
            d = tl.where(at < n, x - mean, 0.0)
            squares += d * d
        rstd = 1 / tl.sqrt(tl.sum(squares, 0) / n + eps)
        for start in range(0, n, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < n
            w = tl.load(w_ptr + at, mask=inside).to(tl.float32)
            b = tl.load(b_ptr + at, mask=inside).to(tl.float32)
            x = tl.load(x_ptr + row * n + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(y_ptr + row * n + at, ((x - mean) * rstd * w + b).to(y_ptr.dtype.element_ty), mask=inside)

    @triton.jit
    def backward_dx_kernel(dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr, lock_ptr, n,
                           GROUPS: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, BLOCK)
        inside = at < n
        x = tl.load(x_ptr + row * n + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * n + at, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        x_hat = tl.where(inside, (x - tl.load(mean_ptr + row)) * rstd, 0.0)
        g = w * dy
        dx = (g - (x_hat * (tl.sum(x_hat * g, 0) / n) + tl.sum(g, 0) / n)) * rstd
        tl.store(dx_ptr + row * n + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        # One of GROUPS rows of partial sums, under its lock; the first program to arrive sets it.
        group = (row % GROUPS).to(tl.int32)
        lock = lock_ptr + group
        count = lock_ptr + GROUPS + group
        dw_at = dw_ptr + group * n + at
        db_at = db_ptr + group * n + at
        while tl.atomic_cas(lock, 0, 1) == 1:
            pass
        dw = dy * x_hat
        db = dy
        if tl.load(count) == 0:
            tl.atomic_xchg(count, 1)
        else:
            dw += tl.load(dw_at, mask=inside)
            db += tl.load(db_at, mask=inside)
        tl.store(dw_at, dw, mask=inside)
        tl.store(db_at, db, mask=inside)
        tl.debug_barrier()
        tl.atomic_xchg(lock, 0)

    @triton.jit
    def backward_sum_kernel(dw_ptr, db_ptr, out_dw_ptr, out_db_ptr, groups, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
        columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        dw = tl.zeros((ROWS, COLUMNS), tl.float32)
        db = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, groups, ROWS):
            rows = start + tl.arange(0, ROWS)
            inside = (rows[:, None] < groups) & (columns[None, :] < n)
            at = rows[:, None] * n + columns[None, :]
            dw += tl.load(dw_ptr + at, mask=inside, other=0.0)
            db += tl.load(db_ptr + at, mask=inside, other=0.0)
        tl.store(out_dw_ptr + columns, tl.sum(dw, 0).to(out_dw_ptr.dtype.element_ty), mask=columns < n)
        tl.store(out_db_ptr + columns, tl.sum(db, 0).to(out_db_ptr.dtype.element_ty), mask=columns < n)


class Triton:
    """The algorithm of Triton's LayerNorm tutorial: one program per row, partial sums under locks, a second kernel."""

    name = "triton"

    @staticmethod
    def block(case):
        block = triton.next_power_of_2(case.n)
        if block * case.x.element_size() > 65536:  # the tutorial's own limit
            return None
        return block, min(max(block // 256, 1), 8)

    def forward(self, case):
        if self.block(case) is None:
            return None
        block, warps = self.block(case)

        def run():
            forward_kernel[(case.m,)](case.x, case.weight, case.bias, case.y, case.n, EPS, BLOCK=block, num_warps=warps)
            return case.y
        return run

    def backward(self, case):
        if self.block(case) is None:
            return None
        block, warps = self.block(case)
        groups = 256 if case.n <= 1024 else 128 if case.n <= 4096 else 96 if case.n <= 8192 else 64

        def run():
            partial = torch.empty((2, groups, case.n), dtype=torch.float32, device="cuda")
            locks = torch.zeros(2 * groups, dtype=torch.int32, device="cuda")
            backward_dx_kernel[(case.m,)](case.dy, case.x, case.weight, case.mean, case.rstd, case.dx, partial[0],
                                          partial[1], locks, case.n, GROUPS=groups, BLOCK=block, num_warps=warps)
            backward_sum_kernel[(triton.cdiv(case.n, 128),)](partial[0], partial[1], case.dweight, case.dbias,
                                                             min(groups, case.m), case.n, ROWS=32, COLUMNS=128)
            return case.dx, case.dweight, case.dbias
        return run


# -------------------------------------------------------------------------------------------------------- one test case

class Case:
    """Inputs of one shape, and outputs initialized with NaN."""

    def __init__(self, dtype, m, n):
        self.dtype, self.m, self.n = dtype, m, n
        kind = DTYPES[dtype]
        def random(*shape):
            return torch.randn(shape, device="cuda", dtype=torch.float32).to(kind)
        self.x, self.dy = random(m, n), random(m, n)
        self.weight, self.bias = random(n), random(n)
        self.y, self.dx = torch.empty_like(self.x), torch.empty_like(self.x)
        self.dweight, self.dbias = torch.empty_like(self.weight), torch.empty_like(self.bias)
        self.sizes, self.codes = (m, n), (CODES[kind], CODES[kind])
        x = self.x.double() if m * n < 1 << 28 else self.x.float()
        mean, rstd = x.mean(1), (x.var(1, correction=0) + EPS).rsqrt()
        self.rstd = rstd.float()
        # The mean, and the error that its rounding adds to x_hat.
        self.mean = torch.stack([mean.float(), ((mean.float() - mean) * rstd).float()])

    def poison(self):
        for t in (self.y, self.dx, self.dweight, self.dbias):
            t.fill_(float("nan"))

    def reference(self):
        x, dy, w, b = (t.double() for t in (self.x, self.dy, self.weight, self.bias))
        x_hat = (x - x.mean(1, keepdim=True)) * (x.var(1, correction=0, keepdim=True) + EPS).rsqrt()
        g = dy * w
        rstd = (x.var(1, correction=0, keepdim=True) + EPS).rsqrt()
        dx = rstd * (g - g.mean(1, keepdim=True) - x_hat * (g * x_hat).mean(1, keepdim=True))
        return {"forward": (x_hat * w + b,), "backward": (dx, (dy * x_hat).sum(0), dy.sum(0)),
                "backward_parameters": ((dy * x_hat).sum(0), dy.sum(0))}


# ------------------------------------------------------------------------------------------------------------- the runs

def measure(case, contestants, ops, clock):
    bytes_once = case.x.numel() * case.x.element_size()
    copy_us = clock.median_us(lambda: case.y.copy_(case.x))
    reference = case.reference()
    tolerance = 2e-5 if case.dtype == "float32" else 2e-2
    for op in ops:
        moved = {"forward": 2, "backward": 3, "backward_parameters": 2}[op] * bytes_once
        for contestant in contestants:
            make = getattr(contestant, op, None)
            run = make(case) if make else None
            if run is None:
                continue
            case.poison()
            try:
                result = run()
                torch.cuda.synchronize()
            except RuntimeError as error:
                yield {"op": op, "dtype": case.dtype, "m": case.m, "n": case.n, "by": contestant.name,
                       "error": str(error).splitlines()[0]}
                continue
            result = result if isinstance(result, tuple) else (result,)
            errors = [relative_error(r, e) for r, e in zip(result, reference[op])]
            us = clock.median_us(run)
            yield {"op": op, "dtype": case.dtype, "m": case.m, "n": case.n, "by": contestant.name,
                   "us": round(us, 2), "gb_per_s": round(moved / us / 1e3, 1), "copy_us": round(copy_us, 2),
                   "copy_gb_per_s": round(2 * bytes_once / copy_us / 1e3, 1),
                   "ratio_to_copy": round(moved / us / (2 * bytes_once / copy_us), 3),
                   "relative_error": max(errors), "correct": max(errors) < tolerance}


def measure_calls(bench):
    """Host time in us of one LayerNorm forward and backward through autograd at 32 x 32, without waiting for the GPU."""
    layer = torch.nn.LayerNorm(32, device="cuda")
    x = torch.randn(32, 32, device="cuda", requires_grad=True)
    dy = torch.randn(32, 32, device="cuda")
    times = []
    for _ in range(40):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            layer(x).backward(dy)
        times.append((time.perf_counter() - start) / 50 * 1e6)
    yield {"op": "call", "by": "torch", "us": round(statistics.median(times[10:]), 2)}
    if bench is not None:
        for row in peers.run_mica(bench, ["--device", "cuda", "--shapes", "32x32"]):
            if row["op"] == "layer_norm_call":
                yield {"op": "call", "by": "mica", "us": round(row["us"], 2)}


def draw(rows, out):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    for op in ("forward", "backward"):
        points = [r for r in rows if r["op"] == op and r["dtype"] == "float16" and r["m"] == 4096 and "us" in r]
        if not points:
            continue
        figure, axes = plt.subplots(figsize=(8, 4.5))
        for name in dict.fromkeys(r["by"] for r in points):
            line = sorted((r["n"], r["gb_per_s"]) for r in points if r["by"] == name)
            axes.plot(*zip(*line), label=name, linewidth=2.4 if name == "mica" else 1.2, marker=".")
        ceiling = sorted({(r["n"], r["copy_gb_per_s"]) for r in points})
        axes.plot(*zip(*ceiling), label="copy", color="black", linestyle="--", linewidth=1)
        axes.set(title=f"LayerNorm {op}, float16, M = 4096, {points[0]['device']}", xlabel="N",
                 ylabel="GB/s", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
        figure.tight_layout()
        figure.savefig(out / f"layer_norm_{op}.svg")
        plt.close(figure)


def add_options(parser):
    parser.add_argument("--bench", help="path of bench_layer_norm, to compare the host time of a call")
    parser.add_argument("--groups", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--peers", nargs="*", choices=["torch", "torch.compile", "triton"], default=["torch", "triton"])
    parser.add_argument("--step", type=int, default=1, help="run every STEP-th shape of a group")


def main():
    args = gpu_peers.parse_arguments(__doc__, add_options)
    contestants = [Mica(args.library)] + [peer() for peer in (Torch, Compiled, Triton) if peer.name in args.peers]
    clock = Clock(args.warmup, args.repeats)
    rows = []
    with peers.results_file(args.out / "layer_norm.jsonl") as log:
        for row in measure_calls(args.bench):
            print(json.dumps(row), file=log, flush=True)
            print(f"host time of a call: {row['by']} {row['us']} us", flush=True)
        for group in args.groups:
            for dtype, m, n in SHAPES[group][::args.step]:
                torch.cuda.empty_cache()
                for row in measure(Case(dtype, m, n), contestants, ("forward", "backward", "backward_parameters"), clock):
                    row["device"] = torch.cuda.get_device_name()
                    row["torch"] = torch.__version__
                    rows.append(row)
                    print(json.dumps(row), file=log, flush=True)
                    print(f"{row['op']:20} {row['dtype']:9} {row['m']:7} x {row['n']:<7} {row['by']:14}",
                          row.get("error") or f"{row['us']:9.2f} us {row['gb_per_s']:7.0f} GB/s  "
                          f"{row['ratio_to_copy']:.3f} of copy{'' if row['correct'] else '  WRONG'}", flush=True)
    draw(rows, args.out)
    wrong = [r for r in rows if r["by"] == "mica" and not r.get("correct")]
    if wrong:
        sys.exit("WRONG: " + ", ".join(f"{r['op']} {r['dtype']} {r['m']}x{r['n']}" for r in wrong))


if __name__ == "__main__":
    main()
