// Runs the fuzzing programs that need the whole library on valid inputs that are damaged at random. Unlike libFuzzer
// (scripts/fuzz 600 folder model), which is guided by coverage, these are built and run with the other tests, in CI
// also with ASan and UBSan: building the library with libFuzzer takes minutes.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <random>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "examples/common/character_model.h"
#include "tests/files.h"
#include "tests/folders.h"
#include "tests/fuzz/memory_file.h"
#include "tests/paths.h"
#include <mica/autograd/grad_mode.h>
#include <mica/core/creation.h>
#include <mica/io/adapter.h>
#include <mica/io/pretrained.h>

#define LLVMFuzzerTestOneInput try_folder
#include "tests/fuzz/folder_fuzz.cpp"
#undef LLVMFuzzerTestOneInput
#define LLVMFuzzerTestOneInput try_model
#include "tests/fuzz/model_fuzz.cpp"
#undef LLVMFuzzerTestOneInput

namespace {

namespace fs = std::filesystem;

class Damaged {
 public:
  explicit Damaged(const char* corpus) {
    std::vector<fs::path> paths;
    const fs::path all = testing_support::folder_from("MICA_FUZZ_CORPUS", MICA_FUZZ_CORPUS);
    for (const auto& entry : fs::directory_iterator(all / corpus)) {
      paths.push_back(entry.path());
    }
    std::sort(paths.begin(), paths.end());
    for (const fs::path& path : paths) {
      whole_.push_back(testing_support::contents(path));
    }
  }

  const std::vector<std::string>& whole() const { return whole_; }

  /// One of the inputs, with a few random changes.
  std::string next() {
    std::string input = whole_[below(whole_.size())];
    for (std::size_t changes = 1 + below(4); changes > 0; --changes) {
      change(input);
    }
    return input;
  }

 private:
  std::size_t below(std::size_t count) { return std::uniform_int_distribution<std::size_t>(0, count - 1)(random_); }

  void change(std::string& input) {
    constexpr std::array<std::string_view, 12> parts{
        "0", "-1", "9223372036854775807", "1e999", "null", "[]", "{}", "\"", "F64", "BF16", "\n", "[[["};
    const std::size_t at = below(input.size() + 1);
    const std::size_t length = below(input.size() - at + 1);
    switch (below(7)) {
      case 0:  // flip a bit
        if (at < input.size()) {
          input[at] = static_cast<char>(input[at] ^ (1 << below(8)));
        }
        break;
      case 1: input.resize(at); break;
      case 2: input.erase(at, std::min<std::size_t>(length, 16)); break;
      case 3: input.insert(at, input.substr(at, length).substr(0, 64)); break;
      case 4: input.insert(at, parts[below(parts.size())]); break;
      case 5: {  // change a number
        const std::size_t digit = input.find_first_of("0123456789", at);
        if (digit != std::string::npos) {
          const std::size_t end = std::min(input.find_first_not_of("0123456789", digit), input.size());
          input.replace(digit, end - digit, std::to_string(random_() >> below(64)));
        }
        break;
      }
      default: {  // replace the rest by that of another input
        const std::string& other = whole_[below(whole_.size())];
        input.replace(at, std::string::npos, other.substr(std::min(at, other.size())));
      }
    }
  }

  std::vector<std::string> whole_;
  std::mt19937_64 random_{17};
};

template <class F>
void try_all(const char* corpus, F&& try_input) {
  const auto bytes = [](const std::string& input) { return reinterpret_cast<const std::uint8_t*>(input.data()); };
  Damaged inputs(corpus);
  ASSERT_GE(inputs.whole().size(), 5u);
  for (const std::string& input : inputs.whole()) {
    try_input(bytes(input), input.size());
  }
  for (int i = 0; i < 400; ++i) {
    const std::string input = inputs.next();
    SCOPED_TRACE(i);
    try_input(bytes(input), input.size());
  }
}

TEST(Damaged, FoldersAreLoadedOrRefused) { try_all("folder", try_folder); }

TEST(Damaged, CharacterModelsAreLoadedOrRefused) { try_all("model", try_model); }

}  // namespace
