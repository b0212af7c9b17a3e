"""Shared code of the programs that compare mica's benchmarks with PyTorch's."""

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time


def parse_arguments(doc, program, torch_rows, add_options):
    """Parses the arguments. In the child process started by run_torch, calls torch_rows(arguments) and exits."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--program", help=f"path of {program}")
    add_options(parser)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=50, help="number of runs per median")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent / "results")
    parser.add_argument("--torch-worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.torch_worker:
        torch_rows(args)
        sys.exit()
    if args.program is None:
        parser.error("--program is required")
    return args


def median_us(run, repeats, calls=1, wait=lambda: None):
    """The median over the repeats of the time per call; wait() before each repeat is not timed."""
    means = []
    for _ in range(3 + repeats):
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        means.append((time.perf_counter() - start) / calls)
    return statistics.median(means[3:]) * 1e6


def run_torch(options, environment={}):
    """The lines of JSON printed by this program as --torch-worker, in a separate process."""
    output = subprocess.run([sys.executable, sys.argv[0], "--torch-worker", *options],
                            env={**os.environ, **environment}, stdout=subprocess.PIPE, check=True, text=True)
    return [json.loads(line) for line in output.stdout.splitlines()]


def run_mica(program, options):
    """The lines of JSON written by one of mica's benchmarks."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "rows.jsonl"
        subprocess.run([program, *options, "--json", path], stdout=subprocess.DEVNULL, check=True)
        return [json.loads(line) for line in path.read_text().splitlines()]


def cpu_model():
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)


@contextlib.contextmanager
def results_file(path):
    """An open file that replaces `path` at the end. After an error, or if nothing was written, the old results stay; the
    rows so far are in a file of the same name that ends in .partial."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w") as file:
        yield file
        if file.tell() == 0:
            sys.exit(f"no results: {path} is unchanged")
    partial.replace(path)


def take_turns(contestants, rounds, path, about, case_of):
    """Runs the programs in turn and writes every row, with `about`, to a file. Returns the minimum times by case and
    name."""
    best = {}
    with results_file(path) as log:
        for number in range(rounds):
            for name, run in contestants.items():
                for row in run():
                    row = {"by": name, "round": number, **about, "cpu": cpu_model(),
                           "load": round(os.getloadavg()[0], 2), **row, "us": round(row["us"], 4)}
                    print(json.dumps(row), file=log, flush=True)
                    times = best.setdefault(case_of(row), {})
                    times[name] = min(times.get(name, row["us"]), row["us"])
    return best
