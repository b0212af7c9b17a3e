#include <sys/stat.h>
#include <tests/files.h>
#include <tests/support.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include <mica/core/rng.h>
#include <mica/io/safetensors.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

/// A separate, empty folder per test.
class Safetensors : public testing::Test {
 protected:
  void write(const std::string& bytes) const { std::ofstream(path_, std::ios::binary) << bytes; }
  std::string read() const { return contents(path_); }
  std::size_t files() const {
    return static_cast<std::size_t>(
        std::distance(std::filesystem::directory_iterator(folder_), std::filesystem::directory_iterator()));
  }

  const TemporaryFolder own_;
  const std::filesystem::path folder_ = own_.path(), path_ = folder_ / "model.safetensors";
};

std::string length_bytes(std::uint64_t length) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) {
    bytes += static_cast<char>(length >> (8 * i));
  }
  return bytes;
}

std::string file_of(const std::string& header, const std::string& data) {
  return length_bytes(header.size()) + header + data;
}

TEST_F(Safetensors, WritesTheFormat) {
  io::save(path_, {{"b", from_data({std::int64_t{258}, std::int64_t{-1}})}, {"a", from_data({1.0f}, Shape{1, 1})}},
           {{"step", "7"}});
  std::string header = R"({"__metadata__":{"step":"7"},"b":{"dtype":"I64","shape":[2],"data_offsets":[0,16]},)"
                       R"("a":{"dtype":"F32","shape":[1,1],"data_offsets":[16,20]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const std::string data =
      std::string("\x02\x01\0\0\0\0\0\0", 8) + std::string(8, '\xff') + std::string("\0\0\x80\x3f", 4);
  EXPECT_EQ(read(), file_of(header, data));
  EXPECT_EQ(files(), 1u);
}

TEST_F(Safetensors, ReadsAFileMadeByHand) {
  write(file_of(R"({"y":{"shape":[2,1],"data_offsets":[4,8],"dtype":"F16"},"s":{"dtype":"F32","shape":[],)"
                R"("data_offsets":[0,4]},"none":{"dtype":"BF16","shape":[0,3],"data_offsets":[8,8]},)"
                R"("__metadata__":{"format":"pt","\u00e4":"\""}}  )",
                std::string("\0\0\0\xc0\0\x3c\0\xc0", 8)));
  const StateDict tensors = io::load(path_);
  ASSERT_EQ(tensors.size(), 3u);
  EXPECT_EQ(tensors.at("s").item(), -2);
  EXPECT_EQ(tensors.at("y").dtype(), float16);
  EXPECT_EQ(tensors.at("y").shape(), (Shape{2, 1}));
  expect_close(tensors.at("y"), {1, -2}, 0, 0);
  EXPECT_EQ(tensors.at("none").shape(), (Shape{0, 3}));
  EXPECT_EQ(io::load_metadata(path_), (io::Metadata{{"format", "pt"}, {"\u00e4", "\""}}));
}

TEST_F(Safetensors, RoundTripOfEveryDType) {
  manual_seed(5);
  for (const Device device : test_devices()) {
    StateDict tensors;
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      tensors[std::string(name_of(dtype))] = randn({3, 5}, dtype, device);
    }
    for (const DType dtype : {int64, int32, uint8}) {
      tensors[std::string(name_of(dtype))] = randint(0, 200, {7}, dtype, device);
    }
    tensors["bool"] = from_data({true, false, true}, {3}).to(device);
    tensors["scalar"] = full({}, 3, float32, device);
    tensors["empty"] = zeros({2, 0}, float32, device);
    const Tensor whole = randn({4, 6}, float32, device);
    tensors["strided"] = as_strided(whole, {3, 4}, {1, 6}, 2);
    io::save(path_, tensors);
    for (const Device target : test_devices()) {
      const StateDict loaded = io::load(path_, target);
      ASSERT_EQ(loaded.size(), tensors.size());
      for (const auto& [name, tensor] : loaded) {
        EXPECT_EQ(tensor.dtype(), tensors.at(name).dtype());
        EXPECT_EQ(tensor.device(), target);
        EXPECT_TRUE(tensor.is_contiguous());
        expect_close(tensor, tensors.at(name), 0, 0, name);
      }
    }
    EXPECT_TRUE(io::load_metadata(path_).empty());
  }
}

TEST_F(Safetensors, EmptyStateDict) {
  io::save(path_, {});
  EXPECT_EQ(read(), file_of("{}      ", ""));
  EXPECT_TRUE(io::load(path_).empty());
}

