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
#include <mica/io/detail/sentence_piece.h>
#include <mica/io/detail/unicode.h>
#include <mica/io/gguf_tokenizer.h>
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

void write_file(const fs::path& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

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

std::vector<std::string> texts_of(const io::JsonValue& list) {
  std::vector<std::string> texts;
  for (const io::JsonValue& text : *list.as<io::JsonValue::Array>()) {
    texts.push_back(*text.as<std::string>());
  }
  return texts;
}

// `expected` has the ids and decoded texts of each text; null: the text itself.
void expect_tokens(const io::Tokenizer& tokenizer, const std::vector<std::string>& texts,
                   const io::JsonValue& expected) {
  const auto& ids = *expected.find("ids")->as<io::JsonValue::Array>();
  const auto& decoded = *expected.find("texts")->as<io::JsonValue::Array>();
  ASSERT_EQ(ids.size(), texts.size());
  for (std::size_t i = 0; i < texts.size(); ++i) {
    Tokens tokens;
    for (const io::JsonValue& id : *ids[i].as<io::JsonValue::Array>()) {
      tokens.push_back(*id.as<std::int64_t>());
    }
    const std::string text = decoded[i].is_null() ? texts[i] : *decoded[i].as<std::string>();
    EXPECT_EQ(tokenizer.encode(texts[i]), tokens) << texts[i];
    EXPECT_EQ(tokenizer.encode(texts[i]), tokens) << "from the cache: " << texts[i];
    EXPECT_EQ(tokenizer.decode(tokens), text) << texts[i];
    io::StreamDecoder stream(tokenizer);
    std::string streamed;
    for (const std::int64_t token : tokens) {
      streamed += stream.push(token);
    }
    EXPECT_EQ(streamed + stream.finish(), text) << texts[i];
  }
}

// Every model with the normalizers, pre-tokenizers and decoders that it is used with: tests/tokenizer/combinations.py.
TEST(Tokenizer, GivesThePackagesTokensForAllCombinations) {
  const io::JsonValue json = io::read_json(fixture("combinations.json"), 1 << 20);
  const std::vector<std::string> texts = texts_of(*json.find("texts"));
  const auto& all = *json.find("tokenizers")->as<io::JsonValue::Array>();
  EXPECT_GE(all.size(), 20u);
  for (const io::JsonValue& entry : all) {
    SCOPED_TRACE(*entry.find("name")->as<std::string>());
    const std::string file = io::to_json(*entry.find("tokenizer"));
#if MICA_WITH_ONIGURUMA
    expect_tokens(io::Tokenizer::parse(file, "", "test"), texts, entry);
#else
    try {
      expect_tokens(io::Tokenizer::parse(file, "", "test"), texts, entry);
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("needs Oniguruma"), std::string::npos) << error.what();
    }
#endif
  }
}

TEST(Tokenizer, GivesSentencePiecesTokens) {
  const io::JsonValue json = io::read_json(fixture("models") / "cases.json", 1 << 20);
  const std::vector<std::string> texts = texts_of(*json.find("texts"));
  const TemporaryFolder folder;
  for (const io::JsonValue& entry : *json.find("models")->as<io::JsonValue::Array>()) {
    const std::string name = *entry.find("name")->as<std::string>();
    SCOPED_TRACE(name);
    const fs::path model = fixture("models") / (name + ".model");
    fs::copy_file(model, folder.path() / "tokenizer.model", fs::copy_options::overwrite_existing);
    write_file(folder.path() / "tokenizer_config.json", R"({"add_bos_token": false})");
    expect_tokens(io::Tokenizer::load(folder.path()), texts, entry);

    write_file(folder.path() / "tokenizer_config.json",
               R"({"tokenizer_class": "LlamaTokenizer", "add_eos_token": true})");
    const io::Tokenizer framed = io::Tokenizer::load(folder.path());
    EXPECT_EQ(framed.bos_token(), framed.find("<s>"));
    const Tokens tokens = framed.encode("a</s>b");
    EXPECT_EQ(tokens.front(), framed.bos_token());
    EXPECT_EQ(tokens.back(), framed.eos_token());
    EXPECT_EQ(std::count(tokens.begin(), tokens.end(), *framed.eos_token()), 2);

    // A file that is cut off or damaged is refused, or is another valid file.
    const std::string bytes = contents(model);
    for (std::size_t size = 0; size < bytes.size(); size += 101) {
      write_file(folder.path() / "tokenizer.model", bytes.substr(0, size));
      try {
        (void)io::Tokenizer::load(folder.path()).encode("abc");
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("tokenizer.model"), std::string::npos) << error.what();
      }
    }
  }
  write_file(folder.path() / "tokenizer_config.json", R"({"tokenizer_class": "XLMRobertaTokenizer"})");
  expect_error([&] { io::Tokenizer::load(folder.path()); }, "it needs a tokenizer.json");
}

