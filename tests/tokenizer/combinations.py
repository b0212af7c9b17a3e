"""Tokenizers of every model with the normalizers, pre-tokenizers, decoders and post-processors that it is used with.

make_fixtures.py stores a few small ones; compare.py trains all on more text, and compares them on random texts.
"""

import io
import json

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

GPT4O = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
SPACE = "\u2581"
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]
ADDED = [AddedToken("<mask>", special=True, lstrip=True), AddedToken("<sep>", special=True, rstrip=True),
         AddedToken("<think>", normalized=False), AddedToken("alone", single_word=True, normalized=False),
         AddedToken("Noir", normalized=True)]


def behaviors():
    return ["removed", "isolated", "merged_with_previous", "merged_with_next", "contiguous"]


def sequence(kind, steps):
    return steps[0] if len(steps) == 1 else kind.Sequence(steps)


def finish(tokenizer, normalizer=(), pre_tokenizer=(), decoder=(), frame=True):
    if normalizer:
        tokenizer.normalizer = sequence(normalizers, list(normalizer))
    if pre_tokenizer:
        tokenizer.pre_tokenizer = sequence(pre_tokenizers, list(pre_tokenizer))
    if decoder:
        tokenizer.decoder = sequence(decoders, list(decoder))
    if frame:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[(t, tokenizer.token_to_id(t)) for t in ("<s>", "</s>")])
    tokenizer.add_tokens(ADDED)
    return tokenizer


def train(model, trainer, texts, normalizer=(), pre_tokenizer=(), **others):
    tokenizer = Tokenizer(model)
    if normalizer:
        tokenizer.normalizer = sequence(normalizers, list(normalizer))
    if pre_tokenizer:
        tokenizer.pre_tokenizer = sequence(pre_tokenizers, list(pre_tokenizer))
    tokenizer.train_from_iterator(texts, trainer)
    return finish(tokenizer, normalizer, pre_tokenizer, **others)


def changed(tokenizer, **model):
    """With other settings of the model, which training does not take."""
    description = json.loads(tokenizer.to_str())
    description["model"] |= model
    return Tokenizer.from_str(json.dumps(description))


def sentence_piece(texts, size, **options):
    """The bytes of a model that the package sentencepiece trains."""
    model = io.BytesIO()
    lines = [line for text in texts for line in text.splitlines() if line]
    if "normalization_rule_tsv" in options:  # a small model
        options["character_coverage"] = 0.98
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=model, vocab_size=size,
                                             hard_vocab_limit=False, minloglevel=2, num_threads=1, **options)
    return model.getvalue()


def pieces(model):
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [(processor.id_to_piece(i), processor.get_score(i)) for i in range(processor.get_piece_size())]


RULES = {"ﬁ": "fi", "①": "1", "②": "2", "Ａ": "A", "ｶ": "カ", "ｶﾞ": "ガ", "e\u0301": "é", "\u00a0": " ", "\u3000": " ", "\t": " ", "\n": " ",
         "\x07": "", "½": "1/2", "\u0323": "", "\u1100\u1161": "가"}


def few_rules(folder):
    """A file of rules of normalization: SentencePiece's own table has 240 KB."""
    path = folder / "rules.tsv"
    codes = lambda text: " ".join(f"{ord(c):X}" for c in text)
    path.write_text("".join(f"{codes(k)}\t{codes(v)}\n" for k, v in RULES.items()))
    return {"normalization_rule_tsv": str(path)}


def character_map(model):
    from transformers.convert_slow_tokenizer import import_protobuf
    proto = import_protobuf().ModelProto()
    proto.ParseFromString(model)
    return proto.normalizer_spec.precompiled_charsmap


def merges_of(vocabulary):
    from transformers.tokenization_utils_base import generate_merges
    return generate_merges(vocabulary)


def byte_pair_of(model, **options):
    """The model that transformers makes of a SentencePiece model with byte-pair encoding."""
    vocabulary = {piece: i for i, (piece, _) in enumerate(pieces(model))}
    return Tokenizer(models.BPE(vocabulary, merges_of(vocabulary), fuse_unk=True, **options))


def sentence_decoder(strip=True):
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return steps + ([decoders.Strip(content=" ", left=1)] if strip else [])


def without(tokenizer, letters):
    """Without some letters, and all merges that need them."""
    description = json.loads(tokenizer.to_str())
    kept = [t for t in description["model"]["vocab"] if not set(t) & set(letters)]
    vocabulary = {token: i for i, token in enumerate(kept)}
    description["model"]["vocab"] = vocabulary
    description["model"]["merges"] = [m for m in description["model"]["merges"]
                                      if all(part in vocabulary for part in [*m, "".join(m)])]
    description["added_tokens"] = []
    description["post_processor"] = None
    result = Tokenizer.from_str(json.dumps(description))
    result.add_special_tokens([*SPECIAL])
    return finish(result)


