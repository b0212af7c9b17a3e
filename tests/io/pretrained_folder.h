#pragma once

// Shared code of the tests of pretrained models: their folders.

#include <gtest/gtest.h>
#include <tests/folders.h>
#include <tests/paths.h>
#include <tests/support.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <mica/io/pretrained.h>
#include <mica/io/safetensors.h>

namespace mica::pretrained_testing {

using namespace mica::testing_support;

namespace fs = std::filesystem;

inline const fs::path kFixtures = folder_from("MICA_PRETRAINED_FIXTURES", MICA_PRETRAINED_FIXTURES);

inline const std::vector<std::string> kModels{"gpt2",
                                              "gpt2_gelu_sharded",
                                              "gpt2_base",
                                              "llama3",
                                              "llama_dynamic",
                                              "llama_longrope",
                                              "smollm",
                                              "smollm3",
                                              "gemma2",
                                              "gemma2_window",
                                              "gemma3",
                                              "mistral",
                                              "mistral_longrope",
                                              "mistral_window",
                                              "qwen2",
                                              "qwen2_window",
                                              "qwen3",
                                              "phi3",
                                              "phi3_longrope",
                                              "phi4_mini",
                                              "granite",
                                              "granite_biases",
                                              "granite_ones",
                                              "olmo2",
                                              "olmo2_biases",
                                              "olmo2_narrow",
                                              "starcoder2",
                                              "starcoder2_plain",
                                              "starcoder2_wide",
                                              "bert",
                                              "bert_tanh_sharded",
                                              "bert_no_pooler",
                                              "bert_pretraining",
                                              "bert_sequence",
                                              "bert_tokens",
                                              "roberta",
                                              "roberta_masked",
                                              "roberta_tokens",
                                              "xlm_roberta_sequence",
                                              "distilbert",
                                              "distilbert_masked",
                                              "distilbert_sequence",
                                              "modern_bert",
                                              "modern_bert_masked",
                                              "modern_bert_tokens",
                                              "modern_bert_sequence"};

inline bool is_encoder(const std::string& model) { return model.find("bert") != std::string::npos; }

/// A separate, empty folder per test.
class Pretrained : public testing::Test {
 protected:
  Pretrained() {
    const auto* const test = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = fs::path(testing::TempDir()) / ("mica_pretrained_" + std::string(test->name()));
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  ~Pretrained() override { fs::remove_all(folder_); }

  void copy(const std::string& fixture) const {
    fs::remove_all(folder_);
    fs::copy(kFixtures / fixture, folder_);
  }
  void write(const std::string& file, const std::string& bytes) const {
    std::ofstream(folder_ / file, std::ios::binary) << bytes;
  }
  std::string read(const std::string& file) const {
    std::ifstream in(folder_ / file, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  /// Copies a fixture and replaces a part of its config.json.
  void copy_with(const std::string& fixture, const std::string& from, const std::string& to) const {
    copy(fixture);
    std::string config = read("config.json");
    const std::size_t at = config.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    write("config.json", config.replace(at, from.size(), to));
  }
  template <class F>
  void change_weights(const F& f) const {
    StateDict state = io::load(folder_ / "model.safetensors");
    f(state);
    io::save(folder_ / "model.safetensors", state);
  }
  void expect_refused(const std::string& message, const io::LoadOptions& options = {}) const {
    expect_error([&] { io::load_pretrained(folder_, options); }, message);
  }

  fs::path folder_;
};

}  // namespace mica::pretrained_testing
