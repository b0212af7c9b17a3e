// Numbers are read and written in the same way whatever the locale is: C's, C++'s, or a stream's.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <clocale>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <locale>
#include <map>
#include <sstream>
#include <string>

#include "tests/files.h"
#include "tests/support.h"
#include <mica/autograd/graph_picture.h>
#include <mica/core/creation.h>
#include <mica/core/rng.h>
#include <mica/io/gguf.h>
#include <mica/io/json.h>
#include <mica/io/pretrained.h>
#include <mica/io/training_checkpoint.h>
#include <mica/nn/models/llama.h>
#include <mica/nn/summary.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/profiler/profiler.h>

using namespace mica;
using namespace mica::testing_support;
namespace fs = std::filesystem;

namespace {

struct Comma : std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

/// Until the end of scope, C++'s global locale has a decimal comma and groups digits, and C's is the one of this name.
class OtherLocale {
 public:
  explicit OtherLocale(const std::string& c_locale = "C")
      : before_(std::locale::global(std::locale(std::locale::classic(), new Comma))),
        c_before_(std::setlocale(LC_ALL, nullptr)),
        is_there_(std::setlocale(LC_ALL, c_locale.c_str()) != nullptr) {}
  ~OtherLocale() {
    std::locale::global(before_);
    std::setlocale(LC_ALL, c_before_.c_str());
  }
  OtherLocale(const OtherLocale&) = delete;
  OtherLocale& operator=(const OtherLocale&) = delete;

  bool is_there() const { return is_there_; }

 private:
  std::locale before_;
  std::string c_before_;
  bool is_there_;
};

class Locales : public testing::Test {
 protected:
  /// Compiles a C locale with this decimal point.
  void make_locale(const std::string& name, const std::string& point, const std::string& charmap) const {
    std::ofstream(locales_.path() / (name + ".txt"))
        << "LC_NUMERIC\ndecimal_point \"" << point << "\"\nthousands_sep \".\"\ngrouping 3;3\nEND LC_NUMERIC\n";
    const std::string to = (locales_.path() / name).string();
    // It warns that there are no other categories, and its status is 1 then.
    (void)std::system(fmt::format("localedef -c {} -i {}.txt {} >/dev/null 2>&1", charmap, to, to).c_str());
  }

  nn::Llama model() const {
    manual_seed(1);
    nn::LlamaConfig config{.vocab = 1234, .layers = 1, .heads = 1, .key_heads = 1, .width = 4, .hidden = 4};
    config.norm_eps = 0.01;
    config.rotary = {.theta = 2.5, .scaling = nn::RotaryScaling::linear, .factor = 1.5};
    return nn::Llama(config);
  }

  /// Texts and files with numbers.
  std::map<std::string, std::string> written() const {
    std::map<std::string, std::string> texts;
    texts["json"] = io::to_json(io::parse_json("[0.01, -2.5e-3, 1234567, 1e300, 12345.5]", "test"));
    nn::Llama llama = model();
    texts["summary"] = nn::summary(llama);
    texts["dot"] = autograd::to_dot(llama.loss(zeros({1, 3}, int64), zeros({1, 3}, int64)));
    const Tensor x = from_data<double>({1234567.5, 0.25, 1e-9}, {3});
    texts["tensor"] = to_string(x);
    std::ostringstream stream;  // with the global locale
    stream << x << Shape{123456, 2};
    texts["stream"] = stream.str();
    try {
      full({1}, 2.5, int64);
    } catch (const Error& error) {
      texts["error"] = error.what();
    }
    io::save_pretrained(llama, folder_ / "model");
    texts["config"] = contents(folder_ / "model/config.json");
    texts["weights"] = contents(folder_ / "model/model.safetensors");
    io::save_gguf(folder_ / "model.gguf", llama);
    texts["gguf"] = contents(folder_ / "model.gguf");
    io::save_training_checkpoint(folder_ / "step", {.step = 123456, .parts = {{"model", llama.state_dict()}}});
    texts["checkpoint"] = contents(folder_ / "step");
    return texts;
  }

  void expect_read() const {
    for (const char* const name : {"model", "model.gguf"}) {
      const auto config = std::get<nn::LlamaConfig>(io::load_pretrained_config(folder_ / name));
      EXPECT_EQ(config.vocab, 1234) << name;
      EXPECT_EQ(config.norm_eps, 0.01) << name;
      EXPECT_EQ(config.rotary.theta, 2.5) << name;
      EXPECT_EQ(config.rotary.factor, 1.5) << name;
    }
    EXPECT_EQ(io::load_training_checkpoint(folder_ / "step").step, 123456);
    const io::JsonValue json = io::parse_json("[0.01, -2.5e-3, 1234567]", "test");
    const auto& list = *json.as<io::JsonValue::Array>();
    EXPECT_EQ(*list[0].as<double>(), 0.01);
    EXPECT_EQ(*list[1].as<double>(), -2.5e-3);
    EXPECT_EQ(*list[2].as<std::int64_t>(), 1234567);
    expect_error([] { io::parse_json("1.5e999", "test"); }, "not valid JSON");

    Profiler profiler;
    sum(ones({3}));
    profiler.stop();
    profiler.write_trace(folder_ / "trace.json");
    const io::JsonValue trace = io::read_json(folder_ / "trace.json", 1 << 20);
    EXPECT_NE(trace.find("traceEvents")->as<io::JsonValue::Array>()->back().find("ts")->as<double>(), nullptr);
    EXPECT_NE(profiler.table().find(" 1.0 "), std::string::npos) << profiler.table();
  }

  const TemporaryFolder own_, locales_;
  const fs::path folder_ = own_.path();
};

TEST_F(Locales, OfCppDoNotMatter) {
  const auto expected = written();
  const OtherLocale other;
  std::ostringstream stream;
  stream << 1234.5;
  ASSERT_EQ(stream.str(), "1.234,5");
  for (const auto& [name, text] : written()) {
    EXPECT_EQ(text, expected.at(name)) << name;
  }
  expect_read();
}

TEST_F(Locales, OfCDoNotMatter) {
  const auto expected = written();
  make_locale("comma", ",", "");
  make_locale("arabic", "<U066B>", "-f UTF-8");  // a decimal point of two bytes
  const char* const path = std::getenv("LOCPATH");
  const std::string path_before = path == nullptr ? "" : path;
  setenv("LOCPATH", locales_.path().c_str(), 1);
  bool any = false;
  for (const char* const name : {"comma", "arabic"}) {
    SCOPED_TRACE(name);
    const OtherLocale other(name);
    if (!other.is_there()) {
      continue;
    }
    any = true;
    ASSERT_EQ(std::strtod("0.5", nullptr), 0);
    for (const auto& [what, text] : written()) {
      EXPECT_EQ(text, expected.at(what)) << what;
    }
    expect_read();
  }
  path == nullptr ? unsetenv("LOCPATH") : setenv("LOCPATH", path_before.c_str(), 1);
  if (!any) {
    GTEST_SKIP() << "localedef does not make locales here";
  }
}

}  // namespace
