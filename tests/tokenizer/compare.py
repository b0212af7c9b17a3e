#!/usr/bin/env python3
"""Compares mica's tokens and decoded text with those of the packages `tokenizers` and `sentencepiece`, for each tokenizer of
combinations.py, trained on TEXT, on its lines and on random texts.

    pip install tokenizers==0.23.3 sentencepiece==0.2.3 transformers
    cmake -B build -DMICA_BENCHMARKS=ON && cmake --build build --target bench_tokenizer
    python tests/tokenizer/compare.py TEXT [--only NAME…]

Unicode versions differ (docs/tokenizers.md), so random texts have characters of Unicode 9 only.
"""

import argparse
import random
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import sentencepiece
from combinations import ADDED, SPACE, all_tokenizers, sentence_piece_models
from make_fixtures import SENTENCES, TEXTS
from tokenizers import Tokenizer

ALPHABETS = ["abcdefghijklmnopqrstuvwxyz     ", "ABCDEabcde .,;!?'\"-()<>  \n\t", "0123456789.,  ", "éàüßñçøåÅ e\u0301\u0302a\u0323 ",
             "русский язык ", "日本語漢字かなカナ。、", "한국어 각\u1100\u1161\u11a8", "עברית العربية हिन्दी ไทย", "😀👨\u200d👩\u200d👧🇩🇪❤\ufe0f",
             "\u00a0\u2003\u3000\u200b\u200d\ufeff\u2028\x85\x0b\x00\x07\u0600\u2581", "ﬁﬂ①②Ⅷ½㎏Ａｂ１ｱｶﾞ\u1e9b\u0323\u212b\u0344", "```''``\"\"  ``"]


def random_texts(count, generator, words):
    for _ in range(count):
        parts = []
        for _ in range(generator.randrange(1, 25)):
            kind = generator.random()
            if kind < 0.5:
                parts.append(generator.choice(words) + " " * generator.randrange(3))
            elif kind < 0.6:
                parts.append(generator.choice([str(t.content) for t in ADDED] + ["<s>", "</s>", "<unk>", "<tool>", "<tool>>", "<0x41>"]))
            elif kind < 0.7:
                parts.append(generator.choice(TEXTS))
            else:
                parts.append("".join(generator.choices(generator.choice(ALPHABETS), k=generator.randrange(1, 12))))
        yield "".join(parts)


def read_back(path, item_size):
    data = path.read_bytes()
    at = 0
    while at < len(data):
        (count,) = struct.unpack_from("<I", data, at)
        yield data[at + 4:at + 4 + count * item_size]
        at += 4 + count * item_size


def compare(name, program, folder, documents, encode, decode, show):
    """Prints how many documents differ. Returns whether any does."""
    output = subprocess.run([program, "--model", folder, "--documents", folder.parent / "documents.bin", "--repeat", "1",
                             "--threads", "1", "--tokens-out", folder / "tokens.bin", "--text-out", folder / "text.bin"],
                            capture_output=True, text=True)
    if output.returncode:
        print(f"{name}: {output.stderr.strip()}")
        return True
    wrong_tokens = wrong_texts = 0
    for text, tokens, decoded in zip(documents, read_back(folder / "tokens.bin", 4), read_back(folder / "text.bin", 1)):
        own = list(struct.unpack(f"<{len(tokens) // 4}I", tokens))
        expected = encode(text)
        if own != expected:
            wrong_tokens += 1
            if wrong_tokens <= 3:
                at = next((i for i, (a, b) in enumerate(zip(own, expected)) if a != b), min(len(own), len(expected)))
                print(f"  {text!r:.200}: token {at}: {show(own[at:at + 5])}, expected {show(expected[at:at + 5])}")
        elif decoded.decode() != decode(own):
            wrong_texts += 1
            if wrong_texts <= 3:
                print(f"  {text!r:.200}: text {decoded.decode()!r:.200}, expected {decode(own)!r:.200}")
    rate = next(line.rsplit(";", 1)[-1] for line in output.stdout.splitlines() if line.startswith("encode"))
    print(f"{name}: {len(documents)} texts, {wrong_tokens} differ in tokens, {wrong_texts} in decoded text;{rate}", flush=True)
    return wrong_tokens + wrong_texts > 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--program", type=Path, default=Path("build/bin/bench_tokenizer"))
    parser.add_argument("--only", nargs="*", help="names of combinations.py; models: the SentencePiece models")
    parser.add_argument("--texts", type=int, default=3000)
    parser.add_argument("--size", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    english = options.text.read_text()
    training = [*english.splitlines(keepends=True), *SENTENCES.splitlines(keepends=True) * 20]
    generator = random.Random(options.seed)
    words = sorted(set(english.split()))
    documents = [*random_texts(options.texts, generator, words), *TEXTS,
                 *[english[i:i + 5000] for i in range(0, min(len(english), 500_000), 5000)]]
    failed = False
    with tempfile.TemporaryDirectory() as work:
        data = [text.encode() for text in documents]
        (Path(work) / "documents.bin").write_bytes(b"".join(struct.pack("<I", len(text)) + text for text in data))
        folder = Path(work) / "tokenizer"
        folder.mkdir()
        for name, tokenizer in all_tokenizers(training, options.size, options.only):
            tokenizer.save(str(folder / "tokenizer.json"))
            own = Tokenizer.from_file(str(folder / "tokenizer.json"))
            failed |= compare(name, options.program, folder, documents, lambda text: own.encode(text).ids,
                              lambda ids: own.decode(ids), lambda ids: [own.id_to_token(i) for i in ids])
        (folder / "tokenizer.json").unlink(missing_ok=True)
        (folder / "tokenizer_config.json").write_text('{"add_bos_token": false}')
        # Control tokens in a text are text for sentencepiece.
        documents = [text if "<" not in text.replace("<tool>", "") else "" for text in documents]
        (Path(work) / "documents.bin").write_bytes(b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in documents))
        for name, model in sentence_piece_models(training, options.size) if not options.only or "models" in options.only else []:
            (folder / "tokenizer.model").write_bytes(model)
            own = sentencepiece.SentencePieceProcessor(model_proto=model)
            failed |= compare(f"{name}.model", options.program, folder, documents, own.encode,
                              lambda ids: own.decode(ids).replace(" \u2047 ", "<unk>"), lambda ids: [own.id_to_piece(i) for i in ids])
    return failed


if __name__ == "__main__":
    sys.exit(main())
