"""LayerNorm on the CPU, mica beside PyTorch: float32, the same shapes and threads.

    python3 benchmarks/layer_norm_cpu_peers.py --program build/bin/bench_layer_norm

The programs take turns, --rounds times each, so that what else the machine does meets all of them; what counts is the
least of the rounds' medians. Each PyTorch run is a process of its own, once as PyTorch comes, and once with malloc told
to keep freed memory ("torch, memory kept"): else large results are fresh pages in every call, which may cost more than
the op. PyTorch's results are allocated in each call, mica's once. Needs a PyTorch for the CPU.
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

OPS = {"layer_norm_forward": "forward", "layer_norm_backward": "backward"}
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def torch_rows(args):
    """What the child process does: one line of JSON an op and shape."""
    import torch
    torch.set_num_threads(args.threads)

    def median_us(run):
        times = []
        for _ in range(3 + args.repeats):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return statistics.median(times[3:]) * 1e6

    for m, n in (map(int, shape.split("x")) for shape in args.shapes.split(",")):
        x, dy, weight, bias = torch.randn(m, n), torch.randn(m, n), torch.randn(n), torch.randn(n)
        _, mean, rstd = torch.native_layer_norm(x, [n], weight, bias, 1e-5)
        runs = {
            "forward": lambda: torch.nn.functional.layer_norm(x, [n], weight, bias, 1e-5),
            "backward": lambda: torch.ops.aten.native_layer_norm_backward(dy, x, [n], mean, rstd, weight, bias,
                                                                          [True, True, True]),
        }
        with torch.no_grad():
            for op, run in runs.items():
                print(json.dumps({"op": op, "M": m, "N": n, "us": median_us(run), "torch": torch.__version__}))


def run_torch(args, environment):
    command = [sys.executable, __file__, "--torch-worker", "--shapes", args.shapes, "--threads", str(args.threads),
               "--repeats", str(args.repeats)]
    output = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, check=True, text=True)
    return [json.loads(line) for line in output.stdout.splitlines()]


def run_mica(args):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "rows.jsonl"
        subprocess.run([args.program, "--device", "cpu", "--dtype", "float32", "--shapes", args.shapes, "--threads",
                        str(args.threads), "--repeats", str(args.repeats), "--json", path], stdout=subprocess.DEVNULL,
                       check=True)
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{**row, "op": OPS[row["op"]]} for row in rows if row["op"] in OPS]


def cpu_model():
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", help="path of bench_layer_norm")
    parser.add_argument("--shapes", default="768x128,4096x1024,2048x4096")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
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

    contestants = {
        "mica": lambda: run_mica(args),
        "torch": lambda: run_torch(args, {}),
        "torch, memory kept": lambda: run_torch(args, KEEP_MEMORY),
    }
    best = {}
    args.out.mkdir(parents=True, exist_ok=True)
    with open(args.out / "layer_norm_cpu.jsonl", "w") as log:
        for number in range(args.rounds):
            for name, run in contestants.items():
                for row in run():
                    row = {"by": name, "round": number, "threads": args.threads, "cpu": cpu_model(),
                           "load": round(os.getloadavg()[0], 2), "dtype": "float32", **row, "us": round(row["us"], 2)}
                    print(json.dumps(row), file=log, flush=True)
                    times = best.setdefault((row["M"], row["N"], row["op"]), {})
                    times[name] = min(times.get(name, row["us"]), row["us"])

    print(f"{'':28}" + "".join(f"{name:>20}" for name in contestants) + f"{'of the faster torch':>21}")
    for (m, n, op), times in best.items():
        rival = min(us for name, us in times.items() if name != "mica")
        print(f"{op:10} {m:7} x {n:<7}" + "".join(f"{times[name]:17.1f} us" for name in contestants)
              + f"{times['mica'] / rival:21.2f}")


if __name__ == "__main__":
    main()