// The same models in the metadata of GGUF files.
TEST(Tokenizer, GivesSentencePiecesTokensFromGguf) {
  const io::JsonValue json = io::read_json(fixture("models") / "cases.json", 1 << 20);
  const std::vector<std::string> texts = texts_of(*json.find("texts"));
  for (const io::JsonValue& entry : *json.find("models")->as<io::JsonValue::Array>()) {
    const std::string name = *entry.find("name")->as<std::string>();
    if (name == "bpe_raw") {
      continue;  // has user-defined tokens, which llama.cpp finds in another way
    }
    SCOPED_TRACE(name);
    const io::detail::SentencePieceModel model =
        io::detail::parse_sentence_piece(contents(fixture("models") / (name + ".model")), "test");
    std::vector<std::string> tokens;
    std::vector<float> scores;
    std::vector<std::int32_t> types;
    for (const auto& piece : model.pieces) {
      tokens.push_back(piece.text);
      scores.push_back(static_cast<float>(piece.score));
      types.push_back(piece.type);
    }
    const std::string p = "tokenizer.ggml.";
    const io::GgufMetadata metadata{
        {p + "model", std::string(model.is_unigram ? "t5" : "llama")},
        {p + "tokens", tokens},
        {p + "scores", scores},
        {p + "token_type", types},
        {p + "precompiled_charsmap", std::vector<std::uint8_t>(model.character_map.begin(), model.character_map.end())},
        {p + "add_space_prefix", model.adds_prefix},
        {p + "remove_extra_whitespaces", model.removes_spaces},
        {p + "unknown_token_id", static_cast<std::uint32_t>(*model.unknown_token)},
        {p + "bos_token_id", std::uint32_t{1}},
        {p + "eos_token_id", std::uint32_t{2}},
        {p + "add_bos_token", false},
        {p + "add_eos_token", false}};
    expect_tokens(io::gguf_tokenizer(metadata, "test"), texts, entry);
    io::GgufMetadata framed = metadata;
    framed.erase(p + "add_bos_token");
    framed.erase(p + "add_eos_token");
    const Tokens ends = io::gguf_tokenizer(framed, "test").encode("a");
    EXPECT_EQ(model.is_unigram ? ends.back() : ends.front(), model.is_unigram ? 2 : 1);
    framed[p + "scores"] = std::vector<float>{1};
    expect_error([&] { io::gguf_tokenizer(framed, "test"); }, "tokenizer.ggml.scores\" 1 scores");
  }
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
// As truncation of the package: the tokens around a text stay.
TEST(Tokenizer, CutsLongTexts) {
  const auto bert = io::Tokenizer::load(fixture("bert"));
  const std::string text = "the end of the text";
  const Tokens all = bert.encode(text), own = bert.encode(text, {.add_special_tokens = false});
  ASSERT_EQ(all.size(), own.size() + 2);
  const auto size = static_cast<std::int64_t>(all.size());
  EXPECT_EQ(bert.encode(text, {.max_length = size}), all);
  for (std::int64_t most = 2; most < size; ++most) {
    Tokens cut(all.begin(), all.begin() + most - 1);
    cut.push_back(all.back());
    EXPECT_EQ(bert.encode(text, {.max_length = most}), cut);
    EXPECT_EQ(bert.encode_batch(std::vector{text}, {.max_length = most}).front(), cut);
    EXPECT_EQ(bert.encode(text, {.add_special_tokens = false, .max_length = most}),
              Tokens(own.begin(), own.begin() + std::min<std::ptrdiff_t>(most, own.size())));
  }
  EXPECT_EQ(bert.encode("", {.max_length = 2}), bert.encode(""));
  expect_error([&] { bert.encode(text, {.max_length = 1}); },
               "encode: expected a max_length of at least 2, the tokens around a text, or 0, got 1");
  expect_error([&] { bert.encode(text, {.max_length = -1}); }, "or 0, got -1");
}

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
  expect(file(R"("a": 0)", "", R"(, "normalizer": {"type": "Upper"})"), "the normalizer \"Upper\" is not supported");
  expect(file(R"("a": 0)", "", R"(, "decoder": {"type": "CTC"})"), "the decoder \"CTC\" is not supported");
  expect(file(R"("a": 0)", "", R"(, "decoder": {"type": "Strip", "content": "", "start": 1, "stop": 0})"),
         "the content of Strip is empty");
  for (const char* const map : {"AAAA", "////", "BAAAAA==", "IAAAAAAA"}) {
    expect(file(R"("a": 0)", "",
                R"(, "normalizer": {"type": "Precompiled", "precompiled_charsmap": ")" + std::string(map) + "\"}"),
           "the table of characters");
  }
  expect(file(R"("a": 0)", "", R"(, "normalizer": {"type": "Precompiled", "precompiled_charsmap": "?"})"),
         "is not Base64");
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
  expect(pieces(R"(, "continuing_subword_prefix": "##", "max_input_chars_per_word": 100000}})"),
         "max_input_chars_per_word is 100000, expected at most 4096");
  expect(R"({"model": {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "b"}})",
         "the vocabulary lacks the unknown token \"b\"");
  expect(R"({"model": {"type": "WordLevel"}})", "models of type \"WordLevel\" are not supported");
  const auto unigram = [](const std::string& rest) {
    return R"({"model": {"type": "Unigram", "vocab": )" + rest + "}}";
  };
  expect(unigram("{}"), "expected a list as \"vocab\"");
  expect(unigram(R"([["a"]])"), "expected a text and a number as token 0");
  expect(unigram(R"([["a", 0], ["b", "c"]])"), "expected a text and a number as token 1");
  expect(unigram(R"([["a", 0]], "unk_id": 1)"), "unk_id is 1, which is not one of the 1 tokens");
  const std::string model = R"({"model": {"vocab": {"a": 0}, "merges": []}, "pre_tokenizer": )";
  expect(model + R"({"type": "UnicodeScripts"}})", "the pre-tokenizer \"UnicodeScripts\" is not supported");
  const auto split = [&](const std::string& pattern, const std::string& behavior) {
    return model + R"({"type": "Split", "pattern": )" + pattern + R"(, "behavior": ")" + behavior + "\"}}";
  };
  expect(split(R"({"String": "x"})", "Everywhere"), "behavior is \"Everywhere\", which is not supported");
  expect(split(R"({"Regex": "(x"})", "Isolated"),
         MICA_WITH_ONIGURUMA ? "the regular expression \"(x\" is not valid" : "needs Oniguruma");
  // An expression whose time would grow exponentially with the text.
  if (MICA_WITH_ONIGURUMA) {
    const io::Tokenizer slow = io::Tokenizer::parse(split(R"({"Regex": "(x|xx)+[yz]"})", "Isolated"), "", "test");
    expect_error([&] { slow.encode(std::string(100, 'x') + " z"); }, "the regular expression \"(x|xx)+[yz]\" fails");
  }

  // Bytes that no token stands for are dropped, or are the unknown token.
  const io::Tokenizer one = io::Tokenizer::parse(file(R"("a": 0)", ""), "", "test");
  EXPECT_EQ(one.encode("bab a"), (Tokens{0, 0}));
  const auto refuse = [](const io::Tokenizer& tokenizer, const std::string& text) {
    expect_error([&] { tokenizer.encode(text, {.refuse_unknown = true}); }, "encode: the vocabulary lacks a part of");
  };
  refuse(one, "ab");
  refuse(one, "ab");  // not from the cache
  EXPECT_EQ(one.encode("aa", {.refuse_unknown = true}), (Tokens{0, 0}));
  expect_error(
      [&] {
        one.encode_batch(std::vector<std::string>{"a", "b"}, {.refuse_unknown = true}, 2);
      },
      "encode: the vocabulary lacks a part of \"b\"");
  const io::Tokenizer unknown = io::Tokenizer::parse(
      R"({"model": {"type": "BPE", "vocab": {"a": 0, "?": 1}, "unk_token": "?", "fuse_unk": true, "merges": []}})", "",
      "test");
  EXPECT_EQ(unknown.encode("bbabb"), (Tokens{1, 0, 1}));
  refuse(unknown, "ab");
  expect_error([] { io::Tokenizer::load(fixture("")); }, "has no tokenizer");
}

