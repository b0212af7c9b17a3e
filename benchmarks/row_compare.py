"""Two builds of libmica_bench.so on the same rows, in one process and in turns: did a change make norms or softmax slower?

    python3 benchmarks/row_compare.py BEFORE/lib/libmica_bench.so AFTER/lib/libmica_bench.so --shapes known
    python3 benchmarks/row_compare.py BEFORE… AFTER… --shapes aligned --seed 7 --count 40

`known` has 16 shapes of models, `aligned` random ones whose rows are multiples of 16 bytes, and `unaligned` ones of odd
length, with PyTorch's times. A line of JSON for each op and shape: medians in µs with the L2 cache flushed before each
run, ratio = time before / time after, and the relative errors against float64 (results are NaN before each check). Then
the geometric mean and the minimum of each op's ratios.
"""

import argparse
import ctypes
import json
import math
import random
import statistics

import torch

import gpu_peers
import row_sweep
from row_sweep import Case, Shape

KNOWN = [(65536, 768), (16384, 4096), (8192, 8192), (8192, 16384), (32768, 1600), (131072, 128), (4096, 1024),
         (1024, 131072)]
TURNS, RUNS = 4, 13


def shapes_of(args):
    if args.shapes == "known":
        return [Shape("bfloat16", weight, m, n) for weight in ("bfloat16", "float32") for m, n in KNOWN]
    generator = random.Random(args.seed)
    shapes = []
    for i in range(args.count):
        dtype, weight_dtype = row_sweep.PAIRS[i % len(row_sweep.PAIRS)]
        size = row_sweep.DTYPES[dtype].itemsize
        unit = 64 if i % 2 else 16 // size
        n = max(round(math.exp(generator.uniform(math.log(64), math.log(32768)))) // unit, 1) * unit
        low, high = math.log(max(1, (64 << 10) // (n * size))), math.log((256 << 20) // (n * size))
        m = max(1, round(math.exp(generator.uniform(low, high))))
        shapes.append(Shape(dtype, weight_dtype, m, n | 1 if args.shapes == "unaligned" else n))
    return shapes


def load(path):
    library = ctypes.CDLL(path, mode=ctypes.RTLD_LOCAL)
    for name, arguments in row_sweep.FUNCTIONS.items():
        getattr(library, name).argtypes = [*arguments, gpu_peers.POINTER]
    return library


def times_of(run, flushed, runs):
    events = []
    for _ in range(runs):
        flushed.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return [1000 * begin.elapsed_time(end) for begin, end in events]


def compare(libraries, shape, flushed, with_torch):
    """A record for each op that both libraries have for the shape."""
    case = Case(shape)
    stream = torch.cuda.current_stream().cuda_stream
    for name, _, arguments in case.ops():
        runs = [lambda library=library: getattr(library, "mica_" + name)(*arguments, stream) for library in libraries]
        errors = []
        for run in runs:
            for result in (case.y, case.dx):
                result.fill_(math.nan)
            errors.append(float(f"{case.error(name):.2g}") if run() == 0 else None)
        if None in errors:
            continue
        times = [[], []]
        for turn in range(TURNS):
            for k in (0, 1) if turn % 2 == 0 else (1, 0):
                times[k] += times_of(runs[k], flushed, RUNS)
        before, after = (statistics.median(of) for of in times)
        record = {"op": name, "x": shape.dtype, "w": shape.weight_dtype, "m": shape.m, "n": shape.n,
                  "before_us": round(before, 2), "after_us": round(after, 2), "ratio": round(before / after, 3),
                  "errors": errors}
        torch_run = row_sweep.torch_run(case, name) if with_torch else None
        if torch_run is not None:
            times_of(torch_run, flushed, 3)
            record["torch_us"] = round(statistics.median(times_of(torch_run, flushed, 20)), 2)
        yield record


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--shapes", choices=["known", "aligned", "unaligned"], default="known")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    args = parser.parse_args()
    libraries = [load(args.before), load(args.after)]
    flushed = torch.empty(96 << 20, dtype=torch.int32, device="cuda")
    ratios = {}
    for shape in shapes_of(args):
        for record in compare(libraries, shape, flushed, args.shapes == "unaligned"):
            ratios.setdefault(record["op"], []).append(record["ratio"])
            print(json.dumps(record), flush=True)
    for name, of in ratios.items():
        mean = math.exp(statistics.fmean(map(math.log, of)))
        print(f"{name}: {mean:.3f}, minimum {min(of):.3f}, {len(of)} shapes")


if __name__ == "__main__":
    main()
