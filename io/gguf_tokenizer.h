#pragma once

// Tokenizers in the metadata of GGUF files.

#include <cstdint>
#include <string>
#include <vector>

#include <mica/io/gguf.h>
#include <mica/io/tokenizer.h>

namespace mica::io {

/// Whether a file's metadata contain a tokenizer, supported or not.
bool has_gguf_tokenizer(const GgufMetadata& metadata);

/// The tokenizer in a file's metadata: byte-level byte-pair encoding ("gpt2" as tokenizer.ggml.model) with the word
/// splitting (tokenizer.ggml.pre) of GPT-2 ("gpt-2"), SmolLM ("smollm"), Llama 3 ("llama-bpe", "smaug-bpe") or Qwen
/// 2 to 3 ("qwen2", "deepseek-r1-qwen"), or a name that llama.cpp treats as one of these; or SentencePiece's byte-pair
/// encoding ("llama") or unigram model ("t5"). Throws an Error that starts with `what` and names the key, including for
/// tokenizers that are not supported.
///
/// It gives llama.cpp's tokens, except with "qwen2" for texts that are not in Unicode normalization form C: mica
/// normalizes them, as Qwen's own tokenizers do; llama.cpp does not.
Tokenizer gguf_tokenizer(const GgufMetadata& metadata, const std::string& what);

/// The tokens that end a text, according to a file's metadata, sorted: its eos, eot and eom tokens, and control tokens
/// with names such as "<|endoftext|>", "<|im_end|>" and "<|eot_id|>". Empty if the file has no tokenizer; the tokenizer
/// need not be supported.
std::vector<std::int64_t> gguf_end_tokens(const GgufMetadata& metadata);

/// A tokenizer as metadata, which gguf_tokenizer() can read, for a model with `vocabulary` tokens: since llama.cpp
/// requires that many, missing ones are added as unused tokens ("[PAD7]"). Throws an Error for what GGUF cannot
/// express: WordPiece, SentencePiece, a space added before a text, tokens around a text other than bos and eos, added
/// tokens that absorb adjacent spaces.
GgufMetadata gguf_metadata(const Tokenizer& tokenizer, std::int64_t vocabulary);

}  // namespace mica::io
