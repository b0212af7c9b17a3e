"""Shared code of the programs that compare mica's kernels with PyTorch's on a GPU, in one process. mica's kernels are
called through libmica_bench.so, with raw pointers."""

import argparse
import ctypes
import json
import pathlib
import statistics
import sys

import torch

import peers

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

# Types of the C functions' arguments.
POINTER, INT64, INT, DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_double


class Library:
    """`functions` maps names to argument types, without the stream, which is the last argument."""

    def __init__(self, path, functions):
        self.lib = ctypes.CDLL(path)
        self.lib.mica_bench_error.restype = ctypes.c_char_p
        for name, arguments in functions.items():
            getattr(self.lib, name).argtypes = [*arguments, POINTER]

    def call(self, name, *args):
        if getattr(self.lib, name)(*args, torch.cuda.current_stream().cuda_stream) != 0:
            raise RuntimeError(self.lib.mica_bench_error().decode())


def pointers(*tensors):
    return [None if t is None else t.data_ptr() for t in tensors]


def random(kind, *shape):
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(kind)


def relative_error(got, expected):
    return float((got.double() - expected).norm() / expected.norm())


def checked_runs(makers, poison, expected):
    """(name, run, error) for each (name, make); make() returns the function to time. Outputs are poisoned before it
    runs."""
    runs = []
    for name, make in makers:
        poison()
        run = make()
        runs.append((name, run, max(relative_error(r, e) for r, e in zip(run(), expected))))
    return runs


class Clock:
    def __init__(self, warmup, repeats):
        self.warmup, self.repeats = warmup, repeats
        self.flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def median_us(self, run, prepare=lambda: None):
        """The median time of a run with the L2 cache flushed. prepare() runs before each run and is not timed."""
        pairs = []
        for i in range(self.warmup + self.repeats):
            prepare()
            self.flush.fill_(i % 251)
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            stop.record()
            pairs.append((start, stop))
        torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) * 1e3 for a, b in pairs[self.warmup:])


def parse_arguments(doc, add_options):
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--library", required=True, help="path of libmica_bench.so")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("benchmarks/results"))
    add_options(parser)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=50)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device")
    torch.manual_seed(1)
    return args


def main(doc, name, add_options, functions, rows, describe):
    """Writes the rows of rows(args, library, clock) to NAME.jsonl and prints describe(row). Exits with 1 if any
    result of mica is wrong."""
    args = parse_arguments(doc, add_options)
    wrong = 0
    with peers.results_file(args.out / f"{name}.jsonl") as log:
        for row in rows(args, Library(args.library, functions), Clock(args.warmup, args.repeats)):
            row["device"], row["torch"] = torch.cuda.get_device_name(), torch.__version__
            wrong += row["by"].startswith("mica") and not row["correct"]
            print(json.dumps(row), file=log, flush=True)
            print(describe(row) + ("" if row["correct"] else "  WRONG"), flush=True)
    sys.exit(1 if wrong else 0)
