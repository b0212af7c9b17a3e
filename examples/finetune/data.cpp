#include "examples/finetune/data.h"

#include <fmt/core.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <string_view>

#include <mica/core/creation.h>
#include <mica/core/progress.h>
#include <mica/io/chat.h>
#include <mica/io/json.h>
#include <mica/io/text.h>

using namespace mica;

namespace {

constexpr std::int64_t kIgnored = -100;
constexpr std::size_t kPiece = std::size_t{1} << 18;  // bytes tokenized between two progress reports

/// The tokens that a tokenizer adds before and after a text.
struct Ends {
  std::vector<std::int64_t> before, behind;

  explicit Ends(const io::Tokenizer& tokenizer) {
    before = tokenizer.encode("");
    if (const auto end = tokenizer.eos_token()) {
      // Some tokenizers add it themselves.
      if (!before.empty() && before.back() == *end) {
        before.pop_back();
      }
      behind.push_back(*end);
    }
  }
};

constexpr io::EncodeOptions kPlain{.add_special_tokens = false};

/// Cuts a text where no tokenizer joins both sides: after a line break that is followed by a non-space character.
std::vector<std::string> pieces_of(std::string_view text) {
  std::vector<std::string> pieces;
  while (!text.empty()) {
    std::size_t end = std::min(kPiece, text.size());
    while (end < text.size() && !(text[end - 1] == '\n' && static_cast<unsigned char>(text[end]) > ' ')) {
      ++end;
    }
    pieces.emplace_back(text.substr(0, end));
    text.remove_prefix(end);
  }
  return pieces;
}

void add_windows(const std::vector<std::int64_t>& tokens, std::int64_t context, std::vector<Example>& to) {
  const auto size = static_cast<std::int64_t>(tokens.size());
  for (std::int64_t begin = 0; begin + 1 < size; begin += context) {
    const std::int64_t end = std::min(begin + context + 1, size);
    to.push_back({.tokens = {tokens.begin() + begin, tokens.begin() + end}});
  }
}

Examples examples_of_text(const std::string& text, const io::Tokenizer& tokenizer, const std::string& what,
                          std::int64_t context) {
  const Ends ends(tokenizer);
  std::vector<std::int64_t> tokens = ends.before;
  ProgressTask progress("tokenizing " + what, static_cast<std::int64_t>(text.size()));
  for (const std::string& piece : pieces_of(text)) {
    const std::vector<std::int64_t> more = tokenizer.encode(piece, kPlain);
    tokens.insert(tokens.end(), more.begin(), more.end());
    progress.advance(static_cast<std::int64_t>(piece.size()));
  }
  tokens.insert(tokens.end(), ends.behind.begin(), ends.behind.end());
  Examples result;
  add_windows(tokens, context, result.examples);
  return result;
}

/// Reads a file line by line.
class JsonLines {
 public:
  JsonLines(const io::Tokenizer& tokenizer, const DataOptions& options, std::string file)
      : tokenizer_(tokenizer), options_(options), file_(std::move(file)), ends_(tokenizer) {}

  Examples read(std::string_view text) {
    ProgressTask progress("tokenizing " + file_, static_cast<std::int64_t>(text.size()));
    while (!text.empty()) {
      ++line_;
      const std::size_t end = std::min(text.find('\n'), text.size());
      const std::string_view line = text.substr(0, end);
      if (line.find_first_not_of(" \t\r") != std::string_view::npos) {
        add(io::parse_json(line, where()));
      }
      text.remove_prefix(std::min(end + 1, text.size()));
      progress.advance(static_cast<std::int64_t>(end) + 1);
    }
    return std::move(result_);
  }

 private:
  std::string where() const { return fmt::format("{}, line {}", file_, line_); }

  const std::string* text_of(const io::JsonValue& object, const char* name) const {
    const io::JsonValue* const entry = object.find(name);
    if (entry == nullptr) {
      return nullptr;
    }
    const auto* const text = entry->as<std::string>();
    check(text != nullptr, "{}: expected a string \"{}\"", where(), name);
    return text;
  }

  void add(const io::JsonValue& object) {
    check(object.as<io::JsonValue::Object>() != nullptr, "{}: expected an object", where());
    const std::string* const text = text_of(object, "text");
    const std::string* const prompt = text_of(object, "prompt");
    const std::string* const completion = text_of(object, "completion");
    if (text != nullptr) {
      std::vector<std::int64_t> tokens = ends_.before;
      append(tokens, tokenizer_.encode(*text, kPlain));
      append(tokens, ends_.behind);
      add_windows(tokens, options_.context, result_.examples);
    } else if (prompt != nullptr && completion != nullptr) {
      Example example{.tokens = ends_.before};
      append(example.tokens, tokenizer_.encode(*prompt, kPlain));
      example.first = static_cast<std::int64_t>(example.tokens.size());
      append(example.tokens, tokenizer_.encode(*completion, kPlain));
      append(example.tokens, ends_.behind);
      add(std::move(example));
    } else if (object.find("messages") != nullptr) {
      add_chat(*object.find("messages"));
    } else {
      fail("{}: expected \"text\", or \"prompt\" and \"completion\", or \"messages\"", where());
    }
  }

