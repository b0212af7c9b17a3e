"""What autograd costs the host, mica beside PyTorch: the ops of bench_autograd, on 64 floats.

    python3 benchmarks/autograd_peers.py --program build/bin/bench_autograd

The programs take turns, --rounds times each, so that what else the machine does meets both; what counts is the least of
the rounds' medians. Every run is a process of its own, on one thread. Runs on the CPU and, where there is one, the GPU.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

SIZE = 64
CHAIN = 2000
CALLS = 200


def torch_rows(args):
    """What the child process does: one line of JSON an op, as bench_autograd's."""
    import torch
    torch.set_num_threads(1)

    def host_us(device, calls, work):
        means = []
        for _ in range(3 + args.repeats):
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                work()
            means.append((time.perf_counter() - start) / calls)
        return statistics.median(means[3:]) * 1e6

    for device in devices(args.device, torch.cuda.is_available()):
        x = torch.randn(SIZE, device=device, requires_grad=True)
        b, dy = torch.randn(SIZE, device=device), torch.randn(SIZE, device=device)

        def chain(op):
            y = x
            for _ in range(CHAIN):
                y = op(y, b)
            y.backward(dy)
            x.grad = None

        works = {
            "add": (1, CALLS, lambda: torch.add(b, dy)),
            "add_recorded": (1, CALLS, lambda: torch.add(x, b)),
            "mul_recorded": (1, CALLS, lambda: torch.mul(x, b)),
            "chain_add": (CHAIN, 1, lambda: chain(torch.add)),
            "chain_mul": (CHAIN, 1, lambda: chain(torch.mul)),
        }
        for op, (ops, calls, work) in works.items():
            print(json.dumps({"op": op, "device": device, "M": ops, "N": SIZE,
                              "us": host_us(device, calls, work) / ops, "torch": torch.__version__}), flush=True)


def devices(name, gpu):
    return ["cpu"] + ["cuda"] * gpu if name == "auto" else [name]


def run_torch(args):
    command = [sys.executable, __file__, "--torch-worker", "--device", args.device, "--repeats", str(args.repeats)]
    output = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return [json.loads(line) for line in output.stdout.splitlines()]


def run_mica(args):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "rows.jsonl"
        subprocess.run([args.program, "--device", args.device, "--repeats", str(args.repeats), "--json", path],
                       stdout=subprocess.DEVNULL, check=True)
        return [json.loads(line) for line in path.read_text().splitlines()]


def cpu_model():
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", help="path of bench_autograd")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=50, help="runs that a median is taken of")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent / "results")
    parser.add_argument("--torch-worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.torch_worker:
        torch_rows(args)
        return
    if args.program is None:
        parser.error("--program is required")

    contestants = {"mica": run_mica, "torch": run_torch}
    best = {}
    args.out.mkdir(parents=True, exist_ok=True)
    with open(args.out / "autograd.jsonl", "w") as log:
        for number in range(args.rounds):
            for name, run in contestants.items():
                for row in run(args):
                    row = {"by": name, "round": number, "cpu": cpu_model(), "load": round(os.getloadavg()[0], 2),
                           **row, "us": round(row["us"], 4)}
                    print(json.dumps(row), file=log, flush=True)
                    times = best.setdefault((row["device"], row["op"]), {})
                    times[name] = min(times.get(name, row["us"]), row["us"])

    print(f"{'us an op, ' + str(SIZE) + ' floats':26}" + "".join(f"{name:>10}" for name in contestants))
    for (device, op), times in best.items():
        print(f"{device:6}{op:20}" + "".join(f"{times[name]:10.3f}" for name in contestants))


if __name__ == "__main__":
    main()
