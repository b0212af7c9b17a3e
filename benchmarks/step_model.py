#!/usr/bin/env python3
"""A model of a data parallel training step, checked against measured steps of several GPUs.

    python3 benchmarks/step_model.py benchmarks/results/ranks_speed.jsonl

Its inputs are measured by ranks_speed.py without data parallel training: the step of one GPU, the moment at which
backward has computed each parameter's gradient, the time of each collective by size, and by how much matrix products
and collectives slow each other down. Nothing is fitted to the steps that it predicts.

The model of a step: compute runs on one stream. Buckets are reduced in order on another stream, each as soon as its
last gradient is complete and has been copied. While both streams are busy, compute takes 1 + slowdown times as long,
and collectives take 1 + stretch times as long. The optimizer waits for all reductions. With the sharded optimizer,
gradients are reduce-scattered, the norm costs one small all-reduce, each rank does its share of the optimizer's work,
and the all-gather of the weights is not overlapped.
"""

import argparse
import bisect
import json
import math
import pathlib

COPY_BYTES_PER_MS = 2 * 2 ** 30  # copying a bucket: reads and writes at 4.1 TB/s
COPY_LAUNCH_MS = 0.004
# Assumptions for more GPUs than were measured. A ring has 2 (N - 1) steps for an all-reduce, N - 1 for its halves.
HOP_MS = 0.002  # a step over NVLink
NODE_HOP_MS = 0.010  # a step between machines
NETWORK_GB_PER_S = 8 * 50 * 0.9  # 8 adapters of 400 Gbit/s per machine, at 90 % efficiency


class Collectives:
    """Times in ms for `ranks` GPUs, with `per_machine` in each machine."""

    def __init__(self, rows, ranks, per_machine):
        self.ranks, self.per_machine = ranks, per_machine
        self.measured_ranks = rows[0]["ranks"]
        self.tables, self.lines = {}, {}
        for row in rows:
            if "bytes" in row:
                self.tables.setdefault(row["op"], []).append((row["bytes"], row["us"] / 1e3))
            elif "line" in row:
                self.lines[row["line"]] = row
        for table in self.tables.values():
            table.sort()

    def ms(self, op, size):
        if self.ranks == self.measured_ranks:
            return self.measured_ms(op, size)
        # Uses the measured latency and bus bandwidth, with more steps in the ring.
        line = self.lines[op]
        rounds = 2 if op == "all_reduce" else 1
        machines = self.ranks // self.per_machine
        steps = rounds * (self.ranks - 1)
        node_steps = rounds * machines if machines > 1 else 0
        # The bandwidth of two GPUs for large buckets.
        size0, ms0 = self.tables[op][-3]
        bus = rounds * (self.measured_ranks - 1) / self.measured_ranks * size0 / ms0 / 1e6
        if machines > 1:
            bus = min(bus, NETWORK_GB_PER_S)
        latency = max(line["latency_us"] / 1e3, self.tables[op][0][1])
        return (latency + (steps - rounds * (self.measured_ranks - 1)) * HOP_MS + node_steps * (NODE_HOP_MS - HOP_MS) +
                rounds * (self.ranks - 1) / self.ranks * size / bus / 1e6)

    def measured_ms(self, op, size):
        table = self.tables[op]
        sizes = [s for s, _ in table]
        i = min(max(bisect.bisect_left(sizes, size), 1), len(table) - 1)
        (s0, t0), (s1, t1) = table[i - 1], table[i]
        if size <= s0:
            return t0
        if size >= s1:  # larger than any measured size
            return t1 * size / s1
        at = (math.log(size) - math.log(s0)) / (math.log(s1) - math.log(s0))
        return math.exp(math.log(t0) + at * (math.log(t1) - math.log(t0)))


class Step:
    """One GPU's step: its parameters and when their gradients are complete, in the order of registration."""

    def __init__(self, row, ms):
        """`row` has the phases of a plain step. `ms` is the time of a step, plain or from a CUDA graph."""
        phases = row["phases"]
        scale = ms / phases["step"]  # the marks between the kernels take some time
        self.ms = ms
        self.width = row["width"]
        self.batch = row["batch"]
        self.backward_end = phases["backward"] * scale
        self.optimizer = self.ms - self.backward_end
        self.parameters = [(numel, at * scale) for _, numel, at in sorted(phases["arrivals"])]

    def data_parallel_buckets(self, limit):
        """(bytes, moment) of the buckets of distributed::DataParallel."""
        buckets = []
        for numel, at in reversed(self.parameters):
            if buckets and buckets[-1][0] + 2 * numel <= limit:
                buckets[-1][0] += 2 * numel
                buckets[-1][1] = max(buckets[-1][1], at)
            else:
                buckets.append([2 * numel, at])
        return buckets

    def sharded_buckets(self, limit):
        """(bytes, moment) of the buckets of distributed::ShardedAdamW: matrices before vectors, in the order of
        completion."""
        vectors = 4 * self.width
        ordered = ([p for p in self.parameters if p[0] > vectors] + [p for p in self.parameters if p[0] <= vectors])
        buckets = []
        for numel, at in ordered:
            if buckets and buckets[-1][0] + 2 * numel <= limit:
                buckets[-1][0] += 2 * numel
                buckets[-1][1] = max(buckets[-1][1], at)
            else:
                buckets.append([2 * numel, at])
        return sorted(buckets, key=lambda bucket: bucket[1])