  /// The last message, with its end token, is trained as the answer to the others.
  void add_chat(const io::JsonValue& list) {
    std::vector<io::ChatMessage> messages;
    const auto* const entries = list.as<io::JsonValue::Array>();
    check(entries != nullptr && entries->size() >= 2, "{}: expected a list of at least two messages", where());
    for (const io::JsonValue& entry : *entries) {
      const std::string *const role = text_of(entry, "role"), *const content = text_of(entry, "content");
      check(role != nullptr && content != nullptr, "{}: expected messages with \"role\" and \"content\"", where());
      io::JsonValue::Object others = *entry.as<io::JsonValue::Object>();  // such as tool_calls
      others.erase("role");
      others.erase("content");
      messages.push_back(
          {.role = *role, .content = *content, .others = others.empty() ? "" : io::to_json({std::move(others)})});
    }
    check(messages.back().role == "assistant", "{}: expected the last message to be the assistant's, got one of {}",
          where(), messages.back().role);
    const std::span<const io::ChatMessage> all(messages);
    std::vector<std::int64_t> question;
    Example example;
    try {
      if (!chat_) {
        chat_.emplace(tokenizer_);
        end_token_ = chat_->end_token();
      }
      question = chat_->encode(all.first(all.size() - 1));
      example.tokens = chat_->encode(all, {.add_generation_prompt = false});
    } catch (const Error& error) {
      fail("{}: {}", where(), error.what());
    }
    // Formats may add a line break after the end token of a message.
    const auto end = std::find(example.tokens.rbegin(), example.tokens.rend(), end_token_);
    example.tokens.erase(end.base(), example.tokens.end());
    const auto [read, differing] =
        std::mismatch(question.begin(), question.end(), example.tokens.begin(), example.tokens.end());
    example.first = read - question.begin();
    add(std::move(example));
  }

  void add(Example example) {
    example.first = std::max<std::int64_t>(example.first, 1);
    const auto size = static_cast<std::int64_t>(example.tokens.size());
    if (size - 1 > options_.context) {
      check(options_.skip_long, "{}: the example has {} tokens, too many for a context of {}; see --skip-long", where(),
            size, options_.context);
      ++result_.skipped;
    } else if (example.learned() > 0) {
      result_.examples.push_back(std::move(example));
    }
  }

  static void append(std::vector<std::int64_t>& to, const std::vector<std::int64_t>& more) {
    to.insert(to.end(), more.begin(), more.end());
  }

  const io::Tokenizer& tokenizer_;
  const DataOptions& options_;
  std::string file_;
  Ends ends_;
  std::optional<io::ChatFormat> chat_;
  std::int64_t end_token_ = 0;  // of an answer
  std::int64_t line_ = 0;
  Examples result_;
};

}  // namespace

Examples read_examples(const std::filesystem::path& path, const io::Tokenizer& tokenizer, const DataOptions& options) {
  const std::string text = io::read_text(path);
  check(text.find_first_not_of(" \t\r\n") != std::string::npos, "{}: the file is empty", path.string());
  Examples result = path.extension() == ".jsonl" ? JsonLines(tokenizer, options, path.string()).read(text)
                                                 : examples_of_text(text, tokenizer, path.string(), options.context);
  check(!result.examples.empty(), "{}: there is nothing to learn{}", path.string(),
        result.skipped > 0 ? fmt::format(": all {} examples are longer than the context", result.skipped) : "");
  return result;
}

TokenBatch batch_of(std::span<const Example* const> examples, bool pack, Device device) {
  const auto length_of = [](const Example& example) { return static_cast<std::int64_t>(example.tokens.size()) - 1; };
  std::int64_t longest = 0;
  for (const Example* const example : examples) {
    longest = std::max(longest, length_of(*example));
  }
  // First-fit decreasing: each example, longest first, goes into the first row with enough room.
  struct Place {
    const Example* example;
    std::int64_t row, column;
  };
  std::vector<Place> places;
  std::vector<std::int64_t> used;  // tokens in each row
  std::vector<const Example*> order(examples.begin(), examples.end());
  if (pack) {
    std::stable_sort(order.begin(), order.end(),
                     [&](const Example* a, const Example* b) { return length_of(*a) > length_of(*b); });
  }
  for (const Example* const example : order) {
    const std::int64_t length = length_of(*example);
    auto row =
        pack ? std::find_if(used.begin(), used.end(), [&](auto n) { return n + length <= longest; }) : used.end();
    if (row == used.end()) {
      row = used.insert(used.end(), 0);
    }
    places.push_back({example, row - used.begin(), *row});
    *row += length;
  }

  const Shape shape{static_cast<std::int64_t>(used.size()), longest};
  const Tensor inputs = zeros(shape, int64), targets = full(shape, kIgnored, int64);
  const Tensor positions = zeros(shape, int64), documents = full(shape, -1, int64);
  TokenBatch batch;
  std::int64_t document = 0;
  for (const auto& [example, row, column] : places) {
    const std::int64_t begin = row * longest + column, length = length_of(*example);
    std::copy_n(example->tokens.begin(), length, inputs.data<std::int64_t>() + begin);
    // Position first − 1 predicts the first trained token.
    std::copy(example->tokens.begin() + example->first, example->tokens.end(),
              targets.data<std::int64_t>() + begin + example->first - 1);
    std::iota(positions.data<std::int64_t>() + begin, positions.data<std::int64_t>() + begin + length, 0);
    std::fill_n(documents.data<std::int64_t>() + begin, length, document++);
    batch.learned += example->learned();
  }
  batch.inputs = inputs.to(device);
  batch.targets = targets.to(device);
  if (pack) {
    batch.packed = {.positions = positions.to(device), .documents = documents.to(device)};
  }
  return batch;
}
