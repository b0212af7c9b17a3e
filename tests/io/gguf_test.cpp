#include <tests/files.h>
#include <tests/folders.h>
#include <tests/paths.h>
#include <tests/support.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <mica/autograd/grad_mode.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/rng.h>
#include <mica/infer/generate.h>
#include <mica/io/detail/gguf_header.h>
#include <mica/io/gguf.h>
#include <mica/io/pretrained.h>
#include <mica/io/tokenizer.h>
#include <mica/nn/lora.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace gguf_test {

namespace fs = std::filesystem;

// A file that tests/gguf/make_fixtures.py wrote with llama.cpp's package.
fs::path fixture(const std::string& name) {
  return fs::path(folder_from("MICA_GGUF_FIXTURES", MICA_GGUF_FIXTURES)) / name;
}

/// A separate, empty folder per test.
class Gguf : public testing::Test {
 protected:
  void write(const std::string& bytes) const { std::ofstream(path_, std::ios::binary) << bytes; }

  const TemporaryFolder own_;
  const fs::path folder_ = own_.path(), path_ = folder_ / "model.gguf";
};

void expect_same_bits(const StateDict& a, const StateDict& b) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, tensor] : a) {
    const Tensor& other = b.at(name);
    ASSERT_EQ(tensor.shape(), other.shape()) << name;
    ASSERT_EQ(tensor.dtype(), other.dtype()) << name;
    EXPECT_EQ(std::memcmp(tensor.raw_data(), other.raw_data(), tensor.bytes()), 0) << name;
  }
}

/// Builds a file byte by byte.
class Bytes {
 public:
  template <class T>
  Bytes& number(T value) {
    text_.append(reinterpret_cast<const char*>(&value), sizeof(T));
    return *this;
  }
  Bytes& text(const std::string& value) {
    number<std::uint64_t>(value.size());
    text_ += value;
    return *this;
  }
  Bytes& header(std::uint64_t tensors, std::uint64_t values, std::uint32_t version = 3) {
    text_ += "GGUF";
    return number(version).number(tensors).number(values);
  }
  Bytes& tensor(const std::string& name, const std::vector<std::uint64_t>& sizes, std::uint32_t type,
                std::uint64_t offset) {
    text(name).number(static_cast<std::uint32_t>(sizes.size()));
    for (const std::uint64_t size : sizes) {
      number(size);
    }
    return number(type).number(offset);
  }
  Bytes& data(std::size_t alignment, std::size_t bytes) {
    text_.resize((text_.size() + alignment - 1) / alignment * alignment + bytes, '\1');
    return *this;
  }
  operator const std::string&() const { return text_; }

 private:
  std::string text_;
};

TEST_F(Gguf, EveryTypeIsReadAndWrittenAsThePackageDoes) {
  const StateDict tensors = io::load_gguf(fixture("every_type.gguf"));
  const io::GgufMetadata metadata = io::load_gguf_metadata(fixture("every_type.gguf"));
  EXPECT_EQ(tensors.at("f32").dtype(), float32);
  EXPECT_EQ(tensors.at("bf16").dtype(), bfloat16);
  EXPECT_EQ(tensors.at("f64").dtype(), float64);
  EXPECT_EQ(tensors.at("four.axes").shape(), (Shape{1, 2, 3, 4}));
  EXPECT_EQ(tensors.at("f16").shape(), (Shape{3, 5}));
  for (std::int64_t i = 0; i < 15; ++i) {
    const float expected = -3 + 6 * static_cast<float>(i) / 14;
    EXPECT_NEAR(tensors.at("f32").data<float>()[i], expected, 1e-6);
    EXPECT_NEAR(static_cast<float>(tensors.at("f16").data<Float16>()[i]), expected, 2e-3);
    EXPECT_NEAR(static_cast<float>(tensors.at("bf16").data<BFloat16>()[i]), expected, 2e-2);
  }
  EXPECT_EQ(tensors.at("i64").data<std::int64_t>()[0], std::int64_t{1} << 62);
  EXPECT_EQ(tensors.at("i32").data<std::int32_t>()[0], -3);
  EXPECT_EQ(std::get<std::string>(metadata.at("general.architecture")), "mica");
  EXPECT_EQ(std::get<std::string>(metadata.at("general.name")), "naïve 漢字");
  EXPECT_EQ(std::get<std::int8_t>(metadata.at("value.i8")), -6);
  EXPECT_EQ(std::get<std::uint64_t>(metadata.at("value.u64")), std::uint64_t{1} << 63);
  EXPECT_EQ(std::get<std::vector<std::string>>(metadata.at("list.string")), (std::vector<std::string>{"a", "", "bc"}));
  EXPECT_EQ(std::get<std::vector<bool>>(metadata.at("list.bool")), (std::vector<bool>{true, false}));

  io::save_gguf(path_, tensors, metadata);
  EXPECT_EQ(contents(path_), contents(fixture("every_type.gguf")));
}

