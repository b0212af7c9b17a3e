#!/usr/bin/env python3
"""Convolutions of a network, mica and PyTorch, layer by layer: forward, input gradient, weight gradient.

    python3 benchmarks/conv_peers.py --program build/bin/bench_conv --network resnet18 --batch 16 --threads 2

The programs run in turn, --rounds times, and the least time of a layer counts. On a GPU, PyTorch uses channels_last and
cudnn.benchmark; with --tune, mica measures cuDNN's candidates, too.
"""

import argparse
import json
import subprocess
import tempfile
import time

import torch


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", required=True)
    parser.add_argument("--network", default="resnet18")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tune", action="store_true")
    return parser.parse_args()


def mica_rows(args):
    with tempfile.NamedTemporaryFile() as file:
        options = [f"--{name}={getattr(args, name)}" for name in ("network", "dtype", "device", "batch", "threads",
                                                                  "repeats")]
        subprocess.run([args.program, *options, *(["--tune"] if args.tune else []), "--json", file.name], check=True,
                       stdout=subprocess.DEVNULL)
        return [json.loads(line) for line in open(file.name)]


def least_us(run, args):
    times = []
    for i in range(args.repeats + 2):
        if args.device == "cpu":
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e6)
        else:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flushed.zero_()
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
    return min(times[2:])


def torch_times(row, args):
    layout = torch.channels_last if args.device == "cuda" else torch.contiguous_format

    def drawn(*shape):
        x = torch.randn(shape, device=args.device).to(getattr(torch, args.dtype))
        return x.contiguous(memory_format=layout)

    padding = row["filter"] // 2
    x = drawn(args.batch, row["in"], row["size"], row["size"])
    weight = drawn(row["out"], row["in"] // row["groups"], row["filter"], row["filter"])
    forward = lambda: torch.conv2d(x, weight, None, row["stride"], padding, 1, row["groups"])
    dy = torch.randn_like(forward())

    def backward(*mask):
        return lambda: torch.ops.aten.convolution_backward(
            dy, x, weight, None, [row["stride"]] * 2, [padding] * 2, [1, 1], False, [0, 0], row["groups"],
            [*mask, False])

    return [least_us(forward, args), 0 if row["in"] <= 3 else least_us(backward(True, False), args),
            least_us(backward(False, True), args)]


def main():
    global flushed
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.backends.cudnn.benchmark = True
    if args.device == "cuda":
        flushed = torch.empty(1 << 26, device="cuda")
    ours, theirs = None, None
    for _ in range(args.rounds):
        rows = mica_rows(args)
        torch_now = [torch_times(row, args) for row in rows]
        least = lambda a, b: b if a is None else [[min(p) for p in zip(*pair)] for pair in zip(a, b)]
        ours, theirs = least(ours, [row["us"] for row in rows]), least(theirs, torch_now)
    print(f"{args.network}, {args.dtype}, batch {args.batch}, {args.device}, {args.threads} threads, torch "
          f"{torch.__version__}: us of mica, of PyTorch, and PyTorch / mica")
    sums = [[0, 0] for _ in range(3)]
    for row, a, b in zip(rows, ours, theirs):
        print(f"{row['name']:>22} x{row['count']}", *(
            f"{m:9.0f} {t:9.0f} {t / m if m else 0:5.2f}" for m, t in zip(a, b)))
        for total, m, t in zip(sums, a, b):
            total[0] += m * row["count"]
            total[1] += t * row["count"]
    print(f"{'all':>25}", *(f"{m:9.0f} {t:9.0f} {t / m:5.2f}" for m, t in sums))
    steps = [sum(s[i] for s in sums) for i in range(2)]
    print(f"{'a step':>25} {steps[0]:9.0f} {steps[1]:9.0f} {steps[1] / steps[0]:5.2f}")


if __name__ == "__main__":
    main()
