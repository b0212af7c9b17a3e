"""Self-attention compared with PyTorch's, in one process: mica's own kernel and mica on cuDNN (through
libmica_bench.so), PyTorch's flash, cuDNN and math backends.

    python3 benchmarks/attention_peers.py --library build/cuda/lib/libmica_bench.so --out benchmarks/results

Queries, keys and values are in one tensor (B, T, 3 * H * D), as computed by one product, and results are (B, T, H,
D). Times are medians with the L2 cache flushed; mica's workspace and PyTorch's results are allocated in each call.
Before timing, every result is compared with PyTorch in float64, by the norm of the difference relative to the norm,
and bit by bit with two more runs. TFLOP/s counts 4 * B * H * T * T * D operations forward and 10 backward, half as
many with a causal mask.
"""

import math

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import gpu_peers
from gpu_peers import CODES, DOUBLE, DTYPES, INT, INT64, POINTER, pointers, relative_error

# (B, H, T, D): GPT-2 124M, 1.5B, wide heads, long sequences, a character model
SHAPES = [(32, 12, 1024, 64), (8, 25, 1024, 64), (16, 16, 1024, 128), (4, 16, 4096, 64), (4, 16, 4096, 128),
          (64, 6, 256, 64)]
MICA = {"mica": 0, "mica on cuDNN": 1}
TORCH = {"torch flash": SDPBackend.FLASH_ATTENTION, "torch cuDNN": SDPBackend.CUDNN_ATTENTION,
         "torch math": SDPBackend.MATH}
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.5e-2}
FUNCTIONS = {"mica_attention_forward": [POINTER] * 3 + [INT64] * 4 + [INT, DOUBLE] + [INT] * 2,
             "mica_attention_backward": [POINTER] * 5 + [INT64] * 4 + [INT, DOUBLE] + [INT] * 2}


class Case:
    def __init__(self, kind, b, h, t, d, causal, dropout):
        self.kind, self.shape, self.causal, self.dropout = kind, (b, h, t, d), causal, dropout
        dtype = DTYPES[kind]
        self.qkv = torch.randn(b, t, 3 * h * d, device="cuda").to(dtype)
        self.dy = torch.randn(b, t, h * d, device="cuda").to(dtype)
        self.y, self.dqkv = torch.empty_like(self.dy), torch.empty_like(self.qkv)
        self.lse = torch.empty(b, h, t, device="cuda")

    def by_head(self, x):
        b, h, t, d = self.shape
        return x.view(b, t, h, d).transpose(1, 2)

    def parts(self, x):
        return [self.by_head(part) for part in x.split(self.dy.shape[2], 2)]

    def poison(self):
        for x in (self.y, self.dqkv, self.lse):
            x.fill_(float("nan"))

    def reference(self):
        """Computes one batch item at a time, since float64 attention weights are large."""
        b, h, t, d = self.shape
        ys, gradients = [], []
        for i in range(b):
            qkv = self.qkv[i:i + 1].double().requires_grad_()
            q, k, v = (x.view(1, t, h, d).transpose(1, 2) for x in qkv.split(h * d, 2))
            scores = q @ k.transpose(-1, -2) / math.sqrt(d)
            if self.causal:
                scores = scores.masked_fill(torch.ones(t, t, device="cuda").triu(1).bool(), -math.inf)
            y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(1, t, h * d)
            gradients.append(torch.autograd.grad(y, qkv, self.dy[i:i + 1].double())[0])
            ys.append(y.detach())
        return torch.cat(ys), torch.cat(gradients)


def mica_runs(case, library, backend):
    sizes = [*case.shape, int(case.causal), case.dropout, backend, CODES[case.qkv.dtype]]

    def forward():
        library.call("mica_attention_forward", *pointers(case.qkv, case.y, case.lse), *sizes)
        return case.y

    def backward():
        library.call("mica_attention_backward", *pointers(case.qkv, case.y, case.lse, case.dy, case.dqkv), *sizes)
        return case.dqkv
    return forward, backward


def torch_runs(case, backend):
    leaves = [x.detach().requires_grad_() for x in case.parts(case.qkv)]

    def forward():
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*leaves, is_causal=case.causal, dropout_p=case.dropout)
    y = forward()

    def backward():
        return torch.autograd.grad(y, leaves, case.by_head(case.dy), retain_graph=True)

    def flat(x):
        return x.transpose(1, 2).flatten(2)
    return (forward, lambda: flat(forward())), (backward, lambda: torch.cat([flat(g) for g in backward()], 2))


def contestants(case, library, names):
    for name in names:
        if name in MICA:
            forward, backward = mica_runs(case, library, MICA[name])
            yield name, (forward, forward), (backward, backward)
        else:
            yield name, *torch_runs(case, TORCH[name])


def rows(args, library, clock):
    for kind in args.dtypes:
        for b, h, t, d in (SHAPES[i] for i in args.shapes or range(len(SHAPES))):
            for causal in (True, False):
                case = Case(kind, b, h, t, d, causal, args.dropout)
                names = [name for name in args.by if name != "torch math" or t <= 1024]
                # With dropout, each implementation drops other weights, so results cannot be compared.
                expected = case.reference() if args.dropout == 0 else (None, None)
                torch.cuda.empty_cache()
                for name, *passes in contestants(case, library, names):
                    case.poison()
                    for which, (run, result), wanted in zip(("forward", "backward"), passes, expected):
                        got = result().clone()
                        error = relative_error(got, wanted) if wanted is not None else None
                        repeats = all(torch.equal(got, result()) for _ in range(2))
                        us = clock.median_us(run)
                        flops = (4 if which == "forward" else 10) * b * h * t * t * d / (2 if causal else 1)
                        yield {"op": f"attention_{which}", "dtype": kind, "b": b, "h": h, "t": t, "d": d,
                               "causal": causal, "dropout": args.dropout, "by": name, "us": round(us, 2),
                               "tflops": round(flops / us / 1e6, 1), "relative_error": error, "repeats": repeats,
                               "correct": (error is None or error < TOLERANCE[kind]) and
                                          (repeats or not name.startswith("mica"))}
                del case, expected
                torch.cuda.empty_cache()


def add_options(parser):
    parser.add_argument("--dtypes", nargs="*", choices=list(TOLERANCE), default=["bfloat16"])
    parser.add_argument("--by", nargs="*", choices=[*MICA, *TORCH], default=[*MICA, *TORCH])
    parser.add_argument("--dropout", type=float, default=0,
                        help="dropout of the attention weights; results are then not compared")
    parser.add_argument("--shapes", nargs="*", type=int, choices=range(len(SHAPES)), help="indices into SHAPES")


def describe(row):
    error = "" if row["relative_error"] is None else f"  error {row['relative_error']:.1e}"
    return (f"{row['op']:18} {row['dtype']:9} {row['b']:3} x {row['h']:2} x {row['t']:5} x {row['d']:4}"
            f" {'causal' if row['causal'] else 'full':7}{row['by']:14}{row['us']:9.2f} us {row['tflops']:7.1f} TFLOP/s"
            f"{error}{'' if row['repeats'] else '  bits vary'}")


if __name__ == "__main__":
    gpu_peers.main(__doc__, "attention", add_options, FUNCTIONS, rows, describe)
