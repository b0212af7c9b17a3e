#!/usr/bin/env python3
"""Writes fixtures/: small tokenizers and the tokens that the package `tokenizers` gives for some texts.

    pip install tokenizers==0.23.3 sentencepiece==0.2.3 transformers protobuf
    python tests/tokenizer/make_fixtures.py
"""

import json
import random
import shutil
import tempfile
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = Path(__file__).parent
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
SPECIAL = [AddedToken(text, special=True) for text in ("<|begin_of_text|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>")]
ADDED = SPECIAL + [
    AddedToken("<|im_end|>>", special=True),
    AddedToken("<mask>", special=True, lstrip=True),
    AddedToken("<sep>", special=True, rstrip=True),
    AddedToken("<think>", special=False, normalized=False),
    AddedToken("alone", special=False, single_word=True, normalized=False),
    AddedToken("e\u0323\u0302", special=False, normalized=True),
]
SENTENCES = """The quick brown fox doesn't jump over the lazy dog; it's what we're here for, and they'll say they've seen it.
for (int i = 0; i < 1024; ++i) { sum += x[i] * y[i]; }  // 3.14159, 2026-11-22 12:34:56
def forward(self, x):\n    return self.norm(x + self.attention(x))\n\n\n    # done\n
Größe, Straße, naïve café, señor, Žluťoučký kůň, Ελληνικά, русский язык, українська, עברית, العربية, हिन्दी, ไทย
日本語のテキストと漢字、한국어 문장입니다。中文文本没有空格。 Tiếng Việt có dấu. 😀👨‍👩‍👧‍👦🇩🇪❤️"""
TEXTS = [
    "", " ", "a", "\n", "Hello, world!", SENTENCES, "don't DON'T I'LL we'Ve it'\u017f 'x ''s", "1234567 12 ٣٤٥٦ ½Ⅷ x1y22",
    "  two  spaces \n\n and\tlines \r\n  \r\n end  ", "\u00a0\u180e\u2003x\u3000\u0085y \u1680",
    "e\u0301a éa e\u0323\u0302 e\u0302\u0323 \u1ec7 \u1e9b\u0323 \u212b \u1100\u1161\u11a8\u11a8 각 \u0958 \u0344 \u0f73 a\u0315\u0300\u05ae\u0301b",
    "<|im_start|>user\nHi<|im_end|>\n<|im_end|>><|im_end|> x <mask> y <sep>  z <mask><sep> \n<mask>", "<|begin_of_text|",
    "alone xalone alone_ alonealone, alone helloalone Hellothe", "<think>\n\n<think>text", "====-----~~~~ !?.,;: ((()))\n\n", "x" * 100 + " " * 70 + "\n" * 9 + " y",
    "ab" * 60 + "漢字" * 30, "Hello hello, HELLO! Héllo İstanbul ǅ ΣΑΣ [MASK] [CLS]x can't isn't I'm 'it' ok . ?\x07\x00\ufffd\u200b\u0e31", "\U00010d40\U00011938 \U0001f600\ufe0f\u200d", "end \n",
]
BROKEN = ["ff", "c3", "e282", "f09f98", "c0af", "eda080", "f4908080", "61e28261c3a9f0", "f8a1a1a1a1", "80bf", "e0809f41", "41c3" * 20]


def make_bert(name, cleanup=True, **normalizer):
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=50))
    tokenizer.normalizer = normalizers.BertNormalizer(**normalizer)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=cleanup)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator([SENTENCES], trainers.WordPieceTrainer(vocab_size=500, special_tokens=special, show_progress=False))
    tokenizer.add_tokens([AddedToken("Hello", special=False, normalized=True, single_word=True),
                          AddedToken("alone", special=False, normalized=False, single_word=True)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(t, tokenizer.token_to_id(t)) for t in ("[CLS]", "[SEP]")])
    save(name, json.loads(tokenizer.to_str()))


def make(name, steps, normalizer=None, post_processor=None, **model):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator([SENTENCES], trainer)
    tokenizer.add_tokens(ADDED)
    if post_processor:
        tokenizer.post_processor = post_processor(tokenizer)
    description = json.loads(tokenizer.to_str())
    description["model"] |= model
    save(name, description)
    return description


def save(name, description):
    folder = HERE / "fixtures" / name
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps(description, ensure_ascii=False, separators=(",", ":")) + "\n")

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    random.seed(1)
    bodies = [text.encode() for text in TEXTS] + [bytes.fromhex(text) for text in BROKEN]
    alphabet = "ab 1\n\t'sé\u0301漢😀\u11a8가.<>" + "\u00a0"
    bodies += ["".join(random.choices(alphabet, k=30)).encode() for _ in range(20)]
    cases = []
    for body in bodies:
        ids = tokenizer.encode(body.decode(errors="replace")).ids
        cases.append({"bytes": body.hex(), "ids": ids,
                      "text": tokenizer.decode(ids), "with_special": tokenizer.decode(ids, skip_special_tokens=False)})
    (folder / "cases.json").write_text(json.dumps(cases, ensure_ascii=False, separators=(",", ":")) + "\n")


