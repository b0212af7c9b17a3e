"""Cross entropy compared with its peers, in one process: mica (through libmica_bench.so), PyTorch and torch.compile,
with a device-to-device copy of the logits as the limit.

    python3 benchmarks/cross_entropy_peers.py --library build/cuda/lib/libmica_bench.so --out benchmarks/results

Times are for forward and backward of a mean together. Checked and timed as in layer_norm_peers.py, except that logits
overwritten by an in-place run are restored before the timer starts. GB/s counts 2·M·V·size: one read of the logits, one
write of their gradient. `linear` is a product with a weight (V, 768) followed by the loss, with the gradients of both
factors; peak_mb is the peak memory of a run, minus the memory in use before it.
"""

import torch
import torch.nn.functional as F

import gpu_peers
from gpu_peers import CODES, DOUBLE, DTYPES, INT, INT64, POINTER, pointers, relative_error

ROWS = [("bfloat16", 8192, 50304, 0.0), ("bfloat16", 8192, 50304, 30.0), ("bfloat16", 4096, 128256, 0.0),
        ("bfloat16", 4096, 128256, 30.0), ("bfloat16", 8192, 50257, 0.0), ("bfloat16", 16384, 32000, 0.0),
        ("bfloat16", 65536, 1000, 0.0), ("float16", 8192, 50304, 0.0), ("float32", 4096, 50304, 0.0)]
LINEAR = [("bfloat16", 32768, 768, 50304), ("bfloat16", 8192, 4096, 32000)]
IGNORED = -100


FUNCTIONS = {
    "mica_cross_entropy_forward": [POINTER] * 6 + [INT64, INT64, DOUBLE, INT],
    "mica_cross_entropy_backward": [POINTER] * 7 + [INT64, INT64, DOUBLE, INT],
    "mica_cross_entropy_in_place_forward": [POINTER] * 3 + [INT64, INT64, DOUBLE, INT],
    "mica_cross_entropy_in_place_backward": [POINTER] * 2 + [INT64, INT64, INT],
    "mica_linear_cross_entropy": [POINTER] * 6 + [INT64] * 4 + [INT]}


class Case:
    """Logits and labels; about one label in sixteen is ignored."""

    def __init__(self, dtype, m, v, softcap):
        self.dtype, self.m, self.v, self.softcap = dtype, m, v, softcap
        kind = DTYPES[dtype]
        self.logits = (3 * torch.randn(m, v, device="cuda")).to(kind)
        self.labels = torch.randint(v, (m,), device="cuda")
        self.labels[torch.rand(m, device="cuda") < 1 / 16] = IGNORED
        self.work = self.logits.clone()  # overwritten by in-place runs
        self.dlogits = torch.empty_like(self.logits)
        self.loss, self.dloss = (torch.ones(1, device="cuda") for _ in range(2))
        self.numbers = [torch.empty(n, device="cuda") for n in (m, m, 1)]
        self.size = [m, v]
        self.code = CODES[kind]

    def formula(self, logits):
        z = self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits
        return F.cross_entropy(z, self.labels, ignore_index=IGNORED)

    def reference(self):
        """Loss and gradient in float64, computed for some rows at a time."""
        valid = self.labels != IGNORED
        loss, gradient = 0.0, torch.empty_like(self.logits, dtype=torch.float32)
        for start in range(0, self.m, 512):
            rows = slice(start, start + 512)
            x = self.logits[rows].double()
            part = torch.tanh(x / self.softcap) if self.softcap else None
            z = self.softcap * part if self.softcap else x
            p = torch.softmax(z, 1)
            label = self.labels[rows].clamp(min=0)[:, None]
            loss += float(((z.logsumexp(1) - z.gather(1, label)[:, 0]) * valid[rows]).sum())
            p.scatter_add_(1, label, torch.full_like(p[:, :1], -1.0))
            slope = 1 - part.square() if self.softcap else 1.0
            gradient[rows] = (p * slope * valid[rows, None] / valid.sum()).float()
        return loss / int(valid.sum()), gradient


def nothing():
    pass


def out_of_place(case, library):
    def run():
        library.call("mica_cross_entropy_forward", *pointers(case.logits, case.labels, case.loss, *case.numbers),
                     *case.size, case.softcap, case.code)
        library.call("mica_cross_entropy_backward",
                     *pointers(case.dloss, case.logits, case.labels, *case.numbers, case.dlogits), *case.size,
                     case.softcap, case.code)
        return case.loss, case.dlogits
    return run, nothing


def in_place(case, library):
    def run():
        library.call("mica_cross_entropy_in_place_forward", *pointers(case.work, case.labels, case.loss), *case.size,
                     case.softcap, case.code)
        library.call("mica_cross_entropy_in_place_backward", *pointers(case.dloss, case.work), *case.size, case.code)
        return case.loss, case.work
    return run, lambda: case.work.copy_(case.logits)