TEST_F(Gguf, QuantizedBlocksAreThePackages) {
  const StateDict source = io::load_gguf(fixture("source.gguf"));
  const io::GgufMetadata metadata = io::load_gguf_metadata(fixture("source.gguf"));
  for (const auto& [name, type] : {std::pair{"q8_0", io::GgufType::q8_0}, {"q4_0", io::GgufType::q4_0}}) {
    SCOPED_TRACE(name);
    const fs::path theirs = fixture(std::string(name) + ".gguf");
    io::save_gguf(path_, source, metadata, {.matrices = type});
    EXPECT_EQ(contents(path_), contents(theirs));
    expect_same_bits(io::load_gguf(theirs), io::load_gguf(fixture(std::string(name) + "_values.gguf")));
    const auto types = io::load_gguf_types(theirs);
    EXPECT_EQ(types.at("a.weight"), type);
    EXPECT_EQ(types.at("b.weight"), type);
    EXPECT_EQ(types.at("bias"), io::GgufType::f32);
    EXPECT_EQ(types.at("odd.weight"), io::GgufType::f32);
    // Into another dtype.
    const Tensor narrow = io::load_gguf(theirs, {.dequantized = bfloat16}).at("a.weight");
    EXPECT_EQ(narrow.dtype(), bfloat16);
    EXPECT_EQ(io::load_gguf(theirs, {.dequantized = bfloat16}).at("bias").dtype(), float32);
  }
}

// Random blocks of every type, also more of them: see make_fixtures.py.
TEST_F(Gguf, BlocksHaveTheValuesOfThePackage) {
  const char* const more = std::getenv("MICA_GGUF_BLOCKS");
  const fs::path folder = more != nullptr ? fs::path(more) : fixture("");
  expect_same_bits(io::load_gguf(folder / "blocks.gguf"), io::load_gguf(folder / "blocks_values.gguf"));
  EXPECT_EQ(io::load_gguf_types(folder / "blocks.gguf").at("iq4_xs"), io::GgufType::iq4_xs);
}

// The package has no values of this type: a float32 scale, 256 integers of 8 bits, and their sums.
TEST_F(Gguf, BlocksOf8BitsWithAFloatScale) {
  Bytes bytes;
  bytes.header(1, 0).tensor("x", {256}, 15, 0).data(32, 0).number(-0.3F);
  for (int i = 0; i < 256; ++i) {
    bytes.number(static_cast<std::int8_t>(i));
  }
  write(bytes.data(1, 32));
  const Tensor x = io::load_gguf(path_).at("x");
  for (int i = 0; i < 256; ++i) {
    EXPECT_EQ(x.data<float>()[i], -0.3F * static_cast<float>(static_cast<std::int8_t>(i)));
  }
}

TEST_F(Gguf, SplitModels) {
  expect_same_bits(io::load_gguf(fixture("split-00001-of-00003.gguf")), io::load_gguf(fixture("source.gguf")));
  expect_same_bits(io::load_gguf(fixture("split-00001-of-00003.gguf"), {.mapped = true}),
                   io::load_gguf(fixture("source.gguf")));
  EXPECT_EQ(io::load_gguf_types(fixture("split-00001-of-00003.gguf")).size(), 4u);
  EXPECT_EQ(std::get<std::string>(io::load_gguf_metadata(fixture("split-00001-of-00003.gguf")).at("general.name")),
            "three files");
  expect_error([] { io::load_gguf(fixture("split-00002-of-00003.gguf")); },
               "the model is split into 3 files, expected the first one, with a name that ends in "
               "\"-00001-of-00003.gguf\"");
  const auto copy = [&](int from, int to) {
    fs::copy_file(fixture("split-0000" + std::to_string(from) + "-of-00003.gguf"),
                  folder_ / ("x-0000" + std::to_string(to) + "-of-00003.gguf"), fs::copy_options::overwrite_existing);
  };
  const auto expect = [&](const std::string& message) {
    expect_error([&] { io::load_gguf(folder_ / "x-00001-of-00003.gguf"); }, message);
  };
  copy(1, 1);
  expect("x-00002-of-00003.gguf");  // is not there
  copy(2, 2);
  copy(2, 3);
  expect("x-00003-of-00003.gguf: expected part 3 of 3");
  copy(3, 3);
  EXPECT_EQ(io::load_gguf(folder_ / "x-00001-of-00003.gguf").size(), 4u);
  const auto save = [&](const std::string& name, const StateDict& tensors, int part, int count, int total) {
    io::save_gguf(folder_ / name, tensors,
                  {{"split.no", static_cast<std::uint16_t>(part)},
                   {"split.count", static_cast<std::uint16_t>(count)},
                   {"split.tensors.count", total}});
  };
  save("x-00001-of-00003.gguf", {{"a.weight", zeros({2})}}, 0, 3, 5);
  expect("x-00002-of-00003.gguf: the tensor \"a.weight\" is in another file, too");
  save("x-00001-of-00003.gguf", {}, 0, 3, 5);
  expect("the files of the model have 4 tensors, but \"split.tensors.count\" is 5");
  save("x-00001-of-00003.gguf", {}, 0, 60000, 5);
  expect("expected \"split.count\" from 0 to 4096, got 60000");
}