TEST(Tokenizer, FollowsItsConfiguration) {
  const std::string metaspace =
      R"({"model": {"type": "BPE", "vocab": {"<s>": 0, "</s>": 1, "a": 2, "\u2581": 3}, "merges": []},
    "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": true},
    "added_tokens": [{"id": 0, "content": "<s>", "special": true, "normalized": false}]})";
  const auto encode = [&](const std::string& config, const std::string& text) {
    return io::Tokenizer::parse(metaspace, config, "test").encode(text);
  };
  EXPECT_EQ(encode("", "a a"), (Tokens{3, 2, 3, 2}));
  EXPECT_EQ(encode(R"({"add_prefix_space": false})", "a a"), (Tokens{2, 3, 2}));
  EXPECT_EQ(encode(R"({"add_prefix_space": true})", "a"), (Tokens{3, 2}));
  EXPECT_EQ(encode(R"({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": true})", "a"), (Tokens{0, 3, 2}));
  EXPECT_EQ(encode(R"({"bos_token": "<s>", "eos_token": "</s>", "add_eos_token": true})", "a"), (Tokens{3, 2, 1}));
  // Named tokens are found in a text, and get a number if they have none.
  EXPECT_EQ(encode("", "</s>"), (Tokens{3}));
  EXPECT_EQ(encode(R"({"eos_token": "</s>"})", "a</s>"), (Tokens{3, 2, 1}));
  EXPECT_EQ(encode(R"({"pad_token": "<pad>", "added_tokens_decoder": {"9": {"content": "<x>"}}})", "<x><pad>"),
            (Tokens{9, 10}));
  const io::Tokenizer first =
      io::Tokenizer::parse(std::string(metaspace).replace(metaspace.find("always"), 6, "first"), "", "test");
  EXPECT_EQ(first.encode("a<s>a"), (Tokens{3, 2, 0, 2}));
}

TEST(Tokenizer, BytesOfTokens) {
  const io::Tokenizer tokenizer = io::Tokenizer::parse(
      R"({"model": {"type": "BPE", "byte_fallback": true, "vocab": {"<0xE2>": 0, "\u2581a": 1, "b": 2}, "merges": []},
       "decoder": {"type": "Sequence", "decoders": [
         {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
         {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}})",
      "", "test");
  EXPECT_EQ(tokenizer.token_bytes(0), "\xE2");
  EXPECT_EQ(tokenizer.token_bytes(1), " a");
  EXPECT_EQ(tokenizer.decode(Tokens{1, 1, 0, 2}), "a a\uFFFDb");
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
