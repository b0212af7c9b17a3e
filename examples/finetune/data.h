#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include <mica/core/tensor.h>
#include <mica/io/tokenizer.h>
#include <mica/nn/packed_documents.h>

/// A sequence to train on.
struct Example {
  std::vector<std::int64_t> tokens;
  /// Index of the first trained token; earlier tokens are only context. At least 1, since nothing predicts the first
  /// token.
  std::int64_t first = 1;

  std::int64_t learned() const { return static_cast<std::int64_t>(tokens.size()) - first; }
};

struct DataOptions {
  std::int64_t context = 0;  // maximum number of input tokens; an example has one more, which is only a target
  bool skip_long = false;    // see Options
};

struct Examples {
  std::vector<Example> examples;
  std::int64_t skipped = 0;  // number of examples that were longer than the context
};

/// The examples of a file: lines of JSON if its name ends in .jsonl (see Options), otherwise a text.
///
/// A text is cut into sequences that fill the context; each begins with the last token of the previous one. The
/// tokenizer's begin and end tokens are added. Throws an Error that names the file and the line.
Examples read_examples(const std::filesystem::path& path, const mica::io::Tokenizer& tokenizer,
                       const DataOptions& options);

/// A batch of examples: inputs and targets (B, T), int64, where T is the length of the longest. Tokens that are not
/// trained have the target −100, which cross_entropy ignores; attention is causal, so padding after an example changes
/// nothing.
///
/// With `pack`, short examples share rows, so there are fewer rows: `packed` separates their attention and positions,
/// and the loss is the same.
struct TokenBatch {
  mica::Tensor inputs, targets;
  mica::nn::PackedDocuments packed;
  std::int64_t learned = 0;  // number of trained tokens
};
TokenBatch batch_of(std::span<const Example* const> examples, bool pack, mica::Device device);
