#include <algorithm>

#include <mica/core/check.h>
#include <mica/io/permutation.h>
#include <mica/io/token_windows.h>

namespace mica::io {

namespace {

constexpr std::int64_t kIgnored = -100;  // CrossEntropyOptions::ignore_index

void check_length(const char* name, const TokenView& tokens, std::int64_t context) {
  check(context >= 1, "{}: expected a context of at least 1, got {}", name, context);
  check(tokens.size() > context, "{}: expected more tokens than the context of {}, got {}", name, context,
        tokens.size());
}

std::vector<Dataset::Field> window_fields(const TokenWindowsOptions& options) {
  return std::vector<Dataset::Field>(options.separator ? 4 : 2, {.shape = {options.context}, .dtype = int64});
}

void read_window(const TokenView& tokens, std::int64_t start, const TokenWindowsOptions& options, const Sample& to) {
  const std::span<std::int64_t> inputs = to.field<std::int64_t>(0), targets = to.field<std::int64_t>(1);
  tokens.read(start, inputs);
  std::copy(inputs.begin() + 1, inputs.end(), targets.begin());
  tokens.read(start + options.context, targets.last(1));
  if (options.separator) {
    mark_documents(inputs, *options.separator, options.separator_begins, targets, to.field<std::int64_t>(2),
                   to.field<std::int64_t>(3));
  }
}

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
  check_length("TokenWindows", tokens, context);
  const std::int64_t places = tokens.size() - context;  // number of positions at which a window may begin
  windows_ = std::max<std::int64_t>(1, places / context);
  offsets_ = std::min(context, places - (windows_ - 1) * context);
}

std::vector<Dataset::Field> TokenWindows::fields() const { return window_fields(options_); }

void TokenWindows::read(std::int64_t index, std::int64_t epoch, const Sample& to) const {
  const std::uint64_t random = mix_seeds(options_.seed, static_cast<std::uint64_t>(epoch));
  const auto offset = static_cast<std::int64_t>(random % static_cast<std::uint64_t>(offsets_));
  read_window(tokens_, offset + index * options_.context, options_, to);
}

EvenWindows::EvenWindows(const TokenView& tokens, const TokenWindowsOptions& options, std::int64_t most)
    : tokens_(tokens), options_(options) {
  check_length("EvenWindows", tokens, options.context);
  check(most >= 1, "EvenWindows: expected at least 1 window, got {}", most);
  all_ = (tokens.size() - 1) / options.context;
  size_ = std::min(all_, most);
}

std::vector<Dataset::Field> EvenWindows::fields() const { return window_fields(options_); }

void EvenWindows::read(std::int64_t index, std::int64_t, const Sample& to) const {
  read_window(tokens_, index * all_ / size_ * options_.context, options_, to);
}

}  // namespace mica::io
