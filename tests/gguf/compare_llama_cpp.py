#!/usr/bin/env python3
"""Compares mica with llama.cpp on the same GGUF files: logits, tokens, and texts that are generated greedily.

    pip install llama-cpp-python==0.3.36 tokenizers==0.23.3
    MICA_SAVED_GGUF=/tmp/saved build/bin/mica_tests --gtest_filter=GgufTokenizer.ModelsAreSavedWithIt
    cmake -B build -DMICA_BENCHMARKS=ON && cmake --build build --target bench_tokenizer
    python tests/gguf/compare_llama_cpp.py /tmp/saved [--program build/bin/bench_tokenizer] [--megabytes 1]
        [--vocabularies FOLDER] [--results FILE]

The test writes small random models with each type of tensor and a tokenizer, and beside each file what mica computes with
it in float32: the logits of a prompt, and the 24 tokens that follow it greedily. An error is the norm of the difference,
relative to the norm of the logits. Before a product, llama.cpp rounds the activations to the type of the weights (F16,
BF16) or to 8 bits (Q8_0, Q4_0); mica does not. Hence the tolerances. So each model is compared a second time ("values"):
the weights that mica reads from the file are stored as F32, and both compute in float32. llama.cpp computes GPT-2's GELU
by a table of float16. Its keys and values are float32 here.

If both compute in float32, the generated tokens must be the same. Otherwise, where llama.cpp would have chosen another
token than mica, its logits of these two tokens must differ by less than three times the largest difference between the
prompt's logits.

--vocabularies: a folder with GGUF files of real tokenizers (models/ggml-vocab-*.gguf of llama.cpp's source). Those that
mica does not support are listed. Texts are in normalization form C and contain only characters that this Python's Unicode
version has, since llama.cpp's tables are older than mica's, which are those of Unicode 16.
"""

import argparse
import json
import random
import struct
import subprocess
import sys
import tempfile
import unicodedata
from pathlib import Path

import llama_cpp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import tokenizer_peers  # noqa: E402

TOLERANCE = {"f16": 3e-3, "bf16": 3e-2, "q8_0": 6e-2, "q4_0": 6e-2}  # where activations are rounded
PROMPTS = ["<|im_start|>user\nHi<|im_end|>\n", "<think> x<|begin_of_text|", ""]


def load(path, **options):
    return llama_cpp.Llama(str(path), n_ctx=0, n_batch=128, n_threads=2, flash_attn=False, verbose=False,
                           type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32, **options)


def compare_model(path):
    """Prints one line and returns whether all is well."""
    name, kind = path.stem.rsplit(".", 1)
    own = json.loads(path.with_name(f"{name}.{kind.removesuffix('_values')}.json").read_text())
    prompt, generated = own["tokens"], own["generated"]
    model = load(path, logits_all=True)
    tokens = model.tokenize(own["prompt"].encode(), add_bos=True, special=True)
    model.eval(prompt + generated[:-1])
    logits = np.array(model.scores[:model.n_tokens], dtype=np.float64)
    after, logits = logits[len(prompt) - 1:], logits[:len(prompt)]
    expected = np.array(own["logits"]).reshape(logits.shape)
    error = np.linalg.norm(logits - expected) / np.linalg.norm(expected)
    largest = np.abs(logits - expected).max()
    # After each prefix of mica's tokens, the token that llama.cpp would choose next must be mica's next token.
    same = sum(int(np.argmax(at)) == token for at, token in zip(after, generated, strict=True))
    gap = max(at.max() - at[token] for at, token in zip(after, generated, strict=True))
    computes_alike = kind == "f32" or kind.endswith("_values")
    tolerance = (1e-3 if name == "gpt2" else 1e-5) if computes_alike else TOLERANCE[kind]
    good = [tokens == prompt, error <= tolerance, same == len(generated) if computes_alike else gap <= 3 * largest]
    print_result(f"{name} {kind}: logits of {np.std(expected):.1f} differ by {error:.1e} of their norm, at most by {largest:.1e}; "
                 f"{same} of {len(generated)} generated tokens are llama.cpp's{'' if same == len(generated) else f', the others within {gap:.1e}'}"
                 f"{'' if all(good) else f' FAILED (tokens of the prompt, logits, generated: {good})'}")
    return all(good)


def tokenize(model, text):
    """llama.cpp's tokens. The package's own function uses a buffer that is too small for long texts."""
    buffer = (llama_cpp.llama_token * (len(text) + 8))()
    count = llama_cpp.llama_tokenize(model._model.vocab, text, len(text), buffer, len(buffer), True, True)
    return list(buffer[:count])


def compare_tokens(path, documents, program):
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        (out / "documents").write_bytes(b"".join(struct.pack("<I", len(d)) + d for d in documents))
        run = subprocess.run([program, "--model", path, "--documents", out / "documents", "--tokens-out", out / "tokens",
                              "--repeat", "1"], capture_output=True, text=True)
        if run.returncode != 0:
            print_result(f"{path.name}: {run.stderr.strip().splitlines()[-1].replace(str(path), path.name)}")
            return None
        own = [list(struct.unpack(f"<{len(ids) // 4}I", ids)) for ids in tokenizer_peers.read_back(out / "tokens", 4)]
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    wrong = count = 0
    for document, ids in zip(documents, own, strict=True):
        expected = tokenize(model, document)
        count += len(expected)
        if ids != expected:
            wrong += 1
            if wrong <= 3:
                at = next((i for i, (a, b) in enumerate(zip(ids, expected)) if a != b), min(len(ids), len(expected)))
                print(f"  {path.name}: token {at} is {ids[at:at + 4]}, llama.cpp's is {expected[at:at + 4]}: "
                      f"{model.detokenize(expected[max(0, at - 3):at + 3], special=True)!r}", file=sys.stderr)
    print_result(f"{path.name}: {wrong} of {len(documents)} texts differ, {sum(map(len, documents)) / 1e6:.1f} MB, {count} tokens")
    return wrong == 0


lines = []


def print_result(line):
    lines.append(line)
    print(line, flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--program", default="build/bin/bench_tokenizer")
    parser.add_argument("--megabytes", type=float, default=1)
    parser.add_argument("--vocabularies", type=Path)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    random.seed(1)
    print_result(f"llama-cpp-python {llama_cpp.__version__}")
    models = sorted(options.folder.glob("*.gguf"))
    results = [compare_model(path) for path in models]

    size = int(options.megabytes * 1e6)
    code = [*tokenizer_peers.files("/usr/include", ".h", ".hpp"), *tokenizer_peers.files("/usr/lib", ".py")]
    documents = [text.encode() for text in PROMPTS]
    for texts, part in [(list(tokenizer_peers.catalog_texts()), 30), (code, 30),
                        (list(tokenizer_peers.random_texts(size // 5)), 20),
                        (list(tokenizer_peers.every_character())[:256], 20)]:
        for document in tokenizer_peers.take(texts, size * part // 100):
            text = unicodedata.normalize("NFC", document[:20_000].decode(errors="replace"))
            documents.append("".join(c if unicodedata.category(c) not in ("Cn", "Co") else "\ufffd" for c in text).encode())
    files = [path for path in models if path.stem.endswith(".f32")]
    if options.vocabularies:
        files += sorted(options.vocabularies.glob("*.gguf"))
    results += [good for path in files if (good := compare_tokens(path, documents, options.program)) is not None]
    print_result(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    if options.results:
        options.results.write_text("\n".join(lines) + "\n")
    return not all(results) or not models


if __name__ == "__main__":
    sys.exit(main())
