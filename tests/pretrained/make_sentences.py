#!/usr/bin/env python3
"""Writes fixtures/sentence_bert: a small random model as sentence-transformers saves it, texts, and the vectors that
sentence-transformers gives them. See README.md.

    python3 tests/pretrained/make_sentences.py
"""

import os
import pathlib
import shutil

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")  # the same results on every CPU

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from transformers import BertConfig, BertModel, BertTokenizerFast

FOLDER = pathlib.Path(__file__).parent / "fixtures" / "sentence_bert"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *("##" + letter for letter in LETTERS),
              "the", "of", "##ing", "##ed", ",", ".", "!"]
TEXTS = ["The art of swimming.", "", "a", "b, c", "The end of the art of waiting, of the end of the art of waiting!",
         "É ñ ü", "the [MASK] of", "日本", "painted", "  spaces   and\ttabs ", "c, b", "of the", "x" * 300, "Aa", "a"]
PROMPTS = {"query": "the end of ", "document": ""}
# name of the file: arguments of encode(), and the mode of pooling
EXPECTED = {
    "vectors": ({}, "mean"),
    "query": ({"prompt_name": "query"}, "mean"),
    "cls": ({}, "cls"),
    "max": ({}, "max"),
    "last": ({}, "lasttoken"),
    "two": ({}, ("mean", "max")),
}


def main():
    torch.manual_seed(11)
    shutil.rmtree(FOLDER, ignore_errors=True)
    plain = FOLDER / "plain"
    plain.mkdir(parents=True)
    (plain / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    BertTokenizerFast(str(plain / "vocab.txt"), model_max_length=24).save_pretrained(plain)
    model = BertModel(BertConfig(vocab_size=len(VOCABULARY), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                                 intermediate_size=24, max_position_embeddings=24), add_pooling_layer=False)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape) * 0.3 + (parameter.dim() == 1) * 0.5
    model.save_pretrained(plain)

    transformer = Transformer(str(plain), max_seq_length=12)
    sentences = SentenceTransformer(modules=[transformer, Pooling(16, "mean"), Normalize()], prompts=PROMPTS,
                                    device="cpu")
    sentences.save(str(FOLDER), create_model_card=False)
    shutil.rmtree(plain)
    for name, (arguments, pooling) in EXPECTED.items():
        modes = [pooling] if isinstance(pooling, str) else list(pooling)
        changed = SentenceTransformer(modules=[transformer, Pooling(16, pooling), Normalize()], prompts=PROMPTS,
                                      device="cpu")
        vectors = changed.encode(TEXTS, **arguments)
        assert vectors.shape == (len(TEXTS), 16 * len(modes)) and vectors.dtype == np.float32
        np.save(FOLDER / f"{name}.npy", vectors)
    (FOLDER / "texts.txt").write_text("\n".join(TEXTS) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
