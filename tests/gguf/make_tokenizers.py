#!/usr/bin/env python3
"""Writes fixtures/tokenizers/: the tokenizers of tests/tokenizer in GGUF files, as llama.cpp's conversion stores them, and
llama.cpp's tokens of some texts.

    pip install gguf==0.19.0 llama-cpp-python==0.3.36
    python tests/gguf/make_tokenizers.py

The metadata "test.texts" are the texts, in Unicode normalization form C; "test.counts" are their numbers of tokens;
"test.tokens" are the tokens of all texts, concatenated.
"""

import json
import unicodedata
from pathlib import Path

import gguf
import llama_cpp

HERE = Path(__file__).parent
NAMES = {"gpt2": "gpt-2", "llama3": "llama-bpe", "qwen": "qwen2", "smollm": "smollm"}


def write(name, path, texts=(), tokens=()):
    description = json.loads((HERE.parent / "tokenizer/fixtures" / name / "tokenizer.json").read_text())
    added = {token["id"]: token for token in description["added_tokens"]}
    by_id = {number: text for text, number in description["model"]["vocab"].items()}
    by_id |= {number: token["content"] for number, token in added.items()}
    size = 616
    types = [gguf.TokenType.CONTROL if added.get(i, {}).get("special") else gguf.TokenType.USER_DEFINED if i in added
             else gguf.TokenType.NORMAL if i in by_id else gguf.TokenType.UNUSED for i in range(size)]
    ids = {text: number for number, text in by_id.items()}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in description["model"]["merges"]]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(NAMES[name])
    writer.add_token_list([by_id.get(i, f"[PAD{i}]") for i in range(size)])
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(ids["<|begin_of_text|>"])
    writer.add_eos_token_id(ids["<|endoftext|>"])
    writer.add_chat_template("<|im_start|>{{ message }}<|im_end|>")
    if texts:
        writer.add_array("test.texts", texts)
        writer.add_array("test.counts", [len(each) for each in tokens])
        writer.add_array("test.tokens", [token for each in tokens for token in each])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    (HERE / "fixtures/tokenizers").mkdir(exist_ok=True)
    for name in NAMES:
        path = HERE / "fixtures/tokenizers" / f"{name}.gguf"
        write(name, path)
        model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
        cases = json.loads((HERE.parent / "tokenizer/fixtures" / name / "cases.json").read_text())
        texts = [unicodedata.normalize("NFC", bytes.fromhex(case["bytes"]).decode(errors="replace")) for case in cases]
        texts = [text for text in texts if text and "\0" not in text]
        tokens = [model.tokenize(text.encode(), add_bos=True, special=True) for text in texts]
        write(name, path, texts, tokens)


if __name__ == "__main__":
    main()