// Relative to the norm of the tensor: llama.cpp's own errors of normal numbers are 0.069 and 0.0155.
TEST_F(Gguf, WritesBlocksOf256) {
  manual_seed(5);
  const Tensor x = randn({8, 512}), small = x * 1e-5, zero = zeros({1, 256});
  const Tensor shifted = x * 0.1 + 3;
  const StateDict tensors{{"x", x}, {"small", small}, {"zero", zero}, {"shifted", shifted}, {"short", randn({2, 96})}};
  for (const auto& [type, expected] : {std::pair{io::GgufType::q4_k, 0.072}, {io::GgufType::q6_k, 0.0175}}) {
    io::save_gguf(path_, tensors, {}, {.matrices = type, .types = {{"small", io::GgufType::q8_0}}});
    const StateDict read = io::load_gguf(path_);
    const auto types = io::load_gguf_types(path_);
    EXPECT_EQ(types.at("x"), type);
    EXPECT_EQ(types.at("small"), io::GgufType::q8_0);
    EXPECT_EQ(types.at("short"), io::GgufType::q8_0);
    const auto error = [&](const std::string& name) {
      const Tensor &a = read.at(name), &b = tensors.at(name);
      double difference = 0, size = 0;
      for (std::int64_t i = 0; i < a.numel(); ++i) {
        difference += std::pow(a.data<float>()[i] - b.data<float>()[i], 2);
        size += std::pow(b.data<float>()[i], 2);
      }
      return size == 0 ? difference : std::sqrt(difference / size);
    };
    EXPECT_LT(error("x"), expected);
    EXPECT_GT(error("x"), expected / 2);
    EXPECT_LT(error("shifted"), type == io::GgufType::q4_k ? 0.06 : 0.016);
    EXPECT_EQ(error("zero"), 0);
  }
}

// Tensors are quantized in chunks of 2¹⁸ elements, and this one has more than two. Each block has its own sign and
// scale, so that no other block could take its place.
TEST_F(Gguf, QuantizedTensorsOfSeveralChunks) {
  constexpr std::int64_t kRows = 17, kColumns = std::int64_t{1} << 15, kBlock = 32;
  const Tensor x = empty({kRows, kColumns});
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    const std::int64_t block = i / kBlock;
    const auto scale = static_cast<float>(block % 2 == 0 ? block + 1 : -block);
    x.data<float>()[i] = i % kBlock == 0 ? scale : scale / 2;
  }
  for (const io::GgufType type : {io::GgufType::q8_0, io::GgufType::q4_0}) {
    io::save_gguf(path_, {{"x", x}}, {}, {.matrices = type});
    EXPECT_EQ(io::load_gguf_types(path_).at("x"), type);
    const Tensor read = io::load_gguf(path_).at("x");
    ASSERT_EQ(read.shape(), x.shape());
    const double step = type == io::GgufType::q8_0 ? 1.0 / 127 : 1.0 / 8;  // of a block's largest element
    std::int64_t wrong = 0;
    for (std::int64_t i = 0; i < x.numel(); ++i) {
      const double expected = x.data<float>()[i], largest = x.data<float>()[i / kBlock * kBlock];
      // Scales are rounded to float16.
      wrong += std::abs(read.data<float>()[i] - expected) > (step / 2 + 1e-3) * std::abs(largest) ? 1 : 0;
    }
    EXPECT_EQ(wrong, 0);
  }
}

TEST_F(Gguf, DTypesAndViews) {
  StateDict source = io::load_gguf(fixture("source.gguf"));
  source["view"] = transpose(source.at("a.weight"), 0, 1);
  source["scalar"] = full({}, 2.0);
  io::save_gguf(path_, source, {}, {.matrices = io::GgufType::bf16, .vectors = io::GgufType::f16});
  const StateDict read = io::load_gguf(path_);
  EXPECT_EQ(read.at("a.weight").dtype(), bfloat16);
  EXPECT_EQ(read.at("bias").dtype(), float16);
  EXPECT_EQ(read.at("scalar").shape(), Shape{});
  EXPECT_EQ(read.at("view").shape(), (Shape{64, 6}));
  EXPECT_EQ(static_cast<float>(read.at("view").data<BFloat16>()[6 * 40 + 1]), 8);  // a.weight[1][40]
}

