// Runs embed on the small model that tests/pretrained/make_sentences.py wrote, and on bad input.

#include <gtest/gtest.h>
#include <tests/examples/programs.h>
#include <tests/folders.h>
#include <tests/paths.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace fs = std::filesystem;

using mica::testing_support::contents;
using mica::testing_support::Outcome;

namespace {

constexpr std::size_t kHeader = 128, kWidth = 16;

class Embed : public testing::Test {
 protected:
  void SetUp() override {
    if (!fs::exists(programs / "embed")) {
      GTEST_SKIP() << "there is no " << programs / "embed";
    }
    fs::copy(fixture, folder / "model", fs::copy_options::recursive);
  }

  Outcome run(const std::string& options) const {
    return mica::testing_support::run_program(folder, programs, "embed --threads 1 " + options);
  }

  void write(const std::string& name, const std::string& text) const {
    std::ofstream(folder / name, std::ios::binary) << text;
  }
  /// Replaces a part of a file of the model, which must have it.
  void edit(const std::string& name, const std::string& from, const std::string& to) const {
    std::string text = contents(folder / "model" / name);
    const std::size_t at = text.find(from);
    ASSERT_NE(at, std::string::npos) << name << " lacks " << from;
    write("model/" + name, text.replace(at, from.size(), to));
  }
  void restore() const {
    fs::remove_all(folder / "model");
    fs::copy(fixture, folder / "model", fs::copy_options::recursive);
  }

  /// The elements of a .npy file of float32; the header must be as NumPy writes it.
  static std::vector<float> elements(const fs::path& file, std::size_t columns) {
    const std::string bytes = contents(file);
    EXPECT_GE(bytes.size(), kHeader) << file;
    std::vector<float> values(bytes.size() < kHeader ? 0 : (bytes.size() - kHeader) / sizeof(float));
    std::memcpy(values.data(), bytes.data() + bytes.size() - values.size() * sizeof(float),
                values.size() * sizeof(float));
    const std::string shape =
        "'shape': (" + std::to_string(values.size() / columns) + ", " + std::to_string(columns) + ")";
    EXPECT_NE(bytes.substr(0, kHeader).find(shape), std::string::npos) << bytes.substr(0, kHeader);
    return values;
  }

  /// Runs embed on the fixture's texts and compares the vectors with those of sentence-transformers.
  void expect_vectors(const std::string& options, const std::string& expected, std::size_t columns = kWidth,
                      float error = 1e-5F) const {
    SCOPED_TRACE(options);
    const Outcome outcome = run("--model model --input model/texts.txt --device cpu --out out.npy " + options);
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(outcome.out, "15 vectors of " + std::to_string(columns) + " elements in out.npy\n");
    EXPECT_EQ(contents(folder / "out.npy").substr(0, kHeader), contents(fixture / expected).substr(0, kHeader));
    const std::vector<float> got = elements(folder / "out.npy", columns);
    const std::vector<float> wanted = elements(fixture / expected, columns);
    ASSERT_EQ(got.size(), wanted.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_NEAR(got[i], wanted[i], error) << "row " << i / columns;
    }
  }

  void expect_refusal(const std::string& options, int status, const std::string& text) const {
    mica::testing_support::expect_refused(run(options), options, status, text);
    EXPECT_FALSE(fs::exists(folder / "refused.npy")) << options;
  }