def pytorch(case, compiled):
    torch._dynamo.reset()
    formula = torch.compile(case.formula, dynamic=False) if compiled else case.formula
    leaf = case.logits.detach().requires_grad_()

    def run():
        loss = formula(leaf)
        return loss, *torch.autograd.grad(loss, [leaf])
    return run, nothing


def measure(case, library, peers, clock):
    bytes_once = case.logits.numel() * case.logits.element_size()
    copy_us = clock.median_us(lambda: case.dlogits.copy_(case.logits))
    expected_loss, expected = case.reference()
    tolerance = {"float32": 2e-5, "float16": 2e-2, "bfloat16": 2e-2}[case.dtype]
    makers = {"mica": lambda: out_of_place(case, library), "mica in place": lambda: in_place(case, library)}
    for peer in peers:
        makers[peer] = lambda peer=peer: pytorch(case, peer == "torch.compile")
    for name, make in makers.items():
        case.dlogits.fill_(float("nan"))
        run, prepare = make()
        prepare()
        loss, gradient = run()
        errors = [abs(float(loss) - expected_loss) / expected_loss,
                  float((gradient.float() - expected).norm() / expected.norm())]
        del loss, gradient
        us = clock.median_us(run, prepare)
        yield {"op": "cross_entropy" + ("_capped" if case.softcap else ""), "dtype": case.dtype, "m": case.m,
               "n": case.v, "by": name, "us": round(us, 2), "gb_per_s": round(2 * bytes_once / us / 1e3, 1),
               "copy_us": round(copy_us, 2), "ratio_to_copy": round(copy_us / us, 3), "relative_error": max(errors),
               "correct": max(errors) < tolerance}
        torch.cuda.empty_cache()


def measure_linear(shape, library, peers, clock, chunk_bytes):
    dtype, m, k, v = shape
    kind = DTYPES[dtype]
    x = torch.randn(m, k, device="cuda").to(kind)
    weight = (torch.randn(v, k, device="cuda") / k**0.5).to(kind)
    labels = torch.randint(v, (m,), device="cuda")
    loss, dx, dweight = torch.ones(1, device="cuda"), torch.empty_like(x), torch.empty_like(weight)

    def mica():
        library.call("mica_linear_cross_entropy", *pointers(x, weight, labels, loss, dx, dweight), m, k, v, chunk_bytes,
                     CODES[kind])
        return loss, dx, dweight

    def pair(compiled):
        torch._dynamo.reset()
        formula = lambda a, w: F.cross_entropy(a @ w.T, labels)
        formula = torch.compile(formula, dynamic=False) if compiled else formula
        leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]

        def run():
            result = formula(*leaves)
            return result, *torch.autograd.grad(result, leaves)
        return run

    def peak_of(run, by_mica):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        library.lib.mica_bench_peak_bytes()
        results = run()
        torch.cuda.synchronize()
        peak = library.lib.mica_bench_peak_bytes() if by_mica else torch.cuda.max_memory_allocated() - before
        return [r.clone() for r in results], peak

    expected = None
    for name in [*peers, "mica"]:
        run = mica if name == "mica" else pair(name == "torch.compile")
        run()
        results, peak = peak_of(run, name == "mica")
        expected = expected or results
        error = max(relative_error(r, e.double()) for r, e in zip(results, expected))
        us = clock.median_us(run)
        yield {"op": "linear_cross_entropy", "dtype": dtype, "m": m, "k": k, "n": v, "by": name, "us": round(us, 1),
               "peak_mb": round(peak / 1e6, 1), "relative_error": error, "correct": error < 3e-2}
        del run, results


def add_options(parser):
    parser.add_argument("--ops", nargs="*", choices=["rows", "linear"], default=["rows", "linear"])
    parser.add_argument("--peers", nargs="*", choices=["torch", "torch.compile"], default=["torch", "torch.compile"])
    parser.add_argument("--step", type=int, default=1, help="run every STEP-th shape of an op")
    parser.add_argument("--chunk-bytes", type=int, default=1 << 29, help="maximum bytes of logits per chunk")


def rows(args, library, clock):
    library.lib.mica_bench_peak_bytes.restype = INT64
    for shape in ROWS[::args.step] if "rows" in args.ops else []:
        yield from measure(Case(*shape), library, args.peers, clock)
        torch.cuda.empty_cache()
    for shape in LINEAR[::args.step] if "linear" in args.ops else []:
        yield from measure_linear(shape, library, args.peers, clock, args.chunk_bytes)
        torch.cuda.empty_cache()


def describe(row):
    rate = f"{row['gb_per_s']:7.0f} GB/s" if "gb_per_s" in row else f"{row['peak_mb']:8.0f} MB"
    return (f"{row['op']:21} {row['dtype']:9} {row['m']:6} x {row['n']:<7} {row['by']:14} {row['us']:10.2f} us {rate}")


if __name__ == "__main__":
    gpu_peers.main(__doc__, "cross_entropy", add_options, FUNCTIONS, rows, describe)
