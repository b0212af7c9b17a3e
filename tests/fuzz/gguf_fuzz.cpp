// Reads any bytes as a GGUF file: it must load or throw an Error. What was loaded must be the same after it was saved
// and loaded again, and so must its tokenizer.

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tests/fuzz/memory_file.h"
#include <mica/core/check.h>
#include <mica/io/detail/gguf_model.h>
#include <mica/io/gguf.h>
#include <mica/io/gguf_tokenizer.h>
#include <mica/io/pretrained_config.h>

using namespace mica;

namespace {

void check_matrix(const io::detail::GgufMatrix& matrix) {
  const Tensor values = io::detail::dequantized(matrix, bfloat16);
  const QuantizedWeight packed = io::detail::packed(matrix);
  fuzz::expect(values.shape() == Shape{packed.columns(), packed.rows});
}

void check_tokenizer(const io::GgufMetadata& metadata) {
  try {
    (void)io::gguf_end_tokens(metadata);
  } catch (const Error&) {
  }
  std::optional<io::Tokenizer> tokenizer;
  try {
    tokenizer = io::gguf_tokenizer(metadata, "input");
  } catch (const Error&) {
    return;
  }
  const std::string text = "The naïve 12 c\u0327ats\n <|im_end|> \xf0\x9f\x98";
  std::vector<std::int64_t> tokens;
  try {
    tokens = tokenizer->encode(text);
  } catch (const Error&) {  // the text has a byte for which there is no token
  }
  for (std::int64_t token = 0; token < std::min<std::int64_t>(tokenizer->vocabulary_size(), 1000); ++token) {
    (void)tokenizer->token_bytes(token);
  }
  (void)tokenizer->decode(tokens);
  for (const std::int64_t token : tokenizer->end_tokens()) {
    fuzz::expect(tokenizer->has_token(token));
  }
  io::GgufMetadata written;
  try {
    written = io::gguf_metadata(*tokenizer, tokenizer->vocabulary_size());
  } catch (const Error&) {  // added tokens with flags, or tokens with spaces, cannot be saved
    return;
  }
  const io::Tokenizer again = io::gguf_tokenizer(written, "written");
  fuzz::expect(again.vocabulary_size() == tokenizer->vocabulary_size());
  fuzz::expect(again.end_tokens() == tokenizer->end_tokens());
  if (!tokens.empty()) {
    fuzz::expect(again.encode(text) == tokens && again.decode(tokens) == tokenizer->decode(tokens));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const fuzz::MemoryFile file(data, size);
  try {
    fuzz::expect(io::parameter_count(io::detail::load_gguf_config(file.path(), "input")) > 0);
    const io::detail::GgufModel model = io::detail::load_gguf_model(file.path(), bfloat16, "input");
    for (const auto& [name, matrix] : model.matrices) {
      check_matrix(matrix);
    }
  } catch (const Error&) {
  }
  StateDict tensors;
  io::GgufMetadata metadata;
  try {
    metadata = io::load_gguf_metadata(file.path());
    check_tokenizer(metadata);
    const auto types = io::load_gguf_types(file.path());
    tensors = io::load_gguf(file.path());
    fuzz::expect(types.size() == tensors.size());
    std::size_t bytes = 0;
    for (const auto& [name, tensor] : tensors) {
      fuzz::expect(tensor.defined() && tensor.is_contiguous());
      bytes += tensor.bytes();
    }
    fuzz::expect(bytes <= 13 * size);  // 2.625 bits per element become 32
    std::map<std::string, io::detail::GgufMatrix> matrices;
    (void)io::detail::read_gguf_tensors(io::detail::GgufFiles(file.path()), {.mapped = true}, &matrices);
    for (const auto& [name, matrix] : matrices) {
      check_matrix(matrix);
    }
  } catch (const Error&) {
    return 0;
  }
  static const std::filesystem::path saved =
      std::filesystem::temp_directory_path() / ("mica_gguf_fuzz_" + std::to_string(::getpid()));
  try {
    metadata.erase("general.alignment");
    io::save_gguf(saved, tensors, metadata);
  } catch (const Error&) {
    return 0;  // names and shapes that ggml does not support cannot be saved
  }
  const StateDict again = io::load_gguf(saved);
  fuzz::expect(again.size() == tensors.size());
  for (const auto& [name, tensor] : tensors) {
    const Tensor& other = again.at(name);
    fuzz::expect(other.shape() == tensor.shape() && other.dtype() == tensor.dtype() &&
                 std::memcmp(other.raw_data(), tensor.raw_data(), tensor.bytes()) == 0);
  }
  fuzz::expect(io::load_gguf_metadata(saved).size() == metadata.size());
  std::filesystem::remove(saved);
  return 0;
}
