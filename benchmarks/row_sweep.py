"""layer_norm, rms_norm, add_layer_norm and softmax on random shapes: finds the slow ones.

    python3 benchmarks/row_sweep.py --library build/cuda/lib/libmica_bench.so --out benchmarks/results

Draws --count shapes from --seed, log-uniform in the number of rows and in that of columns, with a dtype and, for the
norms, a dtype of the weights. Tensors of 64 MiB and more are compared with a copy of the same tensor: the ratio is the
rate of the kernel, counting each input and output once, over the rate of the copy. Smaller ones are compared with the
fastest of --peers: the ratio is its time over mica's. With --known, it uses the shapes of KNOWN instead, all with the
peers' times. --odd-rows skips shapes whose rows are multiples of 16 bytes; --ops selects ops. Prints the ten worst
ratios of each op. Times are medians with the L2 cache flushed before each run; the first rows of each result are
checked against float64.
"""

import collections
import importlib
import math
import random

import torch
import torch.nn.functional as F

import gpu_peers
from gpu_peers import CODES, DOUBLE, DTYPES, INT, INT64, POINTER, pointers

EPS = 1e-5
LARGE = 64 << 20  # bytes
COLUMNS = (64, 262144)
BYTES = (64 << 10, 512 << 20)  # bytes of a tensor
PAIRS = [("float32", "float32"), ("float16", "float16"), ("float16", "float32"), ("bfloat16", "bfloat16"),
         ("bfloat16", "float32")]

FUNCTIONS = {
    "mica_layer_norm_forward": [POINTER] * 6 + [INT64, INT64, DOUBLE, INT, INT],
    "mica_layer_norm_backward": [POINTER] * 8 + [INT64, INT64, INT, INT],
    "mica_rms_norm_forward": [POINTER] * 4 + [INT64, INT64, DOUBLE, INT, INT],
    "mica_rms_norm_backward": [POINTER] * 6 + [INT64, INT64, INT, INT],
    "mica_add_layer_norm_forward": [POINTER] * 8 + [INT64, INT64, DOUBLE, INT, INT],
    "mica_add_layer_norm_backward": [POINTER] * 9 + [INT64, INT64, INT, INT],
    "mica_softmax_forward": [POINTER] * 2 + [INT64, INT64, INT],
    "mica_softmax_backward": [POINTER] * 3 + [INT64, INT64, INT],
}

Shape = collections.namedtuple("Shape", "dtype weight_dtype m n")

# Shapes of models, and some that used to be slow.
KNOWN = [Shape(*s) for s in [
    ("bfloat16", "float32", 65536, 768), ("bfloat16", "float32", 16384, 4096), ("bfloat16", "float32", 8192, 8192),
    ("bfloat16", "float32", 8192, 16384), ("bfloat16", "float32", 32768, 1600), ("bfloat16", "float32", 4096, 1024),
    ("bfloat16", "float32", 131072, 128), ("bfloat16", "float32", 1024, 131072), ("float32", "float32", 4096, 16384),
    ("bfloat16", "bfloat16", 1024, 131072), ("float16", "float16", 4096, 12288), ("bfloat16", "bfloat16", 4096, 1024),
    ("bfloat16", "bfloat16", 65536, 768), ("float32", "float32", 512, 1024), ("bfloat16", "bfloat16", 1024, 12288),
    ("float16", "float16", 4096, 1024), ("float32", "float32", 2048, 66679), ("float32", "float32", 1024, 123479),
    ("float32", "float32", 67, 123479)]]


