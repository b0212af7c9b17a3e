// Reads any bytes as data for finetune, as lines of JSON or as a text. There must be an Error, or examples that fit
// into the context and batches with tokens to learn.

#include <algorithm>

#include "examples/finetune/data.h"
#include "tests/fuzz/byte_tokens.h"
#include "tests/fuzz/memory_file.h"
#include <mica/core/check.h>
#include <mica/core/creation.h>

using namespace mica;

namespace {

void use(const std::filesystem::path& path, const io::Tokenizer& tokenizer, const DataOptions& options) {
  try {
    const Examples all = read_examples(path, tokenizer, options);
    fuzz::expect(!all.examples.empty() && all.skipped >= 0);
    std::vector<const Example*> some;
    std::int64_t learned = 0;
    for (const Example& example : all.examples) {
      const auto length = static_cast<std::int64_t>(example.tokens.size());
      fuzz::expect(example.first >= 1 && example.first < length && length <= options.context + 1);
      for (const std::int64_t token : example.tokens) {
        fuzz::expect(tokenizer.has_token(token));
      }
      if (some.size() < 8) {
        some.push_back(&example);
        learned += example.learned();
      }
    }
    for (const bool pack : {false, true}) {
      const TokenBatch batch = batch_of(some, pack, Device::cpu());
      const std::vector<std::int64_t> targets = to_vector<std::int64_t>(batch.targets);
      fuzz::expect(batch.inputs.shape() == batch.targets.shape() && batch.learned == learned);
      fuzz::expect(std::count_if(targets.begin(), targets.end(), [](std::int64_t t) { return t >= 0; }) == learned);
    }
  } catch (const Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const fuzz::Folder folder("examples_fuzz");
  static const io::Tokenizer tokenizer =
      fuzz::byte_tokenizer({"<|im_start|>", "<|im_end|>"}, "<|im_start|>user<|im_end|>");
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  use(folder.write("data.jsonl", input), tokenizer, {.context = 32, .skip_long = true});
  use(folder.write("data.txt", input), tokenizer, {.context = 32});
  return 0;
}
