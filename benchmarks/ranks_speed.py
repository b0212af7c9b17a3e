#!/usr/bin/env python3
"""Measures training steps of GPT-2 124M on several GPUs and on one GPU of this machine, and inputs of step_model.py.

    python3 benchmarks/ranks_speed.py --bin build/cuda/bin

Starts bench_collectives and bench_train as ranks, one for each GPU, with the variables that torchrun sets. Writes a
line of JSON for each run, the most important first, and prints a table. With --torch, PyTorch's DistributedDataParallel
with torch.compile trains the same model in the same session. --seconds limits the time: runs that have not started by
then are left out.
"""

import argparse
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time

import peers


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Session:
    def __init__(self, arguments, folder, file):
        self.arguments, self.folder, self.file = arguments, pathlib.Path(folder), file
        self.end = time.monotonic() + arguments.seconds
        self.rows, self.number = [], 0

    def left(self):
        return self.end - time.monotonic()

    def add(self, row):
        self.rows.append(row)
        print(json.dumps(row), file=self.file, flush=True)

    def run(self, name, command, environments, limit=40):
        """Runs a process for each environment at the same time. Returns the first one's output; None if one failed."""
        if self.left() < 3:
            print(f"{name}: no time left", flush=True)
            return None
        start = time.monotonic()
        logs = [open(self.folder / f"log{i}", "w+") for i in range(len(environments))]
        processes = [subprocess.Popen([str(word).format(rank=i) for word in command], stdout=log,
                                      stderr=subprocess.STDOUT, env={**os.environ, **environment})
                     for i, (environment, log) in enumerate(zip(environments, logs))]
        deadline = start + min(limit, self.left())
        problem = ""
        for process in processes:
            try:
                if process.wait(max(0.1, deadline - time.monotonic())) != 0:
                    problem = f"status {process.returncode}"
            except subprocess.TimeoutExpired:
                problem = "it takes too long"
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        texts = []
        for log in logs:
            log.seek(0)
            texts.append(log.read())
            log.close()
        self.seconds = time.monotonic() - start
        if problem:
            for i, text in enumerate(texts):
                print(f"{name}: {problem}; process {i} says:\n{text[-1500:]}", flush=True)
            return None
        return texts

    def ranks(self, n):
        port = str(free_port())
        return [{"RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n),
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": str(os.cpu_count() // n)}
                for r in range(n)]

    def train(self, name, ranks, options, environment=None, warmup=10):
        """ranks: a number of ranks, or "each": one independent process on each GPU."""
        n = self.arguments.gpus
        alone = ranks == "each"
        environments = ([{"CUDA_VISIBLE_DEVICES": str(i), "OMP_NUM_THREADS": str(os.cpu_count() // n)}
                         for i in range(n)] if alone else self.ranks(ranks))
        for values in environments:
            values.update(environment or {})
        self.number += 1
        out = str(self.folder / f"row{self.number}_{{rank}}.json")
        command = [self.arguments.bin / "bench_train", "--model", self.arguments.model, "--warmup", warmup, "--steps",
                   self.arguments.steps, "--json", out, *options]
        if self.run(name, command, environments) is None:
            return None
        rows = []
        for i in range(n if alone else 1):
            row = {"run": name, "gpu": i if alone else None, "environment": environment or {},
                   **json.loads(pathlib.Path(out.format(rank=i)).read_text())}
            rows.append(row)
            self.add(row)
        for row in rows:
            mhz = "/".join(f"{x:.0f}" for x in row["mhz_of_ranks"])
            print(f"{name:34} {row['ms']:8.3f} ms (mean {row['mean_ms']:8.3f}) {row['tokens_per_s']:9.0f} tokens/s  "
                  f"states {row['states_of_ranks'][0] / 2**20:7.1f} MiB, tensors {row['tensors_bytes'] / 2**20:7.1f}, "
                  f"peak {row['tensor_peak_of_ranks'][0] / 2**20:8.1f}, pool {row['pool_peak_of_ranks'][0] / 2**20:8.1f}"
                  f"  loss {row['loss']:.4f}  {mhz} MHz  [{self.seconds:.1f} s]", flush=True)
        return rows


def share(rows, run, base, n):
    """The share of n times the speed of one GPU: of the slower GPU, since ranks wait for it, and of the faster one."""
    ones = [row["ms"] for row in rows if row["run"] == base]
    many = [row["ms"] for row in rows if row["run"] == run]
    if ones and many:
        print(f"{run} / ({n} x {base}): {max(ones) / many[0]:.4f} of the slower GPU, {min(ones) / many[0]:.4f} of the "
              "faster", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, default=pathlib.Path("build/cuda/bin"))
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--model", default="gpt2-124m")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--traces", type=pathlib.Path, help="folder for profiler traces of a few steps")
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--only", nargs="*", default=["collectives", "main", "points", "settings"])
    parser.add_argument("--out", type=pathlib.Path,
                        default=pathlib.Path(__file__).parent / "results" / "ranks_speed.jsonl")
    arguments = parser.parse_args()
    n = arguments.gpus
    with tempfile.TemporaryDirectory() as folder, peers.results_file(arguments.out) as file:
        session = Session(arguments, folder, file)

        def trace(name):
            if arguments.traces is None:
                return []
            arguments.traces.mkdir(parents=True, exist_ok=True)
            return ["--trace", arguments.traces / f"trace_{name}.json"]

        def at_batch(batch):
            session.train(f"one {batch} plain", "each", ["--batch", batch, "--phases"])
            session.train(f"one {batch} graph", "each", ["--batch", batch, "--graph"])
            for graph in ([], ["--graph"]):
                for kind, options in (("data", []), ("zero", ["--zero"])):
                    session.train(f"{kind} {batch} 25{' graph' if graph else ''}", n,
                                  ["--batch", batch, *options, *graph])

        if "collectives" in arguments.only:
            out = session.folder / "collectives.jsonl"
            texts = session.run("collectives", [arguments.bin / "bench_collectives", "--json", out], session.ranks(n))
            if texts is not None:
                print(texts[0], f"[{session.seconds:.1f} s]", flush=True)
                for line in out.read_text().splitlines():
                    session.add({"run": "collectives", **json.loads(line)})
        if "main" in arguments.only:
            at_batch(32)
            if arguments.traces is not None:
                session.train("data 32 25 traced", n, ["--batch", 32, *trace("data")])
                session.train("zero 32 25 traced", n, ["--batch", 32, "--zero", *trace("zero")])
        if "points" in arguments.only:
            for batch in (8, 4):
                at_batch(batch)
            for bucket in (5, 100):
                for kind, options in (("data", []), ("zero", ["--zero"])):
                    session.train(f"{kind} 32 {bucket}", n, ["--batch", 32, "--bucket-mib", bucket, *options])
        if "settings" in arguments.only:
            graph = ["--batch", 32, "--graph"]
            for most in (2, 4, 8, 16):
                session.train(f"data 32 25 graph ctas {most}", n, graph, {"NCCL_MAX_CTAS": str(most)})
            session.train("data 32 25 graph registered", n, graph, {"NCCL_GRAPH_REGISTER": "1"})
            session.train("data 32 25 graph registered ctas 4", n, graph,
                          {"NCCL_GRAPH_REGISTER": "1", "NCCL_MAX_CTAS": "4"})
            for bucket in (8, 64, 128):
                session.train(f"data 32 {bucket} graph", n, [*graph, "--bucket-mib", bucket])
            session.train("data 32 25 graph float32", n, [*graph, "--reduce-float32"])
        if arguments.torch:
            script = pathlib.Path(__file__).parent / "train_peers.py"
            out = session.folder / "ddp.json"
            texts = session.run("torch DDP", [sys.executable, script, "--program", "none", "--ddp", out, "--steps",
                                              arguments.steps], session.ranks(n), limit=150)
            if texts is not None:
                for line in out.read_text().splitlines():
                    session.add({"run": "torch", **json.loads(line)})
                print(out.read_text(), flush=True)
        for batch in (32, 8, 4):
            for kind in ("data", "zero"):
                for run in (f"{kind} {batch} 25", f"{kind} {batch} 25 graph"):
                    share(session.rows, run, f"one {batch} graph", n)
    return 0


if __name__ == "__main__":
    sys.exit(main())