TEST_F(Gguf, SaveErrors) {
  const Tensor x = io::load_gguf(fixture("source.gguf")).at("a.weight");
  io::save_gguf(path_, {{"x", x}});
  const std::string before = contents(path_);
  const auto expect = [&](const StateDict& tensors, const std::string& message,
                          const io::GgufSaveOptions& options = {}) {
    expect_error([&] { io::save_gguf(path_, tensors, {}, options); }, message);
  };
  expect({{"x", Tensor()}}, "model.gguf: \"x\" is an undefined tensor");
  expect({{std::string(64, 'x'), x}}, "is not a name of at most 63 bytes of UTF-8");
  expect({{"\xff", x}}, "is not a name of at most 63 bytes of UTF-8");
  expect({{"x", empty({0, 3}, float32)}}, "\"x\" has no elements, which ggml does not read");
  expect({{"x", empty({1, 1, 1, 1, 1}, float32)}}, "\"x\" has more than four axes");
  expect({{"x", empty({1}, boolean)}}, "\"x\" has a dtype that GGUF lacks");
  expect({{"x", x}}, "expected floating types", {.vectors = io::GgufType::q4_0});
  expect({{"x", x}}, "expected floating types", {.matrices = io::GgufType::i32});
  expect({{"x", x}}, "expected a floating type for x", {.types = {{"x", io::GgufType::i64}}});
  expect({{"x", x}}, "only q8_0, q4_0, q6_k and q4_k are written", {.matrices = io::GgufType::q5_k});
  for (const float bad : {NAN, INFINITY, 1e8F}) {
    const Tensor y = empty({1, 32}, float32);
    fill_data(y, 1);
    y.data<float>()[7] = bad;
    expect({{"y", y}}, "\"y\" has elements that are not finite, or too large", {.matrices = io::GgufType::q8_0});
    expect({{"y", y}}, "\"y\" has elements that are not finite, or too large", {.matrices = io::GgufType::q4_0});
    const Tensor z = full({1, 256}, bad * 1e4F, float32);  // 6 bits and a scale of 8 bits reach further
    expect({{"z", z}}, "\"z\" has elements that are not finite, or too large", {.matrices = io::GgufType::q4_k});
    expect({{"z", z}}, "\"z\" has elements that are not finite, or too large", {.matrices = io::GgufType::q6_k});
  }
  expect_error(
      [&] {
        io::save_gguf(path_, {}, {{"general.alignment", std::uint32_t{64}}});
      },
      "is decided by save_gguf");
  EXPECT_EQ(contents(path_), before);
}

TEST_F(Gguf, LoadErrors) {
  const auto expect = [&](const std::string& bytes, const std::string& message,
                          const std::string& kind = "model.gguf is not a valid GGUF file: ") {
    write(bytes);
    expect_error([&] { io::load_gguf(path_); }, message);
    expect_error([&] { io::load_gguf_metadata(path_); }, kind);
  };
  expect("", "it does not start with \"GGUF\"");
  expect("GGML0000", "it does not start with \"GGUF\"");
  expect(Bytes().header(0, 0, 1), "its version is 1, expected 2 or 3");
  expect(Bytes().header(0, 0, 3U << 24), "model.gguf: it is a big-endian GGUF file, which is not supported", "");
  expect("GGUF\3", "its header ends in the middle");
  // Counts and lengths that exceed the file.
  expect(Bytes().header(std::uint64_t{1} << 60, 0), "its header ends in the middle");
  expect(Bytes().header(0, std::uint64_t{1} << 60), "its header ends in the middle");
  expect(Bytes().header(0, 1).number(UINT64_MAX), "its header ends in the middle");
  expect(Bytes().header(0, 1).text("k").number(8U).number(std::uint64_t{1} << 40), "its header ends in the middle");
  for (const std::uint32_t type : {0U, 7U, 8U, 12U}) {
    expect(Bytes().header(0, 1).text("k").number(9U).number(type).number(UINT64_MAX / 2),
           "its header ends in the middle");
  }
  expect(Bytes().header(0, 1).text("k").number(13U).data(1, 64), "the type 13 of the key \"k\" is not supported");
  expect(Bytes().header(0, 1).text("k").number(9U).number(9U).data(1, 64), "the type 9 of the key \"k\"");
  expect(Bytes().header(0, 1).text("k").number(7U).number('\2'), "a bool is 2, neither 0 nor 1");
  expect(Bytes().header(0, 2).text("k").number(0U).number('\2').text("k").number(0U), "the key \"k\" appears twice");
  expect(Bytes().header(0, 1).text("\xff").number(0U).number('\2'), "a name is not UTF-8");
  for (const std::uint32_t alignment : {0U, 48U}) {
    expect(Bytes().header(0, 1).text("general.alignment").number(4U).number(alignment),
           "general.alignment is not a power of two of type uint32");
  }
  expect(Bytes().header(1, 0).tensor("x", {1, 1, 1, 1, 1}, 0, 0).data(32, 32), "\"x\" has 5 axes, expected at most 4");
  expect(Bytes().header(1, 0).tensor("x", {1U << 31, 1U << 31, 2}, 0, 0).data(32, 32), "\"x\" has too many elements");
  expect(Bytes().header(1, 0).tensor("x", {0, UINT64_MAX}, 0, 0).data(32, 32), "\"x\" has too many elements");
  for (const auto& [number, type] :
       {std::pair{9U, "Q8_1"}, {16U, "IQ2_XXS"}, {25U, "I16"}, {29U, "IQ1_M"}, {34U, "TQ1_0"}, {40U, "NVFP4"}}) {
    expect(Bytes().header(1, 0).tensor("x", {4}, number, 0).data(32, 32),
           fmt::format("model.gguf: the tensor \"x\" has the type {}, which is not supported, only F32, F16", type),
           "");
  }
  for (const std::uint32_t number : {4U, 31U, 38U, 41U, UINT32_MAX}) {
    expect(Bytes().header(1, 0).tensor("x", {4}, number, 0).data(32, 32),
           fmt::format("the tensor \"x\" has the type {}, which is unknown", number));
  }
  expect(Bytes().header(1, 0).tensor("x", {33}, 8, 0).data(32, 64),
         "the rows of the tensor \"x\" are no multiple of 32");
  expect(Bytes().header(1, 0).tensor("x", {32, 33}, 2, 0).data(32, 33 * 18 - 1), "after the end of the file");
  expect(Bytes().header(1, 0).tensor("x", {4}, 0, 32).data(32, 64), "the data of \"x\" are at 32, expected 0");
  expect(Bytes().header(2, 0).tensor("x", {4}, 0, 0).tensor("x", {4}, 0, 32).data(32, 64), "\"x\" appears twice");
  expect(Bytes().header(2, 0).tensor("x", {4}, 0, 0).tensor("y", {4}, 0, 16).data(32, 64),
         "the data of \"y\" are at 16, expected 32");
  expect(Bytes().header(1, 0).tensor("x", {std::uint64_t{1} << 59}, 0, 0).data(32, 32), "after the end of the file");
  expect_error([&] { io::load_gguf(folder_ / "none"); }, "none");

  // An alignment specified by the file, an empty tensor, and no padding after the last tensor.
  write(Bytes()
            .header(3, 1, 2)
            .text("general.alignment")
            .number(4U)
            .number(64U)
            .tensor("x", {3}, 0, 0)
            .tensor("empty", {0, 2}, 0, 64)
            .tensor("y", {2}, 30, 64)
            .data(64, 68));
  const StateDict read = io::load_gguf(path_);
  EXPECT_EQ(read.at("y").shape(), Shape{2});
  EXPECT_EQ(read.at("empty").shape(), (Shape{2, 0}));
  EXPECT_EQ(io::load_gguf_metadata(path_).size(), 1u);
}

