"""Training steps of a ResNet, mica and PyTorch, in the same run.

    python3 benchmarks/resnet_peers.py --program build/cuda/bin/bench_resnet
    python3 benchmarks/resnet_peers.py --program build/bin/bench_resnet --device cpu --depth 18 --batch 16 --dtype float32

On a GPU, PyTorch runs channels_last under autocast, with the fused SGD: eager, compiled, and compiled in a CUDA graph of
the whole step. On the CPU it runs eager, with 2 threads. Times are medians of steps after a warm-up.
"""

import argparse
import contextlib
import statistics
import subprocess
import time

import torch
import torch.nn.functional as F
import torchvision

parser = argparse.ArgumentParser()
parser.add_argument("--program", required=True)
parser.add_argument("--device", default="cuda")
parser.add_argument("--depth", type=int, default=50)
parser.add_argument("--batch", type=int, default=128)
parser.add_argument("--size", type=int, default=224)
parser.add_argument("--dtype", default="bfloat16")
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--forward", action="store_true")
parser.add_argument("--kinds", default="eager,compile,graph")
args = parser.parse_args()
on_gpu = args.device == "cuda"
torch.set_num_threads(args.threads)


def mica():
    command = [args.program, "--device", args.device, "--depth", str(args.depth), "--batch", str(args.batch), "--size",
               str(args.size), "--dtype", args.dtype, "--steps", str(args.steps)]
    command += ["--graph"] if on_gpu else ["--threads", str(args.threads), "--warmup", "2"]
    command += ["--forward"] if args.forward else []
    print("mica:", subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip(), flush=True)


def times(step):
    result = []
    for _ in range(args.steps):
        if on_gpu:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            step()
            end.record()
            end.synchronize()
            result.append(begin.elapsed_time(end))
        else:
            begin = time.perf_counter()
            step()
            result.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(result)


def pytorch(kind):
    torch.manual_seed(1)
    model = getattr(torchvision.models, f"resnet{args.depth}")().to(args.device)
    images = torch.randn(args.batch, 3, args.size, args.size, device=args.device)
    labels = torch.randint(0, 1000, (args.batch,), device=args.device)
    if on_gpu:
        torch.backends.cudnn.benchmark = True
        model = model.to(memory_format=torch.channels_last)
        images = images.contiguous(memory_format=torch.channels_last)
    model.train(not args.forward)
    options = {"fused": True} if on_gpu else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-5, **options)
    forward = model if kind == "eager" else torch.compile(model)
    dtype = {"float32": None, "float16": torch.float16, "bfloat16": torch.bfloat16}[args.dtype]

    def step():
        if args.forward:
            with torch.no_grad(), cast():
                return forward(images)
        with cast():
            loss = F.cross_entropy(forward(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def cast():
        return torch.autocast(args.device, dtype=dtype) if dtype else contextlib.nullcontext()

    if kind == "graph":
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(10):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    else:
        run = step
    for _ in range(10 if on_gpu else 2):
        run()
    ms = times(run)
    print(f"torch {torch.__version__} {kind}: {ms:.3f} ms, {args.batch / ms * 1e3:.0f} images/s", flush=True)


mica()
for kind in args.kinds.split(",") if on_gpu else ["eager"]:
    pytorch(kind)
mica()
