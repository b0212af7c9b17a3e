// Any bytes as a GGUF file: loaded, or refused by an Error. What was loaded is saved and loaded as the same.

#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <string>

#include "tests/fuzz/memory_file.h"
#include <mica/core/check.h>
#include <mica/io/detail/gguf_model.h>
#include <mica/io/gguf.h>
#include <mica/io/pretrained_config.h>

using namespace mica;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const fuzz::MemoryFile file(data, size);
  try {
    const nn::LlamaConfig config = io::detail::load_gguf_config(file.path(), "input");
    fuzz::expect(io::parameter_count(config) > 0);
    (void)io::detail::load_gguf_model(file.path(), bfloat16, "input");
  } catch (const Error&) {
  }
  StateDict tensors;
  io::GgufMetadata metadata;
  try {
    metadata = io::load_gguf_metadata(file.path());
    const auto types = io::load_gguf_types(file.path());
    tensors = io::load_gguf(file.path());
    fuzz::expect(types.size() == tensors.size());
    std::size_t bytes = 0;
    for (const auto& [name, tensor] : tensors) {
      fuzz::expect(tensor.defined() && tensor.is_contiguous());
      bytes += tensor.bytes();
    }
    fuzz::expect(bytes <= 8 * size);  // 4.5 bits become 32
  } catch (const Error&) {
    return 0;
  }
  static const std::filesystem::path saved =
      std::filesystem::temp_directory_path() / ("mica_gguf_fuzz_" + std::to_string(::getpid()));
  try {
    metadata.erase("general.alignment");
    io::save_gguf(saved, tensors, metadata);
  } catch (const Error&) {
    return 0;  // names and shapes that ggml does not read
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
