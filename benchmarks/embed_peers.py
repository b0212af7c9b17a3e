#!/usr/bin/env python3
"""Sentence embeddings on the CPU: the program embed and the Python package sentence-transformers, alternating.

    pip install sentence-transformers
    python3 benchmarks/embed_peers.py --program build/bin/embed --text tinyshakespeare.txt --results embed.txt

The model has the shape of all-MiniLM-L6-v2 with random weights, and a WordPiece tokenizer trained on the text; --model
names a folder to use instead. The inputs are the text's lines, and its paragraphs as lines. All vectors are compared.

Times are the least of all rounds, since other work on the machine only adds time. Those of embed are of the whole
program, which reads the model and writes the file; those of sentence-transformers are of encode() alone, with its
batches of 32. CPU seconds are those of all threads.
"""

import argparse
import os
import pathlib
import platform
import resource
import subprocess
import tempfile
import time

import numpy as np
import sentence_transformers
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from tokenizers import BertWordPieceTokenizer

CLOSE = 1e-5


def make_model(folder, text):
    torch.manual_seed(1)
    plain = folder / "plain"
    plain.mkdir()
    words = BertWordPieceTokenizer()
    words.train([str(text)], vocab_size=30522, show_progress=False)
    words.save_model(str(plain))
    transformers.BertTokenizerFast(str(plain / "vocab.txt"), model_max_length=256).save_pretrained(plain)
    config = transformers.BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12,
                                     intermediate_size=1536)
    transformers.BertModel(config).save_pretrained(plain)
    model = SentenceTransformer(modules=[Transformer(str(plain)), Pooling(384, "mean"), Normalize()], device="cpu")
    model.save(str(folder / "model"), create_model_card=False)
    return folder / "model"


def cpu_model():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor()


def run(command):
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode != 0:
        raise SystemExit(ended.stderr)


def measured(work, who):
    """The result, the elapsed time and the CPU time."""
    before, start = resource.getrusage(who), time.perf_counter()
    result = work()
    after, end = resource.getrusage(who), time.perf_counter()
    return result, end - start, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True, help="path of embed")
    parser.add_argument("--text", required=True, help="a text file")
    parser.add_argument("--model", help="a folder of sentence-transformers")
    parser.add_argument("--lines", type=int, default=4000)
    parser.add_argument("--paragraphs", type=int, default=800)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precisions", nargs="+", default=["bfloat16x2", "float32"], help="embed's --precision")
    parser.add_argument("--results", help="file for the table")
    args = parser.parse_args()

    text = pathlib.Path(args.text).read_text(encoding="utf-8")
    inputs = {"lines": [line for line in text.split("\n") if line.strip()][:args.lines],
              "paragraphs": [part.strip().replace("\n", " ") for part in text.split("\n\n")
                             if part.strip()][:args.paragraphs]}
    rows = [f"{cpu_model()}, {os.cpu_count()} cores; sentence-transformers {sentence_transformers.__version__}, torch "
            f"{torch.__version__}; model {pathlib.Path(args.model).name if args.model else 'random MiniLM-L6'}",
            f"{'input':17} {'tokens':>6} {'threads':>7} {'precision':>10} | {'embed':>20} | "
            f"{'sentence-transformers':>21} | {'ratio':>14} | largest difference"]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        path = pathlib.Path(args.model) if args.model else make_model(folder, pathlib.Path(args.text))
        model = SentenceTransformer(str(path), device="cpu")
        for what, texts in inputs.items():
            (folder / "texts.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
            tokens = sum(len(t) for t in model.tokenizer(texts, truncation=True)["input_ids"])
            for threads in args.threads:
                torch.set_num_threads(threads)
                ours = {precision: (float("inf"),) * 2 for precision in args.precisions}
                theirs, difference = (float("inf"),) * 2, {}
                model.encode(texts[:64])
                for _ in range(args.rounds):
                    expected, *times = measured(lambda: model.encode(texts), resource.RUSAGE_SELF)
                    theirs = tuple(map(min, theirs, times))
                    for precision in args.precisions:
                        command = [args.program, "--model", str(path), "--input", str(folder / "texts.txt"), "--out",
                                   str(folder / "out.npy"), "--device", "cpu", "--threads", str(threads),
                                   "--precision", precision]
                        _, *times = measured(lambda: run(command), resource.RUSAGE_CHILDREN)
                        ours[precision] = tuple(map(min, ours[precision], times))
                        difference[precision] = float(np.abs(np.load(folder / "out.npy") - expected).max())
                for precision, (wall, cpu) in ours.items():
                    rows.append(f"{len(texts):5} {what:11} {tokens:6} {threads:7} {precision:>10} | {wall:6.2f} s, "
                                f"{cpu:6.2f} CPU s | {theirs[0]:7.2f} s, {theirs[1]:6.2f} CPU s | "
                                f"{theirs[0] / wall:4.2f}, {theirs[1] / cpu:4.2f} CPU | {difference[precision]:.1e}")
                    assert difference[precision] <= CLOSE, rows[-1]
                print("\n".join(rows) if len(rows) <= 2 + len(ours) else "\n".join(rows[-len(ours):]), flush=True)
    if args.results:
        pathlib.Path(args.results).write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