def all_tokenizers(texts, size, only=None, rules=None):
    """Yields (name, Tokenizer). `rules`: options for SentencePiece's normalization."""
    byte_level = pre_tokenizers.ByteLevel
    bpe = lambda **options: trainers.BpeTrainer(vocab_size=size, special_tokens=SPECIAL, show_progress=False, **options)
    of_bytes = lambda: bpe(initial_alphabet=byte_level.alphabet())
    unigram = lambda: trainers.UnigramTrainer(vocab_size=size, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    word_piece = lambda: trainers.WordPieceTrainer(vocab_size=size, special_tokens=SPECIAL, show_progress=False)
    metaspace = lambda **options: pre_tokenizers.Metaspace(**options)
    wants = lambda name: not only or name in only
    models_of = {}

    def model(name):
        if name not in models_of:
            options = {"llama": dict(model_type="bpe", byte_fallback=True, character_coverage=0.999, **rules or {}),
                       "gemma": dict(model_type="bpe", byte_fallback=True, add_dummy_prefix=False,
                                     remove_extra_whitespaces=False, **rules or dict(normalization_rule_name="identity")),
                       "t5": dict(model_type="unigram", **rules or {})}[name]
            # At least the bytes and the letters.
            models_of[name] = sentence_piece(texts, max(size, 400) if options.get("byte_fallback") else size, **options)
        return models_of[name]

    # Llama 2 and Mistral in old and new files, Gemma, T5, XLM-R, ALBERT
    if wants("llama_legacy"):
        yield "llama_legacy", finish(byte_pair_of(model("llama"), unk_token="<unk>", byte_fallback=True),
                                     [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)], [], sentence_decoder())
    if wants("llama"):
        yield "llama", finish(byte_pair_of(model("llama"), byte_fallback=True), [],
                              [metaspace(prepend_scheme="first", split=False)], sentence_decoder())
    if wants("gemma"):
        yield "gemma", finish(byte_pair_of(model("gemma"), unk_token="<unk>", byte_fallback=True),
                              [normalizers.Replace(" ", SPACE)], [pre_tokenizers.Split(" ", "merged_with_previous")],
                              sentence_decoder(False))
    if wants("llama_without_bytes"):
        yield "llama_without_bytes", finish(byte_pair_of(model("llama"), unk_token="<unk>"),
                                            [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)], [],
                                            sentence_decoder())
    spaces = [pre_tokenizers.WhitespaceSplit(), metaspace(prepend_scheme="always")]
    if wants("t5"):
        yield "t5", finish(Tokenizer(models.Unigram(pieces(model("t5")), unk_id=0)),
                           [normalizers.Precompiled(character_map(model("t5")))], spaces, [decoders.Metaspace()])
    if wants("xlmr"):
        yield "xlmr", finish(Tokenizer(models.Unigram(pieces(model("t5")), unk_id=0)),
                             [normalizers.Precompiled(character_map(model("t5"))), normalizers.Strip(left=False, right=True),
                              normalizers.Replace(Regex(" {2,}"), SPACE)],
                             [metaspace(prepend_scheme="always")], [decoders.Metaspace()])
    if wants("albert"):
        yield "albert", train(models.Unigram(), unigram(), texts,
                              [normalizers.Replace("``", '"'), normalizers.NFKD(), normalizers.StripAccents(),
                               normalizers.Lowercase(), normalizers.Replace(Regex(" {2,}"), " ")],
                              spaces, decoder=[decoders.Metaspace()])
    if wants("unigram_bytes"):
        tokenizer = train(models.Unigram(), unigram(), texts, [normalizers.Nmt(), normalizers.NFKC()],
                          [metaspace(prepend_scheme="never")], decoder=sentence_decoder(False))
        description = json.loads(tokenizer.to_str())
        description["pre_tokenizer"]["split"] = False
        description["model"]["vocab"] += [[f"<0x{byte:02X}>", 0.0] for byte in range(256)]
        description["model"]["byte_fallback"] = True
        for token in description["added_tokens"][len(SPECIAL):]:
            token["id"] += 256
        yield "unigram_bytes", Tokenizer.from_str(json.dumps(description))
    # Byte-pair encoding of characters with marks of words' ends, of bytes with any expression, and with gaps
    if wants("openai_gpt"):
        yield "openai_gpt", train(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"), bpe(end_of_word_suffix="</w>"), texts,
                                  [normalizers.NFD(), normalizers.Strip(), normalizers.Lowercase()], [pre_tokenizers.BertPreTokenizer()],
                                  decoder=[decoders.BPEDecoder(suffix="</w>")])
    if wants("clip"):
        yield "clip", train(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"), bpe(end_of_word_suffix="</w>"), texts,
                            [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()],
                            [pre_tokenizers.Split(Regex(r"'s|'t|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"), "removed", invert=True),
                             byte_level(add_prefix_space=False)], decoder=[decoders.ByteLevel()])
    if wants("bpe_prefix"):
        yield "bpe_prefix", train(models.BPE(unk_token="<unk>", continuing_subword_prefix="##", fuse_unk=True),
                                  bpe(continuing_subword_prefix="##", limit_alphabet=60), texts, [], [pre_tokenizers.Whitespace()],
                                  decoder=[decoders.WordPiece()])
    if wants("bpe_unfused"):
        yield "bpe_unfused", train(models.BPE(unk_token="<unk>"), bpe(limit_alphabet=60), texts, [], [pre_tokenizers.Digits()])
    if wants("gpt4o"):
        yield "gpt4o", train(models.BPE(), of_bytes(), texts, [],
                             [pre_tokenizers.Split(Regex(GPT4O), "removed", invert=True), byte_level(add_prefix_space=False, use_regex=False)],
                             decoder=[decoders.ByteLevel()])
    if wants("deepseek"):
        yield "deepseek", train(models.BPE(), of_bytes(), texts, [],
                                [pre_tokenizers.Split(Regex("[\r\n]"), "isolated"), pre_tokenizers.Split(Regex(r"\s?\p{L}+"), "isolated"),
                                 pre_tokenizers.Split(Regex(r"\s?\p{P}+"), "isolated"), pre_tokenizers.Split(Regex("[一-龥ࠀ-一가-퟿]+"), "isolated"),
                                 pre_tokenizers.Digits(individual_digits=True), byte_level(add_prefix_space=False, use_regex=False)],
                                decoder=[decoders.ByteLevel()])
    if wants("gpt2_gaps"):
        yield "gpt2_gaps", without(train(models.BPE(), of_bytes(), texts, [], [byte_level()], decoder=[decoders.ByteLevel()]), "zÃ7")
    if wants("gpt2_gaps_unk"):
        tokenizer = train(models.BPE(unk_token="<unk>"), of_bytes(), texts, [], [byte_level(add_prefix_space=True)], decoder=[decoders.ByteLevel()])
        yield "gpt2_gaps_unk", without(tokenizer, "zÃ7")
    # WordPiece with other steps than BERT's, and each behavior of Split and Punctuation
    if wants("word_piece"):
        yield "word_piece", train(models.WordPiece(unk_token="<unk>"), word_piece(), texts,
                                  [normalizers.NFKC(), normalizers.Lowercase()], [pre_tokenizers.Whitespace(), pre_tokenizers.Punctuation()],
                                  decoder=[decoders.WordPiece(cleanup=False)])
    for behavior in behaviors():
        if wants(f"split_{behavior}"):
            yield f"split_{behavior}", train(
                models.BPE(unk_token="<unk>"), bpe(), texts, [normalizers.BertNormalizer(lowercase=False)],
                [pre_tokenizers.Split("e", behavior), pre_tokenizers.Split(Regex(r"\s*\p{Lu}|\b"), behavior, invert=behavior == "isolated"),
                 pre_tokenizers.Punctuation(behavior), pre_tokenizers.CharDelimiterSplit("o")],
                decoder=[decoders.Replace("a", "A"), decoders.Strip(content="t", left=1, right=0)])


def sentence_piece_models(texts, size, rules=None):
    """Yields (name, bytes of the model)."""
    unigram, bpe = dict(model_type="unigram"), dict(model_type="bpe")
    yield "unigram", sentence_piece(texts, size, **unigram, **rules or {})
    yield "unigram_folded", sentence_piece(texts, size, **unigram, byte_fallback=True,
                                           **rules or dict(normalization_rule_name="nmt_nfkc_cf"))
    raw = rules or dict(normalization_rule_name="identity")
    yield "unigram_raw", sentence_piece(texts, size, **unigram, **raw, add_dummy_prefix=False, remove_extra_whitespaces=False)
    yield "bpe", sentence_piece(texts, size, **bpe, byte_fallback=True, character_coverage=0.999, **rules or {})
    yield "bpe_raw", sentence_piece(texts, size, **bpe, **raw, remove_extra_whitespaces=False,
                                    user_defined_symbols=["<tool>", "<tool>>", SPACE * 2, "\n"], character_coverage=0.99)