TEST_F(Safetensors, FailedSaveKeepsTheOldFile) {
  io::save(path_, {{"x", ones({2})}});
  const std::string before = read();
  expect_error([&] { io::save(path_, {{"x", zeros({2})}, {"\xff", ones({1})}}); }, "not valid UTF-8");
  expect_error([&] { io::save(path_, {{"x", Tensor{}}}); }, "\"x\" is an undefined tensor");
  expect_error([&] { io::save(path_, {{"__metadata__", ones({1})}}); }, "cannot be named __metadata__");
  EXPECT_EQ(read(), before);
  io::save(path_, {{"x", zeros({2})}});
  expect_close(io::load(path_).at("x"), {0, 0}, 0, 0);
  EXPECT_EQ(files(), 1u);

  expect_error([&] { io::save(folder_, {{"x", ones({1})}}); }, "is a directory");
  expect_error([&] { io::save(folder_ / "no" / "x", {{"x", ones({1})}}); }, "cannot create");
}

TEST_F(Safetensors, LoadRefusesOtherThanRegularFiles) {
  expect_error([&] { io::load(path_); }, "cannot open " + path_.string());
  expect_error([&] { io::load(folder_); }, "is not a regular file");
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
  expect_error([&] { io::load(path_); }, "is not a regular file");  // without waiting for a writer
  expect_error([&] { io::load_metadata(path_); }, "is not a regular file");
  expect_error([] { io::load("/dev/null"); }, "load: /dev/null is not a regular file");
}

TEST_F(Safetensors, SaveReplacesRegularFilesOnly) {
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
  const StateDict state{{"x", ones({1})}};
  expect_error([&] { io::save(path_, state); }, "save: " + path_.string() + " is not a regular file");
  EXPECT_TRUE(std::filesystem::is_fifo(path_));
  EXPECT_EQ(files(), 1u);
  const std::filesystem::path link = folder_ / "link";
  std::filesystem::create_symlink("/dev/null", link);
  expect_error([&] { io::save(link, state); }, "is not a regular file");
  // Errors of the file system are Errors, too.
  expect_error([&] { io::save(folder_ / std::string(300, 'x'), state); }, "save: cannot create");
  expect_error([&] { io::load(folder_ / std::string(300, 'x')); }, "load: cannot open");
  // A dangling link is replaced like a file.
  std::filesystem::remove(link);
  std::filesystem::create_symlink(folder_ / "nowhere", link);
  io::save(link, state);
  EXPECT_TRUE(std::filesystem::is_regular_file(std::filesystem::symlink_status(link)));
}

TEST_F(Safetensors, RefusesDamagedFiles) {
  const std::string good = R"("x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  const std::string data(8, '\0');
  const auto entry = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return R"({"x":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
  };
  const std::vector<std::pair<std::string, std::string>> cases{
      {"", "too few for a header"},
      {std::string(7, '\0'), "too few for a header"},
      {length_bytes(0), "does not start with '{'"},
      {length_bytes(3) + "{}", "claims 3 bytes"},
      {length_bytes(UINT64_MAX) + "{}", "claims 18446744073709551615 bytes"},
      {length_bytes(UINT64_MAX - 7) + "{}", "claims"},
      {length_bytes(std::uint64_t{1} << 40) + "{}", "claims"},
      {file_of(" {" + good + "}", data), "does not start with"},
      {file_of("[]", ""), "does not start with"},
      {file_of("{" + good, data), "not valid JSON"},
      {file_of("{" + good + "}}", data), "not valid JSON"},
      {file_of("{\"\xff\":1}", ""), "not valid JSON"},
      {file_of("{" + good + "," + good + "}", data), "\"x\" appears twice"},
      {file_of(R"({"x":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}})", data), "appears twice"},
      {file_of(R"({"x":{"a":{}}})", ""), "nested too deeply"},
      {file_of("{\"x\":" + std::string(100000, '['), ""), "nested too deeply"},
      {file_of(R"({"x":1})", ""), "must have exactly dtype"},
      {file_of(R"({"x":{"dtype":"F32","shape":[2]}})", data), "must have exactly dtype"},
      {file_of(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"more":1}})", data), "must have exactly dtype"},
      {file_of(entry("\"F8_E4M3\"", "[2]", "[0,2]"), "12"), "dtype F8_E4M3 of \"x\" is not supported"},
      {file_of(entry("1", "[2]", "[0,8]"), data), "is not a string"},
      {file_of(entry("\"F32\"", "2", "[0,8]"), data), "not a list"},
      {file_of(entry("\"F32\"", "[1,1,1,1,1,1,1,1,2]", "[0,8]"), data), "at most 8"},
      {file_of(entry("\"F32\"", "[-2]", "[0,8]"), data), "not a size"},
      {file_of(entry("\"F32\"", "[2.0]", "[0,8]"), data), "not a size"},
      {file_of(entry("\"F32\"", "[18446744073709551615]", "[0,8]"), data), "not a size"},
      {file_of(entry("\"F32\"", "[4611686018427387906]", "[0,8]"), data), "too many elements"},
      {file_of(entry("\"F32\"", "[4294967296,4294967296]", "[0,0]"), ""), "too many elements"},
      {file_of(entry("\"F32\"", "[0,4294967296,4294967296]", "[0,0]"), ""), "too many elements"},
      {file_of(entry("\"F32\"", "[2]", "[0]"), data), "not two positions"},
      {file_of(entry("\"F32\"", "[2]", "[0,-8]"), data), "not two positions"},
      {file_of(entry("\"F32\"", "[2]", "\"ab\""), data), "not two positions"},
      {file_of(entry("\"F32\"", "[2]", "[8,0]"), data), "do not hold [2] of float32"},
      {file_of(entry("\"F32\"", "[3]", "[0,8]"), data), "do not hold [3] of float32"},
      {file_of(entry("\"F32\"", "[2]", "[18446744073709551608,0]"), data), "do not hold"},
      {file_of(entry("\"F32\"", "[2]", "[8,16]"), data + data), "starts at 8, expected 0"},
      {file_of("{" + good + R"(,"y":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})", data), "starts at 4"},
      {file_of("{" + good + R"(,"y":{"dtype":"U8","shape":[4],"data_offsets":[9,13]}})", data + "12345"),
       "starts at 9"},
      {file_of("{" + good + "}", data.substr(1)), "need 8 bytes of data, it has 7"},
      {file_of("{" + good + "}", data + "x"), "need 8 bytes of data, it has 9"},
      {file_of(R"({"__metadata__":[]})", ""), "is not an object"},
      {file_of(R"({"__metadata__":{"a":1}})", ""), "\"a\" is not a string"},
  };
  for (const auto& [bytes, reason] : cases) {
    write(bytes);
    expect_error([&] { io::load(path_); }, reason);
    expect_error([&] { io::load_metadata(path_); }, path_.string());
  }
  write(file_of(entry("\"BOOL\"", "[2]", "[0,2]"), std::string("\1\2", 2)));
  expect_error([&] { io::load(path_); }, "neither 0 nor 1");
}

