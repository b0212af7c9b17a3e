#!/usr/bin/env python3
"""Recurrent layers, mica and PyTorch: forward and a training step.

    python3 benchmarks/recurrent_peers.py --program build/bin/bench_recurrent --threads 2
    python3 benchmarks/recurrent_peers.py --program build/cuda/bin/bench_recurrent --device cuda --dtype bfloat16 --graph

The programs run in turn, --rounds times, and the least time of each counts. On a GPU, PyTorch uses cuDNN.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time

import torch


def mica_times(args, kind, width):
    with tempfile.NamedTemporaryFile() as file:
        options = [f"--{name}={getattr(args, name)}" for name in ("dtype", "device", "batch", "steps", "threads",
                                                                  "repeats")]
        subprocess.run([args.program, f"--kind={kind}", f"--width={width}", *options,
                        *(["--graph"] if args.graph else []), "--json", file.name], check=True,
                       stdout=subprocess.DEVNULL)
        result = json.loads(open(file.name).read())
        return [result["forward_us"], result["step_us"]]


def torch_times(args, kind, width):
    layer = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn": torch.nn.RNN}[kind](width, width)
    layer.to(args.device, getattr(torch, args.dtype))
    x = torch.randn(args.steps, args.batch, width, device=args.device).to(getattr(torch, args.dtype)).requires_grad_()
    dy = torch.randn_like(x)

    def step():
        layer.zero_grad()
        x.grad = None
        layer(x)[0].backward(dy)

    def median_us(run):
        times = []
        for _ in range(args.repeats + 2):
            if args.device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            if args.device == "cuda":
                torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1e6)
        return statistics.median(times[2:])

    return [median_us(lambda: layer(x)), median_us(step)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--graph", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{args.dtype}, batch {args.batch}, {args.steps} steps, {args.device}, torch {torch.__version__}: ms of mica, "
          "of PyTorch, and PyTorch / mica, forward and in a training step")
    for kind in ("lstm", "gru", "rnn"):
        for width in (256, 512):
            rounds = [(mica_times(args, kind, width), torch_times(args, kind, width)) for _ in range(args.rounds)]
            pairs = [tuple(min(r[side][part] for r in rounds) for side in (0, 1)) for part in (0, 1)]
            print(f"{kind:>5} {width:4}", *(f"{m / 1e3:8.2f} {t / 1e3:8.2f} {t / m:5.2f}" for m, t in pairs), flush=True)


if __name__ == "__main__":
    main()
