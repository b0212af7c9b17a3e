#!/usr/bin/env python3
"""Compares the tokens and the speed of mica's tokenizers with those of the package `tokenizers`.

    pip install tokenizers
    cmake -B build -DMICA_BENCHMARKS=ON && cmake --build build --target bench_tokenizer
    python benchmarks/tokenizer_peers.py [--megabytes 100] [--work /tmp/tokenizers] [--results FILE]

It trains tokenizers on texts of this machine: message catalogs of programs in all their languages (*.mo), C headers,
Python, HTML and text files. The corpus mixes these with random Unicode characters, emoji, combining marks, all kinds of
spaces, long runs, added tokens, and invalid bytes. The package gets invalid bytes as bytes.decode(errors="replace").
"""

import argparse
import gettext
import json
import os
import random
import struct
import subprocess
import sys
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
ADDED = [
    AddedToken("<|begin|>", special=True),
    AddedToken("<|end|>", special=True),
    AddedToken("<|end|>>", special=True),
    AddedToken("<mask>", special=True, lstrip=True),
    AddedToken("<sep>", special=True, rstrip=True),
    AddedToken("<both>", special=True, lstrip=True, rstrip=True),
    AddedToken("<think>", special=False, normalized=False),
    AddedToken("wörd", special=False, single_word=True, normalized=True),
    AddedToken("alone", special=False, single_word=True, normalized=False),
    AddedToken("e\u0301a", special=False, normalized=True),
    AddedToken("  ", special=False, normalized=False, single_word=True),
]


def catalog_texts():
    """The translated messages of each catalog, as one text."""
    for path in sorted(Path("/usr/share/locale").glob("*/LC_MESSAGES/*.mo")):
        try:
            with open(path, "rb") as file:
                messages = gettext.GNUTranslations(file)._catalog.values()
            yield "\n".join(str(m) for m in messages).encode()
        except (OSError, ValueError, IndexError):
            continue


def files(root, *suffixes):
    for folder, _, names in sorted(os.walk(root)):
        for name in sorted(names):
            path = Path(folder, name)
            if path.suffix in suffixes and path.is_file() and not path.is_symlink():
                yield path.read_bytes()


def take(texts, count):
    """At most `count` bytes of the texts, in documents of at most 100 kB, evenly from all of them."""
    pieces = [text[i:i + 100_000] for text in texts for i in range(0, len(text), 100_000)]
    random.shuffle(pieces)
    taken, size = [], 0
    for piece in pieces:
        if size >= count:
            break
        taken.append(piece)
        size += len(piece)
    return taken


def random_character():
    kind = random.random()
    if kind < 0.3:
        return chr(random.randrange(0x20, 0x250))
    if kind < 0.5:
        return random.choice(" \t\n\r\x0b\x0c\x85\u00a0\u1680\u180e\u2003\u2028\u202f\u3000\u200b\ufeff")
    if kind < 0.6:
        return chr(random.randrange(0x300, 0x370))  # combining marks
    if kind < 0.7:
        return chr(random.choice([0x1F600, 0x1F3FB, 0x1F1E6, 0x200D, 0xFE0F, 0x1F468, 0x2764]) + random.randrange(5))
    if kind < 0.8:
        return chr(random.randrange(0x1100, 0x1200))  # parts of Korean syllables
    character = random.randrange(0x110000)
    return "\ufffd" if 0xD800 <= character < 0xE000 else chr(character)


def random_texts(size):
    """A random mix of characters, words and added tokens."""
    words = ["'s", "'S", "'\u017f", "'LL", "'Re", "don't", " 1234567", "12", "٣٤٥٦", "  ", "\n\n", " \r\n ", "a", "the", "...",
             "e\u0301", "e\u0301a", "éa", "\u1e9b\u0323", "한국", "漢字", "ไทย", "x" * 300, " " * 500, "\n" * 200, "=" * 700, "7" * 100]
    words += [token.content for token in ADDED]
    done = 0
    while done < size:
        parts = [random.choice(words) if random.random() < 0.4 else random_character()
                 for _ in range(random.randrange(1, 3000))]
        text = "".join(parts).encode()
        done += len(text)
        yield text