TEST_F(Safetensors, EveryTruncationIsAnError) {
  io::save(path_, {{"x", ones({3})}, {"y", ones({2}, uint8)}}, {{"a", "b"}});
  const std::string bytes = read();
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    write(bytes.substr(0, size));
    EXPECT_THROW(io::load(path_), Error) << size;
  }
}

TEST_F(Safetensors, MapsFiles) {
  manual_seed(9);
  const StateDict written{{"a", randn({3, 5})},          {"b", randn({7}, bfloat16)}, {"c", randint(0, 9, {2})},
                          {"d", ones({3}, boolean)},     {"e", zeros({0, 4})},        {"f", full({}, 2, float64)},
                          {"g", ones({5}, DType::uint8)}};
  io::save(path_, written);
  const std::string bytes = read();
  StateDict mapped = io::load_mapped(path_);
  ASSERT_EQ(mapped.size(), written.size());
  for (const auto& [name, tensor] : written) {
    EXPECT_EQ(mapped.at(name).dtype(), tensor.dtype());
    expect_close(mapped.at(name), tensor, 0, 0, name);
  }
  // Neighbors in one file; each counts its own writes, which stay in memory.
  Tensor a = mapped.at("a");
  a.data<float>()[0] = 5;
  a.bump_version();
  EXPECT_EQ(a.version(), 1u);
  EXPECT_EQ(mapped.at("f").version(), 0u);
  EXPECT_EQ(read(), bytes);
  // The mapping lives as long as one of its tensors, also without the file.
  mapped.clear();
  std::filesystem::remove(path_);
  EXPECT_EQ(a.data<float>()[0], 5);
  EXPECT_EQ(a.data<float>()[14], written.at("a").data<float>()[14]);
}

TEST_F(Safetensors, MapsUnalignedFilesAndRefusesDamagedOnes) {
  const std::vector<float> values{1, 2};
  std::string header = R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  while (header.size() % 4 != 1) {
    header += ' ';
  }
  const std::uint64_t length = header.size();
  const std::string bytes = std::string(reinterpret_cast<const char*>(&length), 8) + header +
                            std::string(reinterpret_cast<const char*>(values.data()), 8);
  write(bytes);
  expect_close(io::load_mapped(path_).at("x"), {1, 2}, 0, 0);
  for (const std::size_t size : {std::size_t{0}, std::size_t{4}, std::size_t{40}, bytes.size() - 1}) {
    write(bytes.substr(0, size));
    expect_error([&] { io::load_mapped(path_); }, "is not a valid safetensors file");
  }
  io::save(path_, {{"b", ones({2}, boolean)}});
  std::string booleans = read();
  booleans.back() = 2;
  write(booleans);
  expect_error([&] { io::load_mapped(path_); }, "neither 0 nor 1");
}

}  // namespace