def draw_shapes(seed, count):
    generator = random.Random(seed)

    def log_uniform(low, high):
        return round(math.exp(generator.uniform(math.log(low), math.log(high))))

    shapes = []
    while len(shapes) < count:
        dtype, weight_dtype = PAIRS[len(shapes) % len(PAIRS)]
        n = log_uniform(*COLUMNS)
        if generator.random() < 0.5:  # most models' row lengths are multiples of 64
            n = max(n // 64, 1) * 64
        row = n * DTYPES[dtype].itemsize
        shapes.append(Shape(dtype, weight_dtype, log_uniform(max(BYTES[0] // row, 1), max(BYTES[1] // row, 2)), n))
    return shapes


class Case:
    """The tensors for a shape, shared by all ops."""

    def __init__(self, shape):
        kind, parameter = DTYPES[shape.dtype], DTYPES[shape.weight_dtype]
        m, n = shape.m, shape.n
        self.sizes, self.codes = [m, n], [CODES[kind], CODES[parameter]]
        self.x, self.residual, self.dy, self.dsum = (gpu_peers.random(kind, m, n) for _ in range(4))
        self.weight, self.bias = gpu_peers.random(parameter, n), gpu_peers.random(parameter, n)
        self.y, self.sum, self.dx = (torch.empty_like(self.x) for _ in range(3))
        self.dweight, self.dbias = torch.empty_like(self.weight), torch.empty_like(self.weight)
        self.mean = torch.empty(2, m, dtype=torch.float32, device="cuda")
        self.rstd = torch.empty(m, dtype=torch.float32, device="cuda")
        self.p = torch.softmax(self.x, 1)

    def ops(self):
        """(name, matrices moved, the C function's arguments) of each op; a forward leaves what its backward reads."""
        m, n = self.sizes
        forward, backward = [m, n, EPS, *self.codes], [m, n, *self.codes]
        s = self
        yield "layer_norm_forward", 2, [*pointers(s.x, s.weight, s.bias, s.y, s.mean, s.rstd), *forward]
        yield "layer_norm_backward", 3, [*pointers(s.dy, s.x, s.weight, s.mean, s.rstd, s.dx, s.dweight, s.dbias),
                                         *backward]
        yield "rms_norm_forward", 2, [*pointers(s.x, s.weight, s.y, s.rstd), *forward]
        yield "rms_norm_backward", 3, [*pointers(s.dy, s.x, s.weight, s.rstd, s.dx, s.dweight), *backward]
        yield "add_layer_norm_forward", 4, [*pointers(s.x, s.residual, s.weight, s.bias, s.sum, s.y, s.mean, s.rstd),
                                            *forward]
        yield "add_layer_norm_backward", 4, [*pointers(s.dsum, s.dy, s.sum, s.weight, s.mean, s.rstd, s.dx, s.dweight,
                                                       s.dbias), *backward]
        yield "softmax_forward", 2, [*pointers(s.x, s.y), m, n, s.codes[0]]
        yield "softmax_backward", 3, [*pointers(s.dy, s.p, s.dx), m, n, s.codes[0]]

    def error(self, name):
        """The relative error of the first rows of the op's result."""
        s, n = self, self.sizes[1]
        x, residual, dy, dsum, p = (t[:16].double() for t in (s.x, s.residual, s.dy, s.dsum, s.p))
        weight, bias = s.weight.double(), s.bias.double()
        if name == "softmax_backward":  # its input is the rounded softmax
            expected = p * (dy - (dy * p).sum(1, keepdim=True))
            return gpu_peers.relative_error(s.dx[:16], expected)
        if name == "add_layer_norm_backward":  # the rounded sum
            x = s.sum[:16].double()
        elif name == "add_layer_norm_forward":
            x = (x + residual).to(s.x.dtype).double()
        x.requires_grad_()
        if name.startswith("softmax"):
            y = torch.softmax(x, 1)
        elif name.startswith("rms_norm"):
            y = F.rms_norm(x, (n,), weight, EPS)
        else:
            y = F.layer_norm(x, (n,), weight, bias, EPS)
        if name.endswith("forward"):
            return gpu_peers.relative_error(s.y[:16], y.detach())
        dx, = torch.autograd.grad(y, x, dy)
        return gpu_peers.relative_error(s.dx[:16], dx + dsum if name.startswith("add") else dx)


# ------------------------------------------------------------------------------------------------- the implementations
# Each maps a case and an op to a function that runs the op; None if the peer has no such kernel.

def torch_run(case, name):
    s, n, aten = case, case.sizes[1], torch.ops.aten
    weight, bias = s.weight.to(s.x.dtype), s.bias.to(s.x.dtype)
    if name == "layer_norm_forward":
        return lambda: aten.native_layer_norm(s.x, [n], weight, bias, EPS)
    if name == "layer_norm_backward":
        _, mean, rstd = aten.native_layer_norm(s.x, [n], weight, bias, EPS)
        return lambda: aten.native_layer_norm_backward(s.dy, s.x, [n], mean, rstd, weight, bias, [True] * 3)
    if name == "rms_norm_forward":
        return lambda: F.rms_norm(s.x, (n,), weight, EPS)
    if name == "softmax_forward":
        return lambda: torch.softmax(s.x, 1)
    if name == "softmax_backward":
        return lambda: aten._softmax_backward_data(s.dy, s.p, 1, s.x.dtype)
    return None


def quack_run(case, name):
    """quack's kernels. Its LayerNorm takes float32 weights only."""
    rmsnorm, softmax = (importlib.import_module(f"quack.{module}") for module in ("rmsnorm", "softmax"))
    s, weight, bias = case, case.weight.float(), case.bias.float()
    if name == "layer_norm_forward":
        return lambda: rmsnorm.layernorm_fwd(s.x, weight, bias, EPS, True, True)
    if name == "layer_norm_backward":
        _, rstd, mean = rmsnorm.layernorm_fwd(s.x, weight, bias, EPS, True, True)
        return lambda: rmsnorm.layernorm_bwd(s.x, weight, s.dy, rstd, mean)
    if name == "rms_norm_forward":
        return lambda: rmsnorm.rmsnorm_fwd(s.x, s.weight, eps=EPS, store_rstd=True)
    if name == "rms_norm_backward":
        return lambda: rmsnorm.rmsnorm_bwd(s.x, s.weight, s.dy, s.rstd)
    if name == "softmax_forward":
        return lambda: softmax.softmax_fwd(s.x)
    if name == "softmax_backward":
        return lambda: softmax.softmax_bwd(s.dy, s.p)
    return None


def liger_run(case, name):
    from liger_kernel.ops import layer_norm, softmax
    s = case
    if name == "layer_norm_forward":
        return lambda: layer_norm.layer_norm_forward(s.x, s.weight, s.bias, EPS)
    if name == "layer_norm_backward":
        _, _, mean, rstd, _, _ = layer_norm.layer_norm_forward(s.x, s.weight, s.bias, EPS)
        return lambda: layer_norm.layer_norm_backward(s.dy, s.x, s.weight, s.bias, mean, rstd)
    if name == "softmax_forward":
        return lambda: softmax._softmax_forward(s.x)
    return None


PEERS = {"torch": torch_run, "quack": quack_run, "liger": liger_run}


def add_options(parser):
    parser.add_argument("--count", type=int, default=200, help="number of shapes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--known", action="store_true", help="use the shapes of KNOWN instead of random ones")
    parser.add_argument("--odd-rows", action="store_true", help="only shapes whose rows are not multiples of 16 bytes")
    parser.add_argument("--ops", nargs="+", default=[""], help="only ops whose names start with one of these")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=["torch"])
    parser.add_argument("--worst", type=int, default=10, help="number of worst ratios per op to print at the end")


def rows(args, library, clock):
    worst = collections.defaultdict(list)
    for shape in KNOWN if args.known else draw_shapes(args.seed, args.count):
        if args.odd_rows and shape.n * DTYPES[shape.dtype].itemsize % 16 == 0:
            continue
        torch.cuda.empty_cache()
        case = Case(shape)
        large = case.x.numel() * case.x.element_size() >= LARGE
        copy_us = clock.median_us(lambda: case.y.copy_(case.x))
        lacking = set()
        for name, moved, arguments in case.ops():
            if not name.startswith(tuple(args.ops)):
                continue
            if name.replace("backward", "forward") in lacking:  # otherwise its forward would have left its inputs
                continue

            def run():
                library.call(f"mica_{name}", *arguments)
            try:
                run()
            except RuntimeError:  # add_layer_norm has no fused kernel for some shapes
                lacking.add(name)
                continue
            error = case.error(name)
            row = {"op": name, **shape._asdict(), "by": "mica", "us": round(clock.median_us(run), 2),
                   "copy_us": round(copy_us, 2), "large": large, "relative_error": error,
                   "correct": error < (2e-5 if shape.dtype == "float32" else 2e-2)}
            peers = {}
            for peer in args.peers if args.known or not large else []:
                try:
                    peer_run = PEERS[peer](case, name)
                    if peer_run:
                        peers[peer] = round(clock.median_us(peer_run), 2)
                except Exception as failure:  # a shape that the peer does not support
                    print(f"{peer}, {name}: {type(failure).__name__}: {str(failure)[:100]!r}")
            row["peers"] = peers
            of_copy = moved * copy_us / (2 * row["us"])
            row["of_copy"] = round(of_copy, 3)
            row["ratio"] = row["of_copy"] if large else round(min(peers.values()) / row["us"], 3) if peers else None
            if row["ratio"]:
                worst[name, large].append(row)
            yield row
    for (name, large), of_op in sorted(worst.items()):
        meaning = "rate over that of a copy" if large else "time of the fastest peer over ours"
        print(f"\n{name}: the worst of {len(of_op)}, {meaning}")
        for row in sorted(of_op, key=lambda r: r["ratio"])[:args.worst]:
            print(describe(row))


def describe(row):
    ratio = f"{row['ratio']:.3f}" if row["ratio"] else "-"
    peers = "".join(f", {name} {us:.2f}" for name, us in row["peers"].items())
    return (f"{row['op']:24} {row['dtype']:9}{row['weight_dtype']:9} {row['m']:8} x {row['n']:<7}{row['us']:9.2f} us,"
            f" copy {row['copy_us']:8.2f}{peers}: {ratio}")


if __name__ == "__main__":
    gpu_peers.main(__doc__, "row_sweep", add_options, FUNCTIONS, rows, describe)
