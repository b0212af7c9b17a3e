#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include <mica/core/tensor.h>
#include <mica/io/tokenizer.h>
#include <mica/nn/packed_documents.h>

/// A sequence to learn.
struct Example {
  std::vector<std::int64_t> tokens;
  /// The first token that is learned; those before are only read. At least 1, as nothing predicts the first one.
  std::int64_t first = 1;

  std::int64_t learned() const { return static_cast<std::int64_t>(tokens.size()) - first; }
};

struct DataOptions {
  std::int64_t context = 0;  // the most tokens that a model reads; an example has one more, which it only predicts
  bool skip_long = false;    // see Options
};

struct Examples {
  std::vector<Example> examples;
  std::int64_t skipped = 0;  // examples that were longer than the context
};

/// The examples of a file: lines of JSON if its name ends in .jsonl (see Options), else a text.
///
/// A text is cut into sequences that fill the context, of which each begins with the token that the one before ended
/// with. Before a text and behind it are the tokens that the tokenizer puts there. Throws an Error that names the file
/// and the line.
Examples read_examples(const std::filesystem::path& path, const mica::io::Tokenizer& tokenizer,
                       const DataOptions& options);

/// Examples side by side: inputs and targets (B, T), int64, as long as the longest. What is not to be learned has the
/// target −100, which cross_entropy ignores; attention is causal, so padding behind an example changes nothing.
///
/// With `pack`, short examples share rows, which are fewer then: `packed` keeps their attention and positions apart, so
/// the loss is the same.
struct TokenBatch {
  mica::Tensor inputs, targets;
  mica::nn::PackedDocuments packed;
  std::int64_t learned = 0;  // tokens
};
TokenBatch batch_of(std::span<const Example* const> examples, bool pack, mica::Device device);
