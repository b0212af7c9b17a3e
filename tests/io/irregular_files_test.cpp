// Each file that a reader opens may be a FIFO, a folder or a link that leads nowhere. Readers must then throw an Error
// that names it, and must not wait.

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <tests/files.h>
#include <tests/folders.h>
#include <tests/paths.h>
#include <tests/support.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include <mica/io/adapter.h>
#include <mica/io/gguf.h>
#include <mica/io/json.h>
#include <mica/io/pretrained.h>
#include <mica/io/safetensors.h>
#include <mica/io/text.h>
#include <mica/io/tokenizer.h>
#include <mica/io/tokens.h>
#include <mica/io/training_checkpoint.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

namespace fs = std::filesystem;

const fs::path kPretrained = folder_from("MICA_PRETRAINED_FIXTURES", MICA_PRETRAINED_FIXTURES);
const fs::path kTokenizers = folder_from("MICA_TOKENIZER_FIXTURES", MICA_TOKENIZER_FIXTURES);
const fs::path kGguf = folder_from("MICA_GGUF_FIXTURES", MICA_GGUF_FIXTURES);

void replace_by_fifo(const fs::path& path) { ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0); }
void replace_by_folder(const fs::path& path) { fs::create_directory(path); }
void replace_by_dangling_link(const fs::path& path) { fs::create_symlink("nowhere", path); }
void replace_by_loop(const fs::path& path) { fs::create_symlink(path.filename(), path); }

/// Copies `source`, a folder or a file, and replaces each of `files` in it, in each way. `read` gets the copy's path.
void expect_refused(const fs::path& source, const std::vector<std::string>& files,
                    const std::function<void(const fs::path&)>& read) {
  const TemporaryFolder temporary;
  const fs::path copy = temporary.path() / "copy";
  for (const std::string& file : files) {
    for (const auto replace : {replace_by_fifo, replace_by_folder, replace_by_dangling_link, replace_by_loop}) {
      fs::remove_all(copy);
      fs::copy(source, copy, fs::copy_options::recursive);
      const fs::path replaced = fs::is_directory(copy) ? copy / file : copy;
      read(copy);
      fs::remove(replaced);
      replace(replaced);
      expect_error([&] { read(copy); }, replaced.string());
    }
  }
}

TEST(IrregularFiles, Pretrained) {
  const auto read = [](const fs::path& folder) { io::load_pretrained(folder); };
  expect_refused(kPretrained / "qwen2", {"config.json", "model.safetensors"}, read);
  std::vector<std::string> files{"config.json", "model.safetensors.index.json"};
  for (const auto& entry : fs::directory_iterator(kPretrained / "llama3")) {
    if (entry.path().filename().string().starts_with("model-")) {
      files.push_back(entry.path().filename());
    }
  }
  EXPECT_GE(files.size(), 4u);
  expect_refused(kPretrained / "llama3", files, read);
}

TEST(IrregularFiles, Adapters) {
  expect_refused(kPretrained.parent_path() / "adapters/llama3/start",
                 {"adapter_config.json", "adapter_model.safetensors"}, [](const fs::path& folder) {
                   nn::Llama llama = io::load_pretrained<nn::Llama>(kPretrained / "llama3");
                   io::load_adapter(llama, folder);
                 });
}

TEST(IrregularFiles, Tokenizers) {
  const auto read = [](const fs::path& folder) { io::Tokenizer::load(folder); };
  expect_refused(kTokenizers / "gpt2", {"tokenizer.json"}, read);
  expect_refused(kTokenizers / "two_files", {"vocab.json", "merges.txt", "tokenizer_config.json"}, read);
  const TemporaryFolder temporary;
  const fs::path with_template = temporary.path() / "tokenizer";
  fs::copy(kTokenizers / "gpt2", with_template);
  fs::copy(kTokenizers / "gpt2/tokenizer.json", with_template / "chat_template.jinja");
  expect_refused(with_template, {"chat_template.jinja"}, read);
}

TEST(IrregularFiles, SingleFiles) {
  const fs::path gguf = kGguf / "every_type.gguf", tensors = kPretrained / "qwen2/model.safetensors";
  expect_refused(gguf, {""}, [](const fs::path& path) { io::load_gguf(path); });
  expect_refused(gguf, {""}, [](const fs::path& path) { io::load_gguf(path, {.mapped = true}); });
  expect_refused(gguf, {""}, [](const fs::path& path) { io::load_gguf_metadata(path); });
  expect_refused(gguf, {""}, [](const fs::path& path) { io::load_gguf_types(path); });
  expect_refused(tensors, {""}, [](const fs::path& path) { io::load(path); });
  expect_refused(kPretrained / "qwen2/config.json", {""}, [](const fs::path& path) { io::read_json(path, 1 << 20); });
  expect_refused(kTokenizers / "two_files/merges.txt", {""}, [](const fs::path& path) { io::read_text(path); });
  const TemporaryFolder temporary;
  const fs::path tokens = temporary.path() / "tokens", checkpoint = temporary.path() / "checkpoint";
  std::ofstream(tokens) << "each two bytes are a token";
  expect_refused(tokens, {""}, [](const fs::path& path) { io::TokenFile{path}; });
  io::save_training_checkpoint(checkpoint, {.step = 3});
  expect_refused(checkpoint, {""}, [](const fs::path& path) { io::load_training_checkpoint(path); });
}

}  // namespace
