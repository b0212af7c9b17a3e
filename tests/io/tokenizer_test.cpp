#include <tests/depth.h>
#include <tests/files.h>
#include <tests/folders.h>
#include <tests/paths.h>
#include <tests/support.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <mica/core/progress.h>
#include <mica/io/detail/pre_tokenizer.h>
#include <mica/io/detail/unicode.h>
#include <mica/io/json.h>
#include <mica/io/text.h>
#include <mica/io/tokenizer.h>

using namespace mica;
using namespace mica::testing_support;

namespace tokenizer_test {

namespace fs = std::filesystem;
using Tokens = std::vector<std::int64_t>;

template <class T>
concept GivesTokenBytes = requires(T tokenizer) {
  std::forward<T>(tokenizer).token_bytes(0);
};
static_assert(GivesTokenBytes<const io::Tokenizer&> && !GivesTokenBytes<io::Tokenizer>);

// A folder that tests/tokenizer/make_fixtures.py wrote.
fs::path fixture(const std::string& name) {
  return fs::path(folder_from("MICA_TOKENIZER_FIXTURES", MICA_TOKENIZER_FIXTURES)) / name;
}

struct Case {
  std::string input, text, with_special;
  Tokens tokens;
};
std::vector<Case> cases_of(const std::string& name) {
  std::vector<Case> cases;
  const io::JsonValue json = io::read_json(fixture(name) / "cases.json", 1 << 20);
  for (const io::JsonValue& entry : *json.as<io::JsonValue::Array>()) {
    const auto text = [&](const char* key) { return *entry.find(key)->as<std::string>(); };
    Case each{.input = {}, .text = text("text"), .with_special = text("with_special"), .tokens = {}};
    const std::string hex = text("bytes");
    for (std::size_t i = 0; i < hex.size(); i += 2) {
      each.input.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
    }
    for (const io::JsonValue& id : *entry.find("ids")->as<io::JsonValue::Array>()) {
      each.tokens.push_back(*id.as<std::int64_t>());
    }
    cases.push_back(std::move(each));
  }
  return cases;
}

void expect_the_packages_tokens(const std::string& folder, const std::string& cases_folder) {
  SCOPED_TRACE(folder);
  const io::Tokenizer tokenizer = io::Tokenizer::load(fixture(folder));
  const std::vector<Case> cases = cases_of(cases_folder);
  ASSERT_GT(cases.size(), 30u);
  std::vector<std::string> inputs;
  for (const Case& each : cases) {
    inputs.push_back(each.input);
    EXPECT_EQ(tokenizer.encode(each.input), each.tokens) << each.text;
    EXPECT_EQ(tokenizer.encode(each.input), each.tokens) << "from the cache: " << each.text;
    EXPECT_EQ(tokenizer.decode(each.tokens), each.text);
    EXPECT_EQ(tokenizer.decode(each.tokens, {.skip_special_tokens = false}), each.with_special);
    io::StreamDecoder stream(tokenizer);
    std::string text;
    for (const std::int64_t token : each.tokens) {
      const std::string part = stream.push(token);
      EXPECT_NO_THROW(io::from_utf8(part));
      text += part;
    }
    EXPECT_EQ(text + stream.finish(), each.text);
  }
  const std::vector<Tokens> batch = tokenizer.encode_batch(inputs, {}, 3);
  for (std::size_t i = 0; i < cases.size(); ++i) {
    EXPECT_EQ(batch[i], cases[i].tokens);
  }
}

TEST(Tokenizer, GivesThePackagesTokens) {
  for (const char* const name : {"gpt2", "llama3", "qwen", "smollm", "roberta", "bert", "bert_cased"}) {
    expect_the_packages_tokens(name, name);
  }
  expect_the_packages_tokens("two_files", "gpt2");
}

TEST(Tokenizer, SpecialTokens) {
  const io::Tokenizer llama = io::Tokenizer::load(fixture("llama3"));
  const std::int64_t begin = *llama.find("<|begin_of_text|>");
  EXPECT_TRUE(llama.is_special(begin));
  EXPECT_EQ(llama.encode("a").front(), begin);
  EXPECT_EQ(llama.encode("a", {.add_special_tokens = false}), Tokens{*llama.find("a")});
  // Encoded as text, a special token is split into pieces, and decodes to the same text.
  const Tokens text = llama.encode("x<|im_end|>", {.add_special_tokens = false, .parse_special_tokens = false});
  EXPECT_GT(text.size(), 2u);
  EXPECT_EQ(llama.decode(text), "x<|im_end|>");
  // An added token that is not special is always found.
  const Tokens think = llama.encode("<think>", {.add_special_tokens = false, .parse_special_tokens = false});
  EXPECT_EQ(think, Tokens{*llama.find("<think>")});

  const io::Tokenizer two = io::Tokenizer::load(fixture("two_files"));
  EXPECT_EQ(two.eos_token(), two.find("<|endoftext|>"));
  EXPECT_EQ(two.bos_token(), two.find("<|begin_of_text|>"));
  EXPECT_EQ(two.pad_token(), std::nullopt);
  EXPECT_EQ(two.find("no such token"), std::nullopt);
  const Tokens special = two.special_tokens();
  EXPECT_EQ(special.size(), 7u);
  EXPECT_TRUE(std::is_sorted(special.begin(), special.end()));
  EXPECT_FALSE(two.has_token(-1));
  EXPECT_FALSE(two.has_token(two.vocabulary_size()));
  expect_error([&] { two.decode(Tokens{two.vocabulary_size()}); }, "is not a token of this vocabulary");
  expect_error(
      [&] { two.decode(Tokens{-1}); },
      fmt::format("decode: -1 is not a token of this vocabulary, which ends at {}", two.vocabulary_size() - 1));
}

// Words that a quadratic algorithm would take minutes for.
TEST(Tokenizer, LongWords) {
  const io::Tokenizer tokenizer = io::Tokenizer::load(fixture("qwen"));
  const std::size_t size = 1 << 16;
  std::string mixed;
  for (std::size_t i = 0; i < size; ++i) {
    mixed.push_back("etaoinsr"[i * i % 31 % 8]);
  }
  for (const std::string& word : {std::string(size, 'a'), std::string(size, ' '), std::string(size, '\n'),
                                  std::string(size, '='), mixed, std::string(size, '\xff')}) {
    const Tokens tokens = tokenizer.encode(word);
    const std::string text = tokenizer.decode(tokens);
    EXPECT_EQ(text.size(), word[0] == '\xff' ? 3 * size : size);
    EXPECT_TRUE(word[0] == '\xff' || text == word);
  }
}

// Both ways of merging give the same tokens: a word of 48 bytes at most is short.
TEST(Tokenizer, WordsOfAllLengths) {
  const io::Tokenizer tokenizer = io::Tokenizer::load(fixture("qwen"));
  std::string word;
  Tokens last;
  std::size_t longest = 0;
  for (int i = 0; i < 100; ++i) {
    word += "thereistheword"[i % 14];
    const Tokens tokens = tokenizer.encode(word);
    EXPECT_EQ(tokenizer.decode(tokens), word);
    // One more letter changes only tokens near the end.
    std::size_t same = 0;
    while (same < std::min(last.size(), tokens.size()) && last[same] == tokens[same]) {
      ++same;
    }
    longest = std::max(longest, last.size() - same);
    last = tokens;
  }
  EXPECT_LE(longest, 4u);
}

// A number that is not a token is skipped, even in the middle of a character.
// Capital and small letters alternate from U+0100, from U+0139 and from U+0179 on: the first is capital in each case.
TEST(Tokenizer, BertsLowerCaseLetters) {
  const auto& characters = io::detail::BertCharacters::get();
  for (const auto& [first, last] : {std::pair{0x100, 0x12F}, {0x139, 0x148}, {0x14A, 0x177}, {0x179, 0x17E}}) {
    for (int c = first; c <= last; ++c) {
      const auto expected = static_cast<char32_t>((c - first) % 2 == 0 ? c + 1 : c);
      EXPECT_EQ(characters.lower_case(static_cast<char32_t>(c)), expected) << c;
    }
  }
  EXPECT_EQ(characters.lower_case(U'Σ'), U'σ');
  EXPECT_EQ(characters.lower_case(U'ß'), U'ß');
  EXPECT_EQ(characters.lower_case(U'Ÿ'), U'ÿ');
}

TEST(StreamDecoder, SkipsNumbersThatAreNotTokens) {
  const io::Tokenizer tokenizer = io::Tokenizer::load(fixture("two_files"));
  io::StreamDecoder stream(tokenizer);
  std::string text;
  for (const std::int64_t token : tokenizer.encode("na\u00EFve \U0001F600")) {
    text += stream.push(token) + stream.push(tokenizer.vocabulary_size()) + stream.push(INT64_MAX) + stream.push(-1);
  }
  EXPECT_EQ(text + stream.finish(), "na\u00EFve \U0001F600");
}

TEST(StreamDecoder, HoldsBackIncompleteCharacters) {
  const io::Tokenizer tokenizer = io::Tokenizer::load(fixture("gpt2"));
  // U+1F600 as four tokens of one byte, in GPT-2's alphabet.
  const Tokens bytes{*tokenizer.find("ð"), *tokenizer.find("Ł"), *tokenizer.find("ĺ"), *tokenizer.find("Ģ")};
  ASSERT_EQ(tokenizer.decode(bytes), "😀");
  io::StreamDecoder stream(tokenizer);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(stream.push(bytes[static_cast<std::size_t>(i)]), "");
  }
  EXPECT_EQ(stream.push(bytes[3]), "😀");
  EXPECT_EQ(stream.finish(), "");
  // Special tokens between the bytes change nothing.
  EXPECT_EQ(stream.push(bytes[0]), "");
  EXPECT_EQ(stream.push(*tokenizer.find("<|im_end|>")), "");
  EXPECT_EQ(stream.push(*tokenizer.find("a")), "\uFFFDa");
  EXPECT_EQ(stream.push(bytes[0]), "");
  EXPECT_EQ(stream.finish(), "\uFFFD");
  EXPECT_EQ(stream.finish(), "");
}