// A file that ends anywhere is an error, never a crash or a tensor.
TEST_F(Gguf, TruncatedFiles) {
  const std::string whole = contents(fixture("q4_0.gguf"));
  ASSERT_GT(whole.size(), 400u);
  for (std::size_t length = 0; length < whole.size() - 32; length += length < 400 ? 1 : 37) {
    write(whole.substr(0, length));
    expect_error([&] { io::load_gguf(path_); }, "is not a valid GGUF file");
  }
}

// Files that tests/gguf/make_models.py wrote: models of transformers, converted by llama.cpp.
TEST_F(Gguf, ModelsGiveTheLogitsOfPyTorch) {
  struct Case {
    const char* name;
    double tolerance;  // of logits of about 10
    DType dtype;
  };
  for (const Case& c :
       {Case{"llama3", 1e-4, float32}, Case{"llama_bias", 1e-4, bfloat16}, Case{"qwen2", 1e-4, float32},
        Case{"qwen3", 1e-4, float32}, Case{"gemma2", 1e-5, float32}, Case{"phi3", 1e-4, float32},
        Case{"granite", 1e-4, bfloat16}, Case{"olmo2", 1e-4, bfloat16}, Case{"starcoder2", 1e-4, bfloat16}}) {
    SCOPED_TRACE(c.name);
    const fs::path path = fixture(fmt::format("models/{}.gguf", c.name));
    const io::GgufMetadata metadata = io::load_gguf_metadata(path);
    std::vector<std::int64_t> tokens;
    for (const std::int32_t token : std::get<std::vector<std::int32_t>>(metadata.at("test.tokens"))) {
      tokens.push_back(token);
    }
    const auto& logits = std::get<std::vector<float>>(metadata.at("test.logits"));
    const std::vector<double> expected(logits.begin(), logits.end());
    const Tensor input = from_data(tokens, {1, static_cast<std::int64_t>(tokens.size())});
    const autograd::NoGrad no_grad;
    const auto state_of = [](const io::PretrainedModel& any) {
      return std::visit([](const auto& model) { return model.state_dict(); }, any);
    };
    const auto logits_of = [&](const io::PretrainedModel& any) {
      return std::visit([&](const auto& model) { return model(input); }, any);
    };
    EXPECT_EQ(state_of(io::load_pretrained(path)).at("model.norm.weight").dtype(), c.dtype);
    const io::PretrainedModel packed = io::load_pretrained(path, {.dtype = float32});
    expect_close(logits_of(packed), expected, c.tolerance, c.tolerance);
    const io::PretrainedModel model = io::load_pretrained(path, {.dtype = float32, .packed = false});
    expect_close(logits_of(model), expected, c.tolerance, c.tolerance);
    // Written and read again, it is the same model.
    io::save_gguf(path_, model, {{"general.name", std::string("test")}});
    EXPECT_EQ(std::get<std::string>(io::load_gguf_metadata(path_).at("general.name")), "test");
    const io::PretrainedModel again = io::load_pretrained(path_);
    expect_same_bits(state_of(again), state_of(model));
    EXPECT_EQ(to_vector<double>(logits_of(again)), to_vector<double>(logits_of(model)));
    std::map<std::string, io::GgufType> names = io::load_gguf_types(path), own = io::load_gguf_types(path_);
    ASSERT_EQ(names.size(), own.size());
    EXPECT_TRUE(std::equal(names.begin(), names.end(), own.begin(),
                           [](const auto& a, const auto& b) { return a.first == b.first; }));
  }
}