def simulate(step, buckets, op, collectives, slowdown, stretch, wide=1):
    """When compute and reductions of a backward end, and how long the reductions take while compute runs."""
    works = []  # (position in compute at which it starts, its time without overlap)
    copied = latest = 0
    for size, at in buckets:
        latest = max(latest, at)
        copied += COPY_LAUNCH_MS + size * (1 + wide) / 2 / COPY_BYTES_PER_MS
        works.append((latest + copied, collectives.ms(op, size * wide)))
    end = step.backward_end + copied
    time = position = hidden = 0
    running, left, next_work = False, 0, 0
    while position < end or next_work < len(works) or running:
        if not running and next_work < len(works) and works[next_work][0] <= position + 1e-12:
            running, left = True, works[next_work][1]
            next_work += 1
        computing = position < end
        stop = works[next_work][0] if next_work < len(works) and not running else end
        if computing and running:
            span = min((end - position) * (1 + slowdown), left * (1 + stretch))
            position += span / (1 + slowdown)
            left -= span / (1 + stretch)
            hidden += span
        elif computing:
            span = stop - position
            position = stop
        else:
            span, left = left, 0
        time += span
        if running and left <= 1e-12:
            running = False
        if end - position < 1e-12:
            position = end
    return time, hidden


def predict(step, kind, bucket_mib, collectives, slowdown, stretch):
    limit = bucket_mib * 2 ** 20
    if kind == "data":
        ready, hidden = simulate(step, step.data_parallel_buckets(limit), "all_reduce", collectives, slowdown, stretch)
        return ready + step.optimizer, hidden
    buckets = step.sharded_buckets(limit)
    ready, hidden = simulate(step, buckets, "reduce_scatter", collectives, slowdown, stretch)
    gather = sum(collectives.ms("all_gather", size) for size, _ in buckets)
    return ready + collectives.ms("all_reduce", 8) + step.optimizer / collectives.ranks + gather, hidden


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=pathlib.Path)
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.results.read_text().splitlines()]
    measured = [row for row in rows if row["run"] == "collectives"]
    overlaps = {row["overlap_mib"]: row for row in measured if "overlap_mib" in row}

    def factors(mib):
        row = overlaps[min(overlaps, key=lambda known: abs(known - mib))]
        return max(0.0, row["slowdown"]), max(0.0, row["stretch"])

    # The slower GPU, since the other one waits for it.
    slowest = {}
    for row in rows:
        if row["run"].startswith("one "):
            key = row["batch"], row["graph"]
            if key not in slowest or row["ms"] > slowest[key]["ms"]:
                slowest[key] = row
    steps = {(batch, graph): Step(slowest[batch, False], row["ms"])
             for (batch, graph), row in slowest.items() if (batch, False) in slowest}
    for (batch, graph), step in sorted(steps.items()):
        print(f"one GPU, batch {batch:2}{' graph' if graph else '      '}: {step.ms:8.3f} ms, backward ends at "
              f"{step.backward_end:.3f}, optimizer {step.optimizer:.3f}")
    ranks = measured[0]["ranks"]
    collectives = Collectives(measured, ranks, ranks)
    print(f"\n{'run':22} {'measured':>9} {'predicted':>9} {'error':>7}   of {ranks} x one GPU")
    worst = 0
    for row in rows:
        words = row["run"].split()
        if words[0] not in ("data", "zero") or (len(words) != 3 and words[3:] != ["graph"]):
            continue
        step = steps.get((row["batch"], row["graph"]))
        if step is None:
            continue
        ms, _ = predict(step, words[0], row["bucket_mib"], collectives, *factors(row["bucket_mib"]))
        error = ms / row["ms"] - 1
        worst = max(worst, abs(error))
        print(f"{row['run']:22} {row['ms']:9.3f} {ms:9.3f} {100 * error:6.2f}%   {step.ms / row['ms']:.4f} measured, "
              f"{step.ms / ms:.4f} predicted")
    print(f"largest error {100 * worst:.2f} %\n")
    step = steps.get((32, True), steps.get((32, False)))
    if step is not None:
        for n, per_machine in ((ranks, ranks), (8, 8), (64, 8)):
            of_n = Collectives(measured, n, per_machine)
            for kind in ("data", "zero"):
                ms, hidden = predict(step, kind, 25, of_n, *factors(25))
                print(f"{n:2} GPUs, {per_machine} per machine, {kind}: {ms:.3f} ms per step, "
                      f"{n * step.ms / ms:.2f} times one GPU ({step.ms / ms:.4f} each); collectives overlap backward for {hidden:.2f} ms")


if __name__ == "__main__":
    main()