TEST(Tokenizer, MatchesCoverEveryText) {
  using io::detail::match_length;
  using io::detail::Pattern;
  const std::string text = "I'll take 1234 of them,  \n\n x\t  y' 's\u3000\u3000z ";
  for (const Pattern pattern : {Pattern::gpt2, Pattern::llama3, Pattern::qwen}) {
    std::size_t at = 0;
    while (at < text.size()) {
      const std::size_t length = match_length(pattern, std::string_view(text).substr(at));
      ASSERT_GE(length, 1u);
      at += length;
    }
    EXPECT_EQ(at, text.size());
  }
}

TEST(Tokenizer, ContractionsOfAnyCase) {
  using io::detail::match_length;
  using io::detail::Pattern;
  for (const Pattern pattern : {Pattern::llama3, Pattern::qwen}) {
    EXPECT_EQ(match_length(pattern, "'sx"), 2u);
    EXPECT_EQ(match_length(pattern, "'Sx"), 2u);
    EXPECT_EQ(match_length(pattern, "'LLx"), 3u);
    EXPECT_EQ(match_length(pattern, "'rEx"), 3u);
    EXPECT_EQ(match_length(pattern, "'\u017Fx"), 3u);  // the long s is another s, of two bytes
  }
  EXPECT_EQ(match_length(Pattern::gpt2, "'sx"), 2u);
  EXPECT_EQ(match_length(Pattern::gpt2, "'Sx"), 1u);
  EXPECT_EQ(match_length(Pattern::gpt2, "'\u017Fx"), 1u);
}