// Every type as a QuantizedWeight.
TEST_F(Gguf, PackedMatricesHaveTheSameValues) {
  std::map<std::string, io::detail::GgufMatrix> matrices;
  const io::detail::GgufFiles files(fixture("blocks.gguf"));
  EXPECT_TRUE(io::detail::read_gguf_tensors(files, {}, &matrices).empty());
  EXPECT_EQ(matrices.size(), 13u);
  const StateDict values = io::load_gguf(fixture("blocks_values.gguf"));
  for (const auto& [name, matrix] : matrices) {
    const QuantizedWeight packed = io::detail::packed(matrix);
    std::size_t bytes = 0;
    for (const auto& [part_name, part] : quantized_parts()) {
      bytes += (packed.*part).defined() ? (packed.*part).bytes() : 0;
    }
    const double bits = 8.0 * static_cast<double>(bytes) / 512;
    const bool of_four = packed.bits == 4;
    EXPECT_LE(bits, of_four ? 5.1 : packed.bits + 1.2) << name;
    for (const Device device : test_devices()) {
      QuantizedWeight there = packed;
      for (const auto& [part_name, part] : quantized_parts()) {
        there.*part = (packed.*part).defined() ? (packed.*part).to(device) : Tensor{};
      }
      const Tensor read = transpose(dequantize(there), 0, 1);
      expect_close(read, to_vector<double>(values.at(name)), 0, 0, name);  // not the bits: −0 is 0
    }
  }
  for (const auto& [name, matrix] : matrices) {
    EXPECT_EQ(to_vector<double>(io::detail::dequantized(matrix, float32)), to_vector<double>(values.at(name))) << name;
  }
}

std::size_t bytes_of(const StateDict& state) {
  std::set<const void*> seen;
  std::size_t bytes = 0;
  for (const auto& [name, tensor] : state) {
    bytes += seen.insert(tensor.raw_data()).second ? tensor.bytes() : 0;
  }
  return bytes;
}

TEST_F(Gguf, QuantizedModelsStayQuantized) {
  manual_seed(9);
  for (const bool tied : {true, false}) {
    const nn::Llama model({.vocab = 40,
                           .layers = 1,
                           .heads = 4,
                           .key_heads = 2,
                           .width = 256,
                           .hidden = 512,
                           .rotary = {},
                           .tied_head = tied});
    for (const auto& [name, parameter] : model.named_parameters()) {
      parameter.set_data(randn(parameter.shape()) * 0.1);
    }
    const Tensor tokens = randint(0, 40, {2, 7});
    const autograd::NoGrad no_grad;
    for (const auto& [type, bits] : {std::pair{io::GgufType::q8_0, 8.5},
                                     {io::GgufType::q4_0, 4.5},
                                     {io::GgufType::q6_k, 8.5625},
                                     {io::GgufType::q4_k, 4.625}}) {
      SCOPED_TRACE(static_cast<int>(type));
      io::save_gguf(path_, model, {}, {.matrices = type, .vectors = io::GgufType::f32});
      for (const Device device : test_devices()) {
        const auto loaded = [&](DType dtype, bool packed) {
          return io::load_pretrained<nn::Llama>(path_, {.device = device, .dtype = dtype, .packed = packed});
        };
        nn::Llama packed = loaded(float32, true);
        const nn::Llama full = loaded(float32, false);
        EXPECT_FALSE(full.lm_head.is_quantized());
        ASSERT_TRUE(packed.lm_head.is_quantized() && packed.model.embed_tokens.is_quantized());
        expect_close(transpose(dequantize(packed.model.layers[0].self_attn.q_proj.quantized), 0, 1),
                     full.model.layers[0].self_attn.q_proj.weight, 0, 0);
        const Tensor there = tokens.to(device), logits = full(there);
        expect_close(packed(there), logits, 1e-4, 1e-4 * max(abs(logits)).item());
        const double elements = static_cast<double>(bytes_of(full.state_dict())) / 4;
        EXPECT_LT(8.0 * static_cast<double>(bytes_of(packed.state_dict())), bits * elements + 32 * 3 * 256 + 64);
        // Text, with a cache.
        EXPECT_EQ(infer::generate(packed, {{1, 2, 3}}, {.count = 8}), infer::generate(full, {{1, 2, 3}}, {.count = 8}));
        // Scales keep their values in a model of another dtype, and adapters get that dtype.
        nn::Llama narrow = loaded(bfloat16, true);
        expect_close(dequantize(narrow.lm_head.quantized), dequantize(packed.lm_head.quantized), 0, 0);
        EXPECT_EQ(narrow(there).dtype(), bfloat16);
        EXPECT_EQ(narrow.new_cache().config().dtype, bfloat16);
        const auto text = infer::generate(narrow, {{1, 2, 3}}, {.count = 8});
        nn::add_lora(narrow, {"*q_proj"});
        EXPECT_EQ(narrow.model.layers[0].self_attn.q_proj.lora_a.dtype(), bfloat16);
        packed.to(bfloat16);
        expect_close(packed(there), to_vector<double>(narrow(there)), 0, 0);
        EXPECT_EQ(infer::generate(packed, {{1, 2, 3}}, {.count = 8}), text);
        expect_error([&] { io::save_pretrained(packed, folder_ / "saved"); }, "is quantized");
      }
    }
  }
}

