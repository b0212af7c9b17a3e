"""Compares LayerNorm on the CPU in mica and PyTorch: float32, with the same shapes and threads.

    python3 benchmarks/layer_norm_cpu_peers.py --program build/bin/bench_layer_norm

The programs alternate, --rounds times each, so that other load affects all of them; the result is the minimum of the
rounds' medians. Each PyTorch run is a separate process, once with default settings, and once with malloc configured to
keep freed memory ("torch, memory kept"): otherwise large results get new pages in every call, which may take longer
than the op. PyTorch's results are allocated in each call, mica's once. Needs a CPU build of PyTorch.
"""

import json
import os

import peers

OPS = {"layer_norm_forward": "forward", "layer_norm_backward": "backward"}
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def torch_rows(args):
    """In the child process: prints one line of JSON per op and shape."""
    import torch
    torch.set_num_threads(args.threads)

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
                us = peers.median_us(run, args.repeats)
                print(json.dumps({"op": op, "M": m, "N": n, "us": us, "torch": torch.__version__}))


def run_mica(program, options):
    rows = peers.run_mica(program, ["--device", "cpu", "--dtype", "float32", *options])
    return [{**row, "op": OPS[row["op"]]} for row in rows if row["op"] in OPS]


def add_options(parser):
    parser.add_argument("--shapes", default="768x128,4096x1024,2048x4096")
    parser.add_argument("--threads", type=int, default=os.cpu_count())


def main():
    args = peers.parse_arguments(__doc__, "bench_layer_norm", torch_rows, add_options)
    options = ["--shapes", args.shapes, "--threads", str(args.threads), "--repeats", str(args.repeats)]
    contestants = {
        "mica": lambda: run_mica(args.program, options),
        "torch": lambda: peers.run_torch(options),
        "torch, memory kept": lambda: peers.run_torch(options, KEEP_MEMORY),
    }
    best = peers.take_turns(contestants, args.rounds, args.out / "layer_norm_cpu.jsonl",
                            {"threads": args.threads, "dtype": "float32"}, lambda row: (row["M"], row["N"], row["op"]))

    print(f"{'':28}" + "".join(f"{name:>20}" for name in contestants) + f"{'of the faster torch':>21}")
    for (m, n, op), times in best.items():
        rival = min(us for name, us in times.items() if name != "mica")
        print(f"{op:10} {m:7} x {n:<7}" + "".join(f"{times[name]:17.1f} us" for name in contestants)
              + f"{times['mica'] / rival:21.2f}")


if __name__ == "__main__":
    main()
