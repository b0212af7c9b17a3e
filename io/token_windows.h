#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include <mica/io/data_loader.h>
#include <mica/io/tokens.h>

namespace mica::io {

struct TokenWindowsOptions {
  std::int64_t context = 1;  ///< tokens per window
  std::uint64_t seed = 0;    ///< of the offsets at which the sequence is cut
  /// The token between documents. If set, samples also have the fields positions and documents.
  std::optional<std::int64_t> separator{};
  /// Whether the separator is the first token of its document, as in llm.c's files, or the last one, as in nanoGPT's.
  bool separator_begins = true;
};

/// Finds the documents in `inputs`, a part of a token sequence. Writes, for each token, its position in its document
/// and the number of that document, both from 0. If the separator ends documents, the target of each separator becomes
/// −100. All four lists have the same length.
void mark_documents(std::span<const std::int64_t> inputs, std::int64_t separator, bool separator_begins,
                    std::span<std::int64_t> targets, std::span<std::int64_t> positions,
                    std::span<std::int64_t> documents);

/// Windows of a token sequence, to train language models. In each epoch the sequence is cut into adjacent windows,
/// starting at a different offset: a short run covers as much of the sequence as possible, and a long one sees windows
/// at every offset. The fields of a sample, each int64 (context):
///
/// - inputs: the window;
/// - targets: the window shifted by one token;
/// - positions: with a separator, the position in the document, from 0. A document that began before the window
///   counts from the start of the window;
/// - documents: with a separator, the number of the document in the window, from 0, for attention within documents:
///   see nn::PackedDocuments and document_mask().
///
/// If the separator ends documents, the token after it belongs to another document and cannot be predicted from it:
/// that target is −100, which cross_entropy ignores.
class TokenWindows : public Dataset {
 public:
  /// Throws an Error unless there are more tokens than `context`. Keeps the view, not a copy of the tokens.
  TokenWindows(const TokenView& tokens, const TokenWindowsOptions& options);

  std::int64_t size() const override { return windows_; }
  std::vector<Field> fields() const override;
  void read(std::int64_t index, std::int64_t epoch, const Sample& to) const override;

 private:
  TokenView tokens_;
  TokenWindowsOptions options_;
  std::int64_t windows_;  // per epoch
  std::int64_t offsets_;  // the first window of an epoch begins at one of 0 … offsets_ − 1
};

/// Adjacent windows of a token sequence, for validation: all that fit, or `most` of them evenly spaced. Samples have
/// the fields of TokenWindows and do not depend on the epoch.
class EvenWindows : public Dataset {
 public:
  /// Throws an Error unless there are more tokens than options.context, and most ≥ 1. Does not use options.seed. Keeps
  /// the view, not a copy of the tokens.
  EvenWindows(const TokenView& tokens, const TokenWindowsOptions& options,
              std::int64_t most = std::numeric_limits<std::int64_t>::max());

  std::int64_t size() const override { return size_; }
  std::vector<Field> fields() const override;
  void read(std::int64_t index, std::int64_t epoch, const Sample& to) const override;

 private:
  TokenView tokens_;
  TokenWindowsOptions options_;
  std::int64_t all_;  // the number of windows that fit
  std::int64_t size_;
};

}  // namespace mica::io