// Of a model with other shapes than its metadata say.
TEST_F(Gguf, QuantizedMatricesOfWrongShapes) {
  const fs::path path = fixture("models/qwen2.gguf");
  StateDict tensors = io::load_gguf(path);
  const io::GgufSaveOptions options{.matrices = io::GgufType::q8_0};
  tensors.at("blk.0.ffn_up.weight") = randn({64, 32});
  io::save_gguf(path_, tensors, io::load_gguf_metadata(path), options);
  expect_error([&] { io::load_pretrained(path_); }, "model.layers.0.mlp.up_proj.weight");
  tensors.at("blk.0.ffn_up.weight") = randn({32, 32});
  tensors["blk.7.ffn_up.weight"] = randn({32, 32});
  io::save_gguf(path_, tensors, io::load_gguf_metadata(path), options);
  expect_error([&] { io::load_pretrained(path_); }, "model.layers.7.mlp.up_proj.weight");
  tensors.erase("blk.7.ffn_up.weight");
  tensors["output.weight"] = randn({13, 32});
  io::save_gguf(path_, tensors, io::load_gguf_metadata(path), options);
  // With a head of its own, the model is another one.
  EXPECT_FALSE(io::load_pretrained<nn::Llama>(path_).config.tied_head);
}

TEST_F(Gguf, RefusesToSaveRotaryEmbeddingsThatLlamaCppDoesNotHave) {
  nn::LlamaConfig config{.vocab = 8, .layers = 1, .heads = 1, .key_heads = 1, .width = 8, .hidden = 8};
  const auto refused = [&](const std::string& message) {
    expect_error([&] { io::save_gguf(path_, nn::Llama(config)); }, message);
    EXPECT_FALSE(fs::exists(path_));
  };
  config.rotary = {.scaling = nn::RotaryScaling::longrope,
                   .short_factors = std::vector<double>(4, 1),
                   .long_factors = std::vector<double>(4, 2)};
  refused("llama.cpp chooses longrope's factors by the size of its context");
  config.rotary = {.scaling = nn::RotaryScaling::yarn, .factor = 4, .attention_factor = 2};
  refused("expected yarn scaling with its usual parameters");
  config.rotary = {.scaling = nn::RotaryScaling::yarn, .factor = 4, .beta_fast = 16};
  refused("expected yarn scaling with its usual parameters");
  config.rotary = {};
  config.rotated_layers = {false};
  refused("has rotary embeddings in all layers");
}

// In a narrow head, it may be that no frequency is divided by the whole factor.
TEST_F(Gguf, Llama3sFrequenciesAreTheSameInHeadsOfAllWidths) {
  for (const std::int64_t head_width : {2, 4, 6, 8, 64}) {
    const nn::Llama model(
        {.vocab = 8, .layers = 1, .heads = 1, .key_heads = 1, .head_width = head_width, .width = 8, .hidden = 8});
    io::save_gguf(path_, model);
    const nn::Llama again = io::load_pretrained<nn::Llama>(path_);
    const std::vector<float> expected = nn::rotary_frequencies(head_width, model.config.rotary);
    const std::vector<float> read = nn::rotary_frequencies(head_width, again.config.rotary);
    ASSERT_EQ(read.size(), expected.size());
    for (std::size_t i = 0; i < read.size(); ++i) {
      EXPECT_NEAR(read[i] / expected[i], 1, 1e-5) << "frequency " << i << " of width " << head_width;
    }
  }
}

// Files that tests/gguf/make_tokenizers.py wrote with llama.cpp's package, and llama.cpp's tokens.
TEST_F(Gguf, TokenizersGiveTheTokensOfLlamaCpp) {
  for (const char* const name : {"gpt2", "llama3", "qwen", "smollm"}) {
    SCOPED_TRACE(name);
    const fs::path path = fixture(fmt::format("tokenizers/{}.gguf", name));
    const io::GgufMetadata metadata = io::load_gguf_metadata(path);
    const io::Tokenizer tokenizer = io::Tokenizer::load(path);
    const auto& texts = std::get<std::vector<std::string>>(metadata.at("test.texts"));
    const auto& counts = std::get<std::vector<std::int32_t>>(metadata.at("test.counts"));
    const auto& tokens = std::get<std::vector<std::int32_t>>(metadata.at("test.tokens"));
    ASSERT_GT(texts.size(), 30u);
    auto at = tokens.begin();
    for (std::size_t i = 0; i < texts.size(); ++i) {
      EXPECT_EQ(tokenizer.encode(texts[i]), (std::vector<std::int64_t>(at, at + counts[i]))) << texts[i];
      at += counts[i];
    }
    EXPECT_EQ(tokenizer.chat_template(), "<|im_start|>{{ message }}<|im_end|>");
    EXPECT_EQ(tokenizer.end_tokens(), (std::vector{*tokenizer.find("<|im_end|>"), *tokenizer.find("<|endoftext|>")}));
  }
}