  const fs::path fixture =
      fs::path(mica::testing_support::folder_from("MICA_PRETRAINED_FIXTURES", MICA_PRETRAINED_FIXTURES)) /
      "sentence_bert";
  const mica::testing_support::TemporaryFolder own;
  const fs::path folder = own.path();
  const fs::path programs = mica::testing_support::folder_from("MICA_PROGRAMS", MICA_PROGRAMS);
};

// Among the texts are an empty one and one of 300 letters, which is cut to 12 tokens.
TEST_F(Embed, GivesTheVectorsOfSentenceTransformers) {
  expect_vectors("", "vectors.npy");
  expect_vectors("--device auto", "vectors.npy");
  expect_vectors("--precision float32", "vectors.npy", kWidth, 1e-6F);
  expect_vectors("--batch 1", "vectors.npy");
  expect_vectors("--batch 4", "vectors.npy");
  expect_vectors("--prompt query", "query.npy");
  expect_vectors("--prompt document", "vectors.npy");
  expect_vectors("--pooling cls", "cls.npy");
  expect_vectors("--pooling last", "last.npy");
  expect_vectors("--pooling max --normalize yes --max-length 12", "max.npy");
  expect_vectors("--dtype bfloat16", "vectors.npy", kWidth, 0.05F);
  expect_vectors("--quantize", "vectors.npy", kWidth, 0.05F);
}

TEST_F(Embed, ReadsEarlierFilesAndOtherModules) {
  // As versions before 6 wrote them, with the model in a folder of its own.
  edit("1_Pooling/config.json", "\"pooling_mode\": \"mean\"",
       "\"pooling_mode_cls_token\": false, \"pooling_mode_max_tokens\": true, \"pooling_mode_mean_tokens\": false");
  edit("tokenizer_config.json", "\"model_max_length\": 12", "\"model_max_length\": 512");
  edit("modules.json", "sentence_transformers.base.modules.transformer.Transformer",
       "sentence_transformers.models.Transformer");
  edit("modules.json", "\"path\": \"\"", "\"path\": \"0_Transformer\"");
  fs::create_directory(folder / "model/0_Transformer");
  for (const char* const file : {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}) {
    fs::rename(folder / "model" / file, folder / "model/0_Transformer" / file);
  }
  write("model/0_Transformer/sentence_bert_config.json", R"({"max_seq_length": 12, "do_lower_case": false})");
  expect_vectors("", "max.npy");
  expect_vectors("--pooling mean", "vectors.npy");
  restore();

  edit("1_Pooling/config.json", "\"mean\"", "[\"mean\", \"max\"]");
  expect_vectors("", "two.npy", 2 * kWidth);
  edit("config_sentence_transformers.json", "\"default_prompt_name\": null", "\"default_prompt_name\": \"query\"");
  expect_vectors("--pooling mean", "query.npy");
  expect_vectors("--pooling mean --prompt ''", "vectors.npy");
  // A plain encoder: means, not normalized.
  fs::remove(folder / "model/modules.json");
  ASSERT_EQ(run("--model model --text a --out plain.npy --prompt document").status, 0);
  ASSERT_EQ(run("--model model --text a --out unit.npy --prompt document --normalize yes").status, 0);
  const std::vector<float> plain = elements(folder / "plain.npy", kWidth), unit = elements(folder / "unit.npy", kWidth);
  const std::vector<float> expected = elements(fixture / "vectors.npy", kWidth);
  ASSERT_EQ(plain.size(), kWidth);
  ASSERT_EQ(unit.size(), kWidth);
  double squares = 0;
  for (const float x : plain) {
    squares += static_cast<double>(x) * x;
  }
  EXPECT_GT(std::abs(squares - 1), 0.1);
  for (std::size_t i = 0; i < kWidth; ++i) {
    EXPECT_NEAR(unit[i], expected[2 * kWidth + i], 1e-5);
    EXPECT_NEAR(plain[i], unit[i] * std::sqrt(squares), 1e-5);
  }
}

TEST_F(Embed, ReadsLines) {
  const auto rows = [&](const std::string& command) {
    const Outcome outcome = mica::testing_support::run_line(
        folder, command + " | timeout 60 '" + programs.string() + "/embed' --threads 1 --model model --out out.npy");
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    return elements(folder / "out.npy", kWidth);
  };
  const std::vector<float> expected = elements(fixture / "vectors.npy", kWidth);
  EXPECT_EQ(rows("true").size(), 0u);
  EXPECT_EQ(rows("printf '\\n'").size(), kWidth);
  const std::vector<float> two = rows("printf 'b, c\\r\\n\\na'");  // the last line has no end
  ASSERT_EQ(two.size(), 3 * kWidth);
  for (std::size_t i = 0; i < kWidth; ++i) {
    EXPECT_NEAR(two[i], expected[3 * kWidth + i], 1e-5);
    EXPECT_NEAR(two[kWidth + i], expected[kWidth + i], 1e-5);
    EXPECT_NEAR(two[2 * kWidth + i], expected[2 * kWidth + i], 1e-5);
  }
  // More lines than are read at once, and one that is as long as all of them.
  const std::vector<float> many =
      rows("(yes 'b, c' | head -20000; head -c 100000 /dev/zero | tr '\\0' x; yes 'a' | head -3)");
  ASSERT_EQ(many.size(), 20003 * kWidth);
  for (std::size_t i = 0; i < kWidth; ++i) {
    EXPECT_NEAR(many[19999 * kWidth + i], expected[3 * kWidth + i], 1e-5);
    EXPECT_NEAR(many[i], expected[3 * kWidth + i], 1e-5);
    EXPECT_NEAR(many[20000 * kWidth + i], expected[12 * kWidth + i], 1e-5);
    EXPECT_NEAR(many[20002 * kWidth + i], expected[2 * kWidth + i], 1e-5);
  }
}

TEST_F(Embed, RefusesBadInput) {
  const std::string good = "--model model --text a --out refused.npy ";
  write("text.txt", "a\n");
  expect_refusal("--text a --out refused.npy", 2, "--model is required");
  expect_refusal("--model model --text a", 2, "--out is required");
  expect_refusal(good + "--input text.txt", 2, "--text and --input exclude each other");
  expect_refusal(good + "--pooling most", 2, "--pooling");
  expect_refusal(good + "--normalize maybe", 2, "--normalize");
  expect_refusal(good + "--batch 0", 2, "--batch");
  expect_refusal(good + "--prompt title", 2, "--prompt: the model has document, query, got title");
  expect_refusal(good + "--max-length 25", 1, "--max-length: expected at most 24, the model's context, got 25");
  expect_refusal(good + "--max-length 1", 1, "expected a max_length of at least 2");
  expect_refusal("--model none --text a --out refused.npy", 1, "cannot open the folder none");
  expect_refusal("--model model --input none.txt --out refused.npy", 1,
                 "cannot read none.txt: No such file or directory");
  expect_refusal("--model model --input model --out refused.npy", 1, "cannot read model: Is a directory");
  expect_refusal("--model model --text a --out none/refused.npy", 1, "none/refused.npy");

  const auto refuses_after = [&](const std::string& file, const std::string& from, const std::string& to,
                                 const std::string& text) {
    edit(file, from, to);
    expect_refusal(good, 1, text);
    restore();
  };
  refuses_after("modules.json", "modules.normalize.Normalize", "models.Dense",
                "model/modules.json: expected the modules Transformer, Pooling and perhaps Normalize, got Transformer, "
                "Pooling, Dense");
  refuses_after("modules.json", "[", "{", "model/modules.json");
  refuses_after("1_Pooling/config.json", "\"mean\"", "\"middle\"", "\"pooling_mode\"");
  refuses_after("1_Pooling/config.json", "true", "false", "\"include_prompt\"");
  refuses_after("sentence_bert_config.json", "{", "{\"max_seq_length\": 0,", "\"max_seq_length\"");
  refuses_after("sentence_bert_config.json", "{", "{\"do_lower_case\": true,", "\"do_lower_case\"");
  refuses_after("config_sentence_transformers.json", "\"default_prompt_name\": null",
                "\"default_prompt_name\": \"title\"", "\"default_prompt_name\" is \"title\"");
  refuses_after("config_sentence_transformers.json", "{", "{\"truncate_dim\": 8,", "\"truncate_dim\"");
  fs::remove(folder / "model/tokenizer.json");
  expect_refusal(good, 1, "embed: model has no tokenizer");
  restore();
  fs::copy_file(fixture.parent_path() / "smollm/config.json", folder / "model/config.json",
                fs::copy_options::overwrite_existing);
  fs::copy_file(fixture.parent_path() / "smollm/model.safetensors", folder / "model/model.safetensors",
                fs::copy_options::overwrite_existing);
  expect_refusal(good, 1, "model is not an encoder");
}

}  // namespace
