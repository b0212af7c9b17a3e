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
    parser.add_argument("--options", nargs="*", default=[], help="further options of embed, without the leading --")
    parser.add_argument("--results", help="file for the table")
    args = parser.parse_args()

    text = pathlib.Path(args.text).read_text(encoding="utf-8")
    inputs = {"lines": [line for line in text.split("\n") if line.strip()][:args.lines],
              "paragraphs": [part.strip().replace("\n", " ") for part in text.split("\n\n")
                             if part.strip()][:args.paragraphs]}
    rows = [f"{cpu_model()}, {os.cpu_count()} cores; sentence-transformers {sentence_transformers.__version__}, torch "
            f"{torch.__version__}; model {pathlib.Path(args.model).name if args.model else 'random MiniLM-L6'}",
            f"{'input':24} {'threads':>7} {'tokens':>7} | {'embed':>16} | {'sentence-transf.':>16} | ratio       | "
            "largest difference"]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        path = pathlib.Path(args.model) if args.model else make_model(folder, pathlib.Path(args.text))
        model = SentenceTransformer(str(path), device="cpu")
        for what, texts in inputs.items():
            (folder / "texts.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
            tokens = sum(len(t) for t in model.tokenizer(texts, truncation=True)["input_ids"])
            for threads in args.threads:
                torch.set_num_threads(threads)
                command = [args.program, "--model", str(path), "--input", str(folder / "texts.txt"), "--out",
                           str(folder / "out.npy"), "--device", "cpu", "--threads", str(threads),
                           *(f"--{option}" for option in args.options)]
                least = [float("inf")] * 4
                model.encode(texts[:64])
                for _ in range(args.rounds):
                    _, *ours = measured(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL),
                                        resource.RUSAGE_CHILDREN)
                    expected, *theirs = measured(lambda: model.encode(texts), resource.RUSAGE_SELF)
                    least = [min(pair) for pair in zip(least, ours + theirs)]
                difference = float(np.abs(np.load(folder / "out.npy") - expected).max())
                assert args.options or difference <= CLOSE, f"{what}: the vectors differ by {difference}"
                wall, cpu, their_wall, their_cpu = least
                rows.append(f"{len(texts):6} {what:17} {threads:7} {tokens:7} | {wall:6.2f} s {cpu:6.2f} CPU | "
                            f"{their_wall:5.2f} s {their_cpu:6.2f} CPU | {their_wall / wall:.2f} {their_cpu / cpu:.2f} CPU"
                            f" | {difference:.1e}")
                print("\n".join(rows) if len(rows) == 3 else rows[-1], flush=True)
    if args.results:
        pathlib.Path(args.results).write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