// A type and a factor that are missing, and the factor's older name, mean what they mean to llama.cpp.
TEST_F(Gguf, ScalingOfRotaryEmbeddingsAsLlamaCppReadsIt) {
  const fs::path path = fixture("models/qwen3.gguf");
  const StateDict tensors = io::load_gguf(path);
  io::GgufMetadata metadata = io::load_gguf_metadata(path);
  metadata["qwen3.rope.scaling.type"] = std::string("linear");
  metadata["qwen3.rope.scaling.factor"] = 2.5F;
  const auto scaling = [&](const std::map<std::string, std::optional<io::GgufValue>>& changes) {
    io::GgufMetadata changed = metadata;
    for (const auto& [key, value] : changes) {
      changed.erase("qwen3.rope." + key);
      if (value) {
        changed["qwen3.rope." + key] = *value;
      }
    }
    io::save_gguf(path_, tensors, changed);
    const auto config = std::get<nn::LlamaConfig>(io::load_pretrained_config(path_)).rotary;
    return std::pair{config.scaling, config.factor};
  };
  using nn::RotaryScaling;
  const std::pair whole{RotaryScaling::linear, 2.5};
  EXPECT_EQ(scaling({}), whole);
  EXPECT_EQ(scaling({{"scaling.type", {}}}), whole);
  const std::pair none{RotaryScaling::none, 1.0};
  EXPECT_EQ(scaling({{"scaling.type", std::string("none")}}), none);
  EXPECT_EQ(scaling({{"scaling.factor", {}}}), none);
  EXPECT_EQ(scaling({{"scaling.factor", 0.0F}}), none);
  EXPECT_EQ(scaling({{"scaling.type", {}}, {"scaling.factor", {}}, {"scale_linear", 8.0F}}),
            (std::pair{RotaryScaling::linear, 8.0}));
  EXPECT_EQ(scaling({{"scale_linear", 8.0F}}), whole);
  EXPECT_EQ(scaling({{"scaling.type", std::string("yarn")}, {"scaling.factor", 4.0F}}),
            (std::pair{RotaryScaling::yarn, 4.0}));
}

TEST_F(Gguf, RefusesModelsThatItCannotCompute) {
  const fs::path path = fixture("models/qwen3.gguf");
  const StateDict tensors = io::load_gguf(path);
  const io::GgufMetadata metadata = io::load_gguf_metadata(path);
  const auto refused = [&](const std::string& key, std::optional<io::GgufValue> value, const std::string& message) {
    io::GgufMetadata changed = metadata;
    changed.erase(key);
    if (value) {
      changed[key] = *value;
    }
    io::save_gguf(path_, tensors, changed);
    expect_error([&] { io::load_pretrained(path_); }, message);
  };
  refused("general.architecture", std::string("gemma"),
          "architectures gpt2, llama, qwen2, qwen3, phi3, granite, olmo2, gemma2, starcoder2, got \"gemma\"");
  refused("general.architecture", {}, "lack \"general.architecture\"");
  refused("qwen3.block_count", {}, "lack \"qwen3.block_count\"");
  refused("qwen3.block_count", 3.5F, "\"qwen3.block_count\" to be a whole number");
  refused("qwen3.block_count", std::uint64_t{1} << 63, "\"qwen3.block_count\" to be a whole number");
  refused("qwen3.block_count", 3U, "model.layers.2.");
  refused("qwen3.attention.head_count", 0U, "num_attention_heads");
  refused("qwen3.expert_count", 8U, "need \"qwen3.expert_count\" to be 0, got 8");
  refused("qwen3.rope.scaling.type", std::string("longrope"), "none, linear or yarn, got \"longrope\"");
  refused("qwen3.rope.dimension_count", 4U, "need \"qwen3.rope.dimension_count\" to be 6, got 4");
  refused("qwen3.attention.layer_norm_rms_epsilon", std::numeric_limits<float>::quiet_NaN(),
          "\"qwen3.attention.layer_norm_rms_epsilon\" to be finite");
  refused("qwen3.rope.scaling.attn_factor", 1.5F, "need \"qwen3.rope.scaling.attn_factor\" to be 1, got 1.5");
  refused("qwen3.rope.scaling.yarn_beta_fast", 16.0F, "need \"qwen3.rope.scaling.yarn_beta_fast\" to be 32, got 16");
  refused("qwen3.attention.scale", 0.125F, "need \"qwen3.attention.scale\" to be 0, got 0.125");
  refused("qwen3.attention.causal", false, "need \"qwen3.attention.causal\" to be true");
  StateDict more = tensors;
  more.emplace("rope_factors_short.weight", ones({3}));
  io::save_gguf(path_, more, metadata);
  expect_error([&] { io::load_pretrained(path_, {.strict = false}); },
               "it has \"rope_factors_short.weight\", and mica reads longrope scaling from config.json only");
  more.erase("rope_factors_short.weight");
  more.emplace("rope_freqs.weight", full({3}, 2.0));
  io::save_gguf(path_, more, metadata);
  expect_error([&] { io::load_pretrained(path_); }, "is not Llama 3's scaling");
  more.erase("rope_freqs.weight");
  more.emplace("model.norm.weight", ones({16}));
  io::save_gguf(path_, more, metadata);
  expect_error([&] { io::load_pretrained(path_); }, "two tensors have the name \"model.norm.weight\"");
}

TEST_F(Gguf, MappedTensorsHaveTheSameBits) {
  const StateDict read = io::load_gguf(fixture("every_type.gguf"));
  const StateDict mapped = io::load_gguf(fixture("every_type.gguf"), {.mapped = true});
  expect_same_bits(mapped, read);
  mapped.at("f32").data<float>()[0] = 7;  // a private page
  expect_same_bits(io::load_gguf(fixture("every_type.gguf")), read);
}

}  // namespace gguf_test
