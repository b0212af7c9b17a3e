#include <algorithm>

#include <mica/core/check.h>
#include <mica/io/permutation.h>
#include <mica/io/token_windows.h>

namespace mica::io {

namespace {

constexpr std::int64_t kIgnored = -100;  // CrossEntropyOptions::ignore_index

}  // namespace

TokenWindows::TokenWindows(const TokenView& tokens, const TokenWindowsOptions& options)
    : tokens_(tokens), options_(options) {
  const std::int64_t context = options.context;
  check(context >= 1, "TokenWindows: expected a context of at least 1, got {}", context);
  check(tokens.size() > context, "TokenWindows: expected more tokens than the context of {}, got {}", context,
        tokens.size());
  const std::int64_t places = tokens.size() - context;  // where a window may begin
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
  if (!options_.separator) {
    return;
  }
  const std::span<std::int64_t> positions = to.field<std::int64_t>(2), documents = to.field<std::int64_t>(3);
  std::int64_t position = 0, document = 0;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const bool begins = i > 0 && inputs[options_.separator_begins ? i : i - 1] == *options_.separator;
    position = begins ? 0 : position;
    document += begins ? 1 : 0;
    positions[i] = position++;
    documents[i] = document;
    if (!options_.separator_begins && inputs[i] == *options_.separator) {
      targets[i] = kIgnored;
    }
  }
}

}  // namespace mica::io
