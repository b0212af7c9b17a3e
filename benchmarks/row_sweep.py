"""layer_norm, rms_norm, add_layer_norm and softmax on random shapes: finds the slow ones.

    python3 benchmarks/row_sweep.py --library build/cuda/lib/libmica_bench.so --out benchmarks/results

Draws --count shapes from --seed, log-uniform in the number of rows and in that of columns, with a dtype and, for the
norms, a dtype of the weights. Tensors of 64 MiB and more are compared with a copy of the same tensor: the ratio is the
rate of the kernel, counting each input and output once, over the rate of the copy. Smaller ones are compared with
PyTorch: the ratio is its time over mica's. Prints the ten worst ratios of each op. Times are medians
with the L2 cache flushed before each run.
"""

import collections
import math
import random

import torch
import torch.nn.functional as F

import gpu_peers
from gpu_peers import CODES, DOUBLE, DTYPES, INT, INT64, POINTER, pointers

EPS = 1e-5
LARGE = 64 << 20  # bytes
COLUMNS = (64, 262144)
BYTES = (64 << 10, 512 << 20)  # of a tensor
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
    """The tensors of all ops of a shape. Ops of one shape share them."""

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

    def torch_run(self, name):
        """PyTorch's kernel for the op; None if it takes several."""
        s, n = self, self.sizes[1]
        weight, bias = s.weight.to(s.x.dtype), s.bias.to(s.x.dtype)
        aten = torch.ops.aten
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


def add_options(parser):
    parser.add_argument("--count", type=int, default=200, help="shapes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--worst", type=int, default=10, help="ratios of each op to print at the end")


def rows(args, library, clock):
    worst = collections.defaultdict(list)
    for shape in draw_shapes(args.seed, args.count):
        case = Case(shape)
        size = case.x.numel() * case.x.element_size()
        copy_us = clock.median_us(lambda: case.y.copy_(case.x))
        for name, moved, arguments in case.ops():
            def run():
                library.call(f"mica_{name}", *arguments)
            try:
                run()
            except RuntimeError:  # add_layer_norm has no kernel of its own for some shapes
                continue
            us = clock.median_us(run)
            peer = case.torch_run(name) if size < LARGE else None
            peer_us = clock.median_us(peer) if peer else None
            ratio = moved * copy_us / (2 * us) if size >= LARGE else peer_us / us if peer else None
            row = {"op": name, **shape._asdict(), "by": "mica", "us": round(us, 2), "copy_us": round(copy_us, 2),
                   "torch_us": peer_us and round(peer_us, 2), "large": size >= LARGE,
                   "ratio": ratio and round(ratio, 3), "correct": True}
            if ratio:
                worst[name, row["large"]].append(row)
            yield row
        del case
    print("\nThe worst")
    for (name, large), of_op in sorted(worst.items()):
        print(f"\n{name}, {'rate over that of a copy' if large else 'time of PyTorch over ours'}"
              f" ({len(of_op)} shapes)")
        for row in sorted(of_op, key=lambda r: r["ratio"])[:args.worst]:
            print(describe(row))


def describe(row):
    ratio = f"{row['ratio']:.3f}" if row["ratio"] else "-"
    return (f"{row['op']:24} {row['dtype']:9}{row['weight_dtype']:9} {row['m']:8} x {row['n']:<7}{row['us']:9.2f} us,"
            f" copy {row['copy_us']:8.2f}, {'of copy' if row['large'] else 'PyTorch / mica'} {ratio}")


if __name__ == "__main__":
    gpu_peers.main(__doc__, "row_sweep", add_options, FUNCTIONS, rows, describe)
