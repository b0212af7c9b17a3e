#!/usr/bin/env python3
"""Compares the loss curves of several ranks with that of one, and two runs of the same ranks with each other.

    python3 benchmarks/ranks_curve.py --program build/bin/train_transformer --ranks 1 2 4

Trains the same small model with the same batches on the CPU (with --gpus on GPUs), in float32 without dropout: as one
process, and twice with each number of ranks, with DataParallel and with the sharded optimizer (--zero). Prints a line
of JSON for each: the largest differences of training loss, validation loss and gradient norm from those of the single
process, and whether the two runs have the same metrics and weights.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

SETTINGS = ("--dtype float32 --dropout 0 --batch 16 --context 64 --layers 2 --heads 4 --width 64 "
            "--eval-every 100 --sample 0 --threads 1 --seed 1").split()
COMPARED = ("train_loss", "val_loss", "grad_norm")


def metrics(folder):
    with open(os.path.join(folder, "metrics.jsonl")) as lines:
        rows = [json.loads(line) for line in lines]
    return [{name: row[name] for name in ("step", "lr", *COMPARED) if name in row} for row in rows]


def weights(folder):
    with open(os.path.join(folder, "model.safetensors"), "rb") as file:
        return file.read()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="build/bin/train_transformer")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--gpus", action="store_true", help="one GPU of this machine per rank")
    arguments = parser.parse_args()
    program = os.path.abspath(arguments.program)
    launcher = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "scripts", "ranks")
    same = True
    with tempfile.TemporaryDirectory() as folder:
        def train(name, before, options):
            out = os.path.join(folder, name)
            device = [] if arguments.gpus else ["--device", "cpu"]
            command = [*before, program, *SETTINGS, *device, "--steps", str(arguments.steps), "--out", out, *options]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            return out

        one = metrics(train("one", [], []))
        for ranks in arguments.ranks:
            for option in ([], ["--zero"]):
                before, more = ([], ["--gpus", str(ranks)]) if arguments.gpus else ([launcher, str(ranks)], [])
                runs = [train(name, before, option + more) for name in ("first", "second")]
                rows = metrics(runs[0])
                result = {"ranks": ranks, "optimizer": "ShardedAdamW" if option else "DataParallel and AdamW",
                          "steps": len(rows), "last_train_loss": rows[-1]["train_loss"]}
                for name in COMPARED:
                    result["largest_difference_" + name] = max(
                        abs(a[name] - b[name]) for a, b in zip(one, rows, strict=True) if name in a)
                result["same_bits_twice"] = rows == metrics(runs[1]) and weights(runs[0]) == weights(runs[1])
                same = same and result["same_bits_twice"]
                print(json.dumps(result), flush=True)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