def make_combinations():
    """fixtures/combinations.json: the small tokenizers of combinations.py; fixtures/models: SentencePiece models."""
    from combinations import all_tokenizers, few_rules, sentence_piece_models
    import sentencepiece
    random.seed(2)
    texts = [text for text in TEXTS if len(text) < 100] + [
        "Noir noir <mask> <sep>  x<s></s> ``a'' ﬁ①②Ａｶﾞ½e\u0301\u0323 \u1100\u1161\u11a8 \u00a0\u3000", "<0x41><0xZZ> \u2581 a\u2581b  \u2581", "zebra 7 Ã", "\t\x07\u200d😀",
        "<tool> <tool>>x\n\n  two   spaces  "]
    alphabet = "ab e1\n\t'sé\u0301漢😀\u11a8가.<>oT" + "\u00a0\u2581"
    texts += ["".join(random.choices(alphabet, k=20)) for _ in range(6)]
    lines = [*SENTENCES.splitlines(keepends=True)[:3] * 15, *SENTENCES.splitlines(keepends=True)]
    with tempfile.TemporaryDirectory() as work:
        rules = few_rules(Path(work))
        tokenizers = []
        for name, tokenizer in all_tokenizers(lines, 290, rules=rules):
            description = tokenizer.to_str()
            own = Tokenizer.from_str(description)
            ids = [own.encode(text).ids for text in texts]
            decoded = [own.decode(each) for each in ids]
            tokenizers.append({"name": name, "tokenizer": json.loads(description), "ids": ids,
                               "texts": [None if a == b else b for a, b in zip(texts, decoded)]})  # None: the same
        dump(HERE / "fixtures" / "combinations.json", {"texts": texts, "tokenizers": tokenizers})
        folder = HERE / "fixtures" / "models"
        folder.mkdir()
        cases = []
        texts = [text for text in texts if "<s>" not in text and "\u2581" not in text]
        for name, model in sentence_piece_models(lines, 400, rules):
            (folder / f"{name}.model").write_bytes(model)
            own = sentencepiece.SentencePieceProcessor(model_proto=model)
            ids = [own.encode(text) for text in texts]
            # sentencepiece decodes the unknown token to " ⁇ ", and transformers to its name.
            cases.append({"name": name, "ids": ids, "texts": [own.decode(each).replace(" \u2047 ", "<unk>") for each in ids]})
        dump(folder / "cases.json", {"texts": texts, "models": cases})


def dump(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n")


def main():
    shutil.rmtree(HERE / "fixtures", ignore_errors=True)
    byte_level = pre_tokenizers.ByteLevel
    split = lambda pattern: pre_tokenizers.Split(Regex(pattern), "isolated")
    make_bert("bert")
    make_bert("bert_cased", cleanup=False, lowercase=False)
    description = make("gpt2", [byte_level(add_prefix_space=False)])
    make("llama3", [split(LLAMA3), byte_level(add_prefix_space=False, use_regex=False)], ignore_merges=True,
         post_processor=lambda t: processors.Sequence([processors.ByteLevel(trim_offsets=False), processors.TemplateProcessing(
             single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", t.token_to_id("<|begin_of_text|>"))])]))
    make("qwen", [split(QWEN), byte_level(add_prefix_space=False, use_regex=False)], normalizer=normalizers.NFC())
    make("smollm", [pre_tokenizers.Digits(individual_digits=True), byte_level(add_prefix_space=False)])
    make("roberta", [byte_level(add_prefix_space=True)], post_processor=lambda t: processors.RobertaProcessing(
        ("<|im_end|>", t.token_to_id("<|im_end|>")), ("<|begin_of_text|>", t.token_to_id("<|begin_of_text|>"))))

    make_combinations()

    # GPT-2's original two files, which give the same tokens.
    folder = HERE / "fixtures" / "two_files"
    folder.mkdir()
    model = description["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"], ensure_ascii=False, separators=(",", ":")) + "\n")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    decoder = {str(token["id"]): {k: v for k, v in token.items() if k != "id"} for token in description["added_tokens"]}
    config = {"tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": decoder, "eos_token": "<|endoftext|>",
              "bos_token": {"__type": "AddedToken", "content": "<|begin_of_text|>"}, "pad_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
