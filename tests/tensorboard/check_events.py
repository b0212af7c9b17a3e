#!/usr/bin/env python3
"""Trains with --tensorboard and compares what TensorBoard reads with metrics.jsonl.

    python3 tests/tensorboard/check_events.py build/bin/train_transformer

Needs the packages tensorboard and numpy.
"""

import json
import math
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader, LegacyEventFileLoader

SIZE_GUIDANCE = {"scalars": 0, "tensors": 0, "histograms": 0}

with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder)
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    subprocess.run([sys.argv[1], "--data", folder / "text.txt", "--out", folder / "out", "--tensorboard", folder / "runs",
                    *"--device cpu --dtype float32 --steps 40 --batch 4 --context 16 --layers 1 --heads 2 --width 16 "
                     "--eval-every 10 --sample 0".split()], check=True, capture_output=True)
    metrics = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]

    (path,) = (folder / "runs").iterdir()
    # The loader that the web page uses. It converts scalars and histograms to tensors, as in TensorBoard's second version.
    events = list(EventFileLoader(str(path)).Load())
    assert events[0].file_version == "brain.Event:2"
    assert all(a.wall_time <= b.wall_time for a, b in zip(events, events[1:]))
    shapes = set()
    for event in events[1:]:
        for value in event.summary.value:
            if value.tag.startswith("weights/"):
                shapes.add(tuple(d.size for d in value.tensor.tensor_shape.dim))
    assert shapes and all(len(s) == 2 and s[1] == 3 for s in shapes), shapes

    # The legacy loader returns values as they are in the file.
    legacy = list(LegacyEventFileLoader(str(path)).Load())
    assert len(legacy) == len(events)
    accumulator = EventAccumulator(str(path), size_guidance=SIZE_GUIDANCE)
    accumulator.Reload()
    tags = accumulator.Tags()

    def scalars(tag):
        if tag in tags["scalars"]:
            return {e.step: e.value for e in accumulator.Scalars(tag)}
        return {e.step: e.tensor_proto.float_val[0] for e in accumulator.Tensors(tag)}

    for tag, name in [("loss/train", "train_loss"), ("lr", "lr"), ("grad_norm", "grad_norm"),
                      ("tokens_per_second", "tokens_per_second"), ("loss/validation", "val_loss")]:
        read = scalars(tag)
        written = {m["step"]: m[name] for m in metrics if name in m}
        assert read.keys() == written.keys(), tag
        assert all(math.isclose(read[s], written[s], rel_tol=1e-6) for s in written), tag
    text = accumulator.Tensors("model")[0].tensor_proto.string_val[0].decode()
    assert text.startswith("1 layers, 2 heads, width 16"), text

    histograms = 0
    for event in legacy:
        for value in event.summary.value:
            if value.HasField("histo"):
                histograms += 1
                h = value.histo
                assert sum(h.bucket) == h.num and len(h.bucket) == len(h.bucket_limit)
                assert h.min <= h.bucket_limit[0] and h.bucket_limit[-1] == h.max and np.all(np.diff(h.bucket_limit) > 0)
                assert h.min <= h.sum / h.num <= h.max
    print(f"TensorBoard reads {len(events)} events: {len(metrics)} steps, {histograms} histograms, the text {text!r}")

# A run that was killed after its last checkpoint and resumed: TensorBoard shows each step once.
with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder)
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    command = [sys.argv[1], "--data", folder / "text.txt", "--out", folder / "out", "--tensorboard", folder / "runs",
               "--checkpoint", folder / "checkpoints",
               *"--device cpu --dtype float32 --steps 400 --batch 4 --context 16 --layers 1 --heads 2 --width 16 "
                "--eval-every 100 --checkpoint-every 50 --resume --sample 0".split()]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    metrics = folder / "out/metrics.jsonl"
    while not any(folder.glob("checkpoints/checkpoint-*")) or len(metrics.read_text().splitlines()) < 80:
        time.sleep(0.005)
    first.kill()
    first.wait()
    killed_at = len(metrics.read_text().splitlines())
    again = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "resumed after step" in again, again
    accumulator = EventAccumulator(str(folder / "runs"), size_guidance=SIZE_GUIDANCE)
    accumulator.Reload()
    steps = [e.step for e in accumulator.Scalars("loss/train")]
    assert steps == list(range(1, 401)), steps
    print(f"killed at step {killed_at}, {again[again.index('resumed'):].splitlines()[0]}: TensorBoard shows each step once")