// A minimal tokenizer.json.
std::string file(const std::string& vocabulary, const std::string& merges, const std::string& others = "") {
  return R"({"model": {"type": "BPE", "vocab": {)" + vocabulary + R"(}, "merges": [)" + merges +
         R"(]}, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false})" + others + "}";
}

TEST(Tokenizer, Errors) {
  const auto expect = [](const std::string& json, const std::string& message) {
    expect_error([&] { io::Tokenizer::parse(json, "", "test"); }, message);
  };
  EXPECT_NO_THROW(io::Tokenizer::parse(file(R"("a": 0, "b": 1, "ab": 2)", R"("a b")"), "", "test"));
  expect("[]", "test: expected a \"model\"");
  expect(file(R"("a": 0, "b": 0)", ""), "test: the tokens \"a\" and \"b\" have the same id 0");
  expect(file(R"("a": -1)", ""), "test: the token \"a\" has the id -1, expected one in [0, 65538)");
  expect(file(R"("a": 4000000000)", ""), "has the id 4000000000");
  expect(file(R"("a": 1.5)", ""), "the id of the token \"a\" is not a whole number");
  expect(file(R"("a": 0, "b": 1)", R"("a b")"), "the merge of \"a\" and \"b\" needs the token \"ab\"");
  expect(file(R"("a": 0, "ab": 1)", R"(["a", "b"])"), "needs the token \"b\", which the vocabulary lacks");
  expect(file(R"("a": 0, "b": 1, "ab": 2)", R"("a b", ["a", "b"])"), "the merge of \"a\" and \"b\" appears twice");
  expect(file(R"("a": 0)", R"("a")"), "expected a merge of two tokens with a space between them, got \"a\"");
  expect(file(R"("a": 0)", R"(["a"])"), "expected two tokens as merge 0");
  expect(file(R"("a": 0)", "", R"(, "normalizer": {"type": "Lowercase"})"), "the normalizer \"Lowercase\"");
  expect(file(R"("a": 0)", "", R"(, "added_tokens": [{"id": 1, "content": "a"}])"),
         "the added token \"a\" has the id 1, but 0 in the vocabulary");
  expect(file(R"("a": 0)", "", R"(, "added_tokens": [{"id": 0, "content": "x"}])"), "have the same id 0");
  expect(file(R"("a": 0)", "", R"(, "added_tokens": [{"id": 1, "content": ")" + std::string(5000, 'x') + "\"}]"),
         "has 5000 bytes, expected at most 4096");
  expect(
      file(R"("a": 0)", "", R"(, "post_processor": {"type": "RobertaProcessing", "cls": ["x", 7], "sep": ["x", 7]})"),
      "adds the token 7, which the vocabulary lacks");
  const auto pieces = [](const std::string& rest) {
    return R"({"model": {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a")" + rest;
  };
  expect(pieces("}}"), "expected a text as \"continuing_subword_prefix\"");
  expect(pieces(R"(, "continuing_subword_prefix": "##"}})"), "expected BertPreTokenizer as the pre-tokenizer");
  expect(pieces(R"(, "continuing_subword_prefix": "##", "max_input_chars_per_word": 100000}})"),
         "max_input_chars_per_word is 100000, expected at most 4096");
  expect(R"({"model": {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "b"}})",
         "the vocabulary lacks the unknown token \"b\"");
  expect(R"({"model": {"type": "Unigram"}})", "models of type \"Unigram\" are not supported");
  expect(R"({"model": {"byte_fallback": true}})", "byte_fallback is not supported");
  const std::string model = R"({"model": {"vocab": {"a": 0}, "merges": []}, "pre_tokenizer": )";
  expect(model + "null}", "expected a byte-level pre_tokenizer, got none");
  expect(model + R"({"type": "Whitespace"}})", "the pre-tokenizer \"Whitespace\" is not supported");
  expect(model + R"({"type": "Sequence", "pretokenizers": []}})", "expected ByteLevel as the last pre-tokenizer");
  expect(model + R"({"type": "Split", "pattern": {"Regex": "x+"}, "behavior": "Isolated"}})",
         "the regular expression \"x+\" is not supported");

  const io::Tokenizer one = io::Tokenizer::parse(file(R"("a": 0)", ""), "", "test");
  expect_error([&] { one.encode("ab"); }, "encode: the vocabulary has no token for the byte 0x62");
  EXPECT_EQ(one.encode("aa"), (Tokens{0, 0}));
  expect_error([&] { one.encode_batch(std::vector<std::string>{"a", "b"}, {}, 2); }, "no token for the byte 0x62");
  expect_error([] { io::Tokenizer::load(fixture("")); }, "has no tokenizer");
}

TEST(Tokenizer, ReportsProgressInLongTexts) {
  const io::Tokenizer tokenizer = io::Tokenizer::load(fixture("qwen"));
  std::string text;
  while (text.size() < (std::size_t{3} << 19)) {
    text += "some words, cafe\u0301 <|im_end|>\n";  // normalization makes it shorter
  }
  const auto size = static_cast<std::int64_t>(text.size());
  struct Report {
    std::int64_t done;
    bool finished;
  };
  std::vector<Report> reports;
  std::int64_t expected_total = size;
  const ProgressObserver observer([&](const ProgressReport& report) {
    EXPECT_EQ(report.task, "tokenizing");
    EXPECT_EQ(report.total, expected_total);
    reports.push_back({report.done, report.finished});
  });
  // How many reports there are before the last one depends on the machine.
  const auto expect_finished_once = [&] {
    ASSERT_FALSE(reports.empty());
    std::int64_t before = 0;
    for (std::size_t i = 0; i < reports.size(); ++i) {
      EXPECT_EQ(reports[i].finished, i + 1 == reports.size()) << i;
      EXPECT_GE(reports[i].done, before) << i;
      before = reports[i].done;
    }
    EXPECT_EQ(reports.back().done, expected_total);
    reports.clear();
  };
  const Tokens tokens = tokenizer.encode(text);
  expect_finished_once();
  tokenizer.encode(text.substr(0, 1 << 10));
  EXPECT_TRUE(reports.empty());  // the text is too short for reports
  expected_total = 2 * size;
  EXPECT_EQ(tokenizer.encode_batch(std::vector<std::string>{text, text}, {}, 2), (std::vector<Tokens>{tokens, tokens}));
  expect_finished_once();
}

TEST(Tokenizer, NormalizesLongTextsInPieces) {
  const std::string line = "cafe\u0301\u0323 q\u0307\u0323\u1100\u1161\u11a8\u0130\u4e2d\u0301\n";
  mica::testing_support::OneIn five(5);
  for (const char* name : {"qwen", "bert"}) {
    const io::Tokenizer tokenizer = io::Tokenizer::load(fixture(name));
    const io::EncodeOptions options{.add_special_tokens = false};
    const Tokens of_line = tokenizer.encode(line, options);
    for (const int before : {0, 3, 8}) {  // pieces end at other characters of the line
      if (five.skips()) {
        continue;
      }
      std::string text = std::string(before, '\n');
      Tokens expected = tokenizer.encode(text, options);
      while (text.size() < (std::size_t{9} << 17)) {
        text += line;
        expected.insert(expected.end(), of_line.begin(), of_line.end());
      }
      std::set<std::string> tasks;
      const ProgressObserver observer([&](const ProgressReport& report) { tasks.insert(report.task); });
      EXPECT_EQ(tokenizer.encode(text, options), expected) << name;
      EXPECT_EQ(tasks, (std::set<std::string>{"normalizing", "tokenizing"})) << name;
    }
  }
}

TEST(Tokenizer, SaysWhatCannotBeOpened) {
  const TemporaryFolder folder;
  EXPECT_FALSE(io::Tokenizer::is_in(folder.path()));
  fs::create_symlink("tokenizer.json", folder.path() / "tokenizer.json");  // to itself
  EXPECT_TRUE(io::Tokenizer::is_in(folder.path()));
  expect_error([&] { io::Tokenizer::load(folder.path()); }, "symbolic links");
}

TEST(Tokenizer, ThrowsAfterAMove) {
  io::Tokenizer from = io::Tokenizer::load(fixture("gpt2"));
  const io::Tokenizer copy = from;
  const io::Tokenizer to = std::move(from);
  const std::string message = "Tokenizer: used after it was moved from";
  // NOLINTBEGIN(bugprone-use-after-move)
  expect_error([&] { (void)from.encode("x"); }, message);
  expect_error([&] { (void)from.encode_batch(std::vector<std::string>{"x"}, {}, 1); }, message);
  expect_error([&] { (void)from.decode(Tokens{1}); }, message);
  expect_error([&] { (void)from.vocabulary_size(); }, message);
  expect_error([&] { (void)from.chat_template(); }, message);
  io::StreamDecoder decoder(copy);
  io::StreamDecoder moved = std::move(decoder);
  expect_error([&] { (void)decoder.push(1); }, message);
  // NOLINTEND(bugprone-use-after-move)
  EXPECT_EQ(to.encode("x"), copy.encode("x"));
  EXPECT_EQ(moved.push(copy.encode("x")[0]), "x");
  from = to;
  EXPECT_EQ(from.encode("x"), copy.encode("x"));
}

}  // namespace tokenizer_test
