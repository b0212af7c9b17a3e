#include <algorithm>

#include <mica/core/check.h>
#include <mica/io/permutation.h>
#include <mica/io/token_windows.h>

namespace mica::io {

namespace {

constexpr std::int64_t kIgnored = -100;  // CrossEntropyOptions::ignore_index

}  // namespace

void mark_documents(std::span<const std::int64_t> inputs, std::int64_t separator, bool separator_begins,
                    std::span<std::int64_t> targets, std::span<std::int64_t> positions,
                    std::span<std::int64_t> documents) {
  const std::size_t length = inputs.size();
  check(targets.size() == length && positions.size() == length && documents.size() == length,
        "mark_documents: expected four lists of the same length, got {}, {}, {} and {}", length, targets.size(),
        positions.size(), documents.size());
  std::int64_t position = 0, document = 0;
  for (std::size_t i = 0; i < length; ++i) {
    const bool begins = i > 0 && inputs[separator_begins ? i : i - 1] == separator;
    if (begins) {
      position = 0;
      ++document;
    }
    positions[i] = position++;
    documents[i] = document;
    if (!separator_begins && inputs[i] == separator) {
      targets[i] = kIgnored;
    }
  }
}

TokenWindows::TokenWindows(const TokenView& tokens, const TokenWindowsOptions& options)
    : tokens_(tokens), options_(options) {
  const std::int64_t context = options.context;
  check(context >= 1, "TokenWindows: expected a context of at least 1, got {}", context);
  check(tokens.size() > context, "TokenWindows: expected more tokens than the context of {}, got {}", context,
        tokens.size());
  const std::int64_t places = tokens.size() - context;  // number of positions at which a window may begin
  windows_ = std::max<std::int64_t>(1, places / context);
  offsets_ = std::min(context, places - (windows_ - 1) * context);
}

std::vector<Dataset::Field> TokenWindows::fields() const {
  return std::vector<Field>(options_.separator ? 4 : 2, {.shape = {options_.context}, .dtype = int64});
}

void TokenWindows::read(std::int64_t index, std::int64_t epoch, const Sample& to) const {
  const std::uint64_t random = mix_seeds(options_.seed, static_cast<std::uint64_t>(epoch));
  const auto offset = static_cast<std::int64_t>(random % static_cast<std::uint64_t>(offsets_));
  const std::int64_t start = offset + index * options_.context;
  const std::span<std::int64_t> inputs = to.field<std::int64_t>(0), targets = to.field<std::int64_t>(1);
  tokens_.read(start, inputs);
  std::copy(inputs.begin() + 1, inputs.end(), targets.begin());
  tokens_.read(start + options_.context, targets.last(1));
  if (options_.separator) {
    mark_documents(inputs, *options_.separator, options_.separator_begins, targets, to.field<std::int64_t>(2),
                   to.field<std::int64_t>(3));
  }
}

}  // namespace mica::io