def damaged(texts):
    """The texts with bytes changed, removed and inserted."""
    for text in texts:
        data = bytearray(text)
        for _ in range(1 + len(data) // 50):
            at = random.randrange(len(data) + 1)
            data[at:at + random.randrange(3)] = random.choices(range(256), k=random.randrange(4))
        yield bytes(data)


def every_character():
    """Each character of Unicode between letters, digits, spaces and signs."""
    for first in range(0, 0x110000, 0x400):
        characters = [chr(c) for c in range(first, first + 0x400) if not 0xD800 <= c < 0xE000]
        yield "".join(f"a{c}b {c}.{c} 1" for c in characters).encode()


def corpus(megabytes):
    size = megabytes * 10**6
    catalogs = take(list(catalog_texts()), size * 45 // 100)
    code = take([*files("/usr/include", ".h", ".hpp"), *files("/usr/lib/python3", ".py"),
                 *files("/usr/lib/python3.11", ".py")], size * 25 // 100)
    documents = take([*files("/usr/share/doc", ".txt", ".html", ".md"), *files("/usr/share/perl", ".pm", ".pod")],
                     size * 12 // 100)
    generated = [*random_texts(size * 6 // 100), *every_character()]
    broken = list(damaged(take(catalogs + code + generated, size * 8 // 100)))
    # Words that would take quadratic time.
    broken += [b"a" * 10**6, "é".encode() * 300_000, bytes(random.choices(b"abcdefgh", k=10**6)), b" " * 10**6, b"\xff" * 10**5]
    everything = catalogs + code + documents + generated + broken
    random.shuffle(everything)
    return everything, take(catalogs + code + documents, 20 * 10**6)


def train(name, sample, folder):
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=name == "prefix", use_regex=name not in ("llama3", "qwen"))
    if name == "llama3":
        steps = [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), byte_level]
    elif name == "qwen":
        tokenizer.normalizer = normalizers.NFC()
        steps = [pre_tokenizers.Split(Regex(QWEN), "isolated"), byte_level]
    elif name == "smollm":
        steps = [pre_tokenizers.Digits(individual_digits=True), byte_level]
    else:
        steps = [byte_level]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    tokenizer.decoder = decoders.ByteLevel()
    size = {"gpt2": 50_000, "llama3": 100_000}.get(name, 32_000)
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator((text.decode(errors="replace") for text in sample), trainer)
    tokenizer.add_tokens(ADDED)
    tokenizer.add_special_tokens([token for token in ADDED if token.special])
    if name == "llama3":
        tokenizer.post_processor = processors.Sequence([
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", tokenizer.token_to_id("<|begin|>"))])])
    description = json.loads(tokenizer.to_str())
    description["model"]["ignore_merges"] = name == "llama3"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(description, ensure_ascii=False))


def train_bert(sample, folder):
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator((text.decode(errors="replace") for text in sample),
                                  trainers.WordPieceTrainer(vocab_size=30_000, special_tokens=special, show_progress=False))
    tokenizer.add_tokens(ADDED)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(t, tokenizer.token_to_id(t)) for t in ("[CLS]", "[SEP]")])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))


def read_back(path, item_size):
    data = path.read_bytes()
    at = 0
    while at < len(data):
        (count,) = struct.unpack_from("<I", data, at)
        at += 4
        yield data[at:at + count * item_size]
        at += count * item_size


def compare(name, documents, folder, program, work):
    tokens_path, text_path = work / "tokens.bin", work / "text.bin"
    output = subprocess.run([program, "--model", folder, "--documents", work / "documents.bin", "--tokens-out", tokens_path,
                             "--text-out", text_path], check=True, capture_output=True, text=True).stdout
    lines = [f"{name}: {line}" for line in output.splitlines()]
    package = Tokenizer.from_file(str(folder / "tokenizer.json"))
    count, wrong_tokens, wrong_texts = 0, 0, 0
    as_letters = {package.token_to_id(token) for token in ("wörd", "e\u0301a")}
    own_texts = read_back(text_path, 1)
    own_tokens = read_back(tokens_path, 4)
    for first in range(0, len(documents), 256):
        batch = [document.decode(errors="replace") for document in documents[first:first + 256]]
        expected = [encoding.ids for encoding in package.encode_batch_fast(batch)]
        texts = package.decode_batch(expected)
        for i, ids in enumerate(expected):
            count += len(ids)
            own = next(own_tokens)
            if own != struct.pack(f"<{len(ids)}I", *ids):
                wrong_tokens += 1
                if wrong_tokens <= 5:
                    got = struct.unpack(f"<{len(own) // 4}I", own)
                    at = next((k for k, (a, b) in enumerate(zip(got, ids)) if a != b), min(len(got), len(ids)))
                    print(f"{name}: document {first + i}, token {at}: {[package.id_to_token(t) for t in got[at:at + 4]]}, "
                          f"expected {[package.id_to_token(t) for t in ids[at:at + 4]]} "
                          f"after {package.decode(ids[max(0, at - 5):at])!r}", file=sys.stderr)
            # The package decodes an added token by GPT-2's mapping of characters to bytes: "ö" becomes one byte, which
            # is not UTF-8.
            wrong_texts += next(own_texts).decode() != texts[i] and not as_letters.intersection(ids)
    size = sum(map(len, documents))
    lines.append(f"{name}: {len(documents)} documents, {size / 1e6:.1f} MB, {count} tokens; documents that differ: "
                 f"{wrong_tokens} in tokens, {wrong_texts} in decoded text")
    code = ("import struct, sys, time\nfrom tokenizers import Tokenizer\n"
            "tokenizer = Tokenizer.from_file(sys.argv[1])\ndata = open(sys.argv[2], 'rb').read()\nat, texts = 0, []\n"
            "while at < min(len(data), 20_000_000):\n"
            "    count, = struct.unpack_from('<I', data, at)\n"
            "    texts.append(data[at + 4:at + 4 + count].decode(errors='replace'))\n"
            "    at += 4 + count\n"
            "start = time.process_time()\ntokenizer.encode_batch_fast(texts)\n"
            "print(at / (time.process_time() - start) / 1e6)")
    rate = float(subprocess.run([sys.executable, "-c", code, folder / "tokenizer.json", work / "documents.bin"], check=True,
                                capture_output=True, text=True, env={**os.environ, "TOKENIZERS_PARALLELISM": "false"}).stdout)
    lines.append(f"{name}: the package, one thread: {rate:.1f} MB per second of CPU time")
    return lines, wrong_tokens + wrong_texts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--work", type=Path, default=Path("/tmp/tokenizers"))
    parser.add_argument("--program", default="build/bin/bench_tokenizer")
    parser.add_argument("--results", type=Path)
    parser.add_argument("names", nargs="*", default=["gpt2", "llama3", "qwen", "smollm", "prefix", "bert"])
    options = parser.parse_args()
    random.seed(1)
    options.work.mkdir(parents=True, exist_ok=True)
    documents, sample = corpus(options.megabytes)
    with open(options.work / "documents.bin", "wb") as file:
        for document in documents:
            file.write(struct.pack("<I", len(document)) + document)
    wrong, lines = 0, []
    for name in options.names:
        folder = options.work / name
        if not (folder / "tokenizer.json").exists():
            train_bert(sample, folder) if name == "bert" else train(name, sample, folder)
        report, differences = compare(name, documents, folder, options.program, options.work)
        print("\n".join(report), flush=True)
        lines += report
        wrong += differences
    if options.results:
        options.results.write_text("\n".join(lines) + "\n")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
